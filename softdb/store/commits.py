"""When changes come to disk: with every verb, or, relaxed, some of them together.

Full: a verb is one transaction, on disk when it returns. Relaxed: verbs gather in one open transaction, each a
savepoint within it; a second after the first of them, or at `flush`, their columns are fsynced and then the transaction
commits. So at any moment the disk holds a whole state that there was, in either mode; relaxed, one of at most about a
second ago, which is what other processes see, too.
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
PAGES = 1000  # of SQLite's log that make it fold that in
MOST_PAGES = 4 * PAGES  # from here on it waits for the readers of the log, so that it can start anew
PATIENCE = 1000  # milliseconds


class Flushed(Protocol):
    """Who holds relaxed changes."""

    def flush_late(self) -> None:
        """Bring them to disk, if there are any. Raises nothing: the next verb tells what failed, or closing."""


_open: weakref.WeakSet[Flushed] = weakref.WeakSet()
_ending = False  # whether the interpreter is: nobody will come to flush


def late(store: Flushed) -> Callable[[], None]:
    """What brings a store's changes to disk when they have waited long enough, and when the interpreter ends."""
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
    """What a thread does for relaxed changes. Nothing here or at its start is a lock that an interrupt could keep."""
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
        self.in_verb = False  # whether one has begun and not ended
        self.broken: apsw.Error | None = None  # what a checkpoint met: its sync is not to be tried again
        if directory is not None:
            catalog.connection.set_wal_hook(self._checkpoint)
        self.acknowledge()

    @property
    def relaxed(self) -> bool:
        """Whether verbs gather."""
        return self._late is not None

    # An interrupt may come after any call, before any function: what must follow a statement stands in a `finally`, and
    # what is left of a verb is undone by whoever comes next.

    def begin(self) -> None:
        """Start a verb. What an interrupt has left of another is undone."""
        self.rollback()
        if not self.waiting:
            self._catalog.rollback()
        connection = self._catalog.connection
        if not connection.in_transaction:
            self.in_verb = True
            self._catalog.begin(write=True)
        if self.relaxed:
            try:
                connection.execute("SAVEPOINT verb")
            finally:
                self.in_verb = True

    def rollback(self) -> None:
        """Undo the verb, if one has begun and not ended. Raises apsw.Error, also where SQLite has undone more."""
        if not self.in_verb:
            return
        connection = self._catalog.connection
        if connection.in_transaction:
            undoing = "ROLLBACK TO verb; RELEASE verb" if self.waiting else "ROLLBACK"
            try:
                connection.execute(undoing)
            finally:
                self.in_verb = False
        elif self.waiting:
            raise apsw.AbortError("SQLite undid what was to be flushed")
        self.in_verb = False

    def end(self, durable: bool) -> None:
        """The verb has happened: on disk when this returns, unless verbs gather and it needs not be."""
        if not self.in_verb:
            return  # undone
        if self.relaxed:
            durable = durable or _ending or not self._wake()
            self.waiting += 1
            connection = self._catalog.connection
            try:
                connection.execute("RELEASE verb")
            finally:
                self.in_verb = False
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
                if not self._catalog.connection.in_transaction:  # it has happened
                    self.in_verb, self.waiting = False, 0
                raise
        self.in_verb, self.waiting = False, 0
        self.acknowledge()

    def _wake(self) -> bool:
        """See to it that somebody flushes in a while; whether somebody will."""
        if self._late is not None and not self._asleep.locked():
            try:
                _thread.start_new_thread(_sleep, (self._asleep, self._late))
            except RuntimeError:  # no more threads
                return False
        return True

    def give_up(self) -> None:
        """After a failure: what has not come to disk never will."""
        self.in_verb, self.waiting = False, 0
        with contextlib.suppress(apsw.Error):
            self._catalog.rollback()

    def acknowledge(self) -> None:
        """Leave the catalogue's generation beside it; if that fails, only a lost log would go unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(self._catalog.state().generation)

    def close(self) -> None:
        """Let go of the file beside the catalogue, not of the connection."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()

    def _checkpoint(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Fold the log into the catalogue after a commit that leaves it long; longer still, wait for those who read it.

        SQLite's own checkpoint says nothing when it fails, and tries the sync again.
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
