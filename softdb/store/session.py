"""Open, close and fork a database. It has at most one writer and any number of readers, in any processes.

Guarantee: an opening that fails leaves nothing locked or open; closing brings relaxed changes to disk. The parts:
reading (`reader.py`), writing (`writer.py`, the commit protocol), recovery after a crash (`recovery.py`), the directory
and its lock (`directory.py`). Operations run one after the other on the store's own thread (`worker.py`), which no
interrupt reaches.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import apsw

from softdb.check import Schema
from softdb.errors import Closed, NotADatabase, ReadOnly
from softdb.store import committed, files, fork, keyed, recovery, writer
from softdb.store.catalog import Catalog
from softdb.store.connect import UnreadableLog, typed_errors
from softdb.store.directory import CATALOG, NO_DATABASE, Directory, enter, require_new
from softdb.store.generation import SnapshotLoader
from softdb.store.reader import Reader
from softdb.store.segments import ColumnFiles
from softdb.store.snapshot import Snapshot
from softdb.store.worker import Worker
from softdb.store.writer import Change, Writer

P = ParamSpec("P")
S = TypeVar("S", bound="Session")
T = TypeVar("T")

_IN_MEMORY = "this database is in the memory of the process that opened it; give one with a path to a forked process"
_RETRY_SECONDS, _TRIES = 0.02, 50  # seconds between a reader's attempts to connect, and their number
_relaxed: weakref.WeakSet[Session] = weakref.WeakSet()  # to be flushed at the end of the interpreter


@atexit.register
def _flush_all() -> None:
    writer.ending = True
    for session in list(_relaxed):
        session.flush_late()


def on_thread(
    method: Callable[Concatenate[S, P], T], by: Callable[[Worker, Callable[[], T]], T] = Worker.run
) -> Callable[Concatenate[S, P], T]:
    """Make a method run on the store's thread, where nothing interrupts it; or `by` another method of `Worker`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **words: P.kwargs) -> T:
        return by(self.worker, functools.partial(method, self, *args, **words))

    return call


def lookup(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method that looks up records run in the caller's thread, between two operations, with typed errors."""
    return on_thread(typed_errors()(method), Worker.run_between)


class Session:
    """A connection to the catalogue, the column files, and the snapshot that this handle reads."""

    columns: ColumnFiles  # compaction also writes to these files
    _why_closed = "this handle is closed; open the database again"
    loader: SnapshotLoader  # its `loaded` is the snapshot that this handle reads

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        """Open a directory (None: memory); `create`: schema of a new database, None to require an existing one.

        `relaxed`: see `softdb.store.writer`.
        """
        self.path, self.mode = path, mode
        self.worker = Worker(self.flush_late)
        self._relaxed = relaxed and path is not None and mode == "rw"
        self._directory: Directory | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        fork.watch(self)  # first, as another thread may fork meanwhile
        try:
            self.run(self._open, create)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[P, T], *args: P.args, **words: P.kwargs) -> T:
        """Call a function on the store's thread, the only one that may use the connection, as one operation."""
        result: T = self.worker.run(functools.partial(work, *args, **words))
        return result

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, create: Schema | None) -> None:
        writing = self.mode == "rw"
        if self.path is not None:
            self._directory = enter(self.path, writing, create is not None)
        acknowledged = -1 if self.path is None else committed.last(self.path)  # read first: a writer may raise it
        with contextlib.ExitStack() as opened:
            catalog = self._connect()
            opened.callback(catalog.close)
            if not catalog.laid_out:
                require_new(self.path, acknowledged)
                if create is None or not writing:
                    raise NotADatabase(f"{self.path} {NO_DATABASE}")
                catalog.create(create)
                if self.path is not None and self._directory is not None:
                    files.sync_directory(self.path)
                    self._directory.watch_catalog(self._directory.catalog_mark(), False)  # the log exists now
            with typed_errors():
                origin = keyed.read(catalog)
                committed.require(catalog.state().generation, acknowledged, self.path)
            folder = None if self._directory is None else self._directory.descriptor
            self.columns = ColumnFiles(self.path, origin.schema, self._relaxed, folder)
            connect = functools.partial(type(self)._connect, weakref.proxy(self))  # no cycle: `del` frees the lock
            self._reader = Reader(catalog, self.columns, origin, None if writing else self._directory, connect)
            self.loader = self._reader.loader
            opened.pop_all()
        self._reader.refresh()
        if writing:
            checkpointed = self.path is None or recovery.bring_to_disk(catalog, self.path)
            if self._relaxed:
                _relaxed.add(self)
            later = self.worker.ring if self._relaxed else None
            self._writer = Writer(self._reader, self.columns, self._directory, later, checkpointed)
            recovery.clean(catalog, self.columns)
            self._writer.note_state()
            if self.path is not None:
                recovery.clean_folders(self.path, self.keyed.since)

    def _connect(self) -> Catalog:
        """Connect to the catalogue. Raises NotADatabase if the directory or a file was replaced meanwhile.

        A reader retries for about a second while a writer creates or removes the log.
        """
        if self.path is None or self._directory is None:
            return Catalog.open(None, True)
        for retries in reversed(range(_TRIES if self.mode == "r" else 1)):
            before = self._directory.catalog_mark()
            try:
                catalog = Catalog.open(self.path / CATALOG, self.mode == "rw")
                break
            except (apsw.CantOpenError, apsw.ReadOnlyError, UnreadableLog) as error:
                if not retries and isinstance(error, UnreadableLog):
                    raise NotADatabase(*error.args) from None
                if not retries:
                    raise
            time.sleep(_RETRY_SECONDS)
        try:
            self._directory.watch_catalog(before, catalog.immutable)
            self._directory.require_opened()  # SQLite opens its files by the path
        except BaseException:
            catalog.close()
            raise
        return catalog

    def close(self) -> None:
        """Close the files and release the lock; safe to call twice. Raises WriteFailed if relaxed changes are lost."""
        try:
            self.run(self._close)
        finally:
            self.worker.stop()

    def _close(self) -> None:
        last_writer = self._writer
        try:
            if self.waiting:
                self.flush()
            self.require_unchanged()  # SQLite writes to the catalogue when it closes
        finally:
            self._release()
        if last_writer is not None:
            last_writer.raise_unreported()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            self.flush_late()
        if hasattr(self, "worker"):
            self.worker.stop()

    def _release(self) -> None:
        """Close writer, connection and directory, even if closing one of them raises."""
        with contextlib.ExitStack() as closing:
            if self._directory is not None:
                closing.callback(self._directory.close)
            if self._reader is not None:
                if self._reader.connected is not None:
                    closing.callback(self._reader.connected.close)
                self._reader.connected, self._reader.inherited = None, False
            if self._writer is not None:
                closing.callback(self._writer.close)
        self._directory = self._writer = None

    @property
    def closed(self) -> bool:
        """True if the handle is closed, or was never opened."""
        return self._reader is None or not (self._reader.connected or self._reader.inherited)

    def require_open(self) -> None:
        """Raise Closed if this handle is closed."""
        if self.closed:
            raise Closed(self._why_closed)

    # -- forking: see `softdb.store.fork.Connected` ----------------------------------------------------------------

    def before_fork(self) -> Callable[[], None]:
        """Flush relaxed changes, as a child sees only what is on disk, and pause the store's thread."""
        return fork.hold(self.worker, self.flush_late)

    def after_fork(self) -> None:
        """In a forked child: close inherited files; the next call connects again, read-only."""
        self.mode = "r"
        parents, self._writer = self._writer, None
        if parents is not None:
            parents.close()
        if self._directory is not None and self._directory.lock is not None:
            self._directory.lock.close()
            self._directory.lock = None
        if self._reader is not None:
            self._reader.abandon(self._directory)
            if self.path is None:
                self._reader.inherited, self._why_closed = False, _IN_MEMORY
        self.worker.after_fork()
        self.worker = Worker(self.flush_late)

    # -- the parts -------------------------------------------------------------------------------------------------

    @property
    def reader(self) -> Reader:
        """The reader. Raises Closed."""
        self.require_open()
        assert self._reader is not None
        return self._reader

    @property
    def catalog(self) -> Catalog:
        """The connection to the catalogue. Raises Closed."""
        return self.reader.catalog

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that this handle reads: for a writer the newest, for a reader that of the last `refresh`."""
        return self.loader.loaded.snapshot

    @property
    def keyed(self) -> keyed.Keyed:
        """Origin of the snapshot's keys."""
        return self.loader.loaded.keyed

    @property
    def schema(self) -> Schema:
        """Schema of the snapshot."""
        return self.loader.loaded.keyed.schema

    @on_thread
    def refresh(self) -> int:
        """Load the newest generation, and return its number."""
        return self.reader.refresh().generation

    def read_transaction(self) -> contextlib.AbstractContextManager[Snapshot]:
        """Open a read transaction, see `Reader.transaction`. Call it on the store's thread."""
        return self.reader.transaction()

    @property
    def writer(self) -> Writer:
        """The writer. Raises Closed, ReadOnly, and WriteFailed after a failed write."""
        self.require_open()
        if self.mode != "rw" or self._writer is None:
            raise ReadOnly("this handle is read-only; open the database with mode='rw' to write")
        self._writer.require_ready()
        return self._writer

    def require_writable(self) -> None:
        """Raise Closed, ReadOnly or WriteFailed if this handle cannot write."""
        _ = self.writer

    def require_unchanged(self) -> None:
        """Raise WriteFailed if this handle writes and another program has written to its catalogue."""
        if self._writer is not None:
            self._writer.require_unchanged()

    def write_transaction(self, durable: bool = False) -> contextlib.AbstractContextManager[Change]:
        """Open a write transaction, see `Writer.transaction`. Call it on the store's thread."""
        return self.writer.transaction(durable)

    @on_thread
    def flush(self) -> None:
        """Bring relaxed changes to disk. Raises WriteFailed."""
        self.writer.flush()

    @on_thread
    def flush_late(self) -> None:
        """Bring relaxed changes to disk; an error is raised only by the next write, or by `close`."""
        if self._writer is not None:
            self._writer.flush_late()

    @property
    def waiting(self) -> int:
        """Number of relaxed changes that are not on disk."""
        return 0 if self._writer is None else self._writer.waiting

    @property
    def relaxed(self) -> bool:
        """True if changes need not be on disk when a call returns."""
        return self._relaxed and self.mode == "rw"
