"""The truth: catalogue and column files kept in step. One writer, any number of readers, in any processes and threads.

A commit is: columns written and fsynced beyond the watermark -> one SQLite transaction at synchronous=FULL -> a new
snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Id, Schema, json_text, shown
from softdb.errors import (
    Closed,
    CorruptionError,
    DuplicateId,
    NotADatabase,
    ReadOnly,
    UnknownId,
    WriteFailed,
)
from softdb.store import files, fork
from softdb.store.append import Batch, append
from softdb.store.catalog import Catalog
from softdb.store.directory import enter
from softdb.store.filters import compile_filter
from softdb.store.segments import Columns, SegmentEntry
from softdb.store.snapshot import Segment, Snapshot

__all__ = ["Store"]

FILTERS_KEPT = 16  # filters whose matching rows are remembered: n bytes each


class Store:
    """The records of one database. Arguments are checked already; see `softdb.database.SoftDB` for the public face."""

    schema: Schema
    snapshot: Snapshot

    def __init__(self, path: Path | None, mode: str, create: Schema | None) -> None:
        """Open a directory (None: memory); `create` is the schema of one that does not exist yet, if it may be made."""
        self.path = path
        self.mode = mode
        self._lock = threading.RLock()  # one user of the connection at a time
        self._writer: int | None = None  # descriptor of the lock file
        self._failure: str | None = None  # why this handle takes no more writes
        self._filters: OrderedDict[str, tuple[int, NDArray[np.bool_]]] = OrderedDict()
        self._catalog: Catalog | None = None
        try:
            self._open(create)
        except BaseException:
            self.close()
            raise
        fork.watch(self)

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, create: Schema | None) -> None:
        writing = self.mode == "rw"
        if self.path is not None:
            self._writer = enter(self.path, writing, create is not None)
        self._catalog = Catalog.open(self.path and self.path / "catalog.sqlite", writing)
        if not self._catalog.tables():
            if create is None or not writing:
                raise NotADatabase(f"{self.path} holds no database yet; give dim= to make one")
            self._catalog.create(create)
            if self.path is not None:
                files.sync_directory(self.path)
        self.schema = self._catalog.schema()
        self._columns = Columns(self.path, self.schema)
        if writing:
            self._columns.clean({entry.number for entry in self._catalog.segments()})
        self.snapshot = Snapshot.of(-1, (), np.zeros(0, np.bool_))
        self.refresh()

    def close(self) -> None:
        """Let go of files and lock; safe to call twice."""
        with self._lock:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None
            if self._writer is not None:
                os.close(self._writer)
                self._writer = None

    @property
    def closed(self) -> bool:
        """Whether the handle was closed."""
        return self._catalog is None

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed."""
        self.require_open()
        assert self._catalog is not None
        return self._catalog

    def require_open(self) -> None:
        """Raises Closed."""
        if self._catalog is None:
            raise Closed("this handle is closed; open the database again")

    def after_fork(self) -> None:
        """In a forked child: drop what belongs to the parent and read on through a connection of one's own."""
        self._lock = threading.RLock()
        if self._catalog is None:
            return
        fork.abandon(self._catalog)
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
        self.mode = "r"
        if self.path is None:
            return  # memory was copied whole
        self._catalog = Catalog.open(self.path / "catalog.sqlite", False)

    # -- reading ---------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Move to the newest committed generation, and return it."""
        with self._lock:
            for attempt in range(8):
                with self._reading():
                    state = self.catalog.state()
                    if state.generation == self.snapshot.generation:
                        break
                    entries, live = self.catalog.segments(), self.catalog.live(state.next_row)
                    try:
                        segments = self._segments(entries, state.next_row)
                    except FileNotFoundError as error:
                        if attempt < 7 and self.mode == "r":
                            continue  # a compaction may have replaced it since
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                self._columns.forget({entry.number for entry in entries})
                self.snapshot = Snapshot.of(state.generation, segments, live)
                break
            return self.snapshot.generation

    def _segments(self, entries: list[SegmentEntry], rows: int) -> tuple[Segment, ...]:
        known = {(s.number, len(s)): s for s in self.snapshot.segments}
        segments, row = [], 0
        for entry in entries:
            if entry.first_row != row or not 0 <= entry.used <= entry.capacity:
                raise CorruptionError(
                    f"catalog.sqlite has an impossible segment {entry}; restore the directory from a copy"
                )
            keys, values = self._columns.open(entry.number, entry.capacity)
            fresh = Segment(
                entry.number, row, None, keys[: entry.used], None if values is None else values[: entry.used]
            )
            segments.append(known.get((entry.number, entry.used), fresh))
            row += entry.used
        if row != rows:
            raise CorruptionError(
                f"catalog.sqlite counts {rows} rows but {row} in segments; restore the directory from a copy"
            )
        return tuple(segment for segment in segments if len(segment))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """One generation for a few statements; nested in a transaction it does nothing."""
        if self.catalog.connection.in_transaction:
            yield
            return
        try:
            self.catalog.begin(write=False)
            yield
        except apsw.CorruptError as error:
            raise CorruptionError(f"catalog.sqlite is damaged ({error}); restore the directory from a copy") from error
        finally:
            if self._catalog is not None:
                self._catalog.rollback()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Catalogue and snapshot of one generation, the newest, for several statements."""
        with self._lock, self._reading():
            self.refresh()
            yield self.snapshot

    def locate(self, ids: list[Id]) -> tuple[Snapshot, NDArray[np.int64], list[str | None]]:
        """The snapshot, the rows of ids (n,) in it, -1 for those that it does not hold, and their payload texts."""
        with self._lock:
            found, snapshot = self.catalog.lookup(ids), self.snapshot
        nothing = (-1, None)
        pairs = [found.get(one, nothing) for one in ids]
        rows = np.fromiter((row for row, _ in pairs), np.int64, len(ids))
        rows[snapshot.positions(rows) < 0] = -1  # written after a reader's generation
        return snapshot, rows, [text for _, text in pairs]

    def require(self, ids: list[Id]) -> tuple[Snapshot, NDArray[np.int64], list[str | None]]:
        """As `locate`. Raises UnknownId naming the first that is not stored."""
        snapshot, rows, texts = self.locate(ids)
        if (rows < 0).any():
            missing = np.flatnonzero(rows < 0)
            several = f" ({len(missing)} of {len(ids)} ids are unknown)" if len(ids) > 1 else ""
            raise UnknownId(f"id {shown(ids[missing[0]])} is not stored{several}{self._behind()}; check it with `in`")
        return snapshot, rows, texts

    def _behind(self) -> str:
        with self._lock:
            newest = self.catalog.state().generation
        mine = self.snapshot.generation
        return "" if newest == mine else f" as of generation {mine} (the newest is {newest}: refresh() shows it)"

    def read(self, rows: NDArray[np.int64]) -> dict[int, tuple[Id, str | None]]:
        """Id and payload text of rows; those deleted since are absent."""
        with self._lock:
            return self.catalog.read(rows)

    def matching(self, where: dict[str, Any]) -> tuple[Snapshot, NDArray[np.bool_]]:
        """The snapshot, and which of its positions (size,) hold a record that the filter matches.

        A filter needs vectors and catalogue of one generation, so a reader that has fallen behind is refreshed first.
        Cost: one pass over the payloads, remembered until the next commit.
        """
        condition, bindings = compile_filter(where)
        text = json_text([condition, bindings], "where")
        with self.reading() as snapshot:
            known = self._filters.get(text)
            if known is not None and known[0] == snapshot.generation:
                self._filters.move_to_end(text)
                return snapshot, known[1]
            allowed = np.zeros(snapshot.size, np.bool_)
            allowed[snapshot.positions(self.catalog.matching(condition, bindings))] = True
            self._filters[text] = (snapshot.generation, allowed)
            if len(self._filters) > FILTERS_KEPT:
                self._filters.popitem(last=False)
            return snapshot, allowed

    # -- writing ---------------------------------------------------------------------------------------------------

    def insert(self, batch: Batch) -> None:
        """Add records. Raises DuplicateId when an id is stored already; then nothing is written."""
        with self._writing():
            try:
                append(self.catalog, self._columns, batch)
            except apsw.ConstraintError:
                self.catalog.rollback()
                stored = self.catalog.lookup(batch.ids)
                first = next(one for one in batch.ids if one in stored)
                raise DuplicateId(
                    f"id {shown(first)} is stored already ({len(stored)} of {len(batch.ids)} ids); upsert replaces"
                ) from None

    def upsert(self, batch: Batch) -> None:
        """Add records, replacing those whose ids are stored already."""
        with self._writing():
            stored = self.catalog.lookup(batch.ids)
            if stored:
                self.catalog.bury(np.fromiter((row for row, _ in stored.values()), np.int64))
            append(self.catalog, self._columns, batch)

    def update(
        self, ids: list[Id], keys: Array | None, values: Array | None, payloads: Iterable[str | None] | None
    ) -> None:
        """Replace the given parts of stored records. Raises UnknownId; then nothing is written."""
        with self._writing():
            snapshot, rows, texts = self.require(ids)
            if keys is None and values is None:
                self.catalog.set_payloads(rows.tolist(), texts if payloads is None else payloads)
                self.catalog.advance(0)
                return
            positions = snapshot.positions(rows)
            if keys is None:
                keys = snapshot.keys_at(positions).numpy()
            if values is None and self.schema.has_values:
                values = snapshot.values_at(positions).numpy().astype(self.schema.value_dtype)
            self.catalog.bury(rows)
            append(self.catalog, self._columns, Batch(ids, keys, values, texts if payloads is None else payloads))

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete the records of ids (missing ones are fine), or those that a filter matches; returns how many."""
        with self._writing():
            if ids is not None:
                rows = np.unique(self.locate(ids)[1])
                rows = rows[rows >= 0]
            else:
                rows = self.catalog.matching(*compile_filter(where or {}))
            if len(rows):
                self.catalog.bury(rows)
                self.catalog.advance(0)
        return len(rows)

    # -- indexes: a cache, known to the catalogue by name --------------------------------------------------------------

    def index_entry(self) -> dict[str, Any] | None:
        """What the catalogue knows of the index file, if there is one."""
        with self._lock:
            found = self.catalog.one("SELECT entry FROM indexes WHERE name = 'keys'")
        try:
            entry = None if found is None else json.loads(found[0])
        except ValueError:
            entry = None  # a cache that cannot be read is a cache that is not there
        return entry if isinstance(entry, dict) else None

    def put_index_entry(self, entry: dict[str, Any] | None) -> None:
        """Make the catalogue know an index file that is on disk already, or none. No record changes."""
        with self._writing():
            self.catalog.connection.execute("DELETE FROM indexes WHERE name = 'keys'")
            if entry is not None:
                self.catalog.connection.execute("INSERT INTO indexes VALUES('keys', ?)", (json.dumps(entry),))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing; afterwards the snapshot is what the catalogue says."""
        with self._lock:
            self._require_writable()
            try:
                self.catalog.begin(write=True)
                yield
                if self.catalog.connection.in_transaction:
                    self.catalog.commit()
            except (OSError, apsw.Error, MemoryError) as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise WriteFailed(
                    f"the disk refused a write ({self._failure}); nothing more is written through this handle: "
                    "mend the cause, then open the database again"
                ) from error
            finally:
                with contextlib.suppress(apsw.Error):
                    self.catalog.rollback()
                if self._failure is None:
                    self.refresh()

    def _require_writable(self) -> None:
        self.require_open()
        if self.mode != "rw":
            raise ReadOnly("this handle is read-only; open the database with mode='rw' to write")
        if self._failure is not None:
            raise WriteFailed(f"an earlier write failed ({self._failure}); open the database again")
