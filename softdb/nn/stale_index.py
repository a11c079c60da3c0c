"""Index of the records' vectors at an earlier training step, which finds candidates while the vectors change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.check import Metric, shown
from softdb.device import nearest as nearest_on_device
from softdb.errors import BadInput
from softdb.index.build import Target, build
from softdb.index.choose import KINDS
from softdb.index.contract import Floats, Index, Live, Recent, Rows
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.index.sampler import Answering, Drawing, Sampler
from softdb.index.search import Searcher
from softdb.index.sketches import Sketches
from softdb.lazy import cached_property
from softdb.reports import ReindexReport
from softdb.store import Segment, Snapshot

CACHED_MASKS = 4  # number of masks of live vectors that a version caches, n bytes each
FEWEST = 10_000  # smallest number of records to build an index for; exact search of fewer takes a millisecond
TUNED_FOR = 10  # number of nearest vectors, k, that an index's recall is tuned for


@dataclass(frozen=True)
class Version:
    """The vectors of all records at one training step, and their index. Immutable, so a search sees one version."""

    number: int  # 1 for the first; 0: nothing was indexed yet
    rows: Rows  # (n,) row of each vector
    vectors: Snapshot | Tensor | None  # columns, or (n, d) on the GPU of the encoder; None: no vectors
    index: Index | None  # of the vectors; None: every vector is compared, for example on a GPU
    metric: Metric
    seconds: float  # time that making this version took
    step: int = 0  # training step of the vectors

    _alive: Recent[Live] = field(default_factory=lambda: Recent(CACHED_MASKS), init=False, repr=False, compare=False)

    @cached_property
    def indexed_until(self) -> int:
        """The row after the highest one; records from this row on are newer than this version."""
        return int(self.rows.max(initial=-1)) + 1

    @cached_property
    def _searcher(self) -> Searcher | None:
        return None if self.index is None else Searcher(self.index)

    def alive(self, snapshot: Snapshot, allowed: Live | None = None) -> Live:  # (size,) over positions -> (n,)
        """Return the mask of vectors whose records are live and allowed. Cached: indexes compare masks by identity."""
        mask = snapshot.live if allowed is None else allowed

        def computed() -> Live:
            if not snapshot.size:
                return np.zeros(len(self.rows), np.bool_)
            positions = snapshot.positions(self.rows)
            return (positions >= 0) & (snapshot.live & mask)[positions]

        return self._alive.of(computed, snapshot, mask)

    def find(
        self,
        queries: Tensor,  # (q, d)
        k: int,
        keep: Live | None = None,  # (n,) mask of the vectors that take part; None: all
    ) -> Rows:  # (q, k)
        """Return the rows of the k nearest vectors of this version, best first, -1 = none."""
        vectors = self.vectors
        if vectors is None:
            return np.full((len(queries), k), -1)
        if isinstance(vectors, Tensor):
            mask = None if keep is None else torch.from_numpy(keep).to(vectors.device)
            moved = queries.detach().to(vectors.device, torch.promote_types(queries.dtype, vectors.dtype))
            places = nearest_on_device(moved, vectors, k, metric=self.metric, keep=mask)[1].cpu().numpy()
        else:
            query = Query(queries, k, self.metric, keep, pairwise=False)
            if self._searcher is None:
                places = nearest(vectors, query)
            else:
                places = self._searcher.nearest(vectors, query).positions
        return np.where(places < 0, -1, self.rows[places])

    def draw(self, drawing: Drawing, keep: Live | None = None) -> tuple[Rows, Floats] | None:  # (n,) -> (q, w), (q, w)
        """Draw rows by the index's codes; return rows (-1 = none) and log(1 / probability); None without codes."""
        sketches = None if self.index is None else self.index.sketches
        if self._searcher is None or not isinstance(sketches, Sketches) or not isinstance(self.vectors, Snapshot):
            return None
        drawer = self._searcher.drawer
        sampler = drawer.sampler = drawer.sampler or Sampler(sketches, self.vectors, None)
        eligible = drawer.eligible(self.vectors, keep)
        sample = sampler.draw(eligible, self.vectors, drawing, False, Answering(self.vectors.value_column, 0, 0.0))
        places, logs = sample.positions, -np.log(sample.chances)
        return (np.where(places < 0, -1, self.rows[places]), logs) if eligible.inside else None

    def vectors_at(self, places: Rows) -> Tensor:  # (m,) indices into `rows` -> (m, d)
        """Return a copy of the vectors at the given indices."""
        assert self.vectors is not None  # without vectors there are no indices
        return self.vectors[places] if isinstance(self.vectors, Tensor) else self.vectors.keys_at(places)


NOTHING = Version(0, np.zeros(0, np.int64), None, None, Metric.DOT, 0.0)


class StaleIndex:
    """Index of the records' vectors at an earlier training step, in memory, to find candidates.

    While an encoder or the keys are trained, candidates come from this index and scores from the current vectors.
    `replace` makes a new version; until that is complete, the old version answers searches. Safe to use from several
    threads. Vectors on a GPU stay there, and every vector is compared, without an index. Memory: n d numbers, twice
    that while the next version is made. A deep copy shares the current version, not later ones; a pickle has none.

        index = StaleIndex("l2")
        index.replace(rows, (encoder(block) for block in blocks))
        index.now.find(queries, k=10)  # (q, k) rows, -1 = none

    Args:
        metric: "dot", "cosine" or "l2".
        recall: share of the true nearest vectors that the index is tuned to find.
        kind: kind of index for 10,000 vectors or more, see `db.build_index`; "auto": the first build chooses the kind.
        dtype: type of the vectors in memory, "float32" or "float16".
    """

    def __init__(self, metric: str | Metric, recall: float = 0.95, kind: str = "auto", dtype: str = "float32") -> None:
        self._metric, self.dtype = Metric.parse(metric), dtype
        self._target = check.share(recall, "recall")
        if not self._target:
            raise BadInput(f"recall is {shown(recall)}; expected a share above 0, such as 0.95")
        self._kind = check.one_of(kind, "kind", ("auto", "flat", *KINDS))
        self.now = NOTHING  # the version in use, replaced as a whole
        self._lock = threading.Lock()  # held while a version is made

    def replace(
        self,
        rows: Rows,  # (n,) distinct
        blocks: Iterable[Tensor],  # (m, d), n vectors in all, in the order of the rows
        step: int = 0,  # training step of the vectors
    ) -> ReindexReport:
        """Make the next version, and use it from then on; after an error the old version stays.

        Cost: copies the vectors and builds the index. Raises BadInput for vectors that do not fit the rows, or that
        are NaN or infinite.
        """
        with self._lock:
            start, before, rows = time.perf_counter(), self.now, np.array(rows, np.int64)
            vectors = self._columns(len(rows), blocks)
            index = None
            if vectors is not None and not isinstance(vectors, Tensor) and len(rows) >= FEWEST and self._kind != "flat":
                index, report = build(vectors, self._metric, Target(self._target, TUNED_FOR, kind=self._kind))
                self._kind = self._kind if index is None else report["kind"]  # no index: comparing all is as fast
            number, seconds = before.number + 1, time.perf_counter() - start
            self.now = Version(number, rows, vectors, index, self._metric, seconds, step)
            return ReindexReport(number, len(rows), step, seconds)

    def _columns(self, count: int, blocks: Iterable[Tensor]) -> Snapshot | Tensor | None:
        """Copy the blocks into one column, on the device of the first block; None without vectors."""
        column, done, dtype = torch.empty(0, 0), 0, getattr(torch, self.dtype)
        for block in blocks:
            if not len(block):
                continue
            if done + len(block) > count:
                raise BadInput(f"there are {count} rows but at least {done + len(block)} vectors; give one per row")
            if not column.numel():
                column = torch.empty(count, block.shape[1], dtype=dtype, device=block.device)
            target, vectors = column[done : done + len(block)], block.detach()
            if column.device.type == "cpu":
                vectors = torch.from_numpy(check.matrix(vectors, "vectors", column.shape[1], np.dtype(self.dtype)))
                check.filled(vectors.numpy(), "vectors", len(block))
            target.copy_(vectors)
            if column.device.type != "cpu" and not bool(target.isfinite().all()):
                raise BadInput(f"vectors hold NaN or infinity in {dtype}; repair them or their encoder")
            done += len(block)
        if done < count:
            raise BadInput(f"there are {count} rows but only {done} vectors; give one per row")
        if not count or column.device.type != "cpu":
            return column if count else None
        return Snapshot.of(0, (Segment(0, 0, None, column.numpy(), None),), np.ones(count, np.bool_))

    def emptied(self) -> StaleIndex:
        """Return a stale index with these settings, without vectors."""
        return StaleIndex(self._metric, self._target, self._kind, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleIndex:
        copy = self.emptied()
        copy.now = self.now
        return copy

    def __reduce__(self) -> tuple[type[StaleIndex], tuple[Any, ...]]:
        return StaleIndex, (self._metric, self._target, self._kind, self.dtype)
