"""Answers as short text, and as small tables of HTML: bounded, without colours or scripts, every text escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from softdb.visible import visible

__all__ = ["LINES", "SHOWN", "json_cell", "listed", "numbers", "part_of", "shape", "table"]

SHOWN = 3  # queries, hits or records that a repr shows
LINES = 20  # lines of a table
CELL = 160  # characters of a cell


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], caption: str) -> str:
    """A table of texts, each cut to CELL characters and shown as it is, whatever stands in it."""
    return (
        '<div style="max-width:100%;overflow-x:auto"><table><thead>'
        f"{_line('th', heads)}</thead><tbody>{''.join(_line('td', line) for line in lines)}</tbody></table>"
        f"<small>{_cell(caption)}</small></div>"
    )


def _cell(text: str) -> str:
    return html.escape(visible(text if len(text) <= CELL else text[: CELL - 1] + "…"))


def _line(tag: str, cells: Iterable[str]) -> str:
    style = ' style="text-align:left;overflow-wrap:anywhere"'
    return f"<tr>{''.join(f'<{tag}{style}>{_cell(cell)}</{tag}>' for cell in cells)}</tr>"


def listed(each: Iterator[str], count: int) -> str:
    """The first of some texts."""
    return ", ".join([*islice(each, SHOWN), *(["…"] if count > SHOWN else [])])


def part_of(some: int, every: int) -> str:
    """Text that says how many of all are shown."""
    return f"{every:,}" if some == every else f"{some:,} of {every:,}"


def numbers(tensor: Tensor | None) -> str:
    """A number, or the first of a vector."""
    if tensor is None or not tensor.ndim:
        return "" if tensor is None else f"{tensor.item():.6g}"
    return f"[{listed((f'{x:.4g}' for x in tensor[: SHOWN + 1].tolist()), len(tensor))}]"


def json_cell(value: Any) -> str:
    """A payload as a table shows it."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def shape(tensor: Tensor) -> str:
    """Shape and type."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
