"""The commands by name. Each is imported when it is called: `softdb --help` must not wait for torch."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from softdb.errors import SoftDBError
from softdb.terminal import safe, terminal

__all__ = ["app", "run"]

COMMANDS = {
    "demo": "softdb.cli.records:demo",
    "info": "softdb.cli.keep:info",
    "import": "softdb.cli.records:import_",
    "export": "softdb.cli.records:export",
    "search": "softdb.cli.ask:search",
    "attend": "softdb.cli.ask:attend",
    "train": "softdb.cli.train:train",
    "reembed": "softdb.cli.reembed:reembed",
    "index": "softdb.cli.keep:index",
    "tune": "softdb.cli.keep:tune",
    "fields": "softdb.cli.keep:fields",
    "verify": "softdb.cli.keep:verify",
    "compact": "softdb.cli.keep:compact",
    "snapshot": "softdb.cli.keep:snapshot",
    "bench": "softdb.bench.command:bench",
}


class _Commands(TyperGroup):
    """Imports a command when it is asked for; an error of softdb or of the system is one line and exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader has closed the pipe, which is no error
        except (SoftDBError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError) and error.filename:
                message = f"{error.filename}: {error.strerror}"
            terminal(stderr=True).print(f"[red]error:[/] {safe(' '.join(message.split()))}")
            sys.exit(1)


app = typer.Typer(
    cls=_Commands,
    name="softdb",
    help="A durable vector database you can backpropagate through.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Run the command line."""
    # read by torch when it is loaded: on a busy machine, threads that sleep while they wait are ten times faster
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="softdb")


def _version(asked: bool) -> None:
    if asked:
        import softdb

        typer.echo(f"softdb {softdb.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
