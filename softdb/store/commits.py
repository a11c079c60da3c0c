"""When changes come to disk: with every verb, or, relaxed, some of them together.

Full: a verb is one transaction, on disk when it returns. Relaxed: verbs gather in one open transaction, each a
savepoint within it; a second after the first of them, or at `flush`, their columns are fsynced and then the transaction
commits. So at any moment the disk holds a whole state that there was, in either mode; relaxed, one of at most about a
second ago, which is what other processes see, too.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import apsw

from softdb.errors import SoftDBError
from softdb.store.catalog import Catalog
from softdb.store.committed import Committed
from softdb.store.segments import Columns

__all__ = ["DELAY", "Commits", "late"]

DELAY = 1.0  # seconds that a relaxed change may wait


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
        if held is not None:
            with contextlib.suppress(SoftDBError):  # the next verb says so
                held.flush()

    return flush


def _flush_all() -> None:
    for store in list(_open):
        with contextlib.suppress(SoftDBError):
            if store.waiting:
                store.flush()


atexit.register(_flush_all)


class Commits:
    """A writer's transactions. The caller keeps threads apart, and calls nothing more after one has raised."""

    def __init__(self, catalog: Catalog, columns: Columns, directory: Path | None, late: Callable[[], None] | None):
        """`late`: called from a thread of its own when relaxed changes have waited long enough; None: full."""
        self.waiting = 0  # relaxed changes not on disk
        self._catalog, self._columns, self._late = catalog, columns, late
        self._mark = None if directory is None else Committed(directory)
        self._timer: threading.Timer | None = None
        self.inside = False  # whether a verb has begun and not ended
        self.acknowledge()

    @property
    def relaxed(self) -> bool:
        """Whether verbs gather."""
        return self._late is not None

    def begin(self) -> None:
        """Start a verb."""
        if not self._catalog.connection.in_transaction:
            self._catalog.begin(write=True)
        if self.relaxed:
            self._catalog.connection.execute("SAVEPOINT verb")
        self.inside = True

    def undo(self) -> None:
        """Undo the verb, if one has begun and not ended."""
        if not self.inside:
            return
        self.inside = False
        if self.waiting and self._catalog.connection.in_transaction:
            self._catalog.connection.execute("ROLLBACK TO verb; RELEASE verb")
        else:
            self._catalog.rollback()

    def end(self, durable: bool) -> None:
        """The verb has happened: on disk when this returns, unless verbs gather and it needs not be."""
        if not self.inside:
            return  # undone
        if self.relaxed:
            self._catalog.connection.execute("RELEASE verb")
        if not self.relaxed or durable:
            self.flush()
            return
        self.inside = False
        self.waiting += 1
        if self._timer is None and self._late is not None:
            self._timer = threading.Timer(DELAY, self._late)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Bring every change to disk."""
        self._stop()
        self._columns.settle()
        if self._catalog.connection.in_transaction:
            self._catalog.commit()
        self.inside, self.waiting = False, 0
        self.acknowledge()

    def give_up(self) -> None:
        """After a failure: what has not come to disk never will."""
        self._stop()
        self.inside, self.waiting = False, 0
        with contextlib.suppress(apsw.Error):
            self._catalog.rollback()

    def acknowledge(self) -> None:
        """Leave the catalogue's generation beside it; if that fails, only a lost log would go unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(self._catalog.state().generation)

    def close(self) -> None:
        """Let go of the file beside the catalogue, not of the connection."""
        self._stop()
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
