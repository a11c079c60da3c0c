"""Reading everything back: does the catalogue agree with itself, and every stored number with its checksum?"""

from __future__ import annotations

import apsw
import numpy as np

from softdb.errors import CorruptionError
from softdb.store import gaps
from softdb.store.segments import checksum
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import damaged
from softdb.store.store import Store
from softdb.store.upgrade import runs

__all__ = ["verify"]


def verify(store: Store) -> int:
    """Check a whole database and return how many records it holds.

    Raises CorruptionError that lists every damaged part: file and rows. Cost: every byte is read once.
    """
    with store.reading() as snapshot:
        try:
            damage = _catalogue(store) + _rows(snapshot, gaps.read(store.catalog))
            if store.catalog.present_version() == 1:
                damage += runs(store.catalog, snapshot.segments)
            else:
                damage += [str(one) for segment in snapshot.segments for one in damaged(store.checksums, segment)]
        except (apsw.CorruptError, apsw.IOError, CorruptionError) as error:
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
    sql = "SELECT row FROM records WHERE payload IS NOT NULL AND NOT json_valid(payload) LIMIT 9"
    bad = [str(row) for (row,) in store.catalog.all(sql)]
    if bad:
        damage.append(f"catalog.sqlite: payloads that are not JSON, rows {', '.join(bad)}")
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
