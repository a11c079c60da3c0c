"""Exit codes of the commands, and the line on standard error of a command that failed."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from softdb.errors import DatabaseLocked, SoftDBError, UnknownId
from softdb.misnomers import ARGUMENTS, own_name
from softdb.terminal import dumps, safe, terminal

if TYPE_CHECKING:
    import click

FAILED, USAGE, UNKNOWN, LOCKED = 1, 2, 3, 4
INTERRUPTED, PIPE_CLOSED = 130, 141  # as in shells: 128 + the number of SIGINT or SIGPIPE


def exit_code(error: BaseException, as_json: bool, command: click.Command | None = None) -> int:
    """Print an error as one line on standard error, and return the exit code. `command` is the command that failed."""
    if isinstance(error, BrokenPipeError):
        _drop_output()  # no error: `softdb export … | head -1` closes the pipe after one line
        return PIPE_CLOSED
    if isinstance(error, KeyboardInterrupt):
        _print_error("Interrupted", f"interrupted: {error}".removesuffix(": "), INTERRUPTED, as_json)
        return INTERRUPTED
    if hasattr(error, "format_message"):  # the parser refuses a command, an option or an argument
        context = getattr(error, "ctx", None)
        program = "softdb" if context is None else context.command_path
        message = error.format_message().rstrip(".")
        if context is not None and (typed := getattr(error, "option_name", None)):
            message = f"No such option: {typed}{_own_option(typed, context.command)}"
        _print_error("Usage", f"{message}; see {program} --help", USAGE, as_json)
        return USAGE
    message, code = str(error), FAILED
    if isinstance(error, OSError) and error.strerror and not isinstance(error, SoftDBError):
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, UnknownId | DatabaseLocked):
        code = UNKNOWN if isinstance(error, UnknownId) else LOCKED
    _print_error(type(error).__name__, message if command is None else as_typed(message, command), code, as_json)
    return code


def _own_option(typed: str, command: click.Command) -> str:
    """Return the end of the message about an unknown option: the command's option for it, or the most similar."""
    options = {str(option.name): option.opts[-1] for option in command.params if option.param_type_name == "option"}
    dashed = {("--" if name[1:] else "-") + name.replace("_", "-"): word for name, word in ARGUMENTS.items()}
    own = {name: options[word] for name, word in dashed.items() if word in options}
    return own_name(typed, own, options.values())


def as_typed(message: str, command: click.Command) -> str:
    """Return an error's message with the command's options, such as --fetch-k, in place of arguments of Python.

    A name of several words is always an argument. A single word is one before "=" or "()", or where the message is
    about it, as in "recall is 2.0", "radius and k are both given" or "leave k out".
    """
    message = re.sub(r"(?<=[:;] )[^:;]*, or on a shell ", "", message).replace(", makes one", " makes one")
    message = re.sub("^build_index: ", f"{command.name}: ", message)
    for option in command.params:
        if option.param_type_name == "option":
            name, typed = str(option.name), option.opts[-1]
            about = rf"(^|: |; |\band |\bbut |\bleave |\bomit |\blower |\bwithout ){name}"
            message = re.sub(rf"\b{name}\b", typed, message) if "_" in name else message
            message = re.sub(rf"\b{name}=(?=\w)", f"{typed} ", message)
            message = re.sub(rf"\b{name}(=|\(\))", typed, message)
            follows = r"(?= is\b| continues\b| are both\b| and \S+ are both\b| out\b|$|;|,)"
            message = re.sub(about + follows, rf"\1{typed}", message)
    return message


def _print_error(kind: str, message: str, code: int, as_json: bool) -> None:
    """Print one line on standard error: plain text, or `{"error": {"type", "message", "code"}}`."""
    line = " ".join(message.split())
    if as_json:
        sys.stderr.write(dumps({"error": {"type": kind, "message": line, "code": code}}) + "\n")
    else:
        terminal(stderr=True).print(f"{'[red]error:[/] ' if kind != 'Interrupted' else ''}{safe(line)}")


def warn_in_one_line(as_json: bool) -> None:
    """Print every warning from now on as one line on standard error, without file name and line number."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = " ".join(str(message).split())
        if as_json:
            sys.stderr.write(dumps({"warning": {"type": category.__name__, "message": line}}) + "\n")
        else:
            terminal(stderr=True).print(f"[yellow]warning:[/] {safe(line)}")

    warnings.showwarning = show


def _drop_output() -> None:
    """Drop unwritten output: at exit Python would write it to the closed pipe and report an error again."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # standard output may have no file descriptor
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
