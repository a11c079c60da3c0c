"""Entry of a stored record in the catalogue, checked to be of the types that softdb writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from softdb.check import Id
from softdb.store.connect import damaged_catalog


class RecordEntry(NamedTuple):
    """A stored record; what was not asked for is None."""

    row: int
    id: Id
    payload: str | None = None  # JSON
    text: str | None = None


def plain(records: list[Any]) -> Iterator[RecordEntry]:
    """Records as they came, if they are of the types that softdb writes. Raises CorruptionError."""
    for row, one, *texts in records:
        if type(one) not in (str, int) or not all(text is None or type(text) is str for text in texts):
            raise damaged_catalog(f"has a damaged record in row {row}")
        yield RecordEntry(row, one, *texts)
