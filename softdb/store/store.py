"""The truth: catalogue and column files kept in step. One writer, any number of readers, in any processes and threads.

A commit is: columns written and fsynced beyond the watermark -> one SQLite transaction at synchronous=FULL -> a new
snapshot.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Id, Schema, shown
from softdb.errors import (
    BadInput,
    Closed,
    CorruptionError,
    DuplicateId,
    NestedWrite,
    NotADatabase,
    ReadOnly,
    SoftDBError,
    UnknownId,
    WriteFailed,
)
from softdb.store import commits, committed, files, fork, gaps
from softdb.store.append import Batch, append
from softdb.store.catalog import Catalog
from softdb.store.commits import Commits
from softdb.store.connect import typed, typed_errors
from softdb.store.directory import enter
from softdb.store.format import FORMAT
from softdb.store.matches import Matches
from softdb.store.segments import ColumnFiles, SegmentEntry, checksum
from softdb.store.snapshot import Segment, Snapshot
from softdb.store.soundness import damaged
from softdb.store.upgrade import upgrade

__all__ = ["Store"]


class Store:
    """The records of one database. Arguments are checked already; see `softdb.database.SoftDB` for the public face."""

    schema: Schema

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        """Open a directory (None: memory); `create` is the schema of one that does not exist yet, if it may be made.

        `relaxed`: see `softdb.store.commits`.
        """
        self.path = path
        self.mode = mode
        self._lock = threading.RLock()  # one user of the connection at a time
        self._write_lock = threading.Lock()  # held by a verb that writes: one that has begun without it was interrupted
        self._checkpoint_due = False  # whether the log that another writer has left is still there
        self._stale = False  # whether the snapshot may be behind what this handle has done
        self._writer: files.Lock | None = None
        self._relaxed = relaxed and path is not None and mode == "rw"
        self._commits: Commits | None = None  # a writer's
        self._failure: str | None = None  # why this handle takes no more writes
        self._unreported: WriteFailed | None = None  # what was lost when nobody had asked for anything
        self._read_owner: object | None = None  # whoever has begun the transaction that reads
        self._matches = Matches()
        self._labels_checked: dict[int, int] = {}  # how many labels of each segment have been looked at
        self._catalog: Catalog | None = None
        fork.watch(self)  # first: a child may be forked meanwhile
        try:
            with self._lock:
                self._open(create)
        except BaseException:
            self.close()
            raise

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, create: Schema | None) -> None:
        writing = self.mode == "rw"
        if self.path is not None:
            self._writer = enter(self.path, writing, create is not None)
        acknowledged = -1 if self.path is None else committed.last(self.path)  # first: a reader may be overtaken
        self._catalog = Catalog.open(self.path and self.path / "catalog.sqlite", writing)
        if not self._catalog.version:
            self._require_new(acknowledged)
            if create is None or not writing:
                raise NotADatabase(f"{self.path} holds no database yet; give dim= to make one")
            self._catalog.create(create)
            if self.path is not None:
                files.sync_directory(self.path)
        with typed_errors():
            self.schema = self._catalog.schema()
            committed.require(self._catalog.state().generation, acknowledged)
        self._columns = ColumnFiles(self.path, self.schema, self._relaxed)
        self._snapshot = Snapshot.of(-1, (), np.zeros(0, np.bool_))
        self.refresh()
        if writing:
            if self.path is not None:  # commits of a killed process that all have seen, and that no sync has covered
                files.sync(self.path / "catalog.sqlite-wal")
                with contextlib.suppress(apsw.FullError, apsw.IOError):
                    self._checkpoint()
            if self._catalog.version < FORMAT:
                self._upgrade()
            late = commits.late(self) if self._relaxed else None
            self._commits = Commits(self._catalog, self._columns, self.path, late)
            self._columns.clean({entry.number for entry in self._catalog.segments()})

    def _checkpoint(self) -> None:
        """Fold in the log that another writer has left; on a full disk the first write tries again."""
        self._checkpoint_due = True
        self.catalog.checkpoint()
        self._checkpoint_due = False

    def _require_new(self, acknowledged: int) -> None:
        """Raise CorruptionError where an empty catalogue stands beside data: a new one would have them removed."""
        if acknowledged >= 0 or (self.path is not None and any(self.path.glob("keys-*.npy"))):
            raise CorruptionError(f"{self.path}/catalog.sqlite is empty, the files beside it are not; restore it")

    def _upgrade(self) -> None:
        with typed_errors():
            self.catalog.begin(write=True)
            try:
                upgrade(self.catalog, self.snapshot.segments)
                self.catalog.commit()
            finally:
                self.catalog.rollback()

    def close(self) -> None:
        """Let go of files and lock; safe to call twice. Raises WriteFailed where relaxed changes are lost.

        Called in the middle of a verb, by a signal's handler, it undoes that one.
        """
        with self._lock:
            try:
                if self._commits is not None and self._commits.in_verb:
                    self._rollback()
                if self.waiting:
                    self._flush()
            finally:
                self._release()
            self._raise_unreported()

    def __del__(self) -> None:
        if getattr(self, "_commits", None) is not None and self._writer is not None and self._writer.descriptor >= 0:
            self.flush_late()

    def _release(self) -> None:
        """Each lets go, whatever another raises, and in an order in which an interrupt leaves no lock behind."""
        with contextlib.ExitStack() as rest:
            if self._writer is not None:
                rest.callback(self._writer.release)
            if self._catalog is not None:
                rest.callback(self._catalog.close)
            if self._commits is not None:
                rest.callback(self._commits.close)
                self._columns.wait()
        self._writer = self._catalog = self._commits = None

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """To be held by whoever reads in several steps: `with store.lock, store.read_transaction():`."""
        return self._lock

    @property
    def write_lock(self) -> AbstractContextManager[Any]:
        """To be held by whoever writes: `with store.lock, store.write_lock, store.write_transaction():`.

        Raises NestedWrite where this thread, which holds `lock`, writes already.
        """
        if self._write_lock.locked():
            raise NestedWrite("this thread is in the middle of another write; let that one end first")
        return self._write_lock

    @property
    def closed(self) -> bool:
        """Whether the handle was closed."""
        return self._catalog is None

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed."""
        self.require_open()
        self._rollback_abandoned()
        assert self._catalog is not None
        return self._catalog

    @property
    def snapshot(self) -> Snapshot:
        """The generation that this handle reads: the newest, for a writer; that of the last `refresh`, for a reader."""
        if self._stale and self._catalog is not None:  # an interrupt came between a commit and its snapshot
            with self._lock:
                if not self._in_verb:
                    self.refresh()
        return self._snapshot

    def require_open(self) -> None:
        """Raises Closed."""
        if self._catalog is None:
            raise Closed("this handle is closed; open the database again")

    def acquire(self, seconds: float) -> Callable[[], None] | None:
        """See `fork.Connected`. What waits to be flushed comes to disk first: a child sees what is there."""
        if not self._lock.acquire(timeout=seconds):
            return None
        self.flush_late()
        return self._lock.release

    def release_in_child(self, acquired: bool) -> None:
        """See `fork.Connected`."""
        self._lock, self._write_lock = threading.RLock(), threading.Lock()
        self.mode = "r"
        transactions, self._commits = self._commits, None
        if transactions is not None:
            transactions.close()
        if self._writer is not None:
            self._writer.close()
        if self._catalog is not None:
            if acquired:
                fork.abandon(self._catalog)
            else:
                fork.keep_unused(self._catalog)
                self._catalog = None

    def after_fork(self) -> None:
        """In a forked child: read on through a connection of one's own. Memory was copied whole."""
        if self._catalog is not None and self.path is not None:
            self._catalog = None
            self._catalog = Catalog.open(self.path / "catalog.sqlite", False)

    # -- reading ---------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Move to the newest generation, and return it."""
        with self._lock:
            if self._commits is None:
                self.catalog.rollback()  # what an interrupt has left open would hold the generation
            with self.read_transaction() as snapshot:
                return snapshot.generation

    def _load_newest(self) -> None:
        """Make the snapshot that of the generation which the open transaction reads."""
        state = self.catalog.state()
        if state.generation == self._snapshot.generation:
            self._stale = False
            return
        entries, missing = self.catalog.segments(), gaps.read(self.catalog)
        segments = self._segments(entries, state.next_row, missing)
        if missing.gone:
            whole = Snapshot.of(state.generation, segments, np.ones(sum(map(len, segments)), np.bool_))
            snapshot = whole.without(self.catalog.dead())
        else:
            snapshot = Snapshot.of(state.generation, segments, self.catalog.live(state.next_row))
        self._require_labels(snapshot)
        self._columns.keep_only({entry.number for entry in entries})
        self._snapshot, self._stale = snapshot, False

    def _require_labels(self, snapshot: Snapshot) -> None:
        """Raise CorruptionError where a live record has a label of no class: pooling adds to where labels say."""
        classes, looked = self.schema.num_classes, dict[int, int]()
        if classes is None:
            return
        for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
            done = self._labels_checked.get(segment.number, 0)
            labels = np.asarray(segment.values)[done:]
            wrong = np.flatnonzero(
                ((labels < 0) | (labels >= classes)) & snapshot.live[start + done : start + len(segment)]
            )
            if len(wrong):
                row = segment.rows_of(slice(done, None))[wrong[0]]
                raise CorruptionError(
                    f"values-{segment.number:08d}.npy: row {row} has the label {labels[wrong[0]]}, there are {classes} "
                    "classes; restore the file from a copy"
                )
            looked[segment.number] = len(segment)
        self._labels_checked = looked

    def _segments(self, entries: list[SegmentEntry], rows: int, missing: gaps.Gaps) -> tuple[Segment, ...]:
        known = {(s.number, len(s)): s for s in self._snapshot.segments}
        segments, row, stored = [], 0, 0
        for entry in entries:
            follows = entry.first_row >= row if missing.gone else entry.first_row == row
            if not follows or not 0 <= entry.used <= entry.capacity:
                raise CorruptionError(
                    f"catalog.sqlite has an impossible segment {entry}; restore the directory from a copy"
                )
            segment = known.get((entry.number, entry.used)) or self._segment(entry, missing.checksums.get(entry.number))
            segments.append(segment)
            row, stored = segment.stop_row, stored + entry.used
        if stored + missing.gone != rows or row > rows or stored > self.catalog.capacity():
            raise CorruptionError(
                f"catalog.sqlite counts {rows} rows but {stored} in segments and {missing.gone} compacted away; "
                "restore the directory from a copy"
            )
        return tuple(segment for segment in segments if len(segment))

    def _segment(self, entry: SegmentEntry, rows_crc: int | None) -> Segment:
        number, first, capacity, used = entry
        keys, values = self._columns.open(number, capacity)
        rows = None if rows_crc is None else self._columns.rows(number, capacity)[:used]
        if rows is not None and (not used or rows[0] != first):
            raise CorruptionError(f"rows-{number:08d}.npy does not begin with row {first}; restore it from a copy")
        if rows is not None and checksum(rows) != rows_crc:  # else ids would get other records' vectors
            raise CorruptionError(f"rows-{number:08d}.npy differs from its checksum; restore it from a copy")
        return Segment(number, first, rows, keys[:used], None if values is None else values[:used])

    @contextlib.contextmanager
    def _pinned_generation(self) -> Iterator[None]:
        """One generation for a few statements; nested in a transaction it does nothing."""
        if self.catalog.connection.in_transaction:
            with contextlib.nullcontext() if self._in_verb else typed_errors():
                yield
            return
        mine, dropped = object(), False
        self._read_owner = mine
        try:
            with typed_errors():
                self.catalog.begin(write=False)
                yield
        except GeneratorExit:  # of one that an interrupt has left, dropped at last, in whatever thread
            dropped = True
            if not self._lock._is_owned() and self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
                try:
                    self._end_read_transaction(mine)
                finally:
                    self._lock.release()
            raise
        finally:
            if not dropped:
                self._end_read_transaction(mine)

    def _end_read_transaction(self, mine: object) -> None:
        """End the transaction that one has begun, unless it is another's now."""
        if self._read_owner is mine and self._catalog is not None:
            self._read_owner = None
            self._catalog.rollback()

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[Snapshot]:
        """Catalogue and snapshot of one generation, the newest, for several statements. The caller holds `lock`."""
        with contextlib.ExitStack() as transaction:
            for attempt in range(8):
                with contextlib.ExitStack() as tried:
                    tried.enter_context(self._pinned_generation())
                    try:
                        self._load_newest()
                    except FileNotFoundError as error:
                        if attempt < 7 and self.mode == "r":
                            continue  # a compaction has replaced it since this transaction began
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                    transaction.push(tried.pop_all())
                    break
            yield self._snapshot

    def locate(self, ids: list[Id]) -> tuple[Snapshot, NDArray[np.int64], list[str | None]]:
        """The snapshot, the rows of ids (n,) in it, -1 for those that it does not hold, and their payload texts."""
        with self._lock, typed_errors():
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
        with self._lock, typed_errors():
            newest = self.catalog.state().generation
        mine = self.snapshot.generation
        return "" if newest == mine else f" as of generation {mine} (the newest is {newest}: refresh() shows it)"

    def read(self, rows: NDArray[np.int64]) -> dict[int, tuple[Id, str | None]]:
        """Id and payload text of rows; those deleted since are absent."""
        with self._lock, typed_errors():
            return self.catalog.read(rows)

    def checksums(self, first: int, last: int) -> list[Any]:
        """What `Catalog.checksums` says of the records in rows first … last."""
        with self._lock, typed_errors():
            return self.catalog.checksums(first, last)

    def matching(self, where: dict[str, Any]) -> tuple[Snapshot, NDArray[np.bool_]]:
        """The snapshot, and which of its positions (size,) hold a record that the filter matches.

        A filter needs vectors and catalogue of one generation, so a reader that has fallen behind is refreshed first.
        Cost: see `Matches.of`.
        """
        with self._lock, self.read_transaction() as snapshot:
            return snapshot, self._matches.of(where, self.catalog, snapshot)

    # -- writing ---------------------------------------------------------------------------------------------------

    def insert(self, batch: Batch) -> None:
        """Add records. Raises DuplicateId when an id is stored already; then nothing is written."""
        with self._lock, self.write_lock, self.write_transaction():
            try:
                append(self.catalog, self._columns, batch)
            except apsw.ConstraintError:
                self._transactions.rollback()
                stored = self.catalog.lookup(batch.ids)
                first = next((one for one in batch.ids if one in stored), None)
                if first is None:
                    raise CorruptionError(
                        "catalog.sqlite has records in rows that are yet to come; restore it from a copy"
                    ) from None
                raise DuplicateId(
                    f"id {shown(first)} is stored already ({len(stored)} of {len(batch.ids)} ids); upsert replaces"
                ) from None

    def upsert(self, batch: Batch) -> None:
        """Add records, replacing those whose ids are stored already."""
        with self._lock, self.write_lock, self.write_transaction():
            stored = self.catalog.lookup(batch.ids)
            if stored:
                self.catalog.delete(np.fromiter((row for row, _ in stored.values()), np.int64))
            append(self.catalog, self._columns, batch)

    def update(
        self, ids: list[Id], keys: Array | None, values: Array | None, payloads: Iterable[str | None] | None
    ) -> None:
        """Replace the given parts of stored records. Raises UnknownId; then nothing is written."""
        with self._lock, self.write_lock, self.write_transaction():
            snapshot, rows, texts = self.require(ids)
            if keys is None and values is None:
                self.catalog.set_payloads(rows.tolist(), texts if payloads is None else payloads)
                self.catalog.advance(0)
                return
            positions = snapshot.positions(rows)
            self._require_sound(snapshot, rows)
            if keys is None:
                keys = snapshot.keys_at(positions).numpy()
            if values is None and self.schema.has_values:
                values = snapshot.values_at(positions).numpy().astype(self.schema.value_dtype)
            self.catalog.delete(rows)
            append(self.catalog, self._columns, Batch(ids, keys, values, texts if payloads is None else payloads))

    def _require_sound(self, snapshot: Snapshot, rows: NDArray[np.int64]) -> None:
        """Raise CorruptionError where records differ from their checksums: what is written anew would hide it."""
        found = [str(one) for segment in snapshot.segments for one in damaged(self.checksums, segment, rows)]
        if found:
            raise CorruptionError("; ".join(found) + ": restore them from a copy, or upsert the records whole")

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete the records of ids (missing ones are fine), or those that a filter matches; returns how many."""
        with self._lock, self.write_lock, self.write_transaction():
            if ids is not None:
                rows = np.unique(self.locate(ids)[1])
                rows = rows[rows >= 0]
            else:
                snapshot, matching = self.matching({} if where is None else where)
                rows = snapshot.rows(np.flatnonzero(matching))
            if len(rows):
                self.catalog.delete(rows)
                self.catalog.advance(0)
        return len(rows)

    # -- declared fields -------------------------------------------------------------------------------------------

    def fields(self) -> tuple[str, ...]:
        """The fields of the payload that have an index, as of now."""
        with self._lock, typed_errors():
            return self.catalog.fields()

    def index_fields(self, names: Iterable[str]) -> None:
        """Index fields of the payload, all or none; those that are indexed stay so. No record changes."""
        with self._lock, self.write_lock, self.write_transaction(durable=True):
            for name in names:
                self.catalog.index_field(name)

    def drop_field(self, name: str) -> None:
        """Drop a field's index. Raises BadInput where it has none."""
        with self._lock, self.write_lock, self.write_transaction(durable=True):
            fields = self.catalog.fields()
            if name not in fields:
                raise BadInput(f"field {shown(name)} has no index; indexed fields: {', '.join(fields) or 'none'}")
            self.catalog.drop_field(name)

    # -- the files -------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> ColumnFiles:
        """The column files, for those who copy them."""
        return self._columns

    def shrink(self) -> None:
        """Make the catalogue's file as small as it can be. No record changes."""
        with self._lock:
            if self.relaxed:
                self.flush()
            try:
                self.catalog.shrink()
            except apsw.Error as error:
                if self._commits is not None:
                    self._failed(error)  # a sync is not to be tried again
                raise WriteFailed(
                    f"catalog.sqlite could not be made smaller ({error}); its records are safe"
                ) from error

    def occupied(self) -> int:
        """Bytes on disk; 0 in memory."""
        return 0 if self.path is None else files.occupied(self.path)

    # -- indexes: a cache, known to the catalogue by name --------------------------------------------------------------

    def index_entry(self) -> dict[str, Any] | None:
        """What the catalogue knows of the index file, if there is one."""
        with self._lock, typed_errors():
            found = self.catalog.one("SELECT entry FROM indexes WHERE name = 'keys'")
        try:
            entry = None if found is None else json.loads(found[0])
        except (ValueError, TypeError, RecursionError):
            entry = None  # a cache that cannot be read is a cache that is not there
        return entry if isinstance(entry, dict) else None

    def put_index_entry(self, entry: dict[str, Any] | None) -> None:
        """Make the catalogue know an index file that is on disk already, or none. No record changes."""
        with self._lock, self.write_lock, self.write_transaction(durable=True):
            self.catalog.connection.execute("DELETE FROM indexes WHERE name = 'keys'")
            if entry is not None:
                self.catalog.connection.execute("INSERT INTO indexes VALUES('keys', ?)", (json.dumps(entry),))

    @contextlib.contextmanager
    def write_transaction(self, durable: bool = False) -> Iterator[None]:
        """One write operation: all of it or nothing; afterwards the snapshot is what the catalogue says.

        `durable`: on disk when this ends, with all before it, even if relaxed. The caller holds `lock` and `write_lock`
        in `with` statements: an interrupt may keep this generator from being resumed, or have it closed during a later
        operation, but it cannot come between the end of a `with` and the release of a lock, which is not Python code.
        """
        self.require_writable()
        _ = self.snapshot  # of a verb that was interrupted
        dropped, self._read_owner = False, None
        try:
            if self._checkpoint_due:
                self._checkpoint()
            self._transactions.begin()
            yield
            self._stale = True  # an interrupt may come before the snapshot does
            self._transactions.end(durable)
        except GeneratorExit:  # of one that an interrupt has left, dropped at last, in whatever thread
            dropped = True
            raise
        except (apsw.BusyError, apsw.LockedError) as error:  # nothing was written: another program has it locked
            raise typed(error) from error
        except (OSError, apsw.Error, MemoryError) as error:
            raise self._failed(error) from error
        except UnicodeDecodeError as error:
            raise CorruptionError(f"catalog.sqlite has a damaged text ({error}); restore it from a copy") from None
        finally:
            if not dropped:
                self._rollback()

    @property
    def _in_verb(self) -> bool:
        """Whether a verb has begun and goes on."""
        return self._commits is not None and self._commits.in_verb and self._write_lock.locked()

    def _rollback_abandoned(self) -> None:
        """Undo the verb that has begun and does not go on."""
        if self._commits is None or not self._commits.in_verb or self._write_lock.locked():
            return
        with self._lock:
            if self._commits.in_verb and not self._in_verb:
                self._rollback()

    def _rollback(self) -> None:
        """Undo what has not ended, and see what there is."""
        self._stale = True
        if self._commits is not None:
            try:
                self._commits.rollback()
            except apsw.Error as error:
                self._unreported = self._failed(error)
            self._fail_after_checkpoint()
        with contextlib.suppress(*([] if self._failure is None else [SoftDBError])):
            self.refresh()  # a commit that raised may have come to disk

    def _fail_after_checkpoint(self) -> None:
        """Take no more writes after a checkpoint that failed; what was committed is safe."""
        if self._commits is not None and self._commits.broken is not None and self._failure is None:
            self._failed(self._commits.broken)

    def flush(self) -> None:
        """Bring relaxed changes to disk. Raises WriteFailed."""
        with self._lock:
            self._rollback_abandoned()  # before `write_lock` is held: that says that a verb goes on
            with self.write_lock:
                self._flush()

    def flush_late(self) -> None:
        """The same for nobody: what is lost is told by the next verb, or by `close`."""
        with self._lock:
            if not self.waiting or self._write_lock.locked():
                return
            try:
                self.flush()
            except WriteFailed as error:
                self._unreported = error
            except SoftDBError:
                pass

    def _flush(self) -> None:
        self.require_writable()
        try:
            self._transactions.flush()
        except (OSError, apsw.Error, MemoryError) as error:
            raise self._failed(error) from error
        self._fail_after_checkpoint()

    def _raise_unreported(self) -> None:
        """Raise what nobody has heard yet."""
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    @property
    def waiting(self) -> int:
        """Relaxed changes that are not on disk."""
        return 0 if self._commits is None else self._commits.waiting

    @property
    def relaxed(self) -> bool:
        """Whether changes may wait."""
        return self._relaxed and self.mode == "rw"

    @property
    def _transactions(self) -> Commits:
        if self._commits is None:
            self.require_open()
            raise ReadOnly("the process has forked in the middle of this write; only the parent's goes on")
        return self._commits

    def _failed(self, error: Exception) -> WriteFailed:
        """Take no more writes."""
        lost = self.waiting
        self._failure, self._stale = f"{type(error).__name__}: {error}", True
        if self._commits is not None:
            self._commits.give_up()
        also = f" and what was done since the last flush ({lost} changes) is undone" if lost else ""
        return WriteFailed(
            f"the disk refused a write ({self._failure}){also}; nothing more is written through this handle: "
            "mend the cause, then open the database again"
        )

    def require_writable(self) -> None:
        """Raises Closed, ReadOnly, and WriteFailed after a write that failed."""
        self.require_open()
        if self.mode != "rw":
            raise ReadOnly("this handle is read-only; open the database with mode='rw' to write")
        self._raise_unreported()
        if self._failure is not None:
            raise WriteFailed(f"an earlier write failed ({self._failure}); open the database again")
