"""Short texts and small HTML tables for answers: bounded in size, without colours or scripts, every text escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from softdb.visible import visible

__all__ = ["LINES", "SHOWN", "json_cell", "listed", "numbers", "part_of", "shape", "table"]

SHOWN = 3  # maximum number of queries, hits or records in a repr
LINES = 20  # maximum number of lines in a table
CELL = 160  # maximum number of characters in a cell


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], caption: str) -> str:
    """Return an HTML table with the headings `heads`; texts are escaped and cut to CELL characters."""
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


def listed(texts: Iterator[str], count: int) -> str:
    """Return the first SHOWN of `count` texts, separated by commas, and an ellipsis if `count` is larger."""
    return ", ".join([*islice(texts, SHOWN), *(["…"] if count > SHOWN else [])])


def part_of(count: int, total: int) -> str:
    """Return "count of total", or only the total if both are equal."""
    return f"{total:,}" if count == total else f"{count:,} of {total:,}"


def numbers(tensor: Tensor | None) -> str:
    """Return as text a number, or the first SHOWN numbers of a vector; "" for None."""
    if tensor is None or not tensor.ndim:
        return "" if tensor is None else f"{tensor.item():.6g}"
    return f"[{listed((f'{x:.4g}' for x in tensor[: SHOWN + 1].tolist()), len(tensor))}]"


def json_cell(payload: Any) -> str:
    """Return a payload as compact JSON; "" for None."""
    return "" if payload is None else json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


def shape(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor as text."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
