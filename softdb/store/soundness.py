"""Checksums: each key, value, payload and text has one, so that damage is found and reported row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from softdb.check import Array
from softdb.errors import CorruptionError
from softdb.store.snapshot import Rows, Segment

AT_ONCE = 8192  # records read at once

Fetch = Callable[[int, int], list[Any]]  # see `Catalog.checksums`
FetchTexts = Callable[[str, "Rows | None"], list[int]]  # see `Catalog.damaged_texts`


class Damage(NamedTuple):
    """Records that differ from their checksums, in one file."""

    file: str
    rows: list[int]
    what: str = ""  # begins the message: "payload of " or "text of ", if the file holds both

    def __str__(self) -> str:
        runs = np.split(np.array(self.rows), np.flatnonzero(np.diff(self.rows) > 1) + 1)
        spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
        shown = ", ".join(spans[:8]) + (f" and {len(spans) - 8} more spans" if len(spans) > 8 else "")
        if len(self.rows) == 1:
            return f"{self.file}: {self.what}row {shown} differs from its checksum"
        return f"{self.file}: {self.what}rows {shown} differ from their checksums"


def checksums(column: Array) -> list[int]:
    """Return n checksums (CRC-32), one for each key or value of a column (n, …)."""
    return list(map(crc32, np.ascontiguousarray(column)))


def damaged(fetch: Fetch, segment: Segment, only: Rows | None = None) -> Iterator[Damage]:
    """Yield the damage to the keys and to the values of a segment's records.

    `only`: check only those of the rows (m,) that the segment holds. Cost: every checked byte is read once.
    """
    keys, values = list[int](), list[int]()
    for slots, rows, expected in _fetch_records(fetch, segment, only):
        key_crcs, value_crcs = zip(*expected, strict=True)
        keys += _differing_rows(rows, checksums(segment.keys[slots]), key_crcs)
        values += _differing_rows(
            rows, [None] * len(rows) if segment.values is None else checksums(segment.values[slots]), value_crcs
        )
    number = f"{segment.number:08d}"
    by_file = ((f"keys-{number}.npy", keys), (f"values-{number}.npy", values))
    return (Damage(file, rows) for file, rows in by_file if rows)


def damaged_texts(fetch: FetchTexts, only: Rows | None = None) -> Iterator[Damage]:
    """Yield the damage to payloads and to texts of all records, or of the rows `only` (m,)."""
    for column in ("payload", "text"):
        if rows := fetch(column, only):
            yield Damage("catalog.sqlite", rows, f"{column} of ")


def require_sound(damage: Iterable[Damage], remedy: str) -> None:
    """Raise CorruptionError if there is damage; `remedy` says what to do after, or instead of, restoring a copy."""
    if text := "; ".join(map(str, damage)):
        raise CorruptionError(f"{text}: restore them from a copy, {remedy}")


def _fetch_records(
    fetch: Fetch, segment: Segment, only: Rows | None
) -> Iterator[tuple[Rows, Rows, list[tuple[object, object]]]]:
    """Yield slots, rows and checksums of a segment's records, at most AT_ONCE at a time."""
    for low in range(0, len(segment), AT_ONCE):
        rows = segment.rows_of(slice(low, low + AT_ONCE))
        wanted = rows if only is None else only[(only >= rows[0]) & (only <= rows[-1])]
        if not len(wanted):
            continue
        records = fetch(int(wanted.min()), int(wanted.max()))
        fetched = np.array([row for row, *_ in records], np.int64)
        present = np.isin(fetched, rows if only is None else only)
        if present.any():
            slots = low + np.searchsorted(rows, fetched[present])
            yield slots, fetched[present], [records[i][1:] for i in np.flatnonzero(present)]


def _differing_rows(rows: Rows, actual: Sequence[int | None], expected: tuple[object, ...]) -> list[int]:
    return [row for row, crc, stored in zip(rows.tolist(), actual, expected, strict=True) if crc != stored]
