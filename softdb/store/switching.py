"""Re-embedding: replace all segments by new ones with new keys, together with the schema and the encoder's name.

As in compaction, but for all segments in one commit, the live rows' new keys and their values are written aside and
fsynced; one SQLite transaction swaps segments, checksums, tombstones and settings; then the old files are unlinked. A
crash leaves the old keys or the new ones. Readers of an old generation keep its files mapped. Rows keep their numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Schema
from softdb.errors import WriteFailed
from softdb.store import gaps, keyed
from softdb.store.catalog import Catalog
from softdb.store.gathered import Gathered
from softdb.store.keyed import Keyed
from softdb.store.segments import MAX_ROWS, ColumnFiles, NewSegment, Piece
from softdb.store.snapshot import Rows, Snapshot
from softdb.store.soundness import AT_ONCE, checksums, damaged, require_sound
from softdb.store.store import Store

Gather = Callable[[Snapshot, Rows], None]

TRIES = 5  # maximum rounds that embed changed rows without the write lock; the next round takes it
_NONE = np.empty(0, np.int64)


@dataclass
class Progress:
    """The rows processed so far, with the checksums that their payloads and texts had then."""

    generation: int = -1  # replacements of payloads and texts up to this generation are processed
    rows: Rows = field(default_factory=_NONE.copy)  # (m,) ascending
    crcs: Rows = field(default_factory=lambda: np.empty((0, 2), np.int64))  # (m, 2); -1: no payload or no text
    keyed: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))  # (m,) mask of rows with a new key

    def add(self, rows: Rows, crcs: Rows, keyed: NDArray[np.bool_]) -> None:
        """Add processed rows (m,); a row that was processed before is replaced."""
        others = ~np.isin(self.rows, rows)
        merged = np.concatenate([self.rows[others], rows])
        order = np.argsort(merged, kind="stable")
        self.rows = merged[order]
        self.crcs = np.concatenate([self.crcs[others], crcs])[order]
        self.keyed = np.concatenate([self.keyed[others], keyed])[order]

    def unlike(self, rows: Rows, crcs: Rows) -> Rows:
        """Return those of rows (m,) that are not processed, or were processed with other checksums than crcs (m, 2)."""
        if not len(self.rows):
            return rows
        places = np.minimum(self.rows.searchsorted(rows), len(self.rows) - 1)
        changed: Rows = rows[(self.rows[places] != rows) | (self.crcs[places] != crcs).any(1)]
        return changed

    def of(self, snapshot: Snapshot) -> Rows:
        """Return those rows of a snapshot that have a new key, ascending."""
        rows = self.rows[self.keyed]
        return rows[np.isin(rows, snapshot.all_rows)]


def pending(store: Store, progress: Progress) -> tuple[Snapshot, Rows]:
    """Return the newest snapshot, and those of its rows, ascending, that are not processed or have changed since."""
    return store.run(_find_pending, store, progress)


def _find_pending(store: Store, progress: Progress) -> tuple[Snapshot, Rows]:
    with store.read_transaction() as snapshot:
        live = snapshot.all_rows
        rows = live[~np.isin(live, progress.rows)]
        if store.catalog.payloads_replaced() > progress.generation >= 0:
            rows = np.unique(np.concatenate([rows, *(progress.unlike(*chunk) for chunk in _crcs(store.catalog))]))
        return snapshot, rows


def _crcs(catalog: Catalog) -> Iterator[tuple[Rows, Rows]]:
    """Yield chunks of all rows (m,) and the checksums (m, 2) of their payloads and texts."""
    columns = "row, coalesce(payload_crc, -1), coalesce(text_crc, -1)"
    last, sql = -1, f"SELECT {columns} FROM records WHERE row > ? ORDER BY row LIMIT ?"
    while records := catalog.all(sql, (last, AT_ONCE)):
        chunk = np.array(records, np.int64)
        last = int(chunk[-1, 0])
        yield chunk[:, 0], chunk[:, 1:]


def require_sound_values(store: Store) -> None:
    """Raise CorruptionError if stored values, which re-embedding copies, differ from their checksums."""
    segments = store.snapshot.segments if store.schema.has_values else ()
    reports = (item for segment in segments for item in damaged(store.checksums, segment))
    require_sound((item for item in reports if item.file.startswith("values")), "then reembed")


class _Rekeyed(NamedTuple):
    """A new segment, with its rows and the checksums of its keys."""

    segment: NewSegment
    rows: Rows  # (m,) ascending
    key_crcs: NDArray[np.uint32]  # (m,)


@dataclass
class Switch:
    """Replacement of all keys of a store by the new keys in `gathered`."""

    store: Store
    origin: Keyed  # of the new keys
    gathered: Gathered
    progress: Progress
    gather: Gather  # makes and stores the new keys of rows of a snapshot
    announce: Callable[[int], None]  # called with the new generation before it is committed

    def __post_init__(self) -> None:
        self.schema: Schema = self.origin.schema
        self.columns: ColumnFiles = self.store.columns.like(self.schema)
        self.numbers: list[int] = []  # numbers of new segments whose files may exist
        self.segments: list[_Rekeyed] = []
        self.again = _NONE  # rows whose keys were made again since their segment was written
        self.tries = 0

    def run(self) -> None:
        """Replace all keys in one commit, or none. Raises WriteFailed, CorruptionError, and errors of `gather`."""
        try:
            if self.store.path is not None:  # in memory any commit drops columns that the catalogue does not name
                self.write_aside()
            while not self.store.run(self.commit):
                self.catch_up()
        except BaseException:
            with contextlib.suppress(OSError):
                self.columns.remove(self.numbers)
            raise

    @property
    def all_rows(self) -> Rows:
        """The rows that the new segments hold."""
        return np.concatenate([_NONE, *(segment.rows for segment in self.segments)])

    def write_aside(self) -> None:
        """Write new segments while other threads read and write. An error here changes no record."""
        snapshot, _ = pending(self.store, self.progress)
        rows = self.progress.of(snapshot)
        try:
            self._write(snapshot, rows, self.store.run(self._reserve, len(rows)))
        except (OSError, MemoryError) as error:
            raise WriteFailed(f"the disk refused a write ({error}); no record changed; make room") from error

    def _reserve(self, count: int) -> list[int]:
        with self.store.write_transaction(durable=True):
            return [gaps.reserve(self.store.catalog) for _ in range(0, count, MAX_ROWS)]

    def _write(self, snapshot: Snapshot, rows: Rows, numbers: list[int]) -> None:
        """Write and sync segments of rows (m,) ascending."""
        self.numbers += numbers
        for number, low in zip(numbers, range(0, len(rows), MAX_ROWS), strict=True):
            chunk = rows[low : low + MAX_ROWS]
            crcs = np.empty(len(chunk), np.uint32)
            segment = self.columns.build(number, chunk, partial(self._read, snapshot, chunk, crcs))
            self.segments.append(_Rekeyed(segment, chunk, crcs))

    def _read(
        self, snapshot: Snapshot, rows: Rows, crcs: NDArray[np.uint32], slots: slice
    ) -> tuple[Array, Array | None]:
        """Return the new keys and the stored values of slots; write the checksums of the keys to `crcs`."""
        keys = self.gathered.keys(rows[slots])
        crcs[slots] = checksums(keys)
        return keys, snapshot.stored_values(snapshot.positions(rows[slots]))

    def catch_up(self) -> None:
        """Make the keys of rows that were written or changed meanwhile."""
        snapshot, rows = pending(self.store, self.progress)
        self.again = np.union1d(self.again, rows)
        self.gather(snapshot, rows)
        self.tries += 1

    def commit(self) -> bool:
        """Commit and return True; or return False, at most TRIES times, if the caller must first call `catch_up`."""
        with self.store.write_transaction(durable=True):
            if len(_find_pending(self.store, self.progress)[1]):
                if self.tries < TRIES:
                    return False
                self.catch_up()
            self._complete(self.store.snapshot)
            old = self._put()
        with contextlib.suppress(OSError):  # the switch is committed; the next writer removes remaining files
            self.store.columns.remove(old)
        return True

    def _complete(self, snapshot: Snapshot) -> None:
        """Add the keys that were made after the segments were written, to these or to new segments."""
        for segment, own, crcs in self.segments:
            for slot in np.flatnonzero(np.isin(own, self.again)).tolist():
                key = self.gathered.keys(own[slot : slot + 1])
                self.columns.write(Piece(segment.entry._replace(used=slot), key, None))
                crcs[slot] = checksums(key)[0]
        live, rows = self.progress.of(snapshot), self.all_rows
        late = live[~np.isin(live, rows)]
        if len(rows) and len(late):  # rows must ascend: an old record that only now got a text stays without a key
            self.progress.keyed &= ~np.isin(self.progress.rows, late[late < rows.max()])
            late = late[late > rows.max()]
        self._write(snapshot, late, [gaps.reserve(self.store.catalog) for _ in range(0, len(late), MAX_ROWS)])

    def _put(self) -> list[int]:
        """Replace all segments in the catalogue by the new ones, and return the numbers of the old ones."""
        catalog, rows = self.store.catalog, self.all_rows
        state, old = catalog.state(), [entry.number for entry in catalog.segments()]
        removed = state.next_row - len(rows) - catalog.setting("gone")
        gaps.put(catalog, old, removed, [new.segment for new in self.segments])
        live = self.progress.of(self.store.snapshot)
        for _, own, crcs in self.segments:
            keyed_rows = np.isin(own, live)
            updates = zip(crcs[keyed_rows].tolist(), own[keyed_rows].tolist(), strict=True)
            catalog.connection.executemany("UPDATE records SET key_crc = ? WHERE row = ?", updates)
        catalog.set_tombstones(catalog.dead(), False)
        catalog.set_tombstones(rows[~np.isin(rows, live)])
        catalog.connection.execute("DELETE FROM indexes")  # of the old keys
        keyed.put(catalog, self.origin._replace(since=state.generation + 1))
        self.announce(catalog.advance(0).generation)
        self.store.columns.take(self.columns)
        return old
