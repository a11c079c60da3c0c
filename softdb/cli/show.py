"""What comes back: answers as tables for people, as JSON for scripts."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from softdb.answers import Pooled

__all__ = [
    "attended",
    "fail",
    "listed",
    "plain",
    "print_json",
    "print_table",
    "safe",
    "show_attended",
    "show_hits",
    "terminal",
]

# what a terminal obeys, or what turns the order of letters round: a stranger's payload must not
_OBEYED = [*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _OBEYED} | dict.fromkeys(
    b"\t\n\r", " "
)
_ESCAPED = {code: f"\\u{code:04x}" for code in _OBEYED if code > 31}  # in JSON text, where they stand in strings alone

PIPED = 1 << 16  # columns where there is no terminal: a line stays a line for whatever reads it
SHOWN = 8  # numbers of a soft query's output that are shown


def attended(pooled: Pooled, i: int, spread: float, hits: list[Any]) -> dict[str, Any]:
    """The answer to one query of a batch, as JSON."""
    bar = pooled.bar[i].item()
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.candidates[i] else None,  # JSON has no word for -inf
        "candidates": int(pooled.candidates[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": pooled.missed_mass[i].item(),
        "bar": bar if math.isfinite(bar) else None,  # unknown where truncated
        "met": bool(pooled.met[i]),
        "effective_records": spread if math.isfinite(spread) else 0.0,
        "hits": [dict(zip(("id", "weight", "payload"), hit, strict=True)) for hit in hits],
    }


def show_attended(answer: dict[str, Any], hits: list[Any], temperature: float, is_label: bool) -> None:
    """The answer to one soft query, in words and a table of the records that weigh most."""
    console = terminal()
    if not answer["candidates"]:
        console.print("no record takes part, so the answer is all zeros")
        return
    missed = "" if answer["exact"] else f", {answer['missed_mass']:.1%} of all weight missed"
    if answer["bar"]:
        missed = f", drawn for all: the answer is off by at most {answer['bar']:.3g} in 95 of 100 cases"
    console.print(
        f"{answer['candidates']:,} records weighed at temperature {temperature:g}{missed}; "
        f"the answer is a mean of about {answer['effective_records']:,.1f} of them"
    )
    show_hits("weight", hits)
    output = answer["output"]
    if is_label:
        best = sorted(range(len(output)), key=lambda label: -output[label])[:SHOWN]
        console.print("classes  " + ", ".join(f"{label}: {output[label]:.1%}" for label in best))
    else:
        more = f", … ({len(output)} numbers)" if len(output) > SHOWN else ""
        console.print("output   " + ", ".join(f"{one:.4f}" for one in output[:SHOWN]) + more)


def show_hits(name: str, hits: list[Any]) -> None:
    """Hits (id, number, payload) as a table; `name` says what the number is."""
    if not hits:
        terminal().print("nothing found")
        return
    console, width = terminal(), max(len(str(one)) for one, _, _ in hits)
    room = max(20, console.width - width - len(name) - 8)  # one line a hit on a terminal, all of it in a pipe
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(name, justify="right", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("payload", no_wrap=True)
    for one, number, payload in hits:
        text = _payload(payload)
        shown = text if len(text) <= room else text[: room - 1] + "…"
        table.add_row(f"{number:.4f}", safe(str(one)), safe(shown))
    print_table(table)


def _payload(payload: object) -> str:
    """A payload in one line; `--json` gives it exactly."""
    if isinstance(payload, dict):
        return ", ".join(
            f"{name}: {value if isinstance(value, str) else _dumps(value)}" for name, value in payload.items()
        )
    return "" if payload is None else _dumps(payload)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)


def safe(text: str) -> str:
    """Text from a database or a file as a terminal may show it: nothing in it is obeyed."""
    return escape(text.translate(_SHOWN))


def listed(facts: dict[str, Any]) -> str:
    """Facts in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {plain(value)}" for name, value in facts.items())


def plain(value: object) -> str:
    """A number, or facts, as people read them."""
    if isinstance(value, dict):
        return f"({listed(value)})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def print_table(table: Table) -> None:
    """Print a table; where there is no terminal, without the spaces that fill its lines up."""
    console = terminal()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


def print_json(value: object) -> None:
    """Print JSON in one line."""
    typer.echo(_dumps(value))


def terminal(stderr: bool = False) -> Console:
    """Where text goes: the terminal, or a pipe, whose lines are never broken."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PIPED
    return console


def fail(message: str) -> NoReturn:
    """Say what is wrong in one line, and end with exit code 1."""
    terminal(stderr=True).print(f"[red]error:[/] {safe(' '.join(message.split()))}")
    sys.exit(1)
