"""Load a snapshot from the catalogue. Guarantee, or CorruptionError: every row below `next_row` lies in exactly one
segment, or was compacted away; every segment's files have the right size; every live label is a valid class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from softdb.errors import CorruptionError
from softdb.store import gaps, keyed
from softdb.store.catalog import Catalog, CatalogState
from softdb.store.connect import damaged_catalog
from softdb.store.segments import ColumnFiles, SegmentEntry, checksum
from softdb.store.snapshot import Segment, Snapshot


class Loaded(NamedTuple):
    """A snapshot and the origin of its keys, in one object, so that no thread sees a snapshot with another origin."""

    snapshot: Snapshot
    keyed: keyed.Keyed


class SnapshotLoader:
    """Loads the snapshot of the generation that a catalogue reads, reusing segments that have not changed."""

    def __init__(self, columns: ColumnFiles, origin: keyed.Keyed) -> None:
        self._columns = columns
        self.loaded = Loaded(Snapshot.of(-1, (), np.zeros(0, np.bool_)), origin)
        self._labels_checked: dict[int, int] = {}  # segment number → how many of its labels are checked
        self._entries: list[SegmentEntry] = []  # segments of the loaded snapshot
        self._missing = gaps.Gaps(0, {})
        self._room = np.empty(0, np.bool_)  # buffer that the `live` masks of successive appends share

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that was loaded last."""
        return self.loaded.snapshot

    def load(self, catalog: Catalog) -> None:
        """Load the generation that the open transaction reads. Raises CorruptionError, FileNotFoundError."""
        state = catalog.state()
        if state.generation == self.snapshot.generation:
            return
        entries, missing, origin = catalog.segments(), gaps.read(catalog), keyed.read(catalog)
        if origin != self.loaded.keyed:
            self._columns.reshape(origin.schema)
        segments, keyless = self._segments(entries, missing, state.next_row, catalog.capacity()), catalog.keyless()
        if len(keyless) and not 0 <= keyless[0] <= keyless[-1] < state.next_row:
            raise damaged_catalog("has records in rows beyond the last assigned one")
        if missing.gone:
            all_live = np.ones(sum(map(len, segments)), np.bool_)
            snapshot = Snapshot.of(state.generation, segments, all_live, keyless).without(catalog.dead())
        else:
            snapshot = Snapshot.of(state.generation, segments, catalog.live(state.next_row), keyless)
        self._take(Loaded(snapshot, origin), entries, missing)
        self._columns.keep_only({entry.number for entry in entries})

    def entries(self, catalog: Catalog) -> list[SegmentEntry]:
        """Return the segments of the generation that the open transaction reads."""
        return self._entries if catalog.state().generation == self.snapshot.generation else catalog.segments()

    def append(self, state: CatalogState, entries: list[SegmentEntry]) -> bool:
        """Load a generation that differs from the one before it only by appended rows with keys.

        Return False if the one before it is not loaded. Cost: time for appended rows; 1 to 2 bytes of memory per row.
        """
        old = self.snapshot
        if state.generation != old.generation + 1:
            return False
        same = len(self._entries)  # number of unchanged segments: the last segment may have got more rows
        same -= same > 0 and entries[same - 1] != self._entries[same - 1]
        segments = (*old.segments[:same], *(self._segment(entry, None) for entry in entries[same:]))
        starts = np.empty(len(segments) + 1, np.int64)
        starts[: same + 1] = old.starts[: same + 1]
        size = int(starts[same])
        for i in range(same, len(segments)):
            starts[i + 1] = size = size + len(segments[i])
        if old.live.base is not self._room or len(self._room) < size:
            self._room = np.empty(2 * size, np.bool_)
            self._room[: old.size] = old.live
        self._room[old.size : size] = True  # no older snapshot includes these bytes
        count = old.count + size - old.size
        snapshot = Snapshot(state.generation, segments, starts, self._room[:size], count, old.keyless)
        self._take(self.loaded._replace(snapshot=snapshot), entries, self._missing)
        return True

    def _take(self, loaded: Loaded, entries: list[SegmentEntry], missing: gaps.Gaps) -> None:
        self._require_labels(loaded.snapshot, loaded.keyed.schema.num_classes)
        self.loaded, self._entries, self._missing = loaded, entries, missing

    def _segments(
        self, entries: list[SegmentEntry], missing: gaps.Gaps, rows: int, capacity: int
    ) -> tuple[Segment, ...]:
        known = {(s.number, len(s)): s for s in self.snapshot.segments}
        segments, row = list[Segment](), 0
        for entry in entries:
            if not gaps.follows(entry, row, missing.gone):
                raise damaged_catalog(f"has an impossible segment {entry}")
            segment = known.get((entry.number, entry.used)) or self._segment(entry, missing.checksums.get(entry.number))
            segments.append(segment)
            row = segment.stop_row
        stored, used = sum(map(len, segments)), sum(entry.used for entry in entries)
        if used + missing.gone != rows or row > rows or stored > capacity:
            raise damaged_catalog(f"counts {rows} rows but {stored} in segments and {missing.gone} compacted away")
        return tuple(segment for segment in segments if len(segment))

    def _segment(self, entry: SegmentEntry, rows_crc: int | None) -> Segment:
        number, first, capacity, used = entry
        keys, values = self._columns.open(number, capacity)
        rows = None if rows_crc is None else self._columns.rows(number, capacity)[:used]
        if rows is not None and (not used or rows[0] != first):
            raise CorruptionError(f"rows-{number:08d}.npy does not begin with row {first}; restore it from a copy")
        if rows is not None and checksum(rows) != rows_crc:  # a wrong row would give an id another record's vector
            raise CorruptionError(f"rows-{number:08d}.npy differs from its checksum; restore it from a copy")
        return Segment(number, first, rows, keys[:used], None if values is None else values[:used])

    def _require_labels(self, snapshot: Snapshot, classes: int | None) -> None:
        """Raise CorruptionError if a live record's label is out of range: pooling uses labels as indices."""
        checked = dict[int, int]()
        if classes is None:
            return
        for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
            done = self._labels_checked.get(segment.number, 0)
            labels = np.asarray(segment.values)[done:]
            live = snapshot.live[start + done : start + len(segment)]
            wrong = np.flatnonzero(((labels < 0) | (labels >= classes)) & live)
            if len(wrong):
                row = segment.rows_of(slice(done, None))[wrong[0]]
                raise CorruptionError(
                    f"values-{segment.number:08d}.npy: row {row} has the label {labels[wrong[0]]}; expected 0 to "
                    f"{classes - 1}; restore the file from a copy"
                )
            checked[segment.number] = len(segment)
        self._labels_checked = checked
