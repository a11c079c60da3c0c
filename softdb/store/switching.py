"""All keys made anew: new segments take the place of all others, with the schema and the name of the encoder.

As compaction, but of everything and in one commit: the live rows' new keys and their values are written aside and
fsynced; one SQLite transaction swaps segments, checksums, tombstones and settings; then the old files are unlinked. A
crash leaves the old keys or the new ones. Whoever has an older generation open keeps its maps. Rows keep their numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from softdb.check import Schema
from softdb.errors import CorruptionError, WriteFailed
from softdb.store import gaps, keyed
from softdb.store.catalog import Catalog
from softdb.store.gathered import Gathered
from softdb.store.segments import MAX_ROWS, ColumnFiles, SegmentEntry, SegmentPart, checksum
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import AT_ONCE, checksums, damaged
from softdb.store.store import Store

Rows = NDArray[np.int64]
Gather = Callable[[Snapshot, Rows], None]

TRIES = 5  # times that what has changed meanwhile is embedded while others go on; then they wait
_NONE = np.empty(0, np.int64)


@dataclass
class Progress:
    """The rows that were looked at, and the checksums of payload and text as they were then."""

    generation: int = -1  # nothing that was replaced in place up to here is unseen
    rows: Rows = field(default_factory=_NONE.copy)  # (m,) ascending
    crcs: Rows = field(default_factory=lambda: np.empty((0, 2), np.int64))  # (m, 2), -1 where there is none
    keyed: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))  # (m,) which have a new key

    def add(self, rows: Rows, crcs: Rows, keyed: NDArray[np.bool_]) -> None:
        """Rows (m,) were looked at, some of them again."""
        kept = ~np.isin(self.rows, rows)
        merged = np.concatenate([self.rows[kept], rows])
        order = np.argsort(merged, kind="stable")
        self.rows = merged[order]
        self.crcs = np.concatenate([self.crcs[kept], crcs])[order]
        self.keyed = np.concatenate([self.keyed[kept], keyed])[order]

    def unlike(self, rows: Rows, crcs: Rows) -> Rows:
        """Those of rows (m,) that are not here, or with another checksum."""
        if not len(self.rows):
            return rows
        places = np.minimum(self.rows.searchsorted(rows), len(self.rows) - 1)
        found: Rows = rows[(self.rows[places] != rows) | (self.crcs[places] != crcs).any(1)]
        return found

    def of(self, snapshot: Snapshot) -> Rows:
        """The rows, ascending, that have a new key and hold a record."""
        rows = self.rows[self.keyed]
        return rows[np.isin(rows, snapshot.all_rows)]


def pending(store: Store, progress: Progress) -> tuple[Snapshot, Rows]:
    """The newest generation, and its rows, ascending, that were not looked at, or have changed since."""
    return store.run(_pending, store, progress)


def _pending(store: Store, progress: Progress) -> tuple[Snapshot, Rows]:
    with store.read_transaction() as snapshot:
        live = snapshot.all_rows
        rows = live[~np.isin(live, progress.rows)]
        if store.catalog.payloads_replaced() > progress.generation >= 0:
            rows = np.unique(np.concatenate([rows, *(progress.unlike(*some) for some in _crcs(store.catalog))]))
        return snapshot, rows


def _crcs(catalog: Catalog) -> Iterator[tuple[Rows, Rows]]:
    """Rows (m,) and the checksums (m, 2) of their payloads and texts, some at a time."""
    columns = "row, coalesce(payload_crc, -1), coalesce(text_crc, -1)"
    last, sql = -1, f"SELECT {columns} FROM records WHERE row > ? ORDER BY row LIMIT ?"
    while found := catalog.all(sql, (last, AT_ONCE)):
        some = np.array(found, np.int64)
        last = int(some[-1, 0])
        yield some[:, 0], some[:, 1:]


def require_sound_values(store: Store) -> None:
    """Raise CorruptionError where values, which are carried over, differ from their checksums."""
    segments = store.snapshot.segments if store.schema.has_values else ()
    found = [one for segment in segments for one in damaged(store.checksums, segment)]
    damage = [str(one) for one in found if one.file.startswith("values")]
    if damage:
        raise CorruptionError("; ".join(damage) + ": restore them from a copy, then reembed")


@dataclass
class _NewSegment:
    """A new segment, not yet known to the catalogue."""

    number: int
    rows: Rows  # (m,) ascending
    key_crcs: NDArray[np.uint32]  # (m,)

    @property
    def has_gaps(self) -> bool:
        return int(self.rows[-1] - self.rows[0]) + 1 != len(self.rows)

    @property
    def entry(self) -> SegmentEntry:
        return SegmentEntry(self.number, int(self.rows[0]), len(self.rows), len(self.rows))


@dataclass
class Switch:
    """One change of all keys: the gathered ones take the place of the others."""

    store: Store
    schema: Schema
    encoder: str | None
    gathered: Gathered
    progress: Progress
    gather: Gather  # gathers the keys of rows; called for what others have written meanwhile
    announce: Callable[[int], None]  # told the generation that the commit will make, before it does

    def __post_init__(self) -> None:
        self.columns: ColumnFiles = self.store.columns.like(self.schema)
        self.numbers: list[int] = []  # of segments that may have been made
        self.parts: list[_NewSegment] = []
        self.again = _NONE  # rows that were gathered again since their part was written
        self.tries = 0

    def run(self) -> None:
        """Do it, in one commit. Raises WriteFailed, CorruptionError, and what `gather` raises: nothing has changed."""
        try:
            if self.store.path is not None:  # in memory any commit drops a column that the catalogue does not know
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
        return np.concatenate([_NONE, *(part.rows for part in self.parts)])

    def write_aside(self) -> None:
        """Write the bulk while others read and write. What fails here has changed nothing."""
        snapshot, _ = pending(self.store, self.progress)
        rows = self.progress.of(snapshot)
        try:
            self._write(snapshot, rows, self.store.run(self._reserved, len(rows)))
        except (OSError, MemoryError) as error:
            raise WriteFailed(f"the disk refused a write ({error}); the records are as before, make room") from error

    def _reserved(self, count: int) -> list[int]:
        with self.store.write_transaction(durable=True):
            return [gaps.reserve(self.store.catalog) for _ in range(0, count, MAX_ROWS)]

    def _write(self, snapshot: Snapshot, rows: Rows, numbers: list[int]) -> None:
        """Write segments of rows (m,) ascending, on disk when this returns."""
        self.numbers += numbers
        for number, low in zip(numbers, range(0, len(rows), MAX_ROWS), strict=True):
            mine = rows[low : low + MAX_ROWS]
            part = _NewSegment(number, mine, np.empty(len(mine), np.uint32))
            self.columns.create(number, len(mine), part.has_gaps, aside=True)
            self.columns.fill(number, len(mine), self._columns_of(part, snapshot))
            self.parts.append(part)

    def _columns_of(self, part: _NewSegment, snapshot: Snapshot) -> Iterator[SegmentPart]:
        for low in range(0, len(part.rows), AT_ONCE):
            rows = part.rows[low : low + AT_ONCE]
            keys, values = self.gathered.keys(rows), None
            part.key_crcs[low : low + AT_ONCE] = checksums(keys)
            if self.schema.has_values:
                values = snapshot.values_at(snapshot.positions(rows)).numpy()
                values = values.astype(self.schema.value_dtype, copy=False)
            yield SegmentPart(keys, values, rows if part.has_gaps else None)

    def catch_up(self) -> None:
        """Gather what others have written meanwhile."""
        snapshot, rows = pending(self.store, self.progress)
        self.again = np.union1d(self.again, rows)
        self.gather(snapshot, rows)
        self.tries += 1

    def commit(self) -> bool:
        """Switch, unless something is still to be gathered, which others should not wait for. On the store's thread."""
        with self.store.write_transaction(durable=True):
            if len(_pending(self.store, self.progress)[1]):
                if self.tries < TRIES:
                    return False
                self.catch_up()
            self._complete(self.store.snapshot)
            old = self._put()
        with contextlib.suppress(OSError):  # the switch has happened; the next writer removes what is left
            self.store.columns.remove(old)
        return True

    def _complete(self, snapshot: Snapshot) -> None:
        """Bring the segments up to date with what was gathered since they were written."""
        for part in self.parts:
            for slot in np.flatnonzero(np.isin(part.rows, self.again)).tolist():
                key = self.gathered.keys(part.rows[slot : slot + 1])
                self.columns.overwrite(part.number, len(part.rows), slot, key)
                part.key_crcs[slot] = checksums(key)[0]
        live, rows = self.progress.of(snapshot), self.all_rows
        late = live[~np.isin(live, rows)]
        if len(rows) and len(late):  # rows ascend: a record without a key that came to its text meanwhile stays so
            self.progress.keyed &= ~np.isin(self.progress.rows, late[late < rows.max()])
            late = late[late > rows.max()]
        self._write(snapshot, late, [gaps.reserve(self.store.catalog) for _ in range(0, len(late), MAX_ROWS)])

    def _put(self) -> list[int]:
        """Put the new segments into the catalogue in place of all others, and return the numbers of these."""
        catalog, rows = self.store.catalog, self.all_rows
        state, old = catalog.state(), [entry.number for entry in catalog.segments()]
        gaps.put(catalog, old, state.next_row - len(rows) - catalog.setting("gone"), None)
        live = self.progress.of(self.store.snapshot)
        for part in self.parts:
            catalog.put_segment(part.entry)
            if part.has_gaps:
                gaps.put(catalog, (), 0, (part.number, checksum(part.rows)))
            own = np.isin(part.rows, live)
            crcs = zip(part.key_crcs[own].tolist(), part.rows[own].tolist(), strict=True)
            catalog.connection.executemany("UPDATE records SET key_crc = ? WHERE row = ?", crcs)
        catalog.set_tombstones(catalog.dead(), False)
        catalog.set_tombstones(rows[~np.isin(rows, live)])
        catalog.connection.execute("DELETE FROM indexes")  # of the old keys
        catalog.put_setting("dim", self.schema.dim)
        keyed.note(catalog, self.encoder)
        catalog.put_setting("reembedded", state.generation + 1)
        self.announce(catalog.advance(0).generation)
        self.store.columns.take(self.columns)
        return old
