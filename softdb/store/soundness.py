"""Checksums: a record's key, value, payload and text have each their own, so that damage is named, and lost, by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array
from softdb.store.snapshot import Segment

AT_ONCE = 8192  # records

Rows = NDArray[np.int64]
Fetch = Callable[[int, int], list[Any]]  # see `Catalog.checksums`
FetchTexts = Callable[[str, "Rows | None"], list[int]]  # see `Catalog.damaged_texts`


class Damage(NamedTuple):
    """Records whose bytes do not give their checksums, and where these lie."""

    file: str
    rows: list[int]
    what: str = ""  # of the record, in words

    def __str__(self) -> str:
        runs = np.split(np.array(self.rows), np.flatnonzero(np.diff(self.rows) > 1) + 1)
        spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
        shown = ", ".join(spans[:8]) + (f" and {len(spans) - 8} more spans" if len(spans) > 8 else "")
        if len(self.rows) == 1:
            return f"{self.file}: {self.what}row {shown} differs from its checksum"
        return f"{self.file}: {self.what}rows {shown} differ from their checksums"


def checksums(column: Array) -> list[int]:
    """The CRC-32 of each row of a column (n, …)."""
    return list(map(crc32, np.ascontiguousarray(column)))


def damaged(fetch: Fetch, segment: Segment, only: Rows | None = None) -> Iterator[Damage]:
    """Keys and values of a segment's records, or of some rows of it (m,), that differ from their checksums.

    Cost: every byte of them is read once. A record that the segment does not hold is not looked at.
    """
    keys, values = list[int](), list[int]()
    for slots, rows, expected in _records(fetch, segment, only):
        key_crcs, value_crcs = zip(*expected, strict=True)
        keys += _unlike(rows, checksums(segment.keys[slots]), key_crcs)
        values += _unlike(
            rows, [None] * len(rows) if segment.values is None else checksums(segment.values[slots]), value_crcs
        )
    number = f"{segment.number:08d}"
    named = ((f"keys-{number}.npy", keys), (f"values-{number}.npy", values))
    return (Damage(file, rows) for file, rows in named if rows)


def damaged_texts(fetch: FetchTexts, only: Rows | None = None) -> Iterator[Damage]:
    """Payloads and texts of all records, or of some rows (m,), that differ from their checksums. Cost: as above."""
    for column in ("payload", "text"):
        if rows := fetch(column, only):
            yield Damage("catalog.sqlite", rows, f"{column} of ")


def _records(
    fetch: Fetch, segment: Segment, only: Rows | None
) -> Iterator[tuple[Rows, Rows, list[tuple[object, object]]]]:
    """Slots, rows and checksums of a segment's records, some at a time."""
    for low in range(0, len(segment), AT_ONCE):
        rows = segment.rows_of(slice(low, low + AT_ONCE))
        asked = rows if only is None else only[(only >= rows[0]) & (only <= rows[-1])]
        if not len(asked):
            continue
        found = fetch(int(asked.min()), int(asked.max()))
        named = np.array([row for row, *_ in found], np.int64)
        present = np.isin(named, rows if only is None else only)
        if present.any():
            kept = [found[i] for i in np.flatnonzero(present)]
            slots = low + np.searchsorted(rows, named[present])
            yield slots, named[present], [record[1:] for record in kept]


def _unlike(rows: Rows, found: Sequence[int | None], expected: tuple[object, ...]) -> list[int]:
    return [row for row, mine, theirs in zip(rows.tolist(), found, expected, strict=True) if mine != theirs]
