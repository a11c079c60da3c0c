"""Search by an index on the CPU. Compare unindexed records and outliers exactly, and merge them into the matches."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np

from softdb.check import Metric, all_finite
from softdb.index.contract import FinderResult, Floats, Index, Live, Recent, Rows, Selected, prepared
from softdb.index.flat import nearest
from softdb.index.lists import Among, Lists
from softdb.index.outliers import LEAST, SHARE, Outliers, outliers_of
from softdb.index.planner import FEW, way
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.index.rule import MOSTLY
from softdb.index.sampler import Drawable, Sampler
from softdb.index.sketches import Sketches
from softdb.lazy import cached_property
from softdb.store import Snapshot

FARTHER = 2  # factor on the number of candidates with a filter: matches are farther, where codes rank less well
AROUND, RARE = 64, 0.5  # nearest checked; compare all records if matches are rarer among them than RARE times average
LISTED = 1 << 16  # largest number of a filter's matches whose positions are cached


class Searcher:
    """Searches one index, and caches data that its searches share. Safe to use from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.sampler: Sampler | None = None  # draws records for estimates; made by the first estimate
        self._coverage: _Coverage | None = None  # for the last snapshot
        self._outliers: Outliers | None = None  # None: not copied yet

    @cached_property
    def drawer(self) -> Searcher:
        """The searcher by the index's sketches, which holds the sampler for estimates."""
        sketches = self.index.sketches
        return self if sketches is None or sketches is self.index else Searcher(sketches)

    def find(
        self, snapshot: Snapshot, query: Query
    ) -> FinderResult | None:  # (q, k), -1 only if fewer than k records are allowed
        """Find the k nearest allowed live records of each query. Return None if comparing every record costs less.

        Unindexed rows and outliers of norm are compared exactly and merged into the matches. Cost: the index's search,
        and exact scores of its candidates, of unindexed rows and of outliers.
        """
        coverage, metric = self._coverage_of(snapshot), self.index.metric
        queries, k, allowed = query.queries, query.k, query.allowed
        eligible = coverage.of(snapshot, self.index, allowed)
        vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
        listed = eligible.listed if query.pairwise and eligible.filtered else None
        chosen = way(self.index, eligible.count, len(queries), k, eligible.filtered, listed is not None)
        if chosen == "blocks":
            return None
        if chosen == "pairs" and listed is not None:
            return _compared(snapshot, vectors, listed, k, metric)
        certain = min(query.certain or k, k)
        positions, known, _ = self._searched(snapshot, eligible, allowed, vectors, k, certain)
        scores: Floats | None = known
        if coverage.until < snapshot.size:
            newer = nearest(snapshot, replace(query, k=min(k, snapshot.size - coverage.until)), coverage.until)
            positions, scores = ordered(snapshot, vectors, np.concatenate([positions, newer], axis=1), k, metric)
        short = positions[:, -1] < 0  # the index returned fewer records than exist
        if short.any():
            positions[short], scores = nearest(snapshot, replace(query, queries=queries[np.flatnonzero(short)])), None
        return FinderResult(positions, scores, self.index.kind)

    def nearest(self, snapshot: Snapshot, query: Query) -> FinderResult:  # (q, k)
        """Find the k nearest as `find` does, or by comparing every record if that costs less."""
        return self.find(snapshot, query) or FinderResult(nearest(snapshot, query), None, "flat")

    def find_plainly(
        self, snapshot: Snapshot, vectors: Floats, k: int, allowed: Live | None
    ) -> FinderResult | None:  # (q, d) -> (q, k)
        """Find the k nearest as `find` does, with less overhead, if the index holds every record.

        Return None if the caller has to use `find`: for other indexes, and for queries that are not finite.
        """
        coverage, index = self._coverage, self.index
        if coverage is None or coverage.until < snapshot.size or coverage.snapshot() is not snapshot:
            return None
        if k > snapshot.count:  # `find` handles answers with fewer than k records
            return None
        eligible = coverage.of(snapshot, index, allowed)
        listed = eligible.listed if eligible.filtered else None
        chosen = way(index, eligible.count, len(vectors), k, eligible.filtered, listed is not None)
        if chosen == "pairs" and listed is not None and all_finite(vectors):
            return _compared(snapshot, vectors, listed, k, index.metric)
        if chosen != "index":
            return None
        positions, scores, complete = self._searched(snapshot, eligible, allowed, vectors, k, k)
        return FinderResult(positions, scores, index.kind) if complete else None

    def _searched(
        self, snapshot: Snapshot, eligible: _Eligible, allowed: Live | None, vectors: Floats, k: int, certain: int
    ) -> tuple[Rows, Floats, bool]:  # (q, d) -> (q, k), (q, k)
        """Return the k best eligible records in the index, their scores, and True if all are present and finite."""
        index = self.index
        vectors_seen, candidates = prepared(vectors, index.metric), max(index.candidates_for(certain), k)
        if isinstance(index, Lists):
            among = Among(snapshot.key_column, eligible.places, eligible.slots, eligible.share)
            candidates *= FARTHER if eligible.share < MOSTLY else 1
            positions, scores, complete = index.scan(vectors_seen, k, among, certain, candidates)
        else:
            effort = math.ceil(index.effort_for(certain) / eligible.share)  # the nearest of few records are farther
            rows = index.search(vectors_seen, min(candidates, max(1, eligible.inside)), eligible.selected, effort)
            if eligible.share < MOSTLY:  # if few of the nearest match the filter, compare all
                around = snapshot.positions(index.search(vectors_seen, AROUND, None))
                keep = snapshot.live if allowed is None else snapshot.live & allowed
                rows[((around >= 0) & keep[around]).mean(1) < RARE * eligible.share] = -1
            near = rows if eligible.aligned else snapshot.positions(rows)
            positions, scores = ordered(snapshot, vectors, near, k, index.metric, vectors_seen)
            complete = bool(positions.min(initial=0) >= 0) and all_finite(vectors)
        if index.metric is Metric.DOT:
            outliers, theirs = self.outliers(snapshot, eligible, allowed)
            if outliers.count and outliers.take_part(vectors, theirs, positions, scores):
                positions, scores = ordered(snapshot, vectors, positions, k, index.metric, vectors_seen)
        return positions, scores, complete

    def outliers(self, snapshot: Snapshot, eligible: _Eligible, allowed: Live | None) -> tuple[Outliers, Rows]:
        """Return the outliers of norm and their positions, -1 for outliers that are not eligible."""
        index, known = self.index, eligible.outliers
        if known is not None and known[0].named is index.longest:
            return known
        room = index.room
        if room is None:  # an older version built the index, or it was tuned on a GPU
            room = max(LEAST, int(SHARE * index.candidates_for(index.tuned_for)))
        self._outliers = outliers_of(snapshot, index, eligible.until, room, self._outliers)
        eligible.outliers = known = self._outliers, self._outliers.positions(snapshot, allowed)
        return known

    def eligible(self, snapshot: Snapshot, allowed: Live | None) -> Drawable:
        """Return the slots of the lists that may be drawn: live records that the filter allows."""
        known = self._coverage_of(snapshot).of(snapshot, self.index, allowed)
        return Drawable(known.slots, known.places, known.inside, known.until)

    def _coverage_of(self, snapshot: Snapshot) -> _Coverage:
        known = self._coverage
        if known is None or known.snapshot() is not snapshot:
            known = self._coverage = _Coverage(snapshot, self.index)
        return known


def _compared(snapshot: Snapshot, vectors: Floats, positions: Rows, k: int, metric: Metric) -> FinderResult:
    """Compare every query with the same few records, and return the k best."""
    return FinderResult(*ordered(snapshot, vectors, np.tile(positions, (len(vectors), 1)), k, metric), "flat")


def indexed_until(snapshot: Snapshot, index: Index) -> int:
    """Return the first unindexed position."""
    return snapshot.count_below(index.covered)


class _Eligible:
    """The records of a snapshot that a search may return."""

    def __init__(self, snapshot: Snapshot, index: Index, keep: Live, coverage: _Coverage) -> None:
        self.filtered = keep is not snapshot.live
        self.count = int(np.count_nonzero(keep))
        self.listed = np.flatnonzero(keep) if self.count <= LISTED else None  # positions of the records, if few
        self.until, self.aligned, self.places = coverage.until, coverage.aligned, coverage.places
        self.inside = int(np.count_nonzero(keep[: self.until]))  # number of these records in the index
        every = self.inside == index.count
        self.share = max(1, self.inside) / max(1, index.count)  # eligible share of the indexed rows
        self.selected: Selected | None = None  # the FAISS selector; None: all rows
        self.outliers: tuple[Outliers, Rows] | None = None  # outliers and their positions, once computed
        if isinstance(index, Sketches):
            self.slots = index.filled if every and self.aligned else index.layout.allowed(keep, self.places)
        elif self.count > FEW and not every:
            self.selected = Selected(snapshot.rows(np.flatnonzero(keep[: self.until])), index.covered)


class _Coverage:
    """The records of one snapshot that an index holds, computed once in O(n) for all searches."""

    def __init__(self, snapshot: Snapshot, index: Index) -> None:
        self.snapshot = weakref.ref(snapshot)  # weak: a cached old snapshot must not keep its segments mapped
        # True if each row equals its position; an index of another database may name unknown rows
        self.aligned = snapshot.contiguous and index.covered <= snapshot.size
        self.until = indexed_until(snapshot, index)
        self.places = np.empty(0, np.uint32)  # position for each slot of the lists
        if isinstance(index, Sketches):
            rows = index.layout.rows  # -1, for a row that the snapshot lacks, becomes NO_ROW
            self.places = rows if self.aligned else snapshot.positions(rows.astype(np.int64)).astype(np.uint32)
        self.every = _Eligible(snapshot, index, snapshot.live, self)
        self._filtered: Recent[_Eligible] = Recent()

    def of(self, snapshot: Snapshot, index: Index, allowed: Live | None) -> _Eligible:
        """Return the records that a search with the filter `allowed` may return."""
        if allowed is None:
            return self.every
        return self._filtered.of(lambda: _Eligible(snapshot, index, snapshot.live & allowed, self), allowed)
