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

from softdb.errors import SoftDBError
from softdb.store.catalog import Catalog
from softdb.store.committed import Committed
from softdb.store.connect import BUSY
from softdb.store.segments import Columns

__all__ = ["DELAY", "Commits", "late"]

DELAY = 1.0  # seconds that a relaxed change may wait
PAGES = 1000  # of SQLite's log that make it fold that in
MOST_PAGES = 4 * PAGES  # from here on it waits for the readers of the log, so that it can start anew
PATIENCE = 1000  # milliseconds


class Flushed(Protocol):
    """Who holds relaxed changes."""

    @property
    def waiting(self) -> int:
        """How many."""

    def flush(self) -> None:
        """Bring them to disk. Raises SoftDBError."""


_open: weakref.WeakSet[Flushed] = weakref.WeakSet()


def late(store: Flushed) -> Callable[[], None]:
    """What brings a store's changes to disk when they have waited long enough, and when the interpreter ends."""
    _open.add(store)
    known = weakref.ref(store)

    def flush() -> None:
        held = known()
        if held is not None and held.waiting:
            with contextlib.suppress(SoftDBError):  # the next verb says so
                held.flush()

    return flush


def _flush_all() -> None:
    for store in list(_open):
        with contextlib.suppress(SoftDBError):
            if store.waiting:
                store.flush()


atexit.register(_flush_all)


def _sleep(asleep: _thread.LockType, late: Callable[[], None]) -> None:
    """What a thread does for relaxed changes. Nothing here or at its start is a lock that an interrupt could keep."""
    if asleep.acquire(blocking=False):
        try:
            time.sleep(DELAY)
        finally:
            asleep.release()
        late()


class Verb:
    """One change that has begun."""

    over = False  # undone by who came after an interrupt


class Commits:
    """A writer's transactions. The caller keeps threads apart, and calls nothing more after one has raised."""

    def __init__(self, catalog: Catalog, columns: Columns, directory: Path | None, late: Callable[[], None] | None):
        """`late`: called from a thread of its own when relaxed changes have waited long enough; None: full."""
        self.waiting = 0  # relaxed changes not on disk
        self._catalog, self._columns, self._late = catalog, columns, late
        self._mark = None if directory is None else Committed(directory)
        self._asleep = _thread.allocate_lock()  # held by the thread that will call `late`
        self.verb: Verb | None = None  # what has begun and not ended
        self.broken: apsw.Error | None = None  # what a checkpoint met: its sync is not to be tried again
        if directory is not None:
            catalog.connection.set_wal_hook(self._checkpoint)
        self.acknowledge()

    @property
    def relaxed(self) -> bool:
        """Whether verbs gather."""
        return self._late is not None

    def begin(self) -> Verb:
        """Start a verb. What an interrupt has left of another is undone."""
        self.undo()
        if not self.waiting:
            self._catalog.rollback()
        verb, connection = Verb(), self._catalog.connection
        if not connection.in_transaction:
            self.verb = verb
            self._catalog.begin(write=True)
        if self.relaxed:
            try:
                connection.execute("SAVEPOINT verb")
            finally:  # an interrupt may come when that has happened
                self.verb = verb
        return verb

    def undo(self) -> None:
        """Undo the verb, if one has begun and not ended."""
        if self.verb is None:
            return
        self.verb.over = True
        connection = self._catalog.connection
        if not connection.in_transaction:
            self.verb = None
            return
        undoing = "ROLLBACK TO verb; RELEASE verb" if self.waiting else "ROLLBACK"
        try:
            connection.execute(undoing)
        finally:
            self.verb = None

    def end(self, durable: bool) -> None:
        """The verb has happened: on disk when this returns, unless verbs gather and it needs not be."""
        if self.verb is None:
            return  # undone
        if self.relaxed:
            self.waiting += 1  # before: an interrupt leaves one too many rather than one too few
            connection = self._catalog.connection
            try:
                connection.execute("RELEASE verb")
            finally:
                self.verb = None
        if not self.relaxed or durable:
            self.flush()
            return
        if self._late is not None and not self._asleep.locked():
            _thread.start_new_thread(_sleep, (self._asleep, self._late))

    def flush(self) -> None:
        """Bring every change to disk."""
        self._columns.settle()
        if self._catalog.connection.in_transaction:
            self._catalog.commit()
        self.verb, self.waiting = None, 0
        self.acknowledge()

    def give_up(self) -> None:
        """After a failure: what has not come to disk never will."""
        self.verb, self.waiting = None, 0
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
            connection.set_busy_timeout(PATIENCE if patient else 0)
            try:
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
