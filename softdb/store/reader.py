"""Reading. Guarantee: whatever a transaction reads, catalogue and columns, is of one generation, which stays readable.

Also where this process may not write the directory, so that SQLite cannot take part in a log that is not there: the
catalogue is read without locks then, until a writer comes, and what may have been read half before and half after
that is refused.

A snapshot holds its column files mapped: commits write behind its watermarks, and what compaction unlinks stays mapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from softdb.errors import Closed, CorruptionError, StaleRead
from softdb.store import fork
from softdb.store.catalog import Catalog
from softdb.store.connect import typed_errors
from softdb.store.directory import Directory
from softdb.store.generation import SnapshotLoader
from softdb.store.keyed import Keyed
from softdb.store.segments import ColumnFiles
from softdb.store.snapshot import Snapshot


class Reader:
    """A connection to the catalogue and the snapshot that a handle reads. On the store's thread."""

    def __init__(
        self,
        catalog: Catalog,
        columns: ColumnFiles,
        made: Keyed,
        directory: Directory | None,
        connect: Callable[[], Catalog],
    ) -> None:
        """`directory`: what may be changed under a handle that only reads; None for a writer's, and in memory."""
        self.connected: Catalog | None = catalog  # None: closed, or `inherited`
        self.inherited = False  # by a forked child, which has closed it and connects at its next call
        self.loader = SnapshotLoader(columns, made)
        self.in_operation = False  # within an operation of the writer: its errors are not of a read
        self.unreadable: CorruptionError | None = None  # why the catalogue is read no more
        self._directory, self._connect = directory, connect

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed, and NotADatabase and CorruptionError where its files were replaced."""
        if self.inherited:
            with typed_errors():
                self.connected, self.inherited = self._connect(), False
        if self.connected is None:
            raise Closed("this handle is closed; open the database again")
        if self.unreadable is not None:
            raise self.unreadable
        if self._directory is not None and not self.connected.connection.in_transaction:
            self._follow(self._directory)
        return self.connected

    def _follow(self, directory: Directory) -> None:
        """Connect again where a writer has come to a catalogue that is read as immutable."""
        assert self.connected is not None
        if not self.connected.immutable:
            directory.require_followed()
        elif directory.overtaken():
            fresh, old = self._connect(), self.connected
            self.connected = fresh
            old.close()

    def abandon(self, directory: Directory | None) -> None:
        """In a forked child: close the inherited connection; others may change the directory from now on."""
        inherited, self.connected, self.in_operation = self.connected, None, False
        self._directory = directory
        if inherited is not None:
            self.inherited = True
            fork.abandon(inherited.connection)

    def refresh(self) -> Snapshot:
        """Move to the newest generation."""
        with self.transaction() as snapshot:
            return snapshot

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Snapshot]:
        """Catalogue and snapshot of one generation, the newest, for several statements."""
        with contextlib.ExitStack() as transaction:
            before = -1
            while True:
                with contextlib.ExitStack() as tried:
                    tried.enter_context(self._one_generation())
                    try:
                        self.loader.load(self.catalog)
                    except (FileNotFoundError, CorruptionError) as error:
                        if self._overtaken():
                            continue  # by a writer: read its log, too
                        if isinstance(error, CorruptionError):
                            raise
                        present = self.catalog.state().generation
                        if self._directory is not None and present > before:
                            before = present
                            continue  # a compaction may have replaced it since this transaction began
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                    transaction.push(tried.pop_all())
                    break
            try:
                yield self.loader.snapshot
            finally:
                if self._overtaken() and self._directory is not None and self._directory.rewritten():
                    raise StaleRead("a writer came while the catalogue was read without locks; ask again")

    def _overtaken(self) -> bool:
        immutable = self.connected is not None and self.connected.immutable
        return immutable and self._directory is not None and self._directory.overtaken()

    @contextlib.contextmanager
    def _one_generation(self) -> Iterator[None]:
        """A transaction for a few statements; none where one is open already."""
        if self.catalog.connection.in_transaction:
            with contextlib.nullcontext() if self.in_operation else typed_errors():
                yield
            return
        with typed_errors():
            self.catalog.begin(write=False)
            try:
                yield
            finally:
                if self.connected is not None:
                    self.connected.rollback()
