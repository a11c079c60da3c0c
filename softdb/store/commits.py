"""When changes come to disk. Guarantee: at any moment the disk has one whole state that the database was in.

Full: a write operation is one transaction, on disk when it returns. Relaxed: operations share one open transaction,
each a savepoint in it; a second after the first, or at `flush`, their columns are fsynced and the transaction commits.
The state on disk, which is what other processes see, is then at most about a second old.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import apsw

from softdb.store.catalog import Catalog
from softdb.store.committed import Committed
from softdb.store.connect import BUSY
from softdb.store.segments import ColumnFiles

__all__ = ["DELAY", "Commits", "late"]

DELAY = 1.0  # seconds that a relaxed change may wait
PAGES = 1000  # of the WAL from which on a commit is followed by a checkpoint
MOST_PAGES = 4 * PAGES  # from here on the checkpoint waits for readers, so that the WAL can be restarted
PATIENCE = 1000  # milliseconds that it waits


class Flushed(Protocol):
    """Something with relaxed changes."""

    def flush_late(self) -> None:
        """Bring them to disk, if there are any. An error is raised by the next write, or by `close`."""


_open: weakref.WeakSet[Flushed] = weakref.WeakSet()
_ending = False  # whether the interpreter ends: no thread will flush any more


def late(store: Flushed) -> Callable[[], None]:
    """A function that flushes a store when its changes have waited long enough; it is flushed at exit, too."""
    _open.add(store)
    known = weakref.ref(store)

    def flush() -> None:
        store = known()
        if store is not None:
            store.flush_late()

    return flush


def _flush_all() -> None:
    global _ending
    _ending = True
    for store in list(_open):
        store.flush_late()


atexit.register(_flush_all)


def _sleep(asleep: _thread.LockType, late: Callable[[], None]) -> None:
    """The thread that flushes relaxed changes. It takes no lock that an interrupt could leave locked."""
    if asleep.acquire(blocking=False):
        try:
            time.sleep(DELAY)
        finally:
            asleep.release()
        late()


class Commits:
    """A writer's transactions. The caller keeps threads apart, and calls nothing more after one has raised."""

    def __init__(self, catalog: Catalog, columns: ColumnFiles, directory: Path | None, late: Callable[[], None] | None):
        """`late`: called from a thread of its own when relaxed changes have waited long enough; None: full."""
        self.waiting = 0  # relaxed changes not on disk
        self._catalog, self._columns, self._late = catalog, columns, late
        self._mark = None if directory is None else Committed(directory)
        self._asleep = _thread.allocate_lock()  # held by the thread that will call `late`
        self.in_operation = False  # whether one has begun and not ended
        self.broken: apsw.Error | None = None  # what a checkpoint met: its sync is not to be tried again
        if directory is not None:
            catalog.connection.set_wal_hook(self._checkpoint)
        self.acknowledge()

    @property
    def relaxed(self) -> bool:
        """Whether operations share a transaction."""
        return self._late is not None

    # An interrupt may come after any call: what must follow a statement stands in a `finally`, and the next operation
    # rolls back what is left of an abandoned one.

    def begin(self) -> None:
        """Start an operation. One that an interrupt has abandoned is rolled back."""
        self.rollback()
        if not self.waiting:
            self._catalog.rollback()
        connection = self._catalog.connection
        if not connection.in_transaction:
            self.in_operation = True
            self._catalog.begin(write=True)
        if self.relaxed:
            try:
                connection.execute("SAVEPOINT verb")
            finally:
                self.in_operation = True

    def rollback(self) -> None:
        """Roll back the operation that has not ended. Raises apsw.Error, also where SQLite rolled back more."""
        if not self.in_operation:
            return
        connection = self._catalog.connection
        if connection.in_transaction:
            undoing = "ROLLBACK TO verb; RELEASE verb" if self.waiting else "ROLLBACK"
            try:
                connection.execute(undoing)
            finally:
                self.in_operation = False
        elif self.waiting:
            raise apsw.AbortError("SQLite rolled back what was to be flushed")
        self.in_operation = False

    def end(self, durable: bool) -> None:
        """End the operation: on disk when this returns, unless it is relaxed and not `durable`."""
        if not self.in_operation:
            return  # rolled back
        if self.relaxed:
            durable = durable or _ending or not self._wake()
            self.waiting += 1
            connection = self._catalog.connection
            try:
                connection.execute("RELEASE verb")
            finally:
                self.in_operation = False
        if durable or not self.relaxed:
            self.flush()

    def flush(self) -> None:
        """Bring every change to disk."""
        self._columns.sync()
        connection = self._catalog.connection
        if connection.in_transaction:
            try:
                connection.execute("COMMIT")
            except apsw.Error:
                raise
            except BaseException:
                if not self._catalog.connection.in_transaction:  # it is committed
                    self.in_operation, self.waiting = False, 0
                raise
        self.in_operation, self.waiting = False, 0
        self.acknowledge()

    def _wake(self) -> bool:
        """Start the thread that will flush, if none is waiting; returns whether there is one."""
        if self._late is not None and not self._asleep.locked():
            try:
                _thread.start_new_thread(_sleep, (self._asleep, self._late))
            except RuntimeError:  # no more threads
                return False
        return True

    def give_up(self) -> None:
        """After a failure: what has not come to disk never will."""
        self.in_operation, self.waiting = False, 0
        with contextlib.suppress(apsw.Error):
            self._catalog.rollback()

    def acknowledge(self) -> None:
        """Write the generation to the file `committed`; without it, only the loss of the WAL would go unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(self._catalog.state().generation)

    def close(self) -> None:
        """Close the file `committed`, not the connection."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()

    def _checkpoint(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Checkpoint after a commit that leaves the WAL long; if very long, wait for its readers.

        SQLite's own automatic checkpoint says nothing when it fails, and tries the sync again.
        """
        if pages >= PAGES and self.broken is None:
            patient = pages >= MOST_PAGES
            try:
                connection.set_busy_timeout(PATIENCE if patient else 0)
                connection.wal_checkpoint(
                    name, apsw.SQLITE_CHECKPOINT_RESTART if patient else apsw.SQLITE_CHECKPOINT_PASSIVE
                )
            except (apsw.BusyError, apsw.LockedError):
                pass
            except apsw.Error as error:
                self.broken = error
            finally:
                connection.set_busy_timeout(BUSY)
        return apsw.SQLITE_OK
