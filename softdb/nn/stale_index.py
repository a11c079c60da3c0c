"""The vectors of records as they were at some step, indexed: where candidates come from while the true ones change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.check import Metric, shown
from softdb.device import nearest as nearest_on_device
from softdb.errors import BadInput, Closed
from softdb.index.build import Target, build
from softdb.index.choose import KINDS
from softdb.index.contract import Floats, Index, Recent
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.index.sampler import Answering, Drawing, Sampler
from softdb.index.search import Searcher
from softdb.index.sketches import Sketches
from softdb.lazy import cached_property
from softdb.reports import ReindexReport
from softdb.store import Segment, Snapshot

FILTERS = 4  # of which a version remembers the vectors, n bytes each
FEWEST = 10_000  # records from which on an index is built: fewer are searched exactly in a millisecond

TUNED_FOR = 10  # nearest that an index is tuned to find

Rows = NDArray[np.int64]
Live = NDArray[np.bool_]


@dataclass(frozen=True)
class Version:
    """One complete set of vectors, never changed: what a search began with, it ends with."""

    number: int  # 1 for the first; 0: nothing was indexed yet
    rows: Rows  # (n,) of the vectors, in their order
    vectors: Snapshot | Tensor | None  # as columns; (n, d) on the GPU that they were made on; None: there are none
    index: Index | None  # of them; None: they are compared one by one, as on a GPU
    metric: Metric
    seconds: float  # what making it took
    step: int = 0  # the training step that the vectors are of

    _alive: Recent[Live] = field(default_factory=lambda: Recent(FILTERS), init=False, repr=False, compare=False)

    @cached_property
    def indexed_until(self) -> int:
        """The row after the highest; a record from there on is younger than this version."""
        return int(self.rows.max(initial=-1)) + 1

    @cached_property
    def _searcher(self) -> Searcher | None:
        return None if self.index is None else Searcher(self.index)

    def alive(self, snapshot: Snapshot, allowed: Live | None = None) -> Live:  # (size,) over positions -> (n,)
        """Mask of records that are still there, and allowed; the last few are cached: an index knows them again."""
        named = snapshot.live if allowed is None else allowed

        def computed() -> Live:
            if not snapshot.size:
                return np.zeros(len(self.rows), np.bool_)
            positions = snapshot.positions(self.rows)
            return (positions >= 0) & (snapshot.live & named)[positions]

        return self._alive.of(computed, snapshot, named)

    def find(
        self,
        queries: Tensor,  # (q, d)
        k: int,
        keep: Live | None = None,  # (n,) which vectors may be found; None: all
    ) -> Rows:  # (q, k)
        """Rows of the k nearest as of this version, best first, -1 = none."""
        if self.vectors is None:
            return np.full((len(queries), k), -1)
        if isinstance(self.vectors, Tensor):
            there = self.vectors
            kept = None if keep is None else torch.from_numpy(keep).to(there.device)
            asked = queries.detach().to(there.device, torch.promote_types(queries.dtype, there.dtype))
            places = nearest_on_device(asked, there, k, metric=self.metric, keep=kept)[1].cpu().numpy()
        else:
            query = Query(queries, k, self.metric, keep, pairwise=False)
            if self._searcher is None:
                places = nearest(self.vectors, query)
            else:
                places = self._searcher.nearest(self.vectors, query).positions
        return np.where(places < 0, -1, self.rows[places])

    def draw(self, ask: Drawing, keep: Live | None = None) -> tuple[Rows, Floats] | None:  # (n,) -> (q, w), (q, w)
        """Rows drawn by the codes, -1 = none, and the logs of their inverse probabilities; None: nothing can be."""
        sketches = None if self.index is None else self.index.sketches
        if self._searcher is None or not isinstance(sketches, Sketches) or not isinstance(self.vectors, Snapshot):
            return None
        drawer = self._searcher.drawer
        sampler = drawer.sampler = drawer.sampler or Sampler(sketches, self.vectors, None)
        eligible = drawer.eligible(self.vectors, keep)
        sample = sampler.draw(eligible, self.vectors, ask, False, Answering(self.vectors.value_column, 0, 0.0))
        places, logs = sample.positions, -np.log(sample.chances)
        return (np.where(places < 0, -1, self.rows[places]), logs) if eligible.inside else None

    def vectors_at(self, places: Rows) -> Tensor:  # (m,) counted in `rows` -> (m, d)
        """Some of the vectors, copied."""
        assert self.vectors is not None  # else there are no places
        return self.vectors[places] if isinstance(self.vectors, Tensor) else self.vectors.keys_at(places)


NOTHING = Version(0, np.zeros(0, np.int64), None, None, Metric.DOT, 0.0)


class StaleIndex:
    """The vectors of records as of some version, in memory and indexed; they say which rows may be near.

    While an encoder or the keys themselves are trained, candidates come from here and true scores from the vectors as
    they are. `replace` makes a new version beside the old one, which answers until the swap of one reference. Safe to
    use from several threads. Vectors that come on a GPU stay there and are compared one by one, without an index.
    Memory: n d numbers, twice that while the next version is made. A deep copy shares the version, not what comes
    after; a pickle has none.

        index = StaleIndex("l2")
        index.replace(rows, (encoder(block) for block in blocks))
        index.now.find(queries, k=10)  # (q, k) rows, -1 = none

    Args:
        metric: "dot", "cosine" or "l2".
        recall: the share of the true nearest that the index of a version shall find in it.
        kind: of index, as `db.build_index` takes it, from 10,000 vectors on; "auto" is measured and chosen once.
        dtype: how vectors are kept, "float32" or "float16".
    """

    def __init__(self, metric: str | Metric, recall: float = 0.95, kind: str = "auto", dtype: str = "float32") -> None:
        self._metric, self.dtype = Metric.parse(metric), dtype
        self._target = check.share(recall, "recall")
        if not self._target:
            raise BadInput(f"recall is {shown(recall)}; expected a share above 0, such as 0.95")
        self._kind = check.one_of(kind, "kind", ("auto", "flat", *KINDS))
        self._now, self._closed = NOTHING, False
        self._lock = threading.Lock()  # one version is made at a time

    @property
    def now(self) -> Version:
        """The version in use. Raises Closed."""
        self._require_open()
        return self._now

    def replace(
        self,
        rows: Rows,  # (n,) distinct
        blocks: Iterable[Tensor],  # (m, d), n vectors in all, in the order of the rows
        step: int = 0,  # the training step that they are of
    ) -> ReindexReport:
        """Make the next version and take it into use; a failure on the way leaves the old one.

        Cost: a copy of the vectors, and the building of the index; the kind that "auto" chose first is built from then
        on. Raises BadInput for vectors that do not fit the rows, NaN or infinity, Closed once closed.
        """
        with self._lock:
            start, before, rows = time.perf_counter(), self.now, np.array(rows, np.int64)
            vectors = self._columns(len(rows), blocks)
            index = None
            if vectors is not None and not isinstance(vectors, Tensor) and len(rows) >= FEWEST and self._kind != "flat":
                index, report = build(vectors, self._metric, Target(self._target, TUNED_FOR, kind=self._kind))
                self._kind = self._kind if index is None else report["kind"]  # so few are compared as fast as found
            self._require_open()
            number, seconds = before.number + 1, time.perf_counter() - start
            self._now = Version(number, rows, vectors, index, self._metric, seconds, step)
            return ReindexReport(number, len(rows), step, seconds)

    def close(self) -> None:
        """Release the vectors; a replacement under way ends with Closed. Safe to call twice."""
        self._closed, self._now = True, NOTHING

    def _columns(self, count: int, blocks: Iterable[Tensor]) -> Snapshot | Tensor | None:
        """The vectors as columns, where the first of them lie; None where there are none."""
        column, done, dtype = torch.empty(0, 0), 0, getattr(torch, self.dtype)
        for block in blocks:
            self._require_open()
            if not len(block):
                continue
            if done + len(block) > count:
                raise BadInput(f"there are {count} rows but at least {done + len(block)} vectors; give one for each")
            if not column.numel():
                column = torch.empty(count, block.shape[1], dtype=dtype, device=block.device)
            part, vectors = column[done : done + len(block)], block.detach()
            if column.device.type == "cpu":
                vectors = torch.from_numpy(check.matrix(vectors, "vectors", column.shape[1], np.dtype(self.dtype)))
                check.filled(vectors.numpy(), "vectors", len(block))
            part.copy_(vectors)
            if column.device.type != "cpu" and not bool(part.isfinite().all()):
                raise BadInput(f"vectors hold NaN or infinity in {dtype}; repair them or what made them")
            done += len(block)
        if done < count:
            raise BadInput(f"there are {count} rows but only {done} vectors; give one for each")
        if not count or column.device.type != "cpu":
            return column if count else None
        return Snapshot.of(0, (Segment(0, 0, None, column.numpy(), None),), np.ones(count, np.bool_))

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("this stale index was closed; make another")

    def anew(self) -> StaleIndex:
        """Another of the same kind, without vectors."""
        return StaleIndex(self._metric, self._target, self._kind, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleIndex:
        twin = self.anew()
        twin._now, twin._closed = self._now, self._closed
        return twin

    def __reduce__(self) -> tuple[type[StaleIndex], tuple[Any, ...]]:
        return StaleIndex, (self._metric, self._target, self._kind, self.dtype)
