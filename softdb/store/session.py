"""The life of an open database: opening, closing, forking. One writer, any number of readers, in any processes.

Guarantee: nothing stays locked, open or half open, whatever an opening meets; closing brings relaxed changes to disk.
The rooms: reading (`reader.py`), writing (`writer.py`, the commit protocol), what opening does after a crash
(`recovery.py`), the directory and its lock (`directory.py`). All of it runs on the store's own thread (`worker.py`),
one operation after the other, where nothing interrupts.
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
from softdb.store.directory import CATALOG, Directory, enter, require_new
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
_WAIT, _WAITS = 0.02, 50  # seconds, and how many of them
_relaxed: weakref.WeakSet[Session] = weakref.WeakSet()  # to be flushed when the interpreter ends


@atexit.register
def _flush_all() -> None:
    writer.ending = True
    for session in list(_relaxed):
        session.flush_late()


def on_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method on the store's thread: nothing comes between, and nothing interrupts it."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **words: P.kwargs) -> T:
        result: T = self.worker.run(functools.partial(method, self, *args, **words))
        return result

    return call


def lookup(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method that looks records up in the caller's thread, between two operations."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **words: P.kwargs) -> T:
        result: T = self.worker.run_between(functools.partial(method, self, *args, **words))
        return result

    return call


class Session:
    """A connection to the catalogue, the column files, and the snapshot that this handle reads."""

    columns: ColumnFiles  # compaction writes to them, too
    _why_closed = "this handle is closed; open the database again"
    loader: SnapshotLoader  # its `loaded` is what this handle reads, without a call

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        """Open a directory (None: memory); `create` is the schema of one that does not exist yet, if it may be made.

        `relaxed`: see `softdb.store.writer`.
        """
        self.path, self.mode = path, mode
        self.worker = Worker(self.flush_late)
        self._relaxed = relaxed and path is not None and mode == "rw"
        self._directory: Directory | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        fork.watch(self)  # first: a child may be forked meanwhile
        try:
            self.run(self._open, create)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[P, T], *args: P.args, **words: P.kwargs) -> T:
        """Call something on the store's thread, where alone its connection may be used: nothing comes between."""
        result: T = self.worker.run(functools.partial(work, *args, **words))
        return result

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, create: Schema | None) -> None:
        writing = self.mode == "rw"
        if self.path is not None:
            self._directory = enter(self.path, writing, create is not None)
        acknowledged = -1 if self.path is None else committed.last(self.path)  # first: a reader may be overtaken
        with contextlib.ExitStack() as opened:
            catalog = self._connect()
            opened.callback(catalog.close)
            if not catalog.laid_out:
                require_new(self.path, acknowledged)
                if create is None or not writing:
                    raise NotADatabase(f"{self.path} holds no database yet; give dim= to make one")
                catalog.create(create)
                if self.path is not None and self._directory is not None:
                    files.sync_directory(self.path)
                    self._directory.watch_catalog(self._directory.catalog_mark(), False)  # now there is a log
            with typed_errors():
                made = keyed.read(catalog)
                committed.require(catalog.state().generation, acknowledged, self.path)
            folder = None if self._directory is None else self._directory.descriptor
            self.columns = ColumnFiles(self.path, made.schema, self._relaxed, folder)
            self._reader = Reader(catalog, self.columns, made, None if writing else self._directory, self._connect)
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
        """Connect to the catalogue. Raises NotADatabase where its path led elsewhere meanwhile.

        A reader waits about a second for a writer that is just making or removing the log.
        """
        if self.path is None or self._directory is None:
            return Catalog.open(None, True)
        for waits in reversed(range(_WAITS if self.mode == "r" else 1)):
            before = self._directory.catalog_mark()
            try:
                catalog = Catalog.open(self.path / CATALOG, self.mode == "rw")
                break
            except (apsw.CantOpenError, apsw.ReadOnlyError, UnreadableLog) as error:
                if not waits and isinstance(error, UnreadableLog):
                    raise NotADatabase(*error.args) from None
                if not waits:
                    raise
            time.sleep(_WAIT)
        try:
            self._directory.watch_catalog(before, catalog.immutable)
            self._directory.require_opened()  # SQLite opens its files by the path
        except BaseException:
            catalog.close()
            raise
        return catalog

    def close(self) -> None:
        """Close the files and release the lock; safe to call twice. Raises WriteFailed: relaxed changes are lost."""
        try:
            self.run(self._close)
        finally:
            self.worker.stop()

    def _close(self) -> None:
        last = self._writer
        try:
            if self.waiting:
                self.flush()
            self.require_unchanged()  # SQLite writes to the catalogue when it closes
        finally:
            self._release()
        if last is not None:
            last.raise_unreported()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is not None:
            self.flush_late()
        if hasattr(self, "worker"):
            self.worker.stop()

    def _release(self) -> None:
        """Close everything, whatever one of them raises."""
        with contextlib.ExitStack() as rest:
            if self._directory is not None:
                rest.callback(self._directory.close)
            if self._reader is not None:
                if self._reader.connected is not None:
                    rest.callback(self._reader.connected.close)
                self._reader.connected, self._reader.inherited = None, False
            if self._writer is not None:
                rest.callback(self._writer.close)
        self._directory = self._writer = None

    @property
    def closed(self) -> bool:
        """True if the handle was closed."""
        return self._reader is None or not (self._reader.connected or self._reader.inherited)

    def require_open(self) -> None:
        """Raises Closed."""
        if self.closed:
            raise Closed(self._why_closed)

    # -- forking: see `softdb.store.fork.Connected` ----------------------------------------------------------------

    def before_fork(self) -> Callable[[], None]:
        """Keep the store's thread still. What waits to be flushed is flushed first: a child sees what is on disk."""
        return fork.hold(self.worker, self.flush_late)

    def after_fork(self) -> None:
        """In a forked child: close what was inherited; the next call opens the directory to be read."""
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

    # -- the rooms -------------------------------------------------------------------------------------------------

    @property
    def reader(self) -> Reader:
        """Return the reader. Raises Closed."""
        self.require_open()
        assert self._reader is not None
        return self._reader

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed."""
        return self.reader.catalog

    @property
    def snapshot(self) -> Snapshot:
        """The generation that this handle reads: the newest, for a writer; that of the last `refresh`, for a reader."""
        return self.loader.loaded.snapshot

    @property
    def keyed(self) -> keyed.Keyed:
        """Origin of the keys of that snapshot."""
        return self.loader.loaded.keyed

    @property
    def schema(self) -> Schema:
        """Schema of that snapshot."""
        return self.loader.loaded.keyed.schema

    @on_thread
    def refresh(self) -> int:
        """Move to the newest generation, and return it."""
        return self.reader.refresh().generation

    def read_transaction(self) -> contextlib.AbstractContextManager[Snapshot]:
        """See `Reader.transaction`. On the store's thread."""
        return self.reader.transaction()

    @property
    def writer(self) -> Writer:
        """Return the writer. Raises Closed, ReadOnly, and WriteFailed after a write that failed."""
        self.require_open()
        if self.mode != "rw" or self._writer is None:
            raise ReadOnly("this handle is read-only; open the database with mode='rw' to write")
        self._writer.require_ready()
        return self._writer

    def require_writable(self) -> None:
        """Raises as `writer`."""
        _ = self.writer

    def require_unchanged(self) -> None:
        """See `Writer.require_unchanged`; a handle that only reads is of no writer."""
        if self._writer is not None:
            self._writer.require_unchanged()

    def write_transaction(self, durable: bool = False) -> contextlib.AbstractContextManager[Change]:
        """See `Writer.transaction`. On the store's thread."""
        return self.writer.transaction(durable)

    @on_thread
    def flush(self) -> None:
        """Bring relaxed changes to disk. Raises WriteFailed."""
        self.writer.flush()

    @on_thread
    def flush_late(self) -> None:
        """Flush in the background: an error is raised by the next write, or by `close`."""
        if self._writer is not None:
            self._writer.flush_late()

    @property
    def waiting(self) -> int:
        """Relaxed changes that are not on disk."""
        return 0 if self._writer is None else self._writer.waiting

    @property
    def relaxed(self) -> bool:
        """True if changes may wait."""
        return self._relaxed and self.mode == "rw"
