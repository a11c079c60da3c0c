"""Entries of stored records in the catalogue, checked for the types that softdb writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from softdb.check import Id, json_text, shown
from softdb.errors import BadInput
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


def merged(ids: list[Id], old: list[str | None], new: list[str | None]) -> list[str | None]:
    """Return payloads (n JSON texts) with the fields of `new` replaced in `old`; None in `new` leaves a payload.

    Raises BadInput if one of two payloads is no object, and CorruptionError if a stored payload is not JSON.
    """
    payloads = list(old)
    for i, (was, given) in enumerate(zip(old, new, strict=True)):
        if given is None:
            continue
        try:
            parts = json.loads(was or "{}"), json.loads(given)
        except (ValueError, RecursionError) as error:
            raise damaged_catalog(f"has a payload that is not JSON ({error}), of id {shown(ids[i])}") from None
        for fields in parts:
            if not isinstance(fields, dict):
                what = f"id {shown(ids[i])}: the payload {shown(fields)}"
                raise BadInput(f"{what} is no object and has no fields to merge; replace it whole, without merge")
        payloads[i] = json_text(parts[0] | parts[1], "payload")
    return payloads
