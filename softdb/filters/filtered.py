"""`FilteredStore`: a store with filters, groups and full-text scores of its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Id, Schema
from softdb.filters import masks
from softdb.filters.fulltext import FullText, TextScores
from softdb.filters.grouping import Grouping, Groups
from softdb.filters.matching import Matches, Matching
from softdb.store import Snapshot, Store
from softdb.store.session import on_thread


class ByText(NamedTuple):
    """Scores of a search by text, and masks of the records that take part, in one generation."""

    snapshot: Snapshot
    scores: TextScores
    keep: NDArray[np.bool_] | None  # (m,) True for the records with a text that the filter matches; None: no filter
    allowed: NDArray[np.bool_] | None  # (size,) True for the positions that the filter matches; None: no filter
    left_out: NDArray[np.int64]  # (e,) rows of excluded ids, -1 for an id that is not stored


class FilteredStore(Store):
    """A store with caches of filters' matches, of groups and of text scores.

    A filter needs vectors and catalogue in the same generation, so each call first refreshes an outdated reader.
    """

    def __init__(self, path: Path | None, mode: str, create: Schema | None, relaxed: bool = False) -> None:
        self.matches, self._groups, self._full_text = Matches(), Groups(), FullText()
        super().__init__(path, mode, create, relaxed)

    def matching(self, where: dict[str, Any]) -> tuple[Snapshot, NDArray[np.bool_]]:
        """Return the snapshot, and the mask (size,) of its positions that a filter matches. Cost: see `Matches.of`."""
        snapshot, (matching, _) = self._matching(where)
        return snapshot, matching

    def known_matching(self, where: dict[str, Any], snapshot: Snapshot) -> NDArray[np.bool_] | None:
        """Return a filter's cached mask (size,) for a snapshot, without a call on the store's thread; None: not cached.

        Always None in a read-only handle, whose snapshot may be out of date: `matching` refreshes the handle first.
        """
        return self.matches.cached(where, snapshot.generation) if self.mode == "rw" else None

    def matching_rows(self, where: dict[str, Any]) -> tuple[Snapshot, NDArray[np.int64]]:
        """Return the snapshot, and the ascending rows (m,) of all records that match, with or without a key."""
        snapshot, (matching, keyless) = self._matching(where)
        rows = snapshot.rows(np.flatnonzero(matching))
        return snapshot, np.sort(np.concatenate([rows, keyless])) if len(keyless) else rows

    @on_thread
    def _matching(self, where: dict[str, Any]) -> tuple[Snapshot, Matching]:
        with self.read_transaction() as snapshot:
            return snapshot, self.matches.of(where, self.catalog, snapshot)

    @on_thread
    def delete_matching(self, where: dict[str, Any]) -> int:
        """Delete the records that a filter matches, and return their number."""
        with self.write_transaction():
            return self.delete_rows(self.matching_rows(where)[1])

    @on_thread
    def order_fields(self) -> None:
        """Cache the order of declared fields, if there are many records; see `Orders.make`."""
        with self.read_transaction() as snapshot:
            if snapshot.records >= masks.LARGE:
                self.matches.orders.make(self.catalog.fields(), self.catalog, snapshot)

    @on_thread
    def groups(self, field: str) -> tuple[Snapshot, Grouping]:
        """Return the snapshot, and the groups of its records by the value of a field; see `Groups.of`."""
        with self.read_transaction() as snapshot:
            grouping = self._groups.of(field, self.catalog, snapshot)
            if snapshot.count and grouping.takes_part is not None and not grouping.takes_part.any():
                self.matches.of({field: {"$exists": True}}, self.catalog, snapshot)  # to warn of an unknown field
            return snapshot, grouping

    @on_thread
    def by_text(self, texts: list[str], where: dict[str, Any] | None, left_out: list[Id]) -> ByText:
        """Score records for query texts; also return which records take part, and the rows of the ids in `left_out`.

        Raises BadInput if there is no text index. Cost: see `FullText.scorer`.
        """
        with self.read_transaction() as snapshot:
            scores, rows = self._full_text.scorer(texts, self.catalog, snapshot), self.locate(left_out).rows
            if where is None:
                return ByText(snapshot, scores, None, None, rows)
            keep = np.isin(scores.rows, self.matching_rows(where)[1])
            return ByText(snapshot, scores, keep, self.matching(where)[1], rows)
