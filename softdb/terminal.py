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

_IN_JSON = {code: f"\\u{code:04x}" for code in CONTROLS if code > 31}  # in JSON they are in strings only
PIPE_COLUMNS = 1 << 16  # width without a terminal, so that lines are not wrapped


def terminal(stderr: bool = False) -> Console:
    """Return a console that writes to a terminal, or to a pipe without colours and without wrapping lines."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(stderr=stderr, highlight=False, force_terminal=None if is_terminal else False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


class _Rate(ProgressColumn):
    """Column with the speed in steps per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


@contextlib.contextmanager
def progress(
    stage: str, console: Console | None = None, rate: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal; yield a function that updates it: (stage, steps done, total).

    `rate` adds the speed and the remaining time.
    """
    console = console or terminal()
    columns: list[ProgressColumn] = [
        TextColumn("  {task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    ]  # fmt: skip
    if rate:
        columns += [_Rate(), TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(stage, total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def print_table(
    columns: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    numbers: tuple[str, ...] = (),
    title: str | None = None,
    console: Console | None = None,
    indent: int = 0,
) -> None:
    """Print a table without ruled lines; columns in `numbers` are right-aligned. A pipe gets no trailing spaces."""
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
    """Return JSON in one line, with control characters escaped, and null for infinity and NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_IN_JSON)
    except ValueError:
        return dumps(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: object) -> None:
    """Print JSON in one line, in ASCII if the locale's encoding is not UTF-8."""
    line = dumps(value)
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write((line if unicode else json.dumps(json.loads(line))) + "\n")
    sys.stdout.flush()  # raises BrokenPipeError here if the reader has closed the pipe


def print_result(value: object, as_json: bool, text: str) -> None:
    """Print a value as JSON, or the text for people."""
    if as_json:
        print_json(value)
    else:
        terminal().print(text)


def safe(text: str, width: int | None = None) -> str:
    """Return text from a database or a file, cut to a width, with control characters and markup escaped."""
    cut = text if width is None or len(text) <= width else text[: max(1, width - 1)] + "…"
    return escape(visible(cut))


def listed(facts: dict[str, object]) -> str:
    """Format a dict as one line: "records 2,000, recall 0.95"."""
    return ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in facts.items())


def number(value: object) -> str:
    """Format a number, or a dict of numbers, for people: "0.1235", "2,000"."""
    if isinstance(value, dict):
        return f"({listed(value)})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 record", "2,000 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Return a number of bytes with its unit: "1.5 MB"."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
