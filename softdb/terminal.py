"""Text for people, on a terminal or in a pipe: tables, progress bars, numbers; JSON for scripts (`softdb[cli]`)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from softdb.visible import CONTROLS, visible

_IN_JSON = {code: f"\\u{code:04x}" for code in CONTROLS if code > 31}  # in JSON they are in strings only
PIPE_COLUMNS = 1 << 16  # width without a terminal, so that lines are not wrapped
GAP, LEAST = 2, 12  # columns between two cells; the least width of a shortened text


def terminal(stderr: bool = False) -> Console:
    """Return a console that writes to a terminal, or to a pipe without colours and without wrapping lines."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(stderr=stderr, highlight=False, force_terminal=None if is_terminal else False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


@contextlib.contextmanager
def progress(
    stage: str, console: Console | None = None, rate: bool = False, quiet: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal; yield a function that updates it: (stage, steps done, total).

    The bar moves from the start: a stage of one step pulses until it is done. `rate` adds the speed and the remaining
    time. `quiet` draws nothing.
    """
    console = console or terminal()
    length = max(3, min(30, (console.width - 34) // 2))
    room = max(LEAST, console.width - length - 25)  # beside the bar and "20,000/20,000 0:00:01"
    columns = [
        TextColumn("  {task.description}"), BarColumn(length), TextColumn("{task.fields[steps]}"), TimeElapsedColumn()
    ]  # fmt: skip
    if rate and console.width >= 80:
        columns += [TextColumn("{task.fields[speed]} left"), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        name = bar.add_task(stage, total=None, steps="", speed="")
        (task,) = bar.tasks

        def show(stage: str, done: int, total: int) -> None:
            task.total = total if total > 1 else None
            steps, speed = f"{done:,}/{total:,}" if total > 1 else "", f"{task.speed:,.0f}/s" if task.speed else ""
            bar.update(name, description=escape(shortened(stage, room)), completed=done, steps=steps, speed=speed)

        yield show


class Excerpt:
    """A cell of a table: a text or JSON, shortened to the width of its column; in `print_facts` to three lines."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __rich_measure__(self, *_: object) -> Measurement:
        """Return the least and the largest width in columns."""
        width = cell_len(brief(self.value, PIPE_COLUMNS))
        return Measurement(min(width, LEAST), width)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the text for the width that the table leaves."""
        yield Text(brief(self.value, options.max_width * (3 if options.overflow == "fold" else 1)))


def print_table(
    columns: tuple[str, ...],
    rows: Sequence[tuple[str | Excerpt, ...]],  # strings are markup, and never cut
    numbers: tuple[str, ...] = (),
    console: Console | None = None,
    indent: int = 0,
) -> None:
    """Print a table without ruled lines; columns in `numbers` are right-aligned. No line ends with spaces.

    If the terminal is too narrow, every cell gets a line of its own, after the name of its column.
    """
    console = console or terminal()
    table, least = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim"), indent
    for column, *cells in zip(columns, *rows, strict=True):
        widths = [cell_len(column), *map(_least, cells)]
        least += max(widths) + GAP
        is_text = any(isinstance(cell, Excerpt) for cell in cells)
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=not is_text)
    if least - GAP <= console.width:
        for row in rows:
            table.add_row(*row)
        _print_table(table, console, indent)
        return
    for i, row in enumerate(rows):
        console.print("\n" * (i > 0), end="")
        print_facts(dict(zip(columns, row, strict=True)), console, indent)


def _least(cell: str | Excerpt) -> int:
    return Text.from_markup(cell).cell_len if isinstance(cell, str) else cell.__rich_measure__().minimum


def print_facts(facts: Mapping[str, str | Excerpt], console: Console | None = None, indent: int = 0) -> None:
    """Print a table of names and values; long values go on in the next line."""
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value != "":
            table.add_row(name, value)
    _print_table(table, console or terminal(), indent)


def _print_table(table: Table, console: Console, indent: int) -> None:
    with console.capture() as text:
        console.print(Padding.indent(table, indent))
    console.file.write("".join(line.rstrip() + "\n" for line in text.get().splitlines()))


def shortened(text: str, width: int) -> str:
    """Return text for at most `width` columns of a terminal, cut after a word; "…" stands for the rest."""
    if cell_len(text) <= width:
        return text
    start = set_cell_size(text, width - 1)
    if not text[len(start) : len(start) + 1].isspace() and " " in start[width // 2 :]:
        start = start.rpartition(" ")[0]
    return start.rstrip(" ,;:.") + "…"


def brief(value: object, width: int) -> str:
    """Return JSON as a line for people, of at most `width` columns: a dict as "name: value, name: value".

    In a line that is too long, texts end after a word with "…", lists and dicts become […] and {…}, and last fields are
    left out whole for "…". Numbers are never cut.
    """
    if not isinstance(value, dict):
        return "" if value is None else _brief(value, width)
    fields: list[str] = []
    for share in range(8, 0, -1):
        longest = max(2 * LEAST, width * share // 8)
        fields = [f"{visible(str(name))}: {_brief(item, longest)}" for name, item in value.items()]
        if cell_len(line := ", ".join(fields)) <= width:
            return line
    while fields and cell_len(line := ", ".join([*fields, "…"])) > width:
        fields.pop()
    return line if fields else "{…}"


def _brief(value: object, width: int) -> str:
    text = shortened(" ".join(visible(value).split()), width) if isinstance(value, str) else dumps(value)
    if cell_len(text) <= width or not isinstance(value, dict | list):
        return text
    return "{…}" if isinstance(value, dict) else "[…]"


def dumps(value: object) -> str:
    """Return JSON in one line, with control characters escaped, and null for infinity and NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_IN_JSON)
    except ValueError:
        return dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


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


def safe(text: str) -> str:
    """Return text from a database or a file with control characters and markup escaped."""
    return escape(visible(text))


def fact(value: object) -> str:
    """Format a fact of a report for people: "0.1235", "2,000", "yes", "none", "recall 0.94, of 230"."""
    if isinstance(value, dict):
        facts = {name: f"({fact(item)})" if isinstance(item, dict) else fact(item) for name, item in value.items()}
        return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in facts.items())
    if isinstance(value, list):
        return ", ".join(map(fact, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 record", "2,000 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
