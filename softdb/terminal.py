"""Text for people, on a terminal or in a pipe: tables, progress bars, numbers; JSON for scripts (`softdb[cli]`)."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from softdb.visible import CONTROLS, visible

__all__ = [
    "counted",
    "dumps",
    "listed",
    "number",
    "print_json",
    "print_result",
    "print_table",
    "progress",
    "safe",
    "size",
    "terminal",
]

_IN_JSON = {code: f"\\u{code:04x}" for code in CONTROLS if code > 31}  # JSON has them in strings alone
PIPED = 1 << 16  # columns where there is no terminal: lines are not wrapped


def terminal(stderr: bool = False) -> Console:
    """The console: a terminal, or a pipe, whose lines are never wrapped and have no colours."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(stderr=stderr, highlight=False, force_terminal=None if is_terminal else False)
    if not console.is_terminal:
        console.width = PIPED
    return console


class _Rate(ProgressColumn):
    """The present speed, a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


@contextlib.contextmanager
def progress(
    what: str, console: Console | None = None, rate: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar, told what is being done, how much of it is done, and the whole. None is drawn in a pipe.

    `rate`: how much a second, and the time that remains.
    """
    console = console or terminal()
    columns: list[ProgressColumn] = [
        TextColumn("  {task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    ]  # fmt: skip
    if rate:
        columns += [_Rate(), TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, whole: bar.update(task, description=what, completed=done, total=whole)


def print_table(
    columns: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    numbers: tuple[str, ...] = (),
    title: str | None = None,
    console: Console | None = None,
    indent: int = 0,
) -> None:
    """Print a table without lines; columns named in `numbers` are set to the right. A pipe gets no trailing spaces."""
    console = console or terminal()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left")
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    shown = Padding.indent(table, indent)
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as text:
        console.print(shown)
    console.file.write("".join(line.rstrip() + "\n" for line in text.get().splitlines()))


def dumps(value: object) -> str:
    """JSON in one line, its control characters escaped; null for what JSON has no number for."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_IN_JSON)
    except ValueError:
        return dumps(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: object) -> None:
    """Print JSON in one line, in ASCII where the locale is not of UTF-8."""
    line = dumps(value)
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write((line if unicode else json.dumps(json.loads(line))) + "\n")
    sys.stdout.flush()  # where the reader has closed the pipe it is told here


def print_result(value: object, as_json: bool, text: str) -> None:
    """Print a value as JSON, or the text for people."""
    if as_json:
        print_json(value)
    else:
        terminal().print(text)


def safe(text: str, room: int | None = None) -> str:
    """Text from a database or a file, cut to a width, with its control characters and markup escaped."""
    cut = text if room is None or len(text) <= room else text[: max(1, room - 1)] + "…"
    return escape(visible(cut))


def listed(facts: dict[str, object]) -> str:
    """Facts in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in facts.items())


def number(value: object) -> str:
    """A number, or facts, as people read them."""
    if isinstance(value, dict):
        return f"({listed(value)})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counted(count: int, noun: str) -> str:
    """A count and its noun: "1 record", "2,000 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """A number of bytes as people read it."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
