"""`PinnedStore`: one generation of a store, which stays readable while the store writes later ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.check import Id
from softdb.filters.conditions import statement
from softdb.filters.filtered import FilteredStore
from softdb.filters.grammar import parse
from softdb.filters.matching import Matching, key_of
from softdb.store import Snapshot
from softdb.store.connect import typed_errors
from softdb.store.entry import RecordEntry
from softdb.store.session import lookup, on_thread
from softdb.store.snapshot import Live
from softdb.store.store import Located


class PinnedStore(FilteredStore):
    """The generation that a store reads when this object is made. It shares the store's connection and files.

    Keys and values stay mapped in the snapshot. Ids, payloads and texts of records that were deleted or replaced later
    come from the store's retained records (`Store.retain`).
    """

    def __init__(self, store: FilteredStore) -> None:
        self.__dict__.update(store.__dict__)
        self._newest = store  # keeps the connection open
        self.loader = copy.copy(store.loader)
        self._matched: dict[str, Matching] = {}  # `key_of` a filter -> matches in this generation

    def __del__(self) -> None:
        """Do nothing: the store closes its files itself."""

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[Snapshot]:
        """Open a read transaction; yield the pinned snapshot. Call it on the store's thread."""
        with self.reader.transaction():
            yield self.snapshot

    @lookup
    def locate(self, ids: list[Id], texts: bool = False) -> Located:
        """Find the rows of ids in the pinned snapshot, as `Store.locate` does."""
        snapshot, rows, payloads, own_texts = super().locate(ids, texts)
        missing = np.flatnonzero(rows < 0).tolist()
        if missing:
            source = self.catalog.retired.since(snapshot)
            deleted = self.catalog.lookup([ids[i] for i in missing], texts, source)
            for i in missing:
                entry = deleted.get(ids[i])
                if entry is not None:
                    rows[i], payloads[i], own_texts[i] = entry.row, entry.payload, entry.text
        return Located(snapshot, rows, payloads, own_texts)

    @lookup
    def read(self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        """Return {row: entry} for the rows of the pinned generation, as `Store.read` does."""
        entries = super().read(rows, payloads, texts)
        if len(entries) < len(rows):
            entries |= self.catalog.read(rows, payloads, texts, source=self.catalog.retired.since(self.snapshot))
        return entries

    def known_matching(self, where: dict[str, Any], snapshot: Snapshot) -> Live | None:
        """Return a filter's cached mask (size,) of the pinned snapshot; None: not cached."""
        known = self._matched.get(key_of(where))
        return None if known is None else known.live

    @on_thread
    def _matching(self, where: dict[str, Any]) -> tuple[Snapshot, Matching]:
        snapshot, key = self.snapshot, key_of(where)
        with self.reader.transaction() as newest:
            if key not in self._matched:
                matching = self.matches.of(where, self.catalog, newest)
                same = newest.generation == snapshot.generation
                self._matched[key] = matching if same else self._earlier(where, matching, newest)
        return snapshot, self._matched[key]

    def _earlier(self, where: dict[str, Any], matching: Matching, newest: Snapshot) -> Matching:
        """Convert the matches of the newest generation to those of the pinned one. Cost: time for the matches."""
        snapshot = self.snapshot
        condition, bindings = statement(parse(where))
        with typed_errors():
            sql = f"SELECT row FROM {self.catalog.retired.since(snapshot)} WHERE {condition}"
            deleted = np.fromiter((row for (row,) in self.catalog.connection.execute(sql, bindings)), np.int64)
        rows = np.concatenate([newest.rows(np.flatnonzero(matching.live)), matching.keyless, deleted])
        positions = snapshot.positions(rows[~np.isin(rows, snapshot.keyless)])
        live = np.zeros(snapshot.size, np.bool_)
        live[positions[positions >= 0]] = True
        return Matching(live & snapshot.live, snapshot.keyless[np.isin(snapshot.keyless, rows)])
