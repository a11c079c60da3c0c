"""The finder of one database: its index is loaded when first needed, kept up to date, and saved as a cache."""

from __future__ import annotations

import contextlib
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
from softdb.index.contract import Devices, Floats, Found, Index, Live, Rows
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

ABSORB_ROWS = 10_000  # unindexed rows that are added to the index: fewer are compared exactly in a millisecond
ABSORB_SHARE = 0.1  # and what share of the index they must be: to add copies its codes


class Finder:
    """Finds candidates for a store. An index may be missing, stale or refused; the answer is right all the same."""

    def __init__(
        self,
        store: Store,
        devices: Devices | None = None,  # to compute on; None: the CPU
    ) -> None:
        self._store = store
        self.devices = devices
        # an index, and the oldest generation that it serves: a snapshot before that lacks some of its rows
        self._in_use: tuple[Index | None, int] = (None, 0)
        self._searcher: Searcher | None = None  # by the index in use, made when first needed
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
        """True if an index is being built."""
        return self._build is not None and self._build.running

    def after_fork(self) -> None:
        """In a forked child: no thread builds, and none will release the lock."""
        self._lock = threading.Lock()
        self.watch.after_fork()
        if self._build is not None:
            self._build.after_fork()

    def find(self, snapshot: Snapshot, query: Query) -> Found:  # (q, k)
        """The k nearest.

        Of another metric than the database's, and for few records, the finder is "flat", which is exact. A few of the
        searches by the index are checked against exact ones (`watch`).
        """
        own, devices = self._store.loader.loaded.keyed.schema.metric, self.devices
        index = None if query.exact or query.metric is not own else self._searching(snapshot)
        if index is not None and index.devices is None and devices is not None:
            index = None if devices.beside(snapshot, query.queries.device) else index  # comparing all there is faster
        found, start = None, time.perf_counter()
        if index is not None:
            if devices is not None and query.pairwise:
                query = replace(query, pairwise=False)
            if index.devices is None:
                found = self.searcher(index).find(snapshot, query)
            else:
                found = index.devices.find(snapshot, index, query)
        if index is None or found is None:
            return Found((devices or flat).nearest(snapshot, query), None, "flat")
        if query.certain is None and found.finder == index.kind:  # else its recall is not what the index was tuned to
            numbers, seconds = snapshot.count * query.queries.shape[1], time.perf_counter() - start
            self.watch.saw(
                index, seconds, found.positions, numbers, lambda which: self._compared(snapshot, query, which)
            )
        return found

    def searcher(self, index: Index) -> Searcher:
        """Searches by an index, with the costs and the outliers that are known of it."""
        known = self._searcher
        if known is None or known.index is not index:
            known = self._searcher = Searcher(index)
        return known

    def columns(self, snapshot: Snapshot, device: torch.device) -> PlacedColumns | None:
        """A snapshot's columns as queries on a device find them there; None where the host's serve."""
        return None if self.devices is None else self.devices.columns(snapshot, device)

    def find_plainly(
        self, snapshot: Snapshot, vectors: Floats, k: int, allowed: Live | None
    ) -> Found | None:  # (q, d) -> (q, k)
        """As `find` on the CPU in the few steps that a single query should take; None: ask `find`."""
        index, since = self._in_use
        searcher = self._searcher
        if self.devices is not None or not self._looked or since > snapshot.generation or index is None:
            return None
        if searcher is None or searcher.index is not index or not index.searches:
            return None
        start = time.perf_counter()
        found = searcher.find_plainly(snapshot, vectors, k, allowed)
        if found is not None and found.finder == index.kind:
            numbers, seconds = snapshot.count * vectors.shape[1], time.perf_counter() - start

            def exact(which: int) -> Rows:
                query = Query(torch.from_numpy(vectors), k, searcher.index.metric, allowed)
                return self._compared(snapshot, query, which)

            self.watch.saw(index, seconds, found.positions, numbers, exact)
        return found

    def _compared(self, snapshot: Snapshot, query: Query, which: int) -> Rows:  # (k,)
        """Return the exact answer to one of the queries, as the watch checks it."""
        alone = replace(query, queries=query.queries[which : which + 1])
        nearest: Rows = (self.devices or flat).nearest(snapshot, alone)[0]
        return nearest

    def sampler(self, snapshot: Snapshot, allowed: Live | None) -> tuple[Sampler, Drawable, int] | None:
        """A sampler of the records that the index holds, those that it may draw, and the first position beyond.

        None where nothing can be drawn: there are no sketches, or too few records for a draw to be worth it.
        """
        index = self._current(snapshot) if snapshot.count >= FEWEST else None
        sketches = None if index is None else index.sketches
        if index is None or not isinstance(sketches, Sketches):
            return None
        with self._lock:
            drawer = self.searcher(index).drawer
            if drawer.sampler is None:
                drawer.sampler = Sampler(sketches, snapshot, self._store.schema.num_classes)
            return drawer.sampler, drawer.eligible(snapshot, allowed), indexed_until(snapshot, sketches)

    def builder(
        self,
        kind: str,
        recall: float,
        k: int,
        queries: Tensor | None,
        memory: object = None,  # bytes, or text such as "200MB"
        devices: Devices | None = None,  # to build on, and to compute on from then on; None: the CPU
    ) -> Callable[[Progress], IndexReport]:
        """Build, measure, save and use a new index, and return the report. The old one serves until then."""
        devices = self._in_place_of(devices)
        kind, recall, most = checked(kind, recall, memory, devices)
        snapshot, metric = self._store.snapshot, self._store.schema.metric
        possible(snapshot, kind, most, devices)

        def work(say: Progress) -> IndexReport:
            index, report = build(snapshot, metric, Target(recall, k, queries, kind, most), say, devices)
            sketches = None if index is None else index.sketches
            if isinstance(sketches, Sketches) and snapshot.count >= FEWEST:  # not when an estimate is first asked for
                reach_of(sketches, snapshot, self._store.schema.num_classes)
            with self._lock:
                if self._store.keyed.since > snapshot.generation:
                    raise BadInput("all keys were made anew while the index was built; build it again")
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
        """Of the columns on devices; None: as they are stored."""
        return None if self.devices is None else self.devices.dtype

    def _in_place_of(self, devices: Devices | None) -> Devices | None:
        """Some devices, or those in use, which have columns already, where they are the same."""
        used = self.devices
        if devices is None or used is None:
            return devices
        return used if (devices.name, devices.dtype) == (used.name, used.dtype) else devices

    @property
    def place(self) -> str:
        """Name of the device that it computes on."""
        return "the CPU" if self.devices is None else self.devices.name

    def device_report(self) -> DeviceReport | None:
        """Columns that lie on the devices; None for the CPU."""
        return None if self.devices is None else self.devices.report(self._store.schema)

    def move(self, devices: Devices | None) -> None:
        """Compute elsewhere from now on; an index goes there, too, where it has a form there."""
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
            except (*DEVICE_ERRORS, DeviceFailed) as error:  # what a device that was lost holds is lost
                _log.warning("the index is loaded anew, or else to be built anew: %s", error)
                self._in_use, self._searcher = (None, 0), None
                self._file, self._looked, self._unsaved = None, False, False

    def begin(self, work: Callable[[Progress], IndexReport], progress: Progress | None = None) -> Build[IndexReport]:
        """A build that may run now. Raises BadInput while another one does."""
        with self._lock:
            if self._build is not None and self.building:
                raise BadInput(
                    f"an index is being built or tuned already ({self._build.progress}); wait for it with "
                    "build.result(), or stop it with build.cancel()"
                )
            self._build = Build(work, progress)
            return self._build

    def tune(self, recall: float | None, k: int | None, queries: Tensor | None) -> IndexReport:
        """Measure the index anew, change how hard it looks, save that; returns the report. Codes stay as they are."""

        def work(say: Progress) -> IndexReport:
            index = self._searching(self._store.snapshot)
            if index is None:
                raise BadInput("there is no index to tune, search is exact; build_index() makes one")
            _, goal, _ = checked("auto", index.report["target"] if recall is None else recall)
            twin = index.twin()  # the other is being searched
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
            if len(rows) == self.index.count:
                return
            twin = self.index.hosted()  # the other is being searched
            with contextlib.suppress(RuntimeError):  # an engine that cannot, such as a graph
                twin.keep_only(rows)
                twin = _placed(twin, self.index.devices)
                self.watch.follow(twin)
                self._use(twin, snapshot.generation)
        self.save()

    def forget(self) -> None:
        """Drop the index: all keys were made anew, it is of the old ones."""
        with self._lock:
            self._in_use, self._searcher, self._file, self._unsaved = (None, 0), None, None, False

    def refresh(self) -> None:
        """Ask the catalogue again when the index is next needed: a writer may have built another."""
        if self._store.mode == "r":
            self._looked = False

    def report(self) -> IndexReport | None:
        """Report on the index, on the records that it does not cover yet, and on a build under way."""
        snapshot, build = self._store.snapshot, self._build
        building = "" if build is None or build.done else str(build.progress)
        index = self._current(snapshot)
        if index is None:
            return IndexReport("flat", building=building) if building else None
        serving = {"device": index.place, "unindexed": snapshot.size - indexed_until(snapshot, index)}
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
                index.seal()
                self.watch.follow(index)
                self._use(index, snapshot.generation)
            return index

    def _searching(self, snapshot: Snapshot) -> Index | None:
        """The current index; None where that holds codes for estimates alone."""
        index = self._current(snapshot)
        return index if index is not None and index.searches else None

    def _serving(self, snapshot: Snapshot) -> Index | None:
        index, since = self._in_use
        return index if self._store.loader.loaded.keyed.since <= since <= snapshot.generation else None

    def _use(self, index: Index | None, since: int) -> None:
        """Take an index into use, under the lock."""
        self._in_use, self._searcher, self._looked, self._unsaved = (index, since), None, True, True

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
            index = None if index is None else _placed(index, self.devices)
            since = 0 if index is None else int(entry.get("generation", 0))
            self._in_use, self._file = (index, since), entry.get("file")

    def _folder(self) -> Path | None:
        return None if self._store.path is None else self._store.path / "index"


def _placed(index: Index, devices: Devices | None) -> Index:
    """The same index on other devices, None for the CPU; on the CPU where its codes have no form there."""
    if index.devices is devices or not index.searches:
        return index
    index = index if index.devices is None else index.hosted()
    return index if devices is None else devices.placed(index)
