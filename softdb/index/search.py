"""Candidates for queries by an index on the CPU, where it is worth asking."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np

from softdb.check import Metric, all_finite
from softdb.index.contract import Floats, Found, Index, Live, Recent, Rows, Selected, prepared
from softdb.index.flat import nearest
from softdb.index.lists import Among, Lists
from softdb.index.outliers import LEAST, SHARE, Outliers, outliers_of
from softdb.index.planner import FEW, Planner
from softdb.index.quantizer import NO_ROW, Places
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.index.rule import MOSTLY
from softdb.index.sampler import Drawable, Sampler
from softdb.index.sketches import Sketches
from softdb.lazy import cached_property
from softdb.store import Snapshot

FARTHER = 2  # times as many candidates then: codes tell records apart less well that are far
AROUND, RARE = 64, 0.5  # of so many; so rare in comparison with all that every record is compared
LISTED = 1 << 16  # matches of a filter whose positions are kept


class Searcher:
    """Searches by one index, and what it keeps between them. Safe to use from several threads."""

    def __init__(self, index: Index, planner: Planner | None = None) -> None:
        self.index = index
        self.planner = planner or Planner(index)
        self.sampler: Sampler | None = None  # draws records for estimates, made when one is first asked for
        self._coverage: _Coverage | None = None  # of the last snapshot
        self._outliers: Outliers | None = None  # None: not copied yet

    @cached_property
    def drawer(self) -> Searcher:
        """The same by the codes that estimates draw by, which has their sampler."""
        sketches = self.index.sketches
        return self if sketches is None or sketches is self.index else Searcher(sketches)

    def find(
        self, snapshot: Snapshot, query: Query
    ) -> Found | None:  # (q, k), -1 only beyond the number of records that count
        """The k nearest that are allowed and live; None where to compare every record exactly costs less.

        Unindexed rows and outliers of norm are compared exactly and merged. Cost of the index's search, its candidates
        for each certain one in exact scores, the unindexed rows and the outliers.
        """
        coverage, metric = self._coverage_of(snapshot), self.index.metric
        queries, k, allowed = query.queries, query.k, query.allowed
        eligible = coverage.of(snapshot, self.index, allowed)
        vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
        listed = eligible.listed if query.pairwise and eligible.filtered else None
        way = self.planner.way(eligible.count, len(queries), k, eligible.filtered, listed is not None)
        if way == "blocks":
            return None
        if way == "pairs" and listed is not None:
            return _compared(snapshot, vectors, listed, k, metric)
        certain = min(query.certain or k, k)
        found, known, _ = self._searched(snapshot, eligible, allowed, vectors, k, certain)
        scores: Floats | None = known
        if coverage.until < snapshot.size:
            newer = nearest(snapshot, replace(query, k=min(k, snapshot.size - coverage.until)), coverage.until)
            found, scores = ordered(snapshot, vectors, np.concatenate([found, newer], axis=1), k, metric)
        short = found[:, -1] < 0  # the index gave out before the records did
        if short.any():
            found[short], scores = nearest(snapshot, replace(query, queries=queries[np.flatnonzero(short)])), None
        return Found(found, scores, self.index.kind)

    def nearest(self, snapshot: Snapshot, query: Query) -> Found:  # (q, k)
        """As `find`, and by comparing every record where that costs less."""
        return self.find(snapshot, query) or Found(nearest(snapshot, query), None, "flat")

    def find_plainly(
        self, snapshot: Snapshot, vectors: Floats, k: int, allowed: Live | None
    ) -> Found | None:  # (q, d) -> (q, k)
        """As `find`, where the index holds every record, with as little as one query needs, which is checked, too.

        None where `find` has to be asked, and for queries that are not finite.
        """
        coverage, index = self._coverage, self.index
        if coverage is None or coverage.until < snapshot.size or coverage.snapshot() is not snapshot:
            return None
        if k > snapshot.count:  # answers are no wider
            return None
        eligible = coverage.of(snapshot, index, allowed)
        listed = eligible.listed if eligible.filtered else None
        way = self.planner.way(eligible.count, len(vectors), k, eligible.filtered, listed is not None)
        if way == "pairs" and listed is not None and all_finite(vectors):
            return _compared(snapshot, vectors, listed, k, index.metric)
        if way != "index":
            return None
        found, scores, complete = self._searched(snapshot, eligible, allowed, vectors, k, k)
        return Found(found, scores, index.kind) if complete else None

    def _searched(
        self, snapshot: Snapshot, eligible: _Eligible, allowed: Live | None, vectors: Floats, k: int, certain: int
    ) -> tuple[Rows, Floats, bool]:  # (q, d) -> (q, k), (q, k)
        """The k best of the records that the index holds and that count; True if there are k, and all is finite."""
        index = self.index
        vectors_seen, candidates = prepared(vectors, index.metric), max(index.kept_for(certain), k)
        if isinstance(index, Lists):
            among = Among(snapshot.key_column, eligible.places, eligible.slots, eligible.share)
            candidates *= FARTHER if eligible.share < MOSTLY else 1
            positions, scores, complete = index.scan(vectors_seen, k, among, certain, candidates)
        else:
            effort = math.ceil(index.effort_for(certain) / eligible.share)  # what counts lies farther where less does
            rows = index.search(vectors_seen, min(candidates, max(1, eligible.inside)), eligible.selected, effort)
            if eligible.share < MOSTLY:  # a filter may go with the keys: where few of the nearest count, none is named
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
        """The outliers of norm and their positions, -1 for those that do not count."""
        index, known = self.index, eligible.outliers
        if known is not None and known[0].named is index.longest:
            return known
        room = index.room
        if room is None:  # of an older softdb, or tuned on a GPU
            room = max(LEAST, int(SHARE * index.kept_for(index.tuned_for)))
        self._outliers = outliers_of(snapshot, index, eligible.until, room, self._outliers)
        eligible.outliers = known = self._outliers, self._outliers.positions(snapshot, allowed)
        return known

    def eligible(self, snapshot: Snapshot, allowed: Live | None) -> Drawable:
        """The slots of lists that a draw may take from."""
        known = self._coverage_of(snapshot).of(snapshot, self.index, allowed)
        return Drawable(known.slots, known.places, known.inside)

    def _coverage_of(self, snapshot: Snapshot) -> _Coverage:
        known = self._coverage
        if known is None or known.snapshot() is not snapshot:
            known = self._coverage = _Coverage(snapshot, self.index)
        return known


def _compared(snapshot: Snapshot, vectors: Floats, positions: Rows, k: int, metric: Metric) -> Found:
    """The k best of the same few records for every query."""
    return Found(*ordered(snapshot, vectors, np.tile(positions, (len(vectors), 1)), k, metric), "flat")


def indexed_until(snapshot: Snapshot, index: Index) -> int:
    """The first position whose row the index does not hold yet."""
    return sum(_below(s.first_row, s.rows, len(s), index.covered) for s in snapshot.segments)


def _below(first: int, rows: Rows | None, length: int, covered: int) -> int:
    """Number of a segment's rows that are older than an index."""
    return min(max(covered - first, 0), length) if rows is None else int(np.searchsorted(rows, covered))


class _Eligible:
    """The records of a snapshot that may be found."""

    def __init__(self, snapshot: Snapshot, index: Index, keep: Live, coverage: _Coverage) -> None:
        self.filtered = keep is not snapshot.live
        self.count = int(np.count_nonzero(keep))
        self.listed = np.flatnonzero(keep) if self.count <= LISTED else None  # their positions, where they are few
        self.until, self.aligned, self.places = coverage.until, coverage.aligned, coverage.places
        self.inside = int(np.count_nonzero(keep[: self.until]))  # of them in the index
        every = self.inside == index.count
        self.share = max(1, self.inside) / max(1, index.count)  # of the rows that the index holds
        self.selected: Selected | None = None  # in FAISS' form; None: all of these
        self.outliers: tuple[Outliers, Rows] | None = None  # those of the index, and their positions, once looked for
        if isinstance(index, Sketches):
            self.slots = index.filled if every and self.aligned else index.layout.allowed(keep, self.places)
        elif self.count > FEW and not every:
            self.selected = Selected(snapshot.rows(np.flatnonzero(keep[: self.until])), index.covered)


class _Coverage:
    """Coverage of one snapshot by an index; it takes O(n) to work out and is kept from one search to the next."""

    def __init__(self, snapshot: Snapshot, index: Index) -> None:
        self.snapshot = weakref.ref(snapshot)  # an old one must not keep its segments mapped
        # whether rows are positions; an index of another database may name rows that are nowhere
        self.aligned = snapshot.contiguous and index.covered <= snapshot.size
        self.until = indexed_until(snapshot, index)
        self.places = np.empty(0, np.uint32)  # of the slots of lists
        if isinstance(index, Sketches):
            self.places = index.layout.rows if self.aligned else _places(snapshot, index.layout.rows)
        self.every = _Eligible(snapshot, index, snapshot.live, self)
        self._filtered: Recent[_Eligible] = Recent()

    def of(self, snapshot: Snapshot, index: Index, allowed: Live | None) -> _Eligible:
        """Rows that the index may return for a filter."""
        if allowed is None:
            return self.every
        return self._filtered.of(lambda: _Eligible(snapshot, index, snapshot.live & allowed, self), allowed)


def _places(snapshot: Snapshot, rows: Places) -> Places:  # (slots,)
    """Positions of rows, NO_ROW of those that are nowhere."""
    positions = snapshot.positions(rows.astype(np.int64))
    return np.where(positions >= 0, positions, NO_ROW).astype(np.uint32)
