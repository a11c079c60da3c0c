"""The finder of one database. It loads the index when first needed, adds new records to it, and saves it as a cache."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from softdb.errors import BadInput, DeviceFailed
from softdb.index import cache, flat
from softdb.index.background import Build
from softdb.index.build import Target, build, checked, possible, tuned
from softdb.index.choose import Progress
from softdb.index.contract import Devices, FinderResult, Floats, Index, Live, Rows
from softdb.index.placement import DEVICE_ERRORS, PlacedColumns
from softdb.index.query import Query
from softdb.index.reach import reach_of
from softdb.index.sampler import FEWEST, Drawable, Sampler
from softdb.index.search import Searcher, indexed_until
from softdb.index.sketches import Sketches
from softdb.index.watch import Watch
from softdb.reports import DeviceReport, IndexReport
from softdb.store import Snapshot, Store, fork

_log = logging.getLogger("softdb")

ABSORB_ROWS = 10_000  # fewer unindexed rows are not added to the index: comparing them takes a millisecond
ABSORB_SHARE = 0.1  # unindexed rows below this share of the index are not added either: adding copies the codes


class Finder:
    """Finds the records nearest to queries. Answers are correct even if the index is missing, stale or refused."""

    def __init__(self, store: Store, devices: Devices | None = None) -> None:
        self._store = store
        self.devices = devices  # devices that compute; None: the CPU
        # an index, and the oldest generation that it can search: older snapshots lack some of its rows
        self._in_use: tuple[Index | None, int] = (None, 0)
        self._searcher: Searcher | None = None  # searches by the index in use, made when first needed
        self._file: str | None = None  # index file that was last loaded or refused
        self._since = 0  # generation of the last re-embedding before `_file` was loaded
        self._looked = False  # True: the catalogue's entry of an index file has been read
        self._unsaved = False
        self._compacted = 0  # the generation of the last compaction
        self._build: Build[IndexReport] | None = None  # the last build
        self.watch = Watch()
        self._lock = threading.Lock()  # held while a thread loads, extends, saves or replaces the index
        fork.watch(self)

    @property
    def index(self) -> Index | None:
        """The index in use; None if search is exact."""
        return self._in_use[0]

    @property
    def building(self) -> bool:
        """True if an index is being built."""
        return self._build is not None and self._build.running

    def after_fork(self) -> None:
        """Replace the locks in a forked child, where no thread builds or would release them."""
        self._lock = threading.Lock()
        self.watch.after_fork()
        if self._build is not None:
            self._build.after_fork()

    def pinned(self, store: Store) -> Finder:
        """Return a finder for a pinned store, which keeps the index that this finder has now."""
        self._current(store.snapshot)
        twin = copy.copy(self)
        twin._store = store
        return twin

    def find(self, snapshot: Snapshot, query: Query) -> FinderResult:  # (q, k)
        """Find the k nearest records of each query, by the index or by comparing all records.

        Search is exact (finder "flat") without an index, for another metric than the database's, and for few records.
        The watch repeats a few searches by the index exactly, to measure recall.
        """
        own, devices = self._store.loader.loaded.keyed.schema.metric, self.devices
        index = None if query.exact or query.metric is not own else self._searching(snapshot)
        if index is not None and index.devices is None and devices is not None:
            index = None if devices.beside(snapshot, query.queries.device) else index  # comparing all is faster
        result, start = None, time.perf_counter()
        if index is not None:
            if devices is not None and query.pairwise:
                query = replace(query, pairwise=False)
            if index.devices is None:
                result = self.searcher(index).find(snapshot, query)
            else:
                result = index.devices.find(snapshot, index, query)
        if index is None or result is None:
            return FinderResult((devices or flat).nearest(snapshot, query), None, "flat")
        if query.certain is None and result.finder == index.kind:  # else recall differs from the tuned recall
            numbers, seconds = snapshot.count * query.queries.shape[1], time.perf_counter() - start
            self.watch.saw(
                index, seconds, result.positions, numbers, lambda which: self._compared(snapshot, query, which)
            )
        return result

    def searcher(self, index: Index) -> Searcher:
        """Return the searcher by an index. It is cached until another index is in use."""
        known = self._searcher
        if known is None or known.index is not index:
            known = self._searcher = Searcher(index)
        return known

    def columns(self, snapshot: Snapshot, device: torch.device) -> PlacedColumns | None:
        """Return a snapshot's columns on a device. None: queries on that device read the host's columns."""
        return None if self.devices is None else self.devices.columns(snapshot, device)

    def find_plainly(
        self, snapshot: Snapshot, vectors: Floats, k: int, allowed: Live | None
    ) -> FinderResult | None:  # (q, d) -> (q, k)
        """Find the k nearest as `find` does, with less overhead for a single query on the CPU. None: call `find`."""
        index, since = self._in_use
        searcher = self._searcher
        if self.devices is not None or not self._looked or since > snapshot.generation or index is None:
            return None
        if searcher is None or searcher.index is not index or not index.searches:
            return None
        start = time.perf_counter()
        result = searcher.find_plainly(snapshot, vectors, k, allowed)
        if result is not None and result.finder == index.kind:
            numbers, seconds = snapshot.count * vectors.shape[1], time.perf_counter() - start

            def exact(which: int) -> Rows:
                query = Query(torch.from_numpy(vectors), k, searcher.index.metric, allowed)
                return self._compared(snapshot, query, which)

            self.watch.saw(index, seconds, result.positions, numbers, exact)
        return result

    def _compared(self, snapshot: Snapshot, query: Query, which: int) -> Rows:  # (k,)
        """Return the exact answer to query number `which`, for the watch."""
        alone = replace(query, queries=query.queries[which : which + 1])
        nearest: Rows = (self.devices or flat).nearest(snapshot, alone)[0]
        return nearest

    def sampler(self, snapshot: Snapshot, allowed: Live | None) -> tuple[Sampler, Drawable] | None:
        """Return a sampler of indexed records and the records that it may draw.

        Return None if the index has no sketches or the records are too few to draw from.
        """
        index = self._current(snapshot) if snapshot.count >= FEWEST else None
        sketches = None if index is None else index.sketches
        if index is None or not isinstance(sketches, Sketches):
            return None
        with self._lock:
            drawer = self.searcher(index).drawer
            if drawer.sampler is None:
                drawer.sampler = Sampler(sketches, snapshot, self._store.schema.num_classes)
            return drawer.sampler, drawer.eligible(snapshot, allowed)

    def builder(
        self,
        kind: str,
        recall: float,
        k: int,
        queries: Tensor | None,
        memory: object = None,  # bytes, or text such as "200MB"
        devices: Devices | None = None,  # devices that build the index and then compute; None: the CPU
    ) -> Callable[[Progress], IndexReport]:
        """Return a function that builds, measures, saves and uses a new index. The old index is used until then."""
        devices = self._in_place_of(devices)
        kind, recall, most = checked(kind, recall, memory, devices)
        snapshot, metric = self._store.snapshot, self._store.schema.metric
        possible(snapshot, kind, most, devices)

        def work(progress: Progress) -> IndexReport:
            index, report = build(snapshot, metric, Target(recall, k, queries, kind, most), progress, devices)
            sketches = None if index is None else index.sketches
            if isinstance(sketches, Sketches) and snapshot.count >= FEWEST:  # so that the first estimate is fast
                reach_of(sketches, snapshot, self._store.schema.num_classes)
            with self._lock:
                if self._store.keyed.since > snapshot.generation:
                    raise BadInput("all keys were re-embedded while the index was built; build it again")
                self.devices = devices
                self._use(index, snapshot.generation)
                outdated = self._compacted > snapshot.generation
            if outdated:
                self.compact()
            self.save()
            return IndexReport.of(report)

        return work

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the columns on devices; None: as stored."""
        return None if self.devices is None else self.devices.dtype

    def _in_place_of(self, devices: Devices | None) -> Devices | None:
        """Return the devices in use, which hold columns already, if `devices` names the same; else `devices`."""
        used = self.devices
        if devices is None or used is None:
            return devices
        return used if (devices.name, devices.dtype) == (used.name, used.dtype) else devices

    @property
    def place(self) -> str:
        """Name of the devices that compute answers, "the CPU" without devices."""
        return "the CPU" if self.devices is None else self.devices.name

    def device_report(self) -> DeviceReport | None:
        """Return a report on the columns that devices hold; None for the CPU."""
        return None if self.devices is None else self.devices.report(self._store.schema)

    def move(self, devices: Devices | None) -> None:
        """Compute on other devices from now on, and move the index if they have its engine."""
        devices = self._in_place_of(devices)
        with self._lock:
            if devices is self.devices:
                return
            before, self.devices = self.devices, devices
            index, since = self._in_use
            try:
                if before is not None:
                    before.require_process()
                if index is not None:
                    self._in_use = _placed(index, devices), since
                if before is not None:
                    before.forget()
            except (*DEVICE_ERRORS, DeviceFailed) as error:  # an index in a lost device's memory is lost
                _log.warning("the index is loaded from its file again; without a file, call build_index(): %s", error)
                self._in_use, self._searcher = (None, 0), None
                self._file, self._looked, self._unsaved = None, False, False

    def begin(self, work: Callable[[Progress], IndexReport], progress: Progress | None = None) -> Build[IndexReport]:
        """Return a build that the caller may start. Raises BadInput while another build runs."""
        with self._lock:
            if self._build is not None and self.building:
                running = f"an index is being built or tuned already ({self._build.progress})"
                raise BadInput(f"{running}; wait for it with build.result(), or stop it with build.cancel()")
            self._build = Build(work, progress)
            return self._build

    def tune(
        self, recall: float | None, k: int | None, queries: Tensor | None, progress: Progress | None
    ) -> IndexReport:
        """Measure the index's recall again, set its effort, save it, and return the report. Codes do not change."""

        def work(progress: Progress) -> IndexReport:
            index = self._searching(self._store.snapshot)
            if index is None:
                raise BadInput("there is no index to tune; build one: build_index(), or on a shell softdb index PATH")
            _, goal, _ = checked("auto", index.report["target"] if recall is None else recall)
            twin = copy.copy(index)  # shares the codes, and can be tuned while other threads search the index
            snapshot = self._store.snapshot
            tuned(snapshot, twin, Target(goal, min(k or index.report["k"], snapshot.count), queries), progress)
            with self._lock:
                self._use(twin, self._in_use[1])
            self.save()
            return IndexReport.of(twin.report)

        return self.begin(work, progress).run()

    def close(self) -> None:
        """Cancel a running build, wait for its end, and save the index."""
        if self._build is not None:
            self._build.stop("the database was closed")
        self.save()

    def save(self) -> None:
        """Write the index file if the index has changed."""
        with self._lock:
            folder = self._folder()
            if not self._unsaved or folder is None or self._store.mode != "rw":
                return
            index, since = self._in_use
            try:
                entry = None if index is None else cache.save(folder, index, since)
            except cache.NoKey as error:  # this handle can still use the index
                _log.warning("the index is not saved for the next opening: %s", error)
                self._unsaved = False
                return
            self._store.put_index_entry(entry)
            self._file = None if entry is None else entry["file"]
            cache.clean(folder, self._file)
            self._unsaved = False

    def compact(self) -> None:
        """Remove the codes of rows that compaction dropped. A graph keeps the codes, but never returns the rows."""
        snapshot = self._store.snapshot
        self._current(snapshot)
        with self._lock:
            self._compacted = max(self._compacted, snapshot.generation)
            if self.index is None:
                return
            rows = snapshot.rows(np.flatnonzero(snapshot.live[: indexed_until(snapshot, self.index)]))
            if len(rows) == self.index.count:
                return
            twin = self.index.hosted()  # a copy, as other threads search the index
            with contextlib.suppress(RuntimeError):  # raised by an engine that cannot remove rows, such as a graph
                twin.keep_only(rows)
                twin = _placed(twin, self.index.devices)
                self.watch.follow(twin)
                self._use(twin, snapshot.generation)
        self.save()

    def forget(self) -> None:
        """Drop the index after a re-embedding: its codes are for old keys."""
        with self._lock:
            self._in_use, self._searcher, self._file, self._unsaved = (None, 0), None, None, False

    def refresh(self) -> None:
        """Read the catalogue again when the index is next needed: another process may have built a new index."""
        if self._store.mode == "r":
            self._looked = False

    def report(self) -> IndexReport | None:
        """Return a report on the index, unindexed records and a running build; None without an index or a build."""
        snapshot, build = self._store.snapshot, self._build
        building = "" if build is None or build.done else str(build.progress)
        index = self._current(snapshot)
        if index is None:
            return IndexReport("flat", building=building) if building else None
        serving = {"device": index.place, "unindexed": snapshot.size - indexed_until(snapshot, index)}
        return IndexReport.of({**index.report, **serving, **self.watch.report(index), "building": building})

    def _current(self, snapshot: Snapshot) -> Index | None:
        """Return the index for a snapshot. Load it if needed, and add the unindexed rows if they are many."""
        index = self._serving(snapshot)
        if self._looked and (index is None or not self._behind(snapshot, index) or self._lock.locked()):
            return index  # if another thread adds rows or saves, unindexed rows are compared exactly
        with self._lock:  # not `acquire`: an interrupt right after it would leave the lock locked for ever
            if not self._looked:
                self._load()
            index = self._serving(snapshot)
            if index is not None and self._behind(snapshot, index):
                index = index.copy()  # other threads search the index
                for block in snapshot.blocks(ABSORB_ROWS, start=indexed_until(snapshot, index)):
                    index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
                index.seal()
                self.watch.follow(index)
                self._use(index, snapshot.generation)
            return index

    def _searching(self, snapshot: Snapshot) -> Index | None:
        """Return the current index; None if there is none, or if its codes are for estimates only."""
        index = self._current(snapshot)
        return index if index is not None and index.searches else None

    def _serving(self, snapshot: Snapshot) -> Index | None:
        index, since = self._in_use
        return index if self._store.loader.loaded.keyed.since <= since <= snapshot.generation else None

    def _use(self, index: Index | None, since: int) -> None:
        """Use an index from now on, for snapshots since generation `since`. The caller holds the lock."""
        self._in_use, self._searcher, self._looked, self._unsaved = (index, since), None, True, True

    def _behind(self, snapshot: Snapshot, index: Index) -> bool:
        unindexed = snapshot.size - indexed_until(snapshot, index)
        return unindexed > max(ABSORB_ROWS, ABSORB_SHARE * index.covered)

    def _load(self) -> None:
        entry, folder = self._store.index_entry(), self._folder()
        self._looked = True
        if folder is None:
            return
        if self._since != self._store.keyed.since:  # a file refused before may be for the old keys
            self._since, self._file = self._store.keyed.since, None
        if entry is None:
            self._in_use, self._file = (None, 0), None
        elif entry.get("file") != self._file:
            index = cache.load(folder, entry, self._store.schema.metric, self._store.schema.dim)
            index = None if index is None else _placed(index, self.devices)
            since = 0 if index is None else int(entry.get("generation", 0))
            self._in_use, self._file = (index, since), entry.get("file")

    def _folder(self) -> Path | None:
        return None if self._store.path is None else self._store.path / "index"


def _placed(index: Index, devices: Devices | None) -> Index:
    """Move an index to devices, None for the CPU. It goes to the CPU if the devices cannot run its engine."""
    if index.devices is devices or not index.searches:
        return index
    index = index if index.devices is None else index.hosted()
    return index if devices is None else devices.placed(index)
