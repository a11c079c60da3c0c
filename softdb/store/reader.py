"""Read transactions. Guarantee: all that a transaction reads, in catalogue and columns, belongs to one generation.

This also holds in a directory that this process may not write, where SQLite cannot create a log: there the catalogue is
read without locks until a writer opens the database, and a read that the writer may have interfered with is refused.

A snapshot keeps its column files mapped and stays readable: commits write only to slots that it does not use.
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
    """A connection to the catalogue, and the snapshot that a handle reads. Used on the store's thread only."""

    def __init__(
        self,
        catalog: Catalog,
        columns: ColumnFiles,
        origin: Keyed,
        directory: Directory | None,
        connect: Callable[[], Catalog],
    ) -> None:
        """`directory`: the directory of a read-only handle; None for a writer, or a database in memory."""
        self.connected: Catalog | None = catalog  # None: closed, or `inherited`
        self.inherited = False  # True in a forked child, which connects anew at its next call
        self.loader = SnapshotLoader(columns, origin)
        self.in_operation = False  # True within the writer's operations, which handle SQLite's errors themselves
        self.unreadable: CorruptionError | None = None  # why the catalogue must not be read any more
        self._directory, self._connect = directory, connect

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed, and NotADatabase or CorruptionError if its files were replaced."""
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
        """Connect again if this handle reads the catalogue as immutable and a writer has opened it."""
        assert self.connected is not None
        if not self.connected.immutable:
            directory.require_followed()
        elif directory.overtaken():
            fresh, old = self._connect(), self.connected
            self.connected = fresh
            old.close()

    def abandon(self, directory: Directory | None) -> None:
        """In a forked child: close the inherited connection; from now on read from `directory`."""
        inherited, self.connected, self.in_operation = self.connected, None, False
        self._directory = directory
        if inherited is not None:
            self.inherited = True
            fork.abandon(inherited.connection)

    def refresh(self) -> Snapshot:
        """Load the newest generation, and return its snapshot."""
        with self.transaction() as snapshot:
            return snapshot

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Snapshot]:
        """Run a block in a read transaction; yield the newest snapshot. Raises CorruptionError, StaleRead."""
        with contextlib.ExitStack() as transaction:
            before = -1
            while True:
                with contextlib.ExitStack() as attempt:
                    attempt.enter_context(self._pin_generation())
                    try:
                        self.loader.load(self.catalog)
                    except (FileNotFoundError, CorruptionError) as error:
                        if self._is_overtaken():
                            continue  # a writer has opened the database: connect again, to read its log
                        if isinstance(error, CorruptionError):
                            raise
                        present = self.catalog.state().generation
                        if self._directory is not None and present > before:
                            before = present
                            continue  # a compaction may have replaced the file since this transaction began
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                    transaction.push(attempt.pop_all())
                    break
            try:
                yield self.loader.snapshot
            finally:
                if self._is_overtaken() and self._directory is not None and self._directory.rewritten():
                    raise StaleRead("a writer opened the database during a read without locks; repeat the call")

    def _is_overtaken(self) -> bool:
        immutable = self.connected is not None and self.connected.immutable
        return immutable and self._directory is not None and self._directory.overtaken()

    @contextlib.contextmanager
    def _pin_generation(self) -> Iterator[None]:
        """Open a read transaction, unless one is open already."""
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
