"""An open database: transactions, closing, forking. One writer, any number of readers, in any processes.

Guarantees: a read transaction sees one generation; a write transaction happens whole or not at all. All of it runs on
the store's own thread (`softdb.store.worker`), one operation after the other, where nothing interrupts. A commit is:
columns written and fsynced beyond the watermark -> one SQLite transaction at synchronous=FULL -> a new snapshot.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import apsw

from softdb.check import Schema
from softdb.errors import Closed, CorruptionError, NotADatabase, ReadOnly, SoftDBError, WriteFailed
from softdb.store import commits, committed, files, fork
from softdb.store.catalog import Catalog, CatalogState
from softdb.store.commits import Commits
from softdb.store.connect import damaged_text, typed, typed_errors
from softdb.store.directory import Directory, Displaced, enter, require_new
from softdb.store.generation import SnapshotLoader
from softdb.store.segments import ColumnFiles, SegmentEntry
from softdb.store.snapshot import Snapshot
from softdb.store.worker import Worker

__all__ = ["Session"]

P = ParamSpec("P")
T = TypeVar("T")


class Change:
    """What a write operation has done, where that spares reading it."""

    appended: tuple[CatalogState, list[SegmentEntry]] | None = None  # rows, and nothing else: all segments after


class Session:
    """A connection to the catalogue, the column files, and the snapshot that this handle reads."""

    schema: Schema
    columns: ColumnFiles  # compaction writes to them, too

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        """Open a directory (None: memory); `create` is the schema of one that does not exist yet, if it may be made.

        `relaxed`: see `softdb.store.commits`.
        """
        self.path, self.mode = path, mode
        self._worker = Worker(self._flush_late)
        self._checkpoint_due = False  # whether the WAL that another writer has left is still there
        self._directory: Directory | None = None
        self._relaxed = relaxed and path is not None and mode == "rw"
        self._commits: Commits | None = None  # a writer's
        self._failure: str | None = None  # why this handle takes no more writes
        self._unreported: WriteFailed | None = None  # an error of a flush in the background
        self._catalog: Catalog | None = None
        fork.watch(self)  # first: a child may be forked meanwhile
        try:
            self.run(self._open, create)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[P, T], *args: P.args, **words: P.kwargs) -> T:
        """Call something on the store's thread, where alone its connection may be used: nothing comes between."""
        return self._worker.run(functools.partial(work, *args, **words))

    def run_between(self, work: Callable[P, T], *args: P.args, **words: P.kwargs) -> T:
        """Ask one query in the caller's thread, between operations: that spares two changes of threads."""
        return self._worker.run_between(functools.partial(work, *args, **words))

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, create: Schema | None) -> None:
        writing = self.mode == "rw"
        if self.path is not None:
            self._directory = enter(self.path, writing, create is not None)
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
        if self._directory is not None:
            self._directory.require_ours()  # SQLite has opened its file by the path
        folder = None if self._directory is None else self._directory.descriptor
        self.columns = ColumnFiles(self.path, self.schema, self._relaxed, folder)
        self._loader = SnapshotLoader(self.columns, self.schema)
        self.refresh()
        if writing:
            if self.path is not None:  # commits of a killed process that all have seen, and that no sync has covered
                files.sync(self.path / "catalog.sqlite-wal")
                with contextlib.suppress(apsw.FullError, apsw.IOError):
                    self._checkpoint()
            if self._relaxed:
                commits.flush_at_exit(self)
            later = self._worker.ring if self._relaxed else None
            self._commits = Commits(self._catalog, self.columns, self._directory, later)
            with typed_errors():  # in a transaction: a writer that has lost its lock may be about to commit
                self._catalog.begin(write=True)
                try:
                    self.columns.clean({entry.number for entry in self._catalog.segments()})
                finally:
                    self._catalog.rollback()

    def _checkpoint(self) -> None:
        """Checkpoint the WAL that another writer has left; on a full disk the first write tries again."""
        self._checkpoint_due = True
        self.catalog.checkpoint()
        self._checkpoint_due = False

    def close(self) -> None:
        """Close the files and release the lock; safe to call twice. Raises WriteFailed: relaxed changes are lost."""
        try:
            self.run(self._close)
        finally:
            self._worker.stop()

    def _close(self) -> None:
        try:
            if self.waiting:
                self._flush()
        finally:
            self._release()
        self._raise_unreported()

    def __del__(self) -> None:
        if getattr(self, "_commits", None) is not None:
            self.flush_late()

    def _release(self) -> None:
        """Close everything, whatever one of them raises."""
        with contextlib.ExitStack() as rest:
            if self._directory is not None:
                rest.callback(self._directory.close)
            if self._catalog is not None:
                rest.callback(self._catalog.close)
            if self._commits is not None:
                rest.callback(self._commits.close)
        self._directory = self._catalog = self._commits = None

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
        """Keep the store's thread still. What waits to be flushed is flushed first: a child sees what is on disk."""
        return self._worker.park(seconds, self._flush_late)

    def release_in_child(self, acquired: bool) -> None:
        """In a forked child: close what was inherited."""
        self._worker = Worker(self._flush_late)
        self.mode = "r"
        transactions, self._commits = self._commits, None
        if transactions is not None:
            transactions.close()
        if self._directory is not None and self._directory.lock is not None:
            self._directory.lock.close()
            self._directory.lock = None
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
    def catalog(self) -> Catalog:
        """The connection. Raises Closed."""
        self.require_open()
        assert self._catalog is not None
        return self._catalog

    @property
    def snapshot(self) -> Snapshot:
        """The generation that this handle reads: the newest, for a writer; that of the last `refresh`, for a reader."""
        return self._loader.snapshot

    def refresh(self) -> int:
        """Move to the newest generation, and return it."""
        return self.run(self._refresh).generation

    def _refresh(self) -> Snapshot:
        with self.read_transaction() as snapshot:
            return snapshot

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[Snapshot]:
        """Catalogue and snapshot of one generation, the newest, for several statements. On the store's thread."""
        with contextlib.ExitStack() as transaction:
            before = -1
            while True:
                with contextlib.ExitStack() as tried:
                    tried.enter_context(self._one_generation())
                    try:
                        self._loader.load(self.catalog)
                    except FileNotFoundError as error:
                        present = self.catalog.state().generation
                        if self.mode == "r" and present > before:
                            before = present
                            continue  # a compaction may have replaced it since this transaction began
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
        with typed_errors():
            self.catalog.begin(write=False)
            try:
                yield
            finally:
                if self._catalog is not None:
                    self._catalog.rollback()

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def write_transaction(self, durable: bool = False) -> Iterator[Change]:
        """One write operation on the store's thread, whole or not at all; then the snapshot is what the catalogue says.

        `durable`: on disk when this ends, with all before it, even if relaxed.
        """
        self.require_writable()
        self._worker.require_wanted()
        change, loaded = Change(), False
        try:
            if self._checkpoint_due:
                self._checkpoint()
            self.transactions.begin()
            yield change
            self.transactions.end(durable)
            if change.appended is not None:
                self._loader.append(*change.appended)
                loaded = True
        except (apsw.BusyError, apsw.LockedError) as error:  # nothing was written: another program has it locked
            raise typed(error) from error
        except (OSError, apsw.Error, MemoryError, Displaced) as error:
            raise self._failed(error) from error
        except UnicodeDecodeError as error:
            raise damaged_text(error) from None
        finally:
            self._rollback(loaded)

    @property
    def transactions(self) -> Commits:
        """A writer's transactions."""
        assert self._commits is not None
        return self._commits

    @property
    def _in_operation(self) -> bool:
        """Whether a write operation has begun and goes on."""
        return self._commits is not None and self._commits.in_operation

    def _rollback(self, loaded: bool) -> None:
        """Roll back what has not ended, and load the newest snapshot, if it is not `loaded`."""
        if self._commits is not None:
            try:
                self._commits.rollback()
            except apsw.Error as error:
                self._unreported = self._failed(error)
            self._fail_after_checkpoint()
        if self._failure is None and not loaded:
            self._refresh()

    def _fail_after_checkpoint(self) -> None:
        """Take no more writes after a checkpoint that failed; what was committed is safe."""
        if self._commits is not None and self._commits.broken is not None and self._failure is None:
            self._failed(self._commits.broken)

    def flush(self) -> None:
        """Bring relaxed changes to disk. Raises WriteFailed."""
        self.run(self._flush)

    def flush_late(self) -> None:
        """Flush in the background: an error is raised by the next write, or by `close`."""
        self.run(self._flush_late)

    def _flush_late(self) -> None:
        if self.waiting:
            try:
                self._flush()
            except WriteFailed as error:
                self._unreported = error
            except SoftDBError:
                pass

    def _flush(self) -> None:
        self.require_writable()
        try:
            self.transactions.flush()
        except (OSError, apsw.Error, MemoryError, Displaced) as error:
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
        self._failure = f"{type(error).__name__}: {error}"
        if self._commits is not None:
            self._commits.give_up()
        with contextlib.suppress(SoftDBError):
            self._refresh()  # a commit that raised may have come to disk
        what = str(error) if isinstance(error, Displaced) else f"the disk refused a write ({self._failure})"
        also = f" and what was done since the last flush ({lost} changes) is rolled back" if lost else ""
        return WriteFailed(
            f"{what}{also}; nothing more is written through this handle: mend the cause, then open the database again"
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
