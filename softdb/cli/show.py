"""Answers as tables for people, as JSON for scripts."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from softdb.terminal import CONTROLS, counted, print_table, safe, table, terminal

if TYPE_CHECKING:
    from softdb.answers import Pooled

__all__ = ["attended", "fail", "print_json", "show_attended", "show_hits"]

_ESCAPED = {code: f"\\u{code:04x}" for code in CONTROLS if code > 31}  # JSON has them in strings alone
SHOWN = 8  # numbers of a soft query's output that are shown


def attended(pooled: Pooled, i: int, effective: float, hits: list[Any]) -> dict[str, Any]:
    """The answer to one query of a batch, as JSON."""
    bar = pooled.bar[i].item()
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.n_pooled[i] else None,  # JSON has no word for -inf
        "candidates": int(pooled.n_pooled[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": pooled.missed_mass[i].item(),
        "bar": bar if math.isfinite(bar) else None,  # unknown where truncated
        "met": bool(pooled.met[i]),
        "effective_records": effective if math.isfinite(effective) else 0.0,
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
        missed = f", an estimate: in 95 of 100 cases the answer is off by at most {answer['bar']:.3g}"
    console.print(
        f"{counted(answer['candidates'], 'record')} weighed at temperature {temperature:g}{missed}; "
        f"the answer is a mean of about {answer['effective_records']:,.1f} of them"
    )
    show_hits("weight", hits)
    output = answer["output"]
    if is_label:
        best = sorted(range(len(output)), key=lambda label: -output[label])[:SHOWN]
        console.print("classes  " + ", ".join(f"{label}: {output[label]:.1%}" for label in best))
    else:
        more = f", … ({len(output)} numbers)" if len(output) > SHOWN else ""
        console.print("output   " + ", ".join(f"{number:.4f}" for number in output[:SHOWN]) + more)


def show_hits(name: str, hits: list[Any]) -> None:
    """Hits (id, number, payload) as a table; `name` is that of the number."""
    if not hits:
        terminal().print("nothing found")
        return
    longest = max(len(str(record)) for record, _, _ in hits)
    room = max(20, terminal().width - longest - len(name) - 8)  # one line a hit on a terminal, all of it in a pipe
    made = table(name, "id", "payload", numbers=(name,))
    for record, number, payload in hits:
        text = _payload(payload)
        shown = text if len(text) <= room else text[: room - 1] + "…"
        made.add_row(f"{number:.4f}", safe(str(record)), safe(shown))
    print_table(made)


def _payload(payload: object) -> str:
    """A payload in one line; `--json` gives it exactly."""
    if isinstance(payload, dict):
        return ", ".join(
            f"{name}: {value if isinstance(value, str) else _dumps(value)}" for name, value in payload.items()
        )
    return "" if payload is None else _dumps(payload)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)


def print_json(value: object) -> None:
    """Print JSON in one line."""
    typer.echo(_dumps(value))


def fail(message: str) -> NoReturn:
    """Print an error in one line, and end with exit code 1."""
    terminal(stderr=True).print(f"[red]error:[/] {safe(' '.join(message.split()))}")
    sys.exit(1)
