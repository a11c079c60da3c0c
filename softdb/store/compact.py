"""Compaction: new segments with the live rows alone take the place of old ones. Rows keep their numbers.

The slots of records without a key go, too; these records stay, in rows that no segment holds.

Group after group of neighbouring segments: the live rows are copied into one new segment, fsynced; one SQLite
transaction swaps the segments, their checksums and tombstones; then the old files are unlinked. A crash leaves each
group old or new, and orphans that the next writer removes. Whoever has an older generation open keeps its maps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.errors import CorruptionError, WriteFailed
from softdb.reports import CompactReport
from softdb.store import gaps
from softdb.store.segments import MAX_ROWS, SegmentEntry, SegmentPart, checksum
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import AT_ONCE, damaged
from softdb.store.store import Store


def compact(store: Store) -> CompactReport:
    """Remove the dead rows of a database, merge small segments, and say what that gave.

    Cost: the live rows of segments that have dead ones, and of small neighbours, are read and written once. Memory and
    disk beyond what stays: a part of a segment, and one segment of at most `MAX_ROWS` rows. Other threads read and
    write on meanwhile; what they delete stays for the next time.

    Raises:
        CorruptionError: what would be copied differs from its checksum; that group is left as it is.
        ReadOnly, WriteFailed: this handle may not, or can no longer, write.
    """
    store.require_writable()
    before, segments = store.occupied(), len(store.snapshot.segments)
    removed = sum(_replace(store, group) for group in _groups(store.snapshot))
    store.shrink()
    after = store.snapshot
    return CompactReport(after.records, removed, segments, len(after.segments), before, store.occupied())


def _groups(snapshot: Snapshot) -> list[set[int]]:
    """Numbers of the neighbouring segments that become one each.

    A segment without dead rows stays where it is large, or as large as all that come after it: so a row is copied
    about log n times in its life, and about log n segments remain.
    """
    found: list[set[int]] = []
    group: list[int] = []  # places of segments
    counts = [int(np.count_nonzero(live)) for _, live in _lives(snapshot)]

    def close() -> None:
        if len(group) > 1 or any(counts[i] < len(snapshot.segments[i]) for i in group):
            found.append({snapshot.segments[i].number for i in group})
        group.clear()

    for i, (segment, count) in enumerate(zip(snapshot.segments, counts, strict=True)):
        if count == len(segment) and (2 * count >= MAX_ROWS or count >= sum(counts[i + 1 :])):
            close()
            continue
        if sum(counts[j] for j in group) + count > MAX_ROWS:
            close()
        group.append(i)
    close()
    return found


def _lives(snapshot: Snapshot) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Each segment's first position, and which of its slots are live."""
    for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
        yield start, snapshot.live[start : start + len(segment)]


class _Group(NamedTuple):
    """Segments that shall become one, as they are in one snapshot."""

    snapshot: Snapshot
    places: list[int]  # of the segments in the snapshot
    kept: NDArray[np.int64]  # (m,) positions of live rows, ascending
    dropped: NDArray[np.int64]  # rows of the others

    @classmethod
    def of(cls, store: Store, numbers: set[int]) -> _Group | None:
        """Those segments, in a transaction; None where another thread has compacted them."""
        snapshot = store.snapshot
        places = [i for i, segment in enumerate(snapshot.segments) if segment.number in numbers]
        if len(places) < len(numbers):
            return None
        lives = [(start, live) for i, (start, live) in enumerate(_lives(snapshot)) if i in places]
        kept = np.concatenate([start + np.flatnonzero(live) for start, live in lives])
        dead = np.concatenate([start + np.flatnonzero(~live) for start, live in lives])
        return cls(snapshot, places, kept, snapshot.rows(dead))

    @property
    def shape(self) -> list[tuple[int, int]]:
        """Numbers and lengths of the segments: what is compared to see whether rows have come in."""
        return [(self.snapshot.segments[i].number, len(self.snapshot.segments[i])) for i in self.places]


class _Written(NamedTuple):
    """A new segment on disk, not yet known to the catalogue."""

    entry: SegmentEntry
    rows_crc: int | None  # None: the rows have no gaps


def _replace(store: Store, numbers: set[int]) -> int:
    """Make one segment of several, and return how many rows that removed."""
    group, number = store.run(_reserved, store, numbers)
    if group is None:
        return 0
    # in memory everything happens in one transaction: any commit drops a column that the catalogue does not know
    written = None if store.path is None else _written_aside(store, group, number)
    return store.run(_swapped, store, numbers, group, number, written)


def _reserved(store: Store, numbers: set[int]) -> tuple[_Group | None, int]:
    with store.write_transaction(durable=True):
        return _Group.of(store, numbers), gaps.reserve(store.catalog)


def _swapped(store: Store, numbers: set[int], group: _Group, number: int, written: _Written | None) -> int:
    with store.write_transaction(durable=True):  # before anything is unlinked
        current = _Group.of(store, numbers)
        if current is None:
            store.columns.remove([number])
            return 0
        if store.path is None or current.shape != group.shape:  # rows came in while it was copied
            group, written = current, _write(store, current, number)
        _swap(store, group, written)
    with contextlib.suppress(OSError):  # the swap has happened; the next writer removes what is left
        store.columns.remove(numbers)
    return int(np.count_nonzero(~np.isin(group.dropped, group.snapshot.keyless)))


def _written_aside(store: Store, group: _Group, number: int) -> _Written | None:
    """Copy while others read and write. What fails here has changed nothing."""
    try:
        return _write(store, group, number)
    except (OSError, MemoryError, CorruptionError) as error:
        with contextlib.suppress(OSError):
            store.columns.remove([number])
        if isinstance(error, CorruptionError):
            raise
        raise WriteFailed(f"the disk refused a write ({error}); the records are as before, make room") from error


def _write(store: Store, group: _Group, number: int) -> _Written | None:
    """A new segment with a group's live rows, on disk when this returns; None where there are none."""
    _require_sound(store, group)
    count = len(group.kept)
    if not count:
        return None
    rows = group.snapshot.rows(group.kept)
    has_gaps = int(rows[-1] - rows[0]) + 1 != count

    def parts() -> Iterator[SegmentPart]:
        for low in range(0, count, AT_ONCE):
            places = group.kept[low : low + AT_ONCE]
            keys, values = group.snapshot.keys_at(places).numpy(), None
            if store.schema.has_values:
                values = group.snapshot.values_at(places).numpy().astype(store.schema.value_dtype, copy=False)
            yield SegmentPart(keys, values, rows[low : low + AT_ONCE] if has_gaps else None)

    store.columns.create(number, count, has_gaps, aside=True)
    store.columns.fill(number, count, parts())
    entry = SegmentEntry(number, int(rows[0]), count, count)
    return _Written(entry, checksum(rows) if has_gaps else None)


def _require_sound(store: Store, group: _Group) -> None:
    """Raise CorruptionError where what would be copied is damaged: the undamaged copy may be wanted elsewhere."""
    segments = (group.snapshot.segments[i] for i in group.places)
    damage = [one for segment in segments for one in damaged(store.checksums, segment) if one.file.endswith(".npy")]
    if damage:
        raise CorruptionError("; ".join(map(str, damage)) + ": restore them from a copy, then compact")


def _swap(store: Store, group: _Group, written: _Written | None) -> None:
    """Put the new segment into the catalogue in place of the old ones."""
    catalog = store.catalog
    old = [number for number, _ in group.shape]
    crc = None if written is None or written.rows_crc is None else (written.entry.number, written.rows_crc)
    gaps.put(catalog, old, len(group.dropped), crc)
    if written is not None:
        catalog.put_segment(written.entry)
    catalog.set_tombstones(group.dropped, False)
    catalog.advance(0)
