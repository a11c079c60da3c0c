"""Batches of records on their way in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from softdb.check import Id, shown
from softdb.errors import BadInput
from softdb.formats.lines import Header

__all__ = ["OnError", "Rows", "passed_over", "text_in"]

OnError: TypeAlias = Callable[[BadInput], None]  # told of a bad row, which is then passed over


@dataclass
class Rows:
    """A batch of consecutive records of a file."""

    path: Path
    header: Header | None  # of the file
    share: float  # of the file, read so far
    lines: Sequence[int]  # n, where each stands
    ids: list[Id]  # n
    keys: Any  # (n, d) numbers, or n texts to encode; in a list None where a record has none
    values: Any  # n in an array or a list, where the fields name one
    payloads: list[Any]  # n
    texts: list[str | None]  # n, which the records keep
    what: str = "line"  # what `lines` count: lines from 1, or rows from 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """File and lines of the batch, for a message."""
        return self.at(0) if len(self) == 1 else f"{self.path.name} {self.what}s {self.lines[0]} to {self.lines[-1]}"

    def at(self, i: int) -> str:
        """File and line of a record, for a message."""
        return f"{self.path.name} {self.what} {self.lines[i]}"

    def some(self, places: list[int]) -> Rows:
        """The records at some places in the batch."""
        columns = (self.lines, self.ids, self.keys, self.values, self.payloads, self.texts)
        lines, ids, keys, values, payloads, texts = (_some(column, places) for column in columns)
        return replace(self, lines=lines, ids=ids, keys=keys, values=values, payloads=payloads, texts=texts)


def _some(column: Any, places: list[int]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else column and [column[i] for i in places]


def text_in(row: dict[str, Any], name: str, needed: bool, empty: Collection[str] = ()) -> str | None:
    """Return the text of a row; None where that is null, or its cell empty, unless a text is needed."""
    text = row.get(name)
    if isinstance(text, str) or (text is None and not needed and (name in row or name in empty)):
        return text
    raise BadInput(f"field {name!r} is {shown(text)}, not a text; its fields are {shown(list(row))}")


def passed_over(rows: Rows, bad: dict[int, str], on_error: OnError | None) -> Iterator[Rows]:
    """The good rows, where `bad` has what is wrong with the others.

    Without `on_error` those before the first bad one, and then its BadInput.
    """
    if not bad:
        yield rows
        return
    if on_error is None:
        first = min(bad)
        if first:
            yield rows.some(list(range(first)))
        raise BadInput(f"{rows.at(first)}: {bad[first]}")
    for i in sorted(bad):
        on_error(BadInput(f"{rows.at(i)}: {bad[i]}"))
    good = [i for i in range(len(rows)) if i not in bad]
    if good:
        yield rows.some(good)
