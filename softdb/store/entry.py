"""Entries of stored records in the catalogue, checked for the types that softdb writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from softdb.check import Id
from softdb.store.connect import damaged_catalog


class RecordEntry(NamedTuple):
    """A stored record; columns that were not requested are None."""

    row: int
    id: Id
    payload: str | None = None  # JSON
    text: str | None = None


def plain(records: list[Any]) -> Iterator[RecordEntry]:
    """Yield an entry for each (row, id, texts…) from SQLite. Raises CorruptionError for a type softdb never writes."""
    for row, name, *texts in records:
        if type(name) not in (str, int) or not all(text is None or type(text) is str for text in texts):
            raise damaged_catalog(f"has a damaged record in row {row}")
        yield RecordEntry(row, name, *texts)
