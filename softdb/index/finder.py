"""The finder of one database: its index is loaded when first needed, kept up to date, and saved as a cache."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.errors import BadInput, DeviceFailed
from softdb.index import cache, flat
from softdb.index.background import Build
from softdb.index.build import Progress, Target, build, checked, possible, tuned
from softdb.index.contract import Floats, Found, Index, Live, Rows, Selected, faiss_module
from softdb.index.device import DEVICE_ERRORS, Board, forked
from softdb.index.gpu import board_of, hosted, place, placed
from softdb.index.gpu_search import find_there
from softdb.index.ivf import IVF
from softdb.index.on_device import OnDevice
from softdb.index.reach import reach_of
from softdb.index.search import find, find_among_all, indexed_until
from softdb.index.tail import FEWEST, Tail
from softdb.index.watch import Watch
from softdb.kernels import available
from softdb.reports import DeviceReport, IndexReport
from softdb.store import Snapshot, Store, fork

__all__ = ["Finder"]

_log = logging.getLogger("softdb")

ABSORB_ROWS = 10_000  # unindexed rows that are added to the index: fewer are compared exactly in a millisecond
ABSORB_SHARE = 0.1  # and what share of the index they must be: to add copies its codes


class Finder:
    """Finds candidates for a store. An index may be missing, stale or refused; the answer is right all the same."""

    def __init__(
        self,
        store: Store,
        devices: Sequence[torch.device] | None = None,
        dtype: torch.dtype | None = None,  # of the columns there; None: as they are stored
    ) -> None:
        self._store = store
        self._board = Board.of(devices, dtype)  # the GPUs to compute on; None: the CPU
        # an index, and the oldest generation that it serves: a snapshot before that lacks some of its rows
        self._in_use: tuple[Index | None, int] = (None, 0)
        self._tail: Tail | None = None  # of an index, made when first needed
        self._tail_of: Index | None = None  # which one
        self.rates: dict[int, Any] = {}  # of passes over so many numbers of a record, for `softdb.attend.on_host`
        self._file: str | None = None  # the file that was last loaded or refused
        self._since = 0  # the generation that made the keys which it is of
        self._looked = False  # whether the catalogue was asked for one
        self._unsaved = False
        self._compacted = 0  # the generation of the last compaction
        self._build: Build[IndexReport] | None = None  # the last one
        self.watch = Watch()
        self._lock = threading.Lock()  # one thread loads, absorbs or replaces the index
        fork.watch(self)

    @property
    def index(self) -> Index | None:
        """The index in use; None where search is exact."""
        return self._in_use[0]

    @property
    def building(self) -> bool:
        """Whether an index is being built."""
        return self._build is not None and not self._build.done

    def after_fork(self) -> None:
        """In a forked child: no thread builds, and none will release the lock."""
        self._lock = threading.Lock()
        self.watch.after_fork()
        if self._build is not None:
            self._build.after_fork()

    def find(
        self,
        snapshot: Snapshot,
        queries: Tensor,  # (q, d)
        k: int,
        allowed: Live | None,  # (size,) over positions; None: every live record
        exact: bool = False,
        certain: int | None = None,
        pairwise: bool = True,
        metric: Metric | None = None,  # None: the database's; the index serves no other
    ) -> Found:  # (q, k)
        """The k nearest; `certain` and `pairwise` as in `softdb.index.search.find`.

        Of another metric than the database's, and for few records, the finder is "flat", which is exact. A few of the
        searches by the index are checked against exact ones (`watch`).
        """
        own, board = self._store.loader.loaded.keyed.schema.metric, self._board
        metric = metric or own
        index = None if exact or metric is not own else self._current(snapshot)
        if index is not None and not index.on_gpu and self._beside(snapshot, queries.device):
            index = None
        found, start = None, time.perf_counter()
        if index is not None:
            search = find_there if index.on_gpu else find
            found = search(snapshot, index, queries, k, allowed, certain, pairwise and board is None)
        if index is None or found is None:
            return Found((board or flat).nearest(snapshot, queries, k, metric, allowed), None, "flat")
        if certain is None and found.finder == index.kind:  # else its recall is not what the index was tuned to
            self._watched(snapshot, index, found, time.perf_counter() - start, queries, allowed)
        return found

    def columns(self, snapshot: Snapshot, device: torch.device) -> OnDevice | None:
        """A snapshot's columns as queries on a device find them there; None where the host's serve."""
        board = self._board
        return board.columns(snapshot) if board is not None and board.holds(device) else None

    def _beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Whether queries lie beside all keys: comparing all is faster than asking an index on the host."""
        board = self._board
        return board is not None and board.holds(device) and board.resident(snapshot)

    def find_among_all(self, snapshot: Snapshot, vectors: Floats, k: int) -> Found | None:  # (q, d) -> (q, k)
        """As `find` on the CPU, with no filter, in the few steps that a single query should take; None: ask `find`."""
        index, since = self._in_use
        if self._board is not None or not self._looked or since > snapshot.generation or index is None:
            return None
        start = time.perf_counter()
        found = find_among_all(snapshot, index, vectors, k)
        if found is not None:
            self._watched(snapshot, index, found, time.perf_counter() - start, vectors)
        return found

    def _watched(
        self,
        snapshot: Snapshot,
        index: Index,
        found: Found,
        seconds: float,  # that the search took
        queries: Tensor | Floats,  # (q, d)
        allowed: Live | None = None,
    ) -> None:
        """Tell the watch of a search by the index."""

        def exactly(which: int) -> Rows:
            asked, k = torch.as_tensor(queries[which : which + 1]), found.positions.shape[1]
            alone: Rows = (self._board or flat).nearest(snapshot, asked, k, index.metric, allowed)[0]
            return alone

        self.watch.saw(index, seconds, found.positions, snapshot.count * queries.shape[1], exactly)

    def tail(self, snapshot: Snapshot) -> tuple[Tail | None, int]:
        """A sampler of the records that the index holds, None where none is worth it; and the first position beyond."""
        index = self._current(snapshot) if snapshot.count >= FEWEST else None
        if index is None or not isinstance(index, IVF):
            return None, 0
        with self._lock:
            if self._tail is None or self._tail_of is not index:  # draws go over lists on the host
                self._tail, self._tail_of = Tail(hosted(index) if index.on_gpu else index, snapshot), index
            return self._tail, indexed_until(snapshot, index)

    def builder(
        self,
        kind: str,
        recall: float,
        k: int,
        queries: Tensor | None,
        memory: object = None,  # bytes, or text such as "200MB"
        devices: Sequence[torch.device] | None = None,  # None: where searches run now
    ) -> Callable[[Progress], IndexReport]:
        """What builds, measures, saves and uses a new index, and returns the report. The old one serves until then."""
        board = self._board if devices is None else self._board_of(devices, self.dtype)
        kind, recall, most = checked(kind, recall, memory, board)
        snapshot, metric = self._store.snapshot, self._store.schema.metric
        possible(snapshot, kind, most, board)

        def work(say: Progress) -> IndexReport:
            index, report = build(snapshot, metric, kind, recall, k, queries, say, most, board)
            if isinstance(index, IVF) and board is None and snapshot.count >= FEWEST and available():
                reach_of(index, snapshot)  # here, and not when an estimate is first asked for
            with self._lock:
                if self._store.keyed.since > snapshot.generation:
                    raise BadInput("all keys were made anew while the index was built; build it again")
                self._board = board
                self._use(index, snapshot.generation)
                outdated = self._compacted > snapshot.generation
            if outdated:
                self.compact()
            self.save()
            return IndexReport.of(report)

        return work

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the columns on devices; None: as they are stored."""
        return None if self._board is None else self._board.dtype

    def _board_of(self, devices: Sequence[torch.device], dtype: torch.dtype | None) -> Board | None:
        """The board of some devices: the one in use, whose columns are there already, where it is theirs."""
        board, mine = Board.of(devices, dtype), self._board
        same = board is not None and mine is not None and (board.devices, dtype) == (mine.devices, mine.dtype)
        return mine if same else board

    @property
    def board(self) -> Board | None:
        """The devices to compute on; None: the CPU."""
        return self._board

    @property
    def place(self) -> str:
        """Where it computes, as it is shown."""
        return "the CPU" if self._board is None else self._board.name

    def device_report(self) -> DeviceReport | None:
        """What lies on the devices; None for the CPU."""
        return None if self._board is None else self._board.report(self._store.schema)

    def move(self, devices: Sequence[torch.device], dtype: torch.dtype | None) -> None:
        """Compute elsewhere from now on; an index goes there, too, where it has a form there."""
        board = self._board_of(devices, dtype)
        with self._lock:
            if board is self._board:
                return
            before, self._board, self.rates = self._board, board, {}
            index, since = self._in_use
            try:
                self.require_process(before)
                if index is not None:
                    self._in_use = placed(index, board), since
                if before is not None:
                    before.forget()
            except (*DEVICE_ERRORS, DeviceFailed) as error:  # what a device that was lost holds is lost
                _log.warning("the index is loaded anew, or else to be built anew: %s", error)
                self._in_use, self._tail = (None, 0), None
                self._file, self._looked, self._unsaved = None, False, False

    @staticmethod
    def require_process(board: Board | None) -> None:
        """Raises DeviceFailed where this process cannot use a board's devices."""
        if board is not None and forked():
            raise DeviceFailed(
                f"this process was forked from one that used CUDA, and cannot use {board.name}; go on with "
                "db.to('cpu'), or start processes by 'spawn'"
            )

    def begin(self, work: Callable[[Progress], IndexReport], progress: Progress | None = None) -> Build[IndexReport]:
        """A build that may run now. Raises BadInput while another one does."""
        with self._lock:
            if self._build is not None and not self._build.done and not self._build.left_behind:
                raise BadInput(
                    f"an index is being built or tuned already ({self._build.progress}); wait for it with "
                    "build.result(), or stop it with build.cancel()"
                )
            self._build = Build(work, progress)
            return self._build

    def tune(self, recall: float | None, k: int | None, queries: Tensor | None) -> IndexReport:
        """Measure the index anew, change how hard it looks, save that; returns the report. Codes stay as they are."""

        def work(say: Progress) -> IndexReport:
            index = self._current(self._store.snapshot)
            if index is None:
                raise BadInput("there is no index to tune, search is exact; build_index() makes one")
            _, goal, _ = checked("auto", index.report["target"] if recall is None else recall)
            twin = index.restored(index.inner)  # the other is being searched; the codes are shared
            snapshot = self._store.snapshot
            tuned(snapshot, twin, Target(goal, min(k or index.report["k"], snapshot.count), queries), say)
            with self._lock:
                self._use(twin, self._in_use[1])
            self.save()
            return IndexReport.of(twin.report)

        return self.begin(work).run()

    def close(self) -> None:
        """Cancel a build, wait for its end, and save."""
        if self._build is not None:
            self._build.stop("the database was closed")
        self.save()

    def save(self) -> None:
        """Write the index as a cache, if it has changed."""
        with self._lock:
            folder = self._folder()
            if not self._unsaved or folder is None or self._store.mode != "rw":
                return
            index, since = self._in_use
            try:
                entry = None if index is None else cache.save(folder, index, since)
            except cache.NoKey as error:  # it serves this handle all the same
                _log.warning("the index is not kept for the next opening: %s", error)
                self._unsaved = False
                return
            self._store.put_index_entry(entry)
            self._file = None if entry is None else entry["file"]
            cache.clean(folder, self._file)
            self._unsaved = False

    def compact(self) -> None:
        """Remove the codes of rows that are gone from the index; a graph keeps them, they are never found."""
        snapshot = self._store.snapshot
        self._current(snapshot)
        with self._lock:
            self._compacted = max(self._compacted, snapshot.generation)
            if self.index is None:
                return
            rows = snapshot.rows(np.flatnonzero(snapshot.live[: indexed_until(snapshot, self.index)]))
            if len(rows) == self.index.inner.ntotal:
                return
            selected, twin = Selected(rows, self.index.covered), hosted(self.index)  # the other is being searched
            with contextlib.suppress(RuntimeError):  # an engine that cannot, such as a graph
                twin.inner.remove_ids(faiss_module().IDSelectorNot(selected.selector))
                twin = placed(twin, board_of(self.index))
                self.watch.follow(twin)
                self._use(twin, snapshot.generation)
        self.save()

    def forget(self) -> None:
        """Drop the index: all keys were made anew, it is of the old ones."""
        with self._lock:
            self._in_use, self._tail, self._file, self._unsaved = (None, 0), None, None, False

    def refresh(self) -> None:
        """Ask the catalogue again when the index is next needed: a writer may have built another."""
        if self._store.mode == "r":
            self._looked = False

    def report(self) -> IndexReport | None:
        """What is known of the index, how many records it does not cover yet, and of one that is being built."""
        snapshot, build = self._store.snapshot, self._build
        building = "" if build is None or build.done else str(build.progress)
        index = self._current(snapshot)
        if index is None:
            return IndexReport("flat", building=building) if building else None
        serving = {"device": place(index), "unindexed": snapshot.size - indexed_until(snapshot, index)}
        return IndexReport.of({**index.report, **serving, **self.watch.report(index), "building": building})

    def _current(self, snapshot: Snapshot) -> Index | None:
        """The index that serves a snapshot, loaded, and with unindexed rows added when there are many."""
        index = self._serving(snapshot)
        if self._looked and (index is None or not self._behind(snapshot, index) or self._lock.locked()):
            return index  # another thread adds rows, or saves; until then they are compared exactly
        with self._lock:  # not `acquire`, after which an interrupt would leave it held for ever
            if not self._looked:
                self._load()
            index = self._serving(snapshot)
            if index is not None and self._behind(snapshot, index):
                index = index.copy()  # the other is being searched
                for block in snapshot.blocks(ABSORB_ROWS, start=indexed_until(snapshot, index)):
                    index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
                self.watch.follow(index)
                self._use(index, snapshot.generation)
            return index

    def _serving(self, snapshot: Snapshot) -> Index | None:
        index, since = self._in_use
        return index if self._store.loader.loaded.keyed.since <= since <= snapshot.generation else None

    def _use(self, index: Index | None, since: int) -> None:
        """Take an index into use, under the lock."""
        self._in_use, self._looked, self._unsaved = (index, since), True, True

    def _behind(self, snapshot: Snapshot, index: Index) -> bool:
        unindexed = snapshot.size - indexed_until(snapshot, index)
        return unindexed > max(ABSORB_ROWS, ABSORB_SHARE * index.covered)

    def _load(self) -> None:
        entry, folder = self._store.index_entry(), self._folder()
        self._looked = True
        if folder is None:
            return
        if self._since != self._store.keyed.since:  # what was refused may have been of other keys than were seen
            self._since, self._file = self._store.keyed.since, None
        if entry is None:
            self._in_use, self._file = (None, 0), None
        elif entry.get("file") != self._file:
            index = cache.load(folder, entry, self._store.schema.metric, self._store.schema.dim)
            index = None if index is None else placed(index, self._board)
            since = 0 if index is None else int(entry.get("generation", 0))
            self._in_use, self._file = (index, since), entry.get("file")

    def _folder(self) -> Path | None:
        return None if self._store.path is None else self._store.path / "index"
