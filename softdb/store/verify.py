"""Reading everything back: does the catalogue agree with itself, and every stored number with its checksum?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import apsw
import numpy as np

from softdb.errors import CorruptionError
from softdb.store import gaps
from softdb.store.catalog import Catalog
from softdb.store.segments import checksum
from softdb.store.snapshot import Segment, Snapshot
from softdb.store.store import Store

__all__ = ["batches", "damaged", "verify"]


def verify(store: Store) -> int:
    """Check a whole database and return how many records it holds.

    Raises CorruptionError that lists every damaged part: file, slots and rows. Cost: every byte is read once.
    """
    with store.reading() as snapshot:
        try:
            damage = _catalogue(store) + _rows(snapshot, gaps.read(store.catalog))
            damage += damaged(snapshot.segments, batches(store.catalog))
        except apsw.CorruptError as error:
            damage = [f"catalog.sqlite: {error}"]
        if damage:
            raise CorruptionError(f"{len(damage)} damaged: " + "; ".join(damage) + ": restore them from a copy")
        return snapshot.count


def _catalogue(store: Store) -> list[str]:
    """What SQLite finds, and whether records and tombstones say the same."""
    damage = [f"catalog.sqlite: {row[0]}" for row in store.catalog.all("PRAGMA integrity_check") if row[0] != "ok"]
    live = np.zeros(store.snapshot.size, np.bool_)
    rows = np.fromiter((row for (row,) in store.catalog.connection.execute("SELECT row FROM records")), np.int64)
    positions = store.snapshot.positions(rows)
    inside = positions >= 0
    live[positions[inside]] = True
    wrong = int(np.count_nonzero(live != store.snapshot.live)) + int(np.count_nonzero(~inside))
    if wrong:
        damage.append(f"catalog.sqlite: {wrong} rows are live in one table and dead in the other")
    nowhere = int(np.count_nonzero(store.snapshot.positions(store.catalog.dead()) < 0))
    if nowhere:
        damage.append(f"catalog.sqlite: {nowhere} rows are marked dead that no segment holds")
    return damage


def _rows(snapshot: Snapshot, missing: gaps.Gaps) -> list[str]:
    """Row columns whose bytes do not give their checksum, or that do not ascend."""
    damage = []
    for number, column in ((segment.number, segment.rows) for segment in snapshot.segments):
        if column is not None and checksum(column) != missing.checksums.get(number):
            damage.append(f"rows-{number:08d}.npy differs from its checksum")
        elif column is not None and (np.diff(column) <= 0).any():
            damage.append(f"rows-{number:08d}.npy does not ascend")
    return damage


def batches(catalog: Catalog) -> list[Any]:
    """(segment, slot, count, keys_crc, values_crc) of all batches, in order."""
    return catalog.all("SELECT * FROM batches ORDER BY segment, slot")


def damaged(stored: Iterable[Segment], checksums: list[Any]) -> list[str]:
    """Batches whose bytes do not give their checksum, and slots that no checksum covers."""
    damage = []
    segments = {segment.number: segment for segment in stored}
    covered = dict.fromkeys(segments, 0)
    for number, slot, count, *expected in checksums:
        segment = segments.get(number)
        if segment is None or slot != covered[number] or slot + count > len(segment):
            damage.append(f"catalog.sqlite: a checksum of slots {slot} to {slot + count - 1} of no segment, {number}")
            continue
        covered[number] = slot + count
        for name, column, crc in zip(("keys", "values"), (segment.keys, segment.values), expected, strict=True):
            if column is not None and checksum(column[slot : slot + count]) != crc:
                first = segment.first_row + slot
                damage.append(
                    f"{name}-{number:08d}.npy: rows {first} to {first + count - 1} differ from their checksum"
                )
    damage += [
        f"catalog.sqlite: slots from {covered[number]} of segment {number} have no checksum"
        for number, segment in segments.items()
        if covered[number] != len(segment)
    ]
    return damage
