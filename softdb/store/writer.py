"""Writing. Guarantee: an operation happens whole or not at all, and what has returned is on disk.

The protocol of an operation, in this order, on the store's thread, where nothing interrupts:

1. BEGIN IMMEDIATE: from here on nobody else writes.
2. Columns are written beyond the watermarks and synced (`softdb.store.append`), while SQLite takes the records, the new
   watermarks and the next generation into the open transaction.
3. The path must lead to this directory, and the names in it to the files that this writer opened
   (`softdb.store.directory`), and the lock must be this writer's; likewise at 1.
4. COMMIT, which syncs SQLite's log: from here on it has happened. It is acknowledged only where the names still lead
   to those files.
5. The generation is written to the file `committed`; then the snapshot is the new one.

What fails before 4 is rolled back. A damaged text index does no more than that, and the handle goes on. Where a write
or a sync failed, the handle takes no more writes: what a sync has failed on may look as if it were on disk.

Relaxed operations share one transaction, each a savepoint in it, which begins with 3. A second after the first, or at
`flush`, their columns are synced, and 3 to 5 follow for all. What is on disk, which is what other processes see, is at
any moment one whole state that the database was in, and at most about a second old.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import apsw

from softdb.errors import CorruptionError, SoftDBError, WriteFailed
from softdb.store import disk
from softdb.store.catalog import CatalogState
from softdb.store.committed import Committed
from softdb.store.connect import BUSY, damaged_text, of_text_index, refused, typed
from softdb.store.directory import CATALOG, LOG, Directory, Displaced
from softdb.store.reader import Reader
from softdb.store.segments import ColumnFiles, SegmentEntry

DELAY = 1.0  # seconds that a relaxed change may wait
PAGES = 1000  # of the WAL from which on a commit is followed by a checkpoint
MOST_PAGES = 4 * PAGES  # from here on the checkpoint waits for readers, so that the WAL can be restarted
PATIENCE = 1000  # milliseconds that it waits

_FAILURES = (OSError, apsw.Error, MemoryError, Displaced)  # after which a handle takes no more writes


ending = False  # whether the interpreter ends: no thread will flush any more


class Change:
    """Effects of an operation, where they spare reading them."""

    appended: tuple[CatalogState, list[SegmentEntry]] | None = None  # rows, and nothing else: all segments after


class Writer:
    """Writer of an open database."""

    def __init__(
        self,
        reader: Reader,
        columns: ColumnFiles,
        directory: Directory | None,
        later: Callable[[float], None] | None,
        checkpointed: bool,
    ) -> None:
        """`later` says in how many seconds relaxed changes are to be flushed; None: full.

        `checkpointed`: whether another writer's log was checkpointed when this one opened.
        """
        self.waiting = 0  # relaxed changes not on disk
        self._reader, self._columns, self._directory, self._later = reader, columns, directory, later
        self._mark = None if directory is None else Committed(directory.path, directory.descriptor)
        self._checkpointed = checkpointed
        self._broken: apsw.Error | None = None  # what a checkpoint met: its sync is not to be tried again
        self._displaced: Displaced | None = None  # what kept a checkpoint from being tried
        self._spills = 0  # see `_spilled`, when the open transaction began
        self._failure: str | None = None  # why this handle takes no more writes
        self._unreported: WriteFailed | None = None  # an error of a flush in the background
        if directory is not None:
            reader.catalog.connection.set_wal_hook(self._checkpoint)
        self._acknowledge(reader.catalog.state().generation)

    # -- one operation ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[Change]:
        """One operation, whole or not at all; then the snapshot is what the catalogue says.

        `durable`: on disk when this ends, with all before it, even if relaxed.
        """
        change, loaded = Change(), False
        try:
            self._begin()
            yield change
            self._end(durable)
            if change.appended is not None:
                loaded = self._reader.loader.append(*change.appended)
        except (apsw.BusyError, apsw.LockedError) as error:  # nothing was written: another program has it locked
            raise typed(error) from error
        except _FAILURES as error:
            if isinstance(error, apsw.Error) and of_text_index(error):
                raise typed(error) from error
            raise self.failed(error) from error
        except UnicodeDecodeError as error:
            raise damaged_text(error) from None
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
            self._spills = self._spilled()
        elif self._later is not None:
            self._require_ours(CATALOG)
        self._reader.in_operation = True
        if self._later is not None:
            catalog.connection.execute("SAVEPOINT operation")

    def _end(self, durable: bool) -> None:
        """On disk when this returns, unless it is relaxed and not `durable`."""
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
        """Bring every change to disk: steps 3 to 5, after the columns that are not synced yet."""
        self._columns.sync()
        catalog = self._reader.catalog
        generation = catalog.state().generation
        if catalog.connection.in_transaction:
            self._columns.require_unchanged()
            self._require_ours(CATALOG, *(() if self._spilled() != self._spills else (LOG,)))
            catalog.commit()
            if self._displaced is not None:
                raise self._displaced
            if self._directory is not None:
                self._directory.require_in_place(self._columns.marks)
            self.note_state()
        self._reader.in_operation, self.waiting = False, 0
        self._acknowledge(generation)

    def rollback(self) -> None:
        """Roll back the operation that has not ended. Raises apsw.Error, also where SQLite rolled back more."""
        if not self._reader.in_operation:
            return
        self._reader.in_operation = False
        catalog = self._reader.catalog
        if catalog.connection.in_transaction:
            catalog.rollback("operation" if self.waiting else None)
            if not self.waiting and self._spilled() != self._spills:
                self.note_state()  # pages that SQLite has brought to the log, and taken back
        elif self.waiting:
            raise apsw.AbortError("SQLite rolled back what was to be flushed")

    def _conclude(self, loaded: bool) -> None:
        """Roll back what has not ended, and load the newest snapshot, if it is not `loaded`."""
        if self._reader.connected is not None:
            try:
                self.rollback()
            except apsw.Error as error:
                self._unreported = self.failed(error)
            self._fail_after_checkpoint()
        if self._failure is None and not loaded:
            self._reader.refresh()

    def _require_ours(self, *unchanged: str) -> None:
        """Raise Displaced where a file is not this writer's any more, or one of `unchanged` is not as it was left."""
        if self._directory is not None:
            self._directory.require_ours(self._columns.marks, unchanged)

    def note_state(self) -> None:
        """Note that the catalogue and its log are as this writer, or recovery, left them."""
        if self._directory is not None:
            self._directory.note_state()

    def _spilled(self) -> int:
        """Return how many pages SQLite has written to the log before a commit, for want of memory."""
        return self._reader.catalog.connection.status(apsw.SQLITE_DBSTATUS_CACHE_SPILL)[0]

    def require_unchanged(self) -> None:
        """Raise WriteFailed where another program has written to the catalogue or its log."""
        try:
            self._require_ours(CATALOG, LOG)
        except Displaced as error:
            if error.overwritten and self._failure is None and not self._reader.catalog.connection.in_transaction:
                raise self.failed(error) from error

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """A checkpoint, or whatever else writes to the catalogue's files outside an operation. Raises WriteFailed."""
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
        """Bring them to disk, if there are any. An error is raised by the next write, or by `close`."""
        if self.waiting:
            try:
                self.flush()
            except WriteFailed as error:
                self._unreported = error
            except SoftDBError:
                pass

    # -- failures --------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raises WriteFailed after a write that failed."""
        self.raise_unreported()
        if self._failure is not None:
            raise WriteFailed(f"an earlier write failed ({self._failure}); open the database again")

    def raise_unreported(self) -> None:
        """Raise what a flush in the background met, once."""
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def failed(self, error: Exception) -> WriteFailed:
        """Take no more writes. What has not come to disk never will; what was committed is safe."""
        lost, self.waiting, self._reader.in_operation = self.waiting, 0, False
        if not isinstance(error, Displaced):
            try:
                self._require_ours()
            except Displaced as displaced:  # then that is why
                error = displaced
        self._failure = f"{type(error).__name__}: {error}"
        with contextlib.suppress(apsw.Error):
            self._reader.catalog.rollback()
        if isinstance(error, Displaced) and error.overwritten in (CATALOG, LOG):
            error = self._kept_apart(error)
        with contextlib.suppress(SoftDBError):
            self._reader.refresh()  # a commit that raised may have come to disk
        what = str(error) if isinstance(error, Displaced) else refused(error)
        also = f" and what was done since the last flush ({lost} changes) is rolled back" if lost else ""
        return WriteFailed(
            f"{what}{also}; nothing more is written through this handle: mend the cause, then open the database again"
        )

    def _kept_apart(self, error: Displaced) -> Displaced:
        """Keep SQLite from mixing pages of this database with those that another program wrote over them.

        No checkpoint, and no read. Pages of the log belong to the catalogue that was overwritten, so it gets another
        name: without it, opening tells that commits are gone, and `committed` which.
        """
        self._reader.catalog.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._reader.unreadable = CorruptionError(f"{error}; close this handle, and open the database again")
        if self._directory is not None and error.overwritten == CATALOG:
            aside = f"{LOG}-{os.urandom(4).hex()}"
            with contextlib.suppress(OSError, Displaced):
                self._require_ours()
                disk.rename(self._directory.path / LOG, self._directory.path / aside)
                return Displaced(f"{error} (its log is {aside} now: if {CATALOG} is as it was, give it its name back)")
        return error

    def _fail_after_checkpoint(self) -> None:
        if self._broken is not None and self._failure is None:
            self.failed(self._broken)

    # -- what follows a commit -------------------------------------------------------------------------------------

    def _acknowledge(self, generation: int) -> None:
        """Write the generation to the file `committed`; without it, only the loss of the WAL would go unnoticed."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.put(generation)

    def _checkpoint(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Checkpoint after a commit that leaves the WAL long; if very long, wait for its readers.

        SQLite's own automatic checkpoint says nothing when it fails, and tries the sync again.
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
