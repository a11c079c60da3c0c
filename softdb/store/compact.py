"""Compaction: replace segments by new ones that hold only live rows. Rows keep their numbers.

Records without a key lose their slots, but stay in the catalogue under their row numbers.

For each group of neighbouring segments, the live rows are copied into one new segment and fsynced; one SQLite
transaction swaps the segments, their checksums and tombstones; then the old files are unlinked. After a crash
each group is old or new, and the next writer removes unused files. Readers of an old generation keep its files mapped.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array
from softdb.errors import CorruptionError, WriteFailed
from softdb.reports import CompactReport
from softdb.store import gaps
from softdb.store.segments import MAX_ROWS, NewSegment
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import damaged, require_sound
from softdb.store.store import Store


def compact(store: Store) -> CompactReport:
    """Remove the dead rows of a database, merge small segments, and return a report.

    Cost: the live rows of segments with dead rows, and of small neighbours, are read and written once. Extra memory:
    `AT_ONCE` rows; extra disk: one segment of at most `MAX_ROWS` rows. Other threads read and write meanwhile; rows
    that they delete wait for the next compaction.

    Raises:
        CorruptionError: a record to be copied differs from its checksum; its group of segments stays as it is.
        ReadOnly, WriteFailed: this handle is read-only, or an earlier write failed.
    """
    store.require_writable()
    before, segments = store.occupied(), len(store.snapshot.segments)
    removed = sum(_replace(store, group) for group in _groups(store.snapshot))
    store.shrink()
    after = store.snapshot
    return CompactReport(after.records, removed, segments, len(after.segments), before, store.occupied())


def _groups(snapshot: Snapshot) -> list[set[int]]:
    """Return groups of neighbouring segments, by their numbers; each group is to become one segment.

    A segment without dead rows stays if it is at least half full, or has no fewer rows than are live in all later ones.
    So a row is copied about log n times in its life, and about log n segments remain.
    """
    groups: list[set[int]] = []
    group: list[int] = []  # indices of segments
    counts = [int(np.count_nonzero(snapshot.live[low:high])) for low, high in pairwise(snapshot.starts)]

    def close() -> None:
        if len(group) > 1 or any(counts[i] < len(snapshot.segments[i]) for i in group):
            groups.append({snapshot.segments[i].number for i in group})
        group.clear()

    for i, (segment, count) in enumerate(zip(snapshot.segments, counts, strict=True)):
        if count == len(segment) and (2 * count >= MAX_ROWS or count >= sum(counts[i + 1 :])):
            close()
            continue
        if sum(counts[j] for j in group) + count > MAX_ROWS:
            close()
        group.append(i)
    close()
    return groups


class _Group(NamedTuple):
    """Segments of one snapshot that are to become one segment."""

    snapshot: Snapshot
    places: list[int]  # indices of the segments in the snapshot
    live: NDArray[np.int64]  # (m,) positions of live rows, ascending
    dropped: NDArray[np.int64]  # rows in the other slots: dead, or without a key

    @classmethod
    def of(cls, store: Store, numbers: set[int]) -> _Group | None:
        """Return the group of segments with these numbers; None if another thread has compacted them."""
        snapshot = store.snapshot
        places = [i for i, segment in enumerate(snapshot.segments) if segment.number in numbers]
        if len(places) < len(numbers):
            return None
        own = np.arange(snapshot.starts[places[0]], snapshot.starts[places[-1] + 1])
        live = snapshot.live[own]
        return cls(snapshot, places, own[live], snapshot.rows(own[~live]))

    @property
    def shape(self) -> list[tuple[int, int]]:
        """Return (number, length) of each segment; a length changes when rows are appended."""
        return [(self.snapshot.segments[i].number, len(self.snapshot.segments[i])) for i in self.places]


def _replace(store: Store, numbers: set[int]) -> int:
    """Replace several segments by one, and return the number of removed rows."""
    group, number = store.run(_reserve, store, numbers)
    if group is None:
        return 0
    # in memory everything happens in one transaction: any commit drops columns that the catalogue does not name
    written = None if store.path is None else _write_aside(store, group, number)
    return store.run(_commit, store, numbers, group, number, written)


def _reserve(store: Store, numbers: set[int]) -> tuple[_Group | None, int]:
    with store.write_transaction(durable=True):
        return _Group.of(store, numbers), gaps.reserve(store.catalog)


def _commit(store: Store, numbers: set[int], group: _Group, number: int, written: NewSegment | None) -> int:
    with store.write_transaction(durable=True):  # durable, because files are unlinked afterwards
        current = _Group.of(store, numbers)
        if current is None:
            store.columns.remove([number])
            return 0
        if store.path is None or current.shape != group.shape:  # rows were appended while it was copied
            group, written = current, _write(store, current, number)
        _swap(store, group, written)
    with contextlib.suppress(OSError):  # the swap is committed; the next writer removes remaining files
        store.columns.remove(numbers)
    return int(np.count_nonzero(~np.isin(group.dropped, group.snapshot.keyless)))


def _write_aside(store: Store, group: _Group, number: int) -> NewSegment | None:
    """Copy a group while other threads read and write. An error here changes nothing."""
    try:
        return _write(store, group, number)
    except (OSError, MemoryError, CorruptionError) as error:
        with contextlib.suppress(OSError):
            store.columns.remove([number])
        if isinstance(error, CorruptionError):
            raise
        raise WriteFailed(f"the disk refused a write ({error}); no record changed; make room") from error


def _write(store: Store, group: _Group, number: int) -> NewSegment | None:
    """Write and sync a new segment with a group's live rows; return None if no row is live."""
    _require_sound(store, group)
    if not len(group.live):
        return None

    def read(slots: slice) -> tuple[Array, Array | None]:
        positions = group.live[slots]
        return group.snapshot.keys_at(positions).numpy(), group.snapshot.stored_values(positions)

    return store.columns.build(number, group.snapshot.rows(group.live), read)


def _require_sound(store: Store, group: _Group) -> None:
    """Raise CorruptionError if a record to be copied is damaged: its file must stay, to be restored from a copy."""
    segments = (group.snapshot.segments[i] for i in group.places)
    damage = (d for segment in segments for d in damaged(store.checksums, segment) if d.file.endswith(".npy"))
    require_sound(damage, "then compact")


def _swap(store: Store, group: _Group, written: NewSegment | None) -> None:
    """Replace the old segments by the new one in the catalogue."""
    catalog = store.catalog
    old = [number for number, _ in group.shape]
    gaps.put(catalog, old, len(group.dropped), [written] if written else ())
    catalog.set_tombstones(group.dropped, False)
    catalog.advance(0)
