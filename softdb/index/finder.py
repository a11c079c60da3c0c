"""The finder of one database: its index, loaded when first needed, kept in step with the store, saved as a cache."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from softdb.errors import BadInput
from softdb.index import cache
from softdb.index.build import Progress, Target, build, checked, tuned
from softdb.index.contract import Index, Live, Rows, Selected, faiss_module
from softdb.index.flat import nearest
from softdb.index.search import border_of, find, serves
from softdb.index.watch import Watch
from softdb.scores import Fold
from softdb.store import Snapshot, Store

__all__ = ["Finder"]

ABSORB_ROWS = 10_000  # young rows from which on the index takes them in: fewer are searched exactly in a millisecond
ABSORB_SHARE = 0.1  # and what share of the index they must be: taking in copies its codes


class Finder:
    """Finds candidates for a store. An index may be missing, stale or refused; the answer is right all the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index: Index | None = None
        self._file: str | None = None  # the file that was last loaded or refused
        self._looked = False  # whether the catalogue was asked for one
        self._unsaved = False
        self.watch = Watch()
        self._lock = threading.Lock()  # one thread loads, absorbs or replaces the index

    def find(
        self,
        snapshot: Snapshot,
        queries: Tensor,  # (q, d)
        k: int,
        allowed: Live | None,  # (size,) over positions; None: every live record
        exact: bool = False,
    ) -> Rows:  # (q, k)
        """Positions of the k nearest by the database's metric, -1 = none."""
        index = None if exact else self._current(snapshot)
        return self._watched(snapshot, index, queries, k, allowed)[0]

    def find_folded(
        self,
        snapshot: Snapshot,
        folded: Fold,  # what is asked, as an index sees it
        k: int,
        allowed: Live | None,
        exact: bool = False,
    ) -> tuple[Rows, str]:  # (q, k)
        """Positions of the k nearest by a folded score, and the finder's name.

        The index serves where the fold's metric is the database's; else, and for few records, "flat", which is exact.
        """
        index = None if exact or folded.metric is not self._store.schema.metric else self._current(snapshot)
        if index is None:
            return nearest(snapshot, folded.queries, k, folded.metric, allowed), "flat"
        return self._watched(snapshot, index, folded.queries, k, allowed)

    def _watched(
        self,
        snapshot: Snapshot,
        index: Index | None,
        queries: Tensor,  # (q, d)
        k: int,
        allowed: Live | None,
    ) -> tuple[Rows, str]:  # (q, k)
        """As `find`, by the database's metric, and the finder's name; a few searches by the index are checked."""
        metric = self._store.schema.metric
        if index is None or not serves(snapshot, index, k, allowed):
            return nearest(snapshot, queries, k, metric, allowed), "flat"
        start = time.perf_counter()
        found = find(snapshot, index, queries, k, metric, allowed)

        def exact(which: int) -> Rows:
            alone: Rows = nearest(snapshot, queries[which : which + 1], k, metric, allowed)[0]
            return alone

        self.watch.saw(index, time.perf_counter() - start, found, snapshot.count * queries.shape[1], exact)
        return found, index.kind

    def build(
        self,
        kind: str,
        recall: float,
        k: int,
        queries: Tensor | None,
        progress: Progress | None,
        memory: object = None,  # bytes, or text such as "200MB"
    ) -> dict[str, Any]:
        """Build, measure, save and use a new index; returns the report. The old one serves until then."""
        kind, recall, most = checked(kind, recall, memory)
        metric = self._store.schema.metric
        index, report = build(self._store.snapshot, metric, kind, recall, k, queries, progress, most)
        with self._lock:
            self._index, self._looked, self._unsaved = index, True, True
        self.save()
        return report

    def tune(self, recall: float | None, k: int | None, queries: Tensor | None) -> dict[str, Any]:
        """Measure the index anew, change how hard it looks, save that; returns the report. Codes stay as they are."""
        index = self._current(self._store.snapshot)
        if index is None:
            raise BadInput("there is no index to tune, search is exact; build_index() makes one")
        _, recall, _ = checked("auto", index.report["target"] if recall is None else recall)
        twin = index.restored(index.inner)  # the other is being searched; the codes are shared
        tuned(self._store.snapshot, twin, Target(recall, k or index.report["k"], queries), lambda *_: None)
        with self._lock:
            self._index, self._unsaved = twin, True
        self.save()
        return twin.report

    def save(self) -> None:
        """Write the index as a cache, if it has changed."""
        with self._lock:
            folder = self._folder()
            if not self._unsaved or folder is None or self._store.mode != "rw":
                return
            entry = None if self._index is None else cache.save(folder, self._index, self._store.snapshot.generation)
            self._store.put_index_entry(entry)
            self._file = None if entry is None else entry["file"]
            cache.clean(folder, self._file)
            self._unsaved = False

    def compact(self) -> None:
        """Take the codes of rows that are gone out of the index; a graph keeps them, they are never found."""
        snapshot = self._store.snapshot
        self._current(snapshot)
        with self._lock:
            if self._index is None:
                return
            rows = snapshot.rows(np.flatnonzero(snapshot.live[: border_of(snapshot, self._index)]))
            if len(rows) == self._index.inner.ntotal:
                return
            held = np.zeros(self._index.covered, np.bool_)
            held[rows] = True
            selected, twin = Selected(held), self._index.copy()  # the other is being searched
            with contextlib.suppress(RuntimeError):  # an engine that cannot, such as a graph
                twin.inner.remove_ids(faiss_module().IDSelectorNot(selected.selector))
                self.watch.follow(twin)
                self._index, self._unsaved = twin, True
        self.save()

    def refresh(self) -> None:
        """Ask the catalogue again when the index is next needed: a writer may have built another."""
        if self._store.mode == "r":
            self._looked = False

    def report(self) -> dict[str, Any] | None:
        """What is known of the index, and how many records it does not cover yet."""
        index = self._current(self._store.snapshot)
        if index is None:
            return None
        young = self._store.snapshot.size - border_of(self._store.snapshot, index)
        return {**index.report, "young": young, **self.watch.report(index)}

    def _current(self, snapshot: Snapshot) -> Index | None:
        """The index, loaded and with young rows taken in when there are many."""
        if self._looked and (self._index is None or not self._behind(snapshot, self._index)):
            return self._index
        with self._lock:
            if not self._looked:
                self._load()
            index = self._index
            if index is not None and self._behind(snapshot, index):
                index = index.copy()  # the other is being searched
                for block in snapshot.blocks(ABSORB_ROWS, start=border_of(snapshot, index)):
                    index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
                self.watch.follow(index)
                self._index, self._unsaved = index, True
            return self._index

    def _behind(self, snapshot: Snapshot, index: Index) -> bool:
        young = snapshot.size - border_of(snapshot, index)
        return young > ABSORB_ROWS and young > ABSORB_SHARE * index.covered

    def _load(self) -> None:
        entry, folder = self._store.index_entry(), self._folder()
        self._looked = True
        if folder is None:
            return
        if entry is None:
            self._index = self._file = None
        elif entry.get("file") != self._file:
            self._index, self._file = cache.load(folder, entry, self._store.schema.metric), entry.get("file")

    def _folder(self) -> Path | None:
        return None if self._store.path is None else self._store.path / "index"
