"""An open database: locks, transactions, closing, forking. One writer, any number of readers, in any processes.

Guarantees: a read transaction sees one generation; a write transaction happens whole or not at all, even where an
interrupt, a fork or a full disk comes between; whatever an operation leaves open, the next one rolls back. A commit is:
columns written and fsynced beyond the watermark -> one SQLite transaction at synchronous=FULL -> a new snapshot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import apsw

from softdb.check import Schema
from softdb.errors import Closed, CorruptionError, NestedWrite, NotADatabase, ReadOnly, SoftDBError, WriteFailed
from softdb.store import commits, committed, files, fork
from softdb.store.catalog import Catalog
from softdb.store.commits import Commits
from softdb.store.connect import damaged_text, typed, typed_errors
from softdb.store.directory import enter, require_new
from softdb.store.generation import SnapshotLoader
from softdb.store.segments import ColumnFiles
from softdb.store.snapshot import Snapshot

__all__ = ["Session"]


class Session:
    """A connection to the catalogue, the column files, and the snapshot that this handle reads."""

    schema: Schema
    columns: ColumnFiles  # compaction writes to them, too

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        """Open a directory (None: memory); `create` is the schema of one that does not exist yet, if it may be made.

        `relaxed`: see `softdb.store.commits`.
        """
        self.path, self.mode = path, mode
        self._lock = threading.RLock()  # one user of the connection at a time
        self._write_lock = threading.Lock()  # held by a write operation: one that began without it was interrupted
        self._checkpoint_due = False  # whether the WAL that another writer has left is still there
        self._stale = False  # whether the snapshot may be behind what this handle has done
        self._writer: files.Lock | None = None
        self._relaxed = relaxed and path is not None and mode == "rw"
        self._commits: Commits | None = None  # a writer's
        self._failure: str | None = None  # why this handle takes no more writes
        self._unreported: WriteFailed | None = None  # an error of a flush in the background
        self._read_owner: object | None = None  # whoever has begun the read transaction
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
        if not self._catalog.laid_out:
            require_new(self.path, acknowledged)
            if create is None or not writing:
                raise NotADatabase(f"{self.path} holds no database yet; give dim= to make one")
            self._catalog.create(create)
            if self.path is not None:
                files.sync_directory(self.path)
        with typed_errors():
            self.schema = self._catalog.schema()
            committed.require(self._catalog.state().generation, acknowledged)
        self.columns = ColumnFiles(self.path, self.schema, self._relaxed)
        self._loader = SnapshotLoader(self.columns, self.schema)
        self.refresh()
        if writing:
            if self.path is not None:  # commits of a killed process that all have seen, and that no sync has covered
                files.sync(self.path / "catalog.sqlite-wal")
                with contextlib.suppress(apsw.FullError, apsw.IOError):
                    self._checkpoint()
            late = commits.late(self) if self._relaxed else None
            self._commits = Commits(self._catalog, self.columns, self.path, late)
            self.columns.clean({entry.number for entry in self._catalog.segments()})

    def _checkpoint(self) -> None:
        """Checkpoint the WAL that another writer has left; on a full disk the first write tries again."""
        self._checkpoint_due = True
        self.catalog.checkpoint()
        self._checkpoint_due = False

    def close(self) -> None:
        """Close the files and release the lock; safe to call twice. Raises WriteFailed where relaxed changes are lost.

        Called in the middle of an operation, by a signal's handler, it rolls that one back.
        """
        with self._lock:
            try:
                if self._commits is not None and self._commits.in_operation:
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
        """Close everything, whatever one of them raises, in an order in which an interrupt leaves no lock behind."""
        with contextlib.ExitStack() as rest:
            if self._writer is not None:
                rest.callback(self._writer.release)
            if self._catalog is not None:
                rest.callback(self._catalog.close)
            if self._commits is not None:
                rest.callback(self._commits.close)
                self.columns.wait()
        self._writer = self._catalog = self._commits = None

    @property
    def closed(self) -> bool:
        """Whether the handle was closed."""
        return self._catalog is None

    def require_open(self) -> None:
        """Raises Closed."""
        if self._catalog is None:
            raise Closed("this handle is closed; open the database again")

    # -- forking: see `softdb.store.fork.Connected` ----------------------------------------------------------------

    def acquire(self, seconds: float) -> Callable[[], None] | None:
        """Keep other threads out. What waits to be flushed is flushed first: a child sees what is on disk."""
        if not self._lock.acquire(timeout=seconds):
            return None
        self.flush_late()
        return self._lock.release

    def release_in_child(self, acquired: bool) -> None:
        """In a forked child: close what was inherited."""
        self._lock, self._write_lock = threading.RLock(), threading.Lock()
        self.mode = "r"
        transactions, self._commits = self._commits, None
        if transactions is not None:
            transactions.close()
        if self._writer is not None:
            self._writer.close()
        if self._catalog is not None and acquired:
            fork.abandon(self._catalog)
        elif self._catalog is not None:
            fork.keep_unused(self._catalog)
            self._catalog = None

    def after_fork(self) -> None:
        """In a forked child: read on through a connection of its own. Memory was copied whole."""
        if self._catalog is not None and self.path is not None:
            self._catalog = None
            self._catalog = Catalog.open(self.path / "catalog.sqlite", False)

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """To be held for several reads: `with store.lock, store.read_transaction():`."""
        return self._lock

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
                if not self._in_operation:
                    self.refresh()
        return self._loader.snapshot

    def refresh(self) -> int:
        """Move to the newest generation, and return it."""
        with self._lock:
            if self._commits is None:
                self.catalog.rollback()  # a transaction that an interrupt has left open would keep the generation
            with self.read_transaction() as snapshot:
                return snapshot.generation

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[Snapshot]:
        """Catalogue and snapshot of one generation, the newest, for several statements. The caller holds `lock`."""
        with contextlib.ExitStack() as transaction:
            for attempt in range(8):
                with contextlib.ExitStack() as tried:
                    tried.enter_context(self._one_generation())
                    try:
                        self._loader.load(self.catalog)
                        self._stale = False
                    except FileNotFoundError as error:
                        if attempt < 7 and self.mode == "r":
                            continue  # a compaction has replaced it since this transaction began
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                    transaction.push(tried.pop_all())
                    break
            yield self._loader.snapshot

    @contextlib.contextmanager
    def _one_generation(self) -> Iterator[None]:
        """A transaction for a few statements; none where one is open already."""
        if self.catalog.connection.in_transaction:
            with contextlib.nullcontext() if self._in_operation else typed_errors():
                yield
            return
        mine, abandoned = object(), False
        self._read_owner = mine
        try:
            with typed_errors():
                self.catalog.begin(write=False)
                yield
        except GeneratorExit:  # an interrupt has left this generator, which is collected now, in whatever thread
            abandoned = True
            if not self._lock._is_owned() and self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
                try:
                    self._end_read_transaction(mine)
                finally:
                    self._lock.release()
            raise
        finally:
            if not abandoned:
                self._end_read_transaction(mine)

    def _end_read_transaction(self, mine: object) -> None:
        """End the transaction that one has begun, unless another has begun one since."""
        if self._read_owner is mine and self._catalog is not None:
            self._read_owner = None
            self._catalog.rollback()

    # -- writing ---------------------------------------------------------------------------------------------------

    @property
    def write_lock(self) -> AbstractContextManager[Any]:
        """To be held by an operation that writes: `with store.lock, store.write_lock, store.write_transaction():`.

        Raises NestedWrite where this thread, which holds `lock`, is in the middle of another write.
        """
        if self._write_lock.locked():
            raise NestedWrite("this thread is in the middle of another write; let that one end first")
        return self._write_lock

    @contextlib.contextmanager
    def write_transaction(self, durable: bool = False) -> Iterator[None]:
        """One write operation, all of it or nothing; then the snapshot is what the catalogue says.

        `durable`: on disk when this ends, with all before it, even if relaxed. The caller holds `lock` and `write_lock`
        in `with` statements: an interrupt may keep this generator from being resumed, or have it closed during a later
        operation, but it cannot come between the end of a `with` and the release of a lock, which is not Python code.
        """
        self.require_writable()
        _ = self.snapshot  # rolls back what an interrupted operation has left
        abandoned, self._read_owner = False, None
        try:
            if self._checkpoint_due:
                self._checkpoint()
            self.transactions.begin()
            yield
            self._stale = True  # an interrupt may come before the snapshot does
            self.transactions.end(durable)
        except GeneratorExit:  # as in `_one_generation`
            abandoned = True
            raise
        except (apsw.BusyError, apsw.LockedError) as error:  # nothing was written: another program has it locked
            raise typed(error) from error
        except (OSError, apsw.Error, MemoryError) as error:
            raise self._failed(error) from error
        except UnicodeDecodeError as error:
            raise damaged_text(error) from None
        finally:
            if not abandoned:
                self._rollback()

    @property
    def transactions(self) -> Commits:
        """A writer's transactions. Raises Closed, and ReadOnly in a child forked during a write."""
        if self._commits is None:
            self.require_open()
            raise ReadOnly("the process has forked in the middle of this write; only the parent's goes on")
        return self._commits

    @property
    def _in_operation(self) -> bool:
        """Whether a write operation has begun and goes on."""
        return self._commits is not None and self._commits.in_operation and self._write_lock.locked()

    def _rollback_abandoned(self) -> None:
        """Roll back a write operation that has begun and does not go on."""
        if self._commits is None or not self._commits.in_operation or self._write_lock.locked():
            return
        with self._lock:
            if self._commits.in_operation and not self._in_operation:
                self._rollback()

    def _rollback(self) -> None:
        """Roll back what has not ended, and load the newest snapshot."""
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
            self._rollback_abandoned()  # before `write_lock` is taken, which says that an operation goes on
            with self.write_lock:
                self._flush()

    def flush_late(self) -> None:
        """Flush in the background: an error is raised by the next write, or by `close`."""
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
            self.transactions.flush()
        except (OSError, apsw.Error, MemoryError) as error:
            raise self._failed(error) from error
        self._fail_after_checkpoint()

    @property
    def waiting(self) -> int:
        """Relaxed changes that are not on disk."""
        return 0 if self._commits is None else self._commits.waiting

    @property
    def relaxed(self) -> bool:
        """Whether changes may wait."""
        return self._relaxed and self.mode == "rw"

    def _failed(self, error: Exception) -> WriteFailed:
        """Take no more writes."""
        lost = self.waiting
        self._failure, self._stale = f"{type(error).__name__}: {error}", True
        if self._commits is not None:
            self._commits.give_up()
        also = f" and what was done since the last flush ({lost} changes) is rolled back" if lost else ""
        return WriteFailed(
            f"the disk refused a write ({self._failure}){also}; nothing more is written through this handle: "
            "mend the cause, then open the database again"
        )

    def _raise_unreported(self) -> None:
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def require_writable(self) -> None:
        """Raises Closed, ReadOnly, and WriteFailed after a write that failed."""
        self.require_open()
        if self.mode != "rw":
            raise ReadOnly("this handle is read-only; open the database with mode='rw' to write")
        self._raise_unreported()
        if self._failure is not None:
            raise WriteFailed(f"an earlier write failed ({self._failure}); open the database again")
