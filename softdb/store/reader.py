"""Reading. Guarantee: whatever a transaction reads, catalogue and columns, is of one generation, which stays readable.

A snapshot holds its column files mapped: commits write behind its watermarks, and what compaction unlinks stays mapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from softdb.errors import Closed, CorruptionError
from softdb.store.catalog import Catalog
from softdb.store.connect import typed_errors
from softdb.store.generation import SnapshotLoader
from softdb.store.keyed import Keyed
from softdb.store.segments import ColumnFiles
from softdb.store.snapshot import Snapshot

__all__ = ["Reader"]


class Reader:
    """A connection to the catalogue and the snapshot that a handle reads. On the store's thread."""

    def __init__(self, catalog: Catalog, columns: ColumnFiles, made: Keyed, writing: bool) -> None:
        self.connected: Catalog | None = catalog  # None: closed
        self.loader = SnapshotLoader(columns, made)
        self.in_operation = False  # whether the writer is within an operation: its errors are not of a read
        self._writing = writing

    @property
    def catalog(self) -> Catalog:
        """The connection. Raises Closed."""
        if self.connected is None:
            raise Closed("this handle is closed; open the database again")
        return self.connected

    @property
    def snapshot(self) -> Snapshot:
        """The generation that this handle reads: the newest, for a writer; that of the last `refresh`, for a reader."""
        return self.loader.snapshot

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
                    except FileNotFoundError as error:
                        present = self.catalog.state().generation
                        if not self._writing and present > before:
                            before = present
                            continue  # a compaction may have replaced it since this transaction began
                        raise CorruptionError(f"{error.filename} is missing; restore it from a copy") from None
                    transaction.push(tried.pop_all())
                    break
            yield self.snapshot

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
