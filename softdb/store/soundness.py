"""Checksums: each record's key, value and payload have their own, so that damage is named, and lost, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array
from softdb.store.snapshot import Segment

__all__ = ["Damage", "checksums", "damaged"]

AT_ONCE = 8192  # records

Rows = NDArray[np.int64]
Fetch = Callable[[int, int], list[Any]]  # see `Catalog.checksums`


class Damage(NamedTuple):
    """Records whose bytes do not give their checksums, and where these lie."""

    file: str
    rows: list[int]

    def __str__(self) -> str:
        runs = np.split(np.array(self.rows), np.flatnonzero(np.diff(self.rows) > 1) + 1)
        spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
        shown = ", ".join(spans[:8]) + (f" and {len(spans) - 8} more spans" if len(spans) > 8 else "")
        what = "payload of " if self.file == "catalog.sqlite" else ""
        if len(self.rows) == 1:
            return f"{self.file}: {what}row {shown} differs from its checksum"
        return f"{self.file}: {what}rows {shown} differ from their checksums"


def checksums(column: Array) -> list[int]:
    """The CRC-32 of each row of a column (n, …)."""
    return list(map(crc32, np.ascontiguousarray(column)))


def damaged(fetch: Fetch, segment: Segment, only: Rows | None = None) -> Iterator[Damage]:
    """What of a segment's records, or of some rows of it (m,) alone, differs from its checksum.

    Cost: every byte of them is read once. A record that the segment does not hold is not looked at.
    """
    keys, values, payloads = list[int](), list[int](), list[int]()
    for slots, rows, texts, expected in _records(fetch, segment, only):
        key_crcs, value_crcs, payload_crcs = zip(*expected, strict=True)
        keys += _unlike(rows, checksums(segment.keys[slots]), key_crcs)
        values += _unlike(
            rows, [None] * len(rows) if segment.values is None else checksums(segment.values[slots]), value_crcs
        )
        payloads += _unlike(rows, [text if text is None else crc32(text) for text in texts], payload_crcs)
    number = f"{segment.number:08d}"
    named = ((f"keys-{number}.npy", keys), (f"values-{number}.npy", values), ("catalog.sqlite", payloads))
    return (Damage(file, rows) for file, rows in named if rows)


def _records(
    fetch: Fetch, segment: Segment, only: Rows | None
) -> Iterator[tuple[Rows, Rows, list[bytes | None], list[tuple[object, object, object]]]]:
    """Slots, rows, payload texts and checksums of a segment's records, some at a time."""
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
            yield slots, named[present], [record[1] for record in kept], [record[2:] for record in kept]


def _unlike(rows: Rows, found: Sequence[int | None], expected: tuple[object, ...]) -> list[int]:
    return [row for row, mine, theirs in zip(rows.tolist(), found, expected, strict=True) if mine != theirs]
