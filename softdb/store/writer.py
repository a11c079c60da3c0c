"""Write transactions. Guarantee: an operation happens completely or not at all, and is on disk when its call returns.

The protocol of an operation, in this order, on the store's thread, which no interrupt reaches:

1. The checks of 3, then BEGIN IMMEDIATE: from here on nobody else writes.
2. Columns are written to free slots and synced (`softdb.store.append`), while SQLite takes the records, the new numbers
   of used slots, and the next generation into the open transaction.
3. The path must lead to this directory, and the names in it to the files that this writer opened
   (`softdb.store.directory`), and this writer must hold the lock.
4. COMMIT, which syncs SQLite's log: from here on the operation has happened. It is acknowledged only if the names still
   lead to those files.
5. The generation is written to the file `committed`; then the new snapshot is loaded.

An operation that fails before 4 is rolled back. After a damaged text index the handle can still write. After a failed
write or sync it cannot: bytes whose sync has failed may look as if they were on disk.

Relaxed operations share one transaction; each is a savepoint in it that begins with the checks of 3. One second after
the first, or at `flush`, their columns are synced, and 3 to 5 follow for all. So the disk, which other processes read,
always holds one complete state of the database, at most about a second old.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator

import apsw

from softdb.errors import CorruptionError, SoftDBError, WriteFailed
from softdb.store import disk
from softdb.store.catalog import CatalogState
from softdb.store.committed import Committed
from softdb.store.connect import BUSY, of_text_index, refused, typed
from softdb.store.directory import CATALOG, LOG, Directory, Displaced
from softdb.store.reader import Reader
from softdb.store.segments import ColumnFiles, SegmentEntry

DELAY = 1.0  # seconds that a relaxed change may wait
PAGES = 1000  # pages of the WAL; if a commit leaves at least this many, a checkpoint follows
MOST_PAGES = 4 * PAGES  # pages of the WAL; with at least this many, the checkpoint waits for readers to leave
PATIENCE = 1000  # milliseconds that such a checkpoint waits for readers

_FAILURES = (OSError, apsw.Error, MemoryError, Displaced)  # errors after which a handle takes no more writes


ending = False  # True when the interpreter ends: no thread will flush any more


class Change:
    """Changes made by an operation, so that the new snapshot need not be read from the catalogue."""

    appended: tuple[CatalogState, list[SegmentEntry]] | None = None  # state and all segments, after a mere append


class Writer:
    """The writer of an open database."""

    def __init__(
        self,
        reader: Reader,
        columns: ColumnFiles,
        directory: Directory | None,
        later: Callable[[float], None] | None,
        checkpointed: bool,
    ) -> None:
        """`later`: function that schedules a flush of relaxed changes in some seconds; None: full durability.

        `checkpointed`: True if the last writer's log was checkpointed at opening.
        """
        self.waiting = 0  # relaxed changes not on disk
        self._reader, self._columns, self._directory, self._later = reader, columns, directory, later
        self._mark = None if directory is None else Committed(directory.path, directory.descriptor)
        self._checkpointed = checkpointed
        self._broken: apsw.Error | None = None  # error of a checkpoint, whose sync must not be tried again
        self._displaced: Displaced | None = None  # why a checkpoint was not tried: a file was replaced
        self._spills = 0  # `_spilled_pages` when the open transaction began
        self._failure: str | None = None  # why this handle takes no more writes
        self._unreported: WriteFailed | None = None  # an error of a flush in the background
        if directory is not None:
            reader.catalog.connection.set_wal_hook(functools.partial(type(self)._checkpoint, weakref.proxy(self)))
        self._acknowledge(reader.catalog.state().generation)

    # -- one operation ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[Change]:
        """Run one operation, completely or not at all, then load the new snapshot.

        `durable`: on disk when this ends, with all earlier operations, even if relaxed. Raises WriteFailed,
        CorruptionError, and DatabaseLocked if another program has locked the catalogue.
        """
        change, loaded = Change(), False
        try:
            self._begin()
            yield change
            self._end(durable)
            if change.appended is not None:
                loaded = self._reader.loader.append(*change.appended)
        except (apsw.BusyError, apsw.LockedError, UnicodeDecodeError) as error:  # a lock or damage: nothing was written
            raise typed(error) from error
        except _FAILURES as error:
            if isinstance(error, apsw.Error) and of_text_index(error):
                raise typed(error) from error
            raise self.failed(error) from error
        finally:
            self._conclude(loaded)

    def _begin(self) -> None:
        catalog = self._reader.catalog
        if not catalog.connection.in_transaction:
            self._require_ours(CATALOG, LOG)
            if not self._checkpointed:
                catalog.checkpoint()
                self.note_state()
                self._checkpointed = True
            catalog.begin(write=True)
            self._spills = self._spilled_pages()
        elif self._later is not None:
            self._require_ours(CATALOG)
        self._reader.in_operation = True
        if self._later is not None:
            catalog.connection.execute("SAVEPOINT operation")

    def _end(self, durable: bool) -> None:
        """End the operation; it is on disk when this returns, unless relaxed and not `durable`."""
        if not self._reader.in_operation:
            return  # rolled back
        if self._later is not None:
            self._reader.catalog.connection.execute("RELEASE operation")
            self._reader.in_operation = False
            if not self.waiting:
                self._later(DELAY)
            self.waiting += 1
        if durable or self._later is None or ending:
            self._commit()

    def _commit(self) -> None:
        """Bring every change to disk: sync the columns, then do steps 3 to 5."""
        self._columns.sync()
        catalog = self._reader.catalog
        generation = catalog.state().generation
        if catalog.connection.in_transaction:
            self._columns.require_unchanged()
            self._require_ours(CATALOG, *(() if self._spilled_pages() != self._spills else (LOG,)))
            catalog.commit()
            if self._displaced is not None:
                raise self._displaced
            if self._directory is not None:
                self._directory.require_in_place(self._columns.marks)
            self.note_state()
        self._reader.in_operation, self.waiting = False, 0
        self._acknowledge(generation)

    def rollback(self) -> None:
        """Roll back an operation that has not ended. Raises apsw.Error if SQLite undid earlier ones, too."""
        if not self._reader.in_operation:
            return
        self._reader.in_operation = False
        catalog = self._reader.catalog
        if catalog.connection.in_transaction:
            catalog.rollback("operation" if self.waiting else None)
            if not self.waiting and self._spilled_pages() != self._spills:
                self.note_state()  # SQLite has written pages to the log, and taken them back
        elif self.waiting:
            raise apsw.AbortError("SQLite rolled back changes that were not flushed")

    def _conclude(self, loaded: bool) -> None:
        """Roll back the operation if it has not ended, and load the newest snapshot, unless it is `loaded`."""
        if self._reader.connected is not None:
            try:
                self.rollback()
            except apsw.Error as error:
                self._unreported = self.failed(error)
            self._fail_after_checkpoint()
        if self._failure is None and not loaded:
            self._reader.refresh()

    def _require_ours(self, *unchanged: str) -> None:
        """Raise Displaced if a file was replaced, the lock is lost, or a file of `unchanged` was overwritten."""
        if self._directory is not None:
            self._directory.require_ours(self._columns.marks, unchanged)

    def note_state(self) -> None:
        """Record the marks of the catalogue and its log after a change by this process."""
        if self._directory is not None:
            self._directory.note_state()

    def _spilled_pages(self) -> int:
        """Return how many pages SQLite has spilled to the log before a commit, because its cache was full."""
        return self._reader.catalog.connection.status(apsw.SQLITE_DBSTATUS_CACHE_SPILL)[0]

    def require_unchanged(self) -> None:
        """Raise WriteFailed if another program has written to the catalogue or its log."""
        try:
            self._require_ours(CATALOG, LOG)
        except Displaced as error:
            if error.overwritten and self._failure is None and not self._reader.catalog.connection.in_transaction:
                raise self.failed(error) from error

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Run a checkpoint or VACUUM, which writes to the catalogue outside an operation. Raises WriteFailed."""
        try:
            self._require_ours(CATALOG, LOG)
            yield
            self.note_state()
        except _FAILURES as error:
            raise self.failed(error) from error

    # -- relaxed ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring relaxed changes to disk. Raises WriteFailed."""
        self.require_ready()
        try:
            self._commit()
        except _FAILURES as error:
            raise self.failed(error) from error
        self._fail_after_checkpoint()

    def flush_late(self) -> None:
        """Bring relaxed changes to disk, if any. An error is raised only by the next write, or by `close`."""
        if self.waiting:
            try:
                self.flush()
            except WriteFailed as error:
                self._unreported = error
            except SoftDBError:
                pass

    # -- failures --------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise WriteFailed after a failed write."""
        self.raise_unreported()
        if self._failure is not None:
            raise WriteFailed(f"an earlier write failed ({self._failure}); open the database again")

    def raise_unreported(self) -> None:
        """Raise the error of a flush in the background, once."""
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def failed(self, error: Exception) -> WriteFailed:
        """Roll back, refuse further writes, and return the error to raise. Committed changes are safe."""
        lost, self.waiting, self._reader.in_operation = self.waiting, 0, False
        if not isinstance(error, Displaced):
            try:
                self._require_ours()
            except Displaced as displaced:  # this caused the error
                error = displaced
        self._failure = f"{type(error).__name__}: {error}"
        with contextlib.suppress(apsw.Error):
            self._reader.catalog.rollback()
        if isinstance(error, Displaced) and error.overwritten in (CATALOG, LOG):
            error = self._put_log_aside(error)
        with contextlib.suppress(SoftDBError):
            self._reader.refresh()  # a commit that raised may be on disk all the same
        cause = str(error) if isinstance(error, Displaced) else refused(error)
        also = f" and changes since the last flush ({lost}) are rolled back" if lost else ""
        return WriteFailed(f"{cause}{also}; this handle writes no more: fix the cause, then open the database again")

    def _put_log_aside(self, error: Displaced) -> Displaced:
        """Keep SQLite from mixing pages of this database with pages that another program wrote over the catalogue.

        Forbid checkpoints and reads. The log's pages belong to the catalogue that was overwritten, so rename the log:
        then opening finds by the file `committed` that commits are missing, see `committed.require`.
        """
        self._reader.catalog.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._reader.unreadable = CorruptionError(f"{error}; close this handle, and open the database again")
        if self._directory is not None and error.overwritten == CATALOG:
            aside = f"{LOG}-{os.urandom(4).hex()}"
            with contextlib.suppress(OSError, Displaced):
                self._require_ours()
                disk.rename(self._directory.path / LOG, self._directory.path / aside)
                return Displaced(f"{error} (its log is now {aside}; if {CATALOG} is unchanged, rename it to {LOG})")
        return error

    def _fail_after_checkpoint(self) -> None:
        if self._broken is not None and self._failure is None:
            self.failed(self._broken)

    # -- what follows a commit -------------------------------------------------------------------------------------

    def _acknowledge(self, generation: int) -> None:
        """Write the generation to the file `committed`; without it, only a later loss of the WAL goes unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(generation)

    def _checkpoint(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Checkpoint if a commit leaves a WAL of at least PAGES pages; wait for readers from MOST_PAGES on.

        SQLite's own automatic checkpoint would ignore errors, and try a failed sync again.
        """
        if pages >= PAGES and self._broken is None:
            patient = pages >= MOST_PAGES
            try:
                self._require_ours(CATALOG)
                connection.set_busy_timeout(PATIENCE if patient else 0)
                connection.wal_checkpoint(
                    name, apsw.SQLITE_CHECKPOINT_RESTART if patient else apsw.SQLITE_CHECKPOINT_PASSIVE
                )
            except (apsw.BusyError, apsw.LockedError):
                pass
            except Displaced as error:
                self._displaced = error
            except apsw.Error as error:
                self._broken = error
            finally:
                connection.set_busy_timeout(BUSY)
        return apsw.SQLITE_OK

    def close(self) -> None:
        """Close the file `committed`, not the connection."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.close()
