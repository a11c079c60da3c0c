"""When changes come to disk. Guarantee: at any moment the disk has one whole state that the database was in.

Full: a write operation is one transaction, on disk when it returns. Relaxed: operations share one open transaction,
each a savepoint in it; a second after the first, or at `flush`, their columns are fsynced and the transaction commits.
The state on disk, which is what other processes see, is then at most about a second old.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol

import apsw

from softdb.store.catalog import Catalog
from softdb.store.committed import Committed
from softdb.store.connect import BUSY
from softdb.store.directory import Directory
from softdb.store.segments import ColumnFiles

__all__ = ["DELAY", "Commits", "flush_at_exit"]

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


def flush_at_exit(store: Flushed) -> None:
    """Flush a store when the interpreter ends."""
    _open.add(store)


def _flush_all() -> None:
    global _ending
    _ending = True
    for store in list(_open):
        store.flush_late()


atexit.register(_flush_all)


class Commits:
    """A writer's transactions, on the store's thread. The caller calls nothing more after one has raised."""

    def __init__(
        self, catalog: Catalog, columns: ColumnFiles, directory: Directory | None, later: Callable[[float], None] | None
    ):
        """`later`: says in how many seconds relaxed changes are to be flushed; None: full."""
        self.waiting = 0  # relaxed changes not on disk
        self._catalog, self._columns, self._later = catalog, columns, later
        self._directory = directory
        self._mark = None if directory is None else Committed(directory.path, directory.descriptor)
        self.in_operation = False  # whether one has begun and not ended
        self.broken: apsw.Error | None = None  # what a checkpoint met: its sync is not to be tried again
        if directory is not None:
            catalog.connection.set_wal_hook(self._checkpoint)
        self.acknowledge(catalog.state().generation)

    @property
    def relaxed(self) -> bool:
        """Whether operations share a transaction."""
        return self._later is not None

    def begin(self) -> None:
        """Start an operation."""
        connection = self._catalog.connection
        if not connection.in_transaction:
            self._catalog.begin(write=True)
        self.in_operation = True
        self._require_ours()
        if self.relaxed:
            connection.execute("SAVEPOINT verb")

    def rollback(self) -> None:
        """Roll back the operation that has not ended. Raises apsw.Error, also where SQLite rolled back more."""
        if not self.in_operation:
            return
        self.in_operation = False
        connection = self._catalog.connection
        if connection.in_transaction:
            self._catalog.rollback("verb" if self.waiting else None)
        elif self.waiting:
            raise apsw.AbortError("SQLite rolled back what was to be flushed")

    def end(self, durable: bool) -> None:
        """End the operation: on disk when this returns, unless it is relaxed and not `durable`."""
        if not self.in_operation:
            return  # rolled back
        if self._later is not None:
            self._catalog.connection.execute("RELEASE verb")
            self.in_operation = False
            if not self.waiting:
                self._later(DELAY)
            self.waiting += 1
        if durable or self._later is None or _ending:
            self.flush()

    def flush(self) -> None:
        """Bring every change to disk."""
        self._columns.sync()
        generation = self._catalog.state().generation
        if self._catalog.connection.in_transaction:
            self._require_ours()
            self._catalog.commit()
        self.in_operation, self.waiting = False, 0
        self.acknowledge(generation)

    def _require_ours(self) -> None:
        if self._directory is not None:
            self._directory.require_ours()

    def give_up(self) -> None:
        """After a failure: what has not come to disk never will."""
        self.in_operation, self.waiting = False, 0
        with contextlib.suppress(apsw.Error):
            self._catalog.rollback()

    def acknowledge(self, generation: int) -> None:
        """Write the generation to the file `committed`; without it, only the loss of the WAL would go unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(generation)

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
