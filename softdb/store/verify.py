"""Reading everything back: does the catalogue agree with itself, and every stored number with its checksum?"""

from __future__ import annotations

import apsw
import numpy as np

from softdb.errors import CorruptionError
from softdb.store.segments import checksum
from softdb.store.store import Store

__all__ = ["verify"]


def verify(store: Store) -> int:
    """Check a whole database and return how many records it holds.

    Raises CorruptionError that lists every damaged part: file, slots and rows. Cost: every byte is read once.
    """
    with store.reading() as snapshot:
        try:
            damage = _catalogue(store) + _columns(store)
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
    inside = (rows >= 0) & (rows < store.snapshot.size)
    live[rows[inside]] = True
    wrong = int(np.count_nonzero(live != store.snapshot.live)) + int(np.count_nonzero(~inside))
    if wrong:
        damage.append(f"catalog.sqlite: {wrong} rows are live in one table and dead in the other")
    return damage


def _columns(store: Store) -> list[str]:
    """Batches whose bytes do not give their checksum, and slots that no checksum covers."""
    damage = []
    segments = {segment.number: segment for segment in store.snapshot.segments}
    covered = dict.fromkeys(segments, 0)
    for number, slot, count, *expected in store.catalog.all("SELECT * FROM batches ORDER BY segment, slot"):
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
