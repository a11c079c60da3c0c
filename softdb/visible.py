"""Stored text for a terminal or a page: control characters written out, and small HTML tables without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import compress

CELL = 160  # maximum number of characters in a cell of a table
UNBROKEN = 40  # maximum number of characters in a cell that is not wrapped: headings, ids, numbers

# control characters, marks of writing direction, and surrogates
CONTROLS = [*range(32), *range(127, 160), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F)]
CONTROLS += [*range(0x2066, 0x206A), *range(0xD800, 0xE000)]
_VISIBLE = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROLS}
_VISIBLE |= dict.fromkeys(b"\t\n\r", " ")


def visible(text: str) -> str:
    """Return the text in one line, with its control characters written as escapes."""
    return text.translate(_VISIBLE)


def table(heads: Sequence[str], lines: Iterable[Sequence[str | None]], caption: str) -> str:
    """Return an HTML table with the headings `heads`, without columns that no line uses; texts are escaped and cut."""
    rows = list(lines)
    used = [any(column) for column in zip(*rows, strict=True)] or [True] * len(heads)
    head, *body = [[cell or "" for cell in compress(line, used)] for line in (heads, *rows)]
    return (
        '<div style="max-width:100%;overflow-x:auto"><table><thead>'
        f"{_line('th', head)}</thead><tbody>{''.join(_line('td', line) for line in body)}</tbody></table>"
        f"<small>{_cell(caption)}</small></div>"
    )


def _cell(text: str) -> str:
    return html.escape(visible(text if len(text) <= CELL else text[: CELL - 1] + "…"))


def _line(tag: str, cells: Iterable[str]) -> str:
    styled = ((cell, "white-space:nowrap" if len(cell) <= UNBROKEN else "overflow-wrap:anywhere") for cell in cells)
    line = (f'<{tag} style="text-align:left;{wrap}">{_cell(cell)}</{tag}>' for cell, wrap in styled)
    return f"<tr>{''.join(line)}</tr>"
