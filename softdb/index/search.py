"""Candidates for queries by an index on the CPU, where it is worth asking."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Found, Index, Live, Recent, Rows, Selected, prepared
from softdb.index.costs import Costs, codes_of, costs_of
from softdb.index.flat import nearest
from softdb.index.outliers import LEAST, SHARE, Outliers, outliers_of
from softdb.index.rerank import best_of, ordered
from softdb.kernels import available
from softdb.store import Snapshot

__all__ = ["find", "find_among_all", "indexed_until"]

FEW = 4096  # records that are compared exactly sooner than an index is asked
FLOOR = 64  # candidates that are rescored at least
CODES = 8  # that are compared in the time of one exact score, where outliers were not timed
MOSTLY = 0.9  # share of the records: a filter that allows so many is searched with a little more effort
KINDS = 256  # of searches for which it is known whether the index is asked
LISTED = 1 << 16  # matches of a filter whose positions are kept
PAIRS = 1 << 19  # queries times matches that are compared one by one sooner than in blocks
ENOUGH = 0.25  # share of a query's neighbours that count, from which on the usual effort finds enough


def find(
    snapshot: Snapshot,
    index: Index,
    queries: Tensor,  # (q, d)
    k: int,
    allowed: Live | None,  # (size,) over positions; None: every live record. Not changed between calls
    certain: int | None = None,
    pairwise: bool = False,
) -> Found | None:  # (q, k), -1 only beyond the number of records that count
    """The k nearest that are allowed and live; None where to compare every record exactly costs less.

    `certain`: how many of them shall be found with the recall that the index was tuned to, all k where it is None; the
    others are what is found on the way. Unindexed rows and outliers of norm are compared exactly and merged.
    `pairwise`: score the records one by one where few are eligible, in float32. Cost of the index's search, its
    candidates for each certain one in exact scores, the unindexed rows and the outliers.
    """
    coverage, metric = _coverage(snapshot, index), index.metric
    eligible = coverage.of(snapshot, index, allowed)
    vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
    if not _is_asked(snapshot, index, eligible, len(queries), k, pairwise):
        listed, costs = eligible.listed, costs_of(snapshot, index)
        if (
            listed is None
            or not (pairwise and eligible.filtered)
            or not _one_by_one(costs, index, eligible, len(queries), k)
        ):
            return None
        return Found(*ordered(snapshot, vectors, np.tile(listed, (len(vectors), 1)), k, metric), "flat")
    found, scores = _Search(snapshot, index, coverage, eligible, allowed).find(vectors, k, min(certain or k, k))
    if coverage.until < snapshot.size:
        newer = nearest(snapshot, queries, min(k, snapshot.size - coverage.until), metric, allowed, coverage.until)
        found, scores = ordered(snapshot, vectors, np.concatenate([found, newer], axis=1), k, metric)
    short = found[:, -1] < 0  # the index gave out before the records did
    if short.any():
        found[short], scores = nearest(snapshot, queries[np.flatnonzero(short)], k, metric, allowed), None
    return Found(found, scores, index.kind)


def find_among_all(
    snapshot: Snapshot,
    index: Index,
    vectors: Floats,  # (q, d)
    k: int,
) -> Found | None:  # (q, k)
    """As `find`, where there is no filter and the index holds every record: with as little as one query needs.

    None where `find` has to be asked. Scores are those of `ordered`.
    """
    coverage: _Coverage | None = index.coverage
    if coverage is None or not coverage.whole or coverage.snapshot() is not snapshot or not available():
        return None
    metric, eligible = index.metric, coverage.every
    if coverage.covered != index.covered or not coverage.asks(snapshot, index, len(vectors), k):
        return None
    asked = prepared(vectors, metric)
    candidates = index.find(asked, max(FLOOR, index.fetch_k * k, k), None, _effort(index, k))
    found, scores, whole = best_of(snapshot, asked, candidates, k, metric)
    if not whole:
        return None
    if metric is Metric.DOT:
        known = eligible.outliers
        if known is None or known[0].named is not index.longest:
            known = _Search(snapshot, index, coverage, eligible, None).outliers()
        outliers, positions = known
        if outliers.count and outliers.take_part(vectors, positions, found, scores):
            found, scores, whole = best_of(snapshot, asked, found, k, metric)
    return Found(found, scores, index.kind)


def indexed_until(snapshot: Snapshot, index: Index) -> int:
    """The first position whose row the index does not hold yet."""
    return _coverage(snapshot, index).until


class _Eligible:
    """The records of a snapshot that may be found."""

    def __init__(self, snapshot: Snapshot, index: Index, keep: Live, until: int) -> None:
        self.filtered = keep is not snapshot.live
        self.count = int(np.count_nonzero(keep))
        self.listed = np.flatnonzero(keep) if self.count <= LISTED else None  # their positions, where they are few
        self.inside = int(np.count_nonzero(keep[:until]))  # of them in the index
        indexed: int = index.inner.ntotal
        self.share = max(1, self.inside) / max(1, indexed)  # of the rows that the index holds
        self.selected: Selected | None = None  # None: all of these
        self.outliers: tuple[Outliers, Rows] | None = None  # those of the index, and their positions, once looked for
        if self.count > FEW and self.inside != indexed:
            self.selected = Selected(snapshot.rows(np.flatnonzero(keep[:until])), index.covered)


class _Coverage:
    """What one snapshot has of an index; it takes O(n) to work out and is kept from one search to the next."""

    def __init__(self, snapshot: Snapshot, index: Index) -> None:
        self.snapshot = weakref.ref(snapshot)  # an old one must not keep its segments mapped
        self.covered = index.covered
        # whether rows are positions; an index of another database may name rows that are nowhere
        self.aligned = snapshot.contiguous and index.covered <= snapshot.size
        self.until = sum(_below(s.first_row, s.rows, len(s), index.covered) for s in snapshot.segments)
        self.every = _Eligible(snapshot, index, snapshot.live, self.until)
        # whether rows are positions, and every one of them is in the index, and nothing else
        self.whole = self.aligned and self.until == snapshot.size and self.every.selected is None
        self._filtered: Recent[_Eligible] = Recent()
        self._asks: dict[object, bool] = {}

    def asks(self, snapshot: Snapshot, index: Index, queries: int, k: int) -> bool:
        """Whether the index is asked where there is no filter, as `_is_asked` says: worked out once."""
        kind = queries, k, index.effort, index.costs
        if kind not in self._asks:
            if len(self._asks) >= KINDS:
                self._asks = {}
            self._asks[kind] = _is_asked(snapshot, index, self.every, queries, k)
        return self._asks[kind]

    def of(self, snapshot: Snapshot, index: Index, allowed: Live | None) -> _Eligible:
        """Which rows the index may return for a filter."""
        if allowed is None:
            return self.every
        return self._filtered.of(lambda: _Eligible(snapshot, index, snapshot.live & allowed, self.until), allowed)


def _coverage(snapshot: Snapshot, index: Index) -> _Coverage:
    known: _Coverage | None = index.coverage
    if known is None or known.snapshot() is not snapshot or known.covered != index.covered:
        known = index.coverage = _Coverage(snapshot, index)
    return known


def _below(first: int, rows: Rows | None, length: int, covered: int) -> int:
    """How many of a segment's rows are older than an index."""
    return int(np.clip(covered - first, 0, length) if rows is None else np.searchsorted(rows, covered))


@dataclass
class _Search:
    """The rows of an index that a search may return."""

    snapshot: Snapshot
    index: Index
    coverage: _Coverage
    eligible: _Eligible
    allowed: Live | None  # (size,) over positions

    @property
    def costs(self) -> Costs:
        """Those of the index."""
        return costs_of(self.snapshot, self.index)

    def find(self, queries: Floats, k: int, certain: int) -> tuple[Rows, Floats | None]:  # (q, d) -> (q, k), (q, k)
        """The k best of them, and their scores where none was computed in another way."""
        snapshot, index, eligible, allowed = self.snapshot, self.index, self.eligible, self.allowed
        effort = _effort(index, certain)
        c, asked = max(FLOOR, index.fetch_k * certain, k), prepared(queries, index.metric)
        unfound, selected = None, eligible.selected
        if selected is not None:
            c = min(c, max(1, eligible.inside))
        if selected is None or eligible.share >= MOSTLY:
            wider = effort if selected is None else int(np.ceil(effort / eligible.share))
            rows = index.find(asked, c, selected, wider)
            candidates = rows if self.coverage.aligned else snapshot.positions(rows)
        else:
            candidates, unfound = self._filtered(asked, c, effort)
        found, scores = ordered(snapshot, queries, candidates, k, index.metric, asked)
        changed = False
        if index.metric is Metric.DOT:
            outliers, positions = self.outliers()
            changed = outliers.take_part(queries, positions, found, scores)
        if unfound is not None and len(unfound):
            keep = (snapshot.live if allowed is None else allowed).copy()
            keep[self.coverage.until :] = False
            found[unfound] = nearest(snapshot, torch.from_numpy(queries[unfound]), k, index.metric, keep)
            changed = True
        return found, None if changed else scores

    def outliers(self) -> tuple[Outliers, Rows]:
        """The outliers of norm and their positions, -1 for those that do not count."""
        index, known = self.index, self.eligible.outliers
        if known is not None and known[0].named is index.longest:
            return known
        room = index.room
        if room is None:  # of an older softdb, or tuned on a GPU: by operations
            scored = index.fetch_k * index.tuned_for
            room = max(LEAST, int(SHARE * (scored + codes_of(index, index.effort) / CODES)))
        outliers = outliers_of(self.snapshot, index, self.coverage.until, room)
        self.eligible.outliers = known = outliers, outliers.positions(self.snapshot, self.allowed)
        return known

    def _filtered(self, vectors: Floats, c: int, effort: int) -> tuple[Rows, Rows]:  # (q, c), (m,)
        """Candidates among few eligible records, and the queries for which to compare all of these costs less.

        The effort is doubled where these are rare around a query.
        """
        found, unfound = np.full((len(vectors), c), -1, np.int64), np.ones(len(vectors), np.bool_)
        doublings = self._doublings(vectors, effort)
        for times in np.unique(doublings).tolist():
            mine = np.flatnonzero(doublings == times)
            rows = self._selected(vectors[mine], c, effort << times)
            if rows is not None:
                found[mine], unfound[mine] = self.snapshot.positions(rows), False
        return found, np.flatnonzero(unfound)

    def _selected(self, vectors: Floats, c: int, effort: int) -> Rows | None:  # (q, c)
        """Candidates among the rows that count; None where to compare all of these costs less."""
        found, short = np.full((len(vectors), c), -1, np.int64), np.arange(len(vectors))
        while not _exact_is_cheaper(self.costs, self.index, effort, self.eligible.inside, len(vectors)):
            found[short] = self.index.find(vectors[short], c, self.eligible.selected, effort)
            short = short[found[short].min(axis=1) < 0]  # what counts lies elsewhere: look farther
            if not len(short) or effort >= self.index.effort_most:
                return found
            effort *= 8
        return None

    def _doublings(self, vectors: Floats, effort: int) -> Rows:  # (q,)
        """How often to double the effort for each query.

        The rarer the records that count, the farther a query's nearest lie. The effort that finds them grows about as
        the root of that, as measured on sentence embeddings and on clusters; but in full where they are rarer around
        the query than elsewhere, as with a filter that goes with the keys. The share around a query is taken from the
        nearest codes of all.
        """
        snapshot, index, eligible, allowed = self.snapshot, self.index, self.eligible, self.allowed
        if _exact_is_cheaper(self.costs, index, effort, eligible.inside, len(vectors)):
            return np.zeros(len(vectors), np.int64)
        near = snapshot.positions(index.find(vectors, FLOOR, None, max(1, effort // 4)))
        counts = snapshot.live[near] & (near >= 0)
        if allowed is not None:
            counts &= allowed[near]
        share = np.maximum(counts.sum(axis=1), 0.25) / FLOOR  # none seen: fewer than one
        rarer = np.maximum(0, np.log2(eligible.share / share))
        plenty = (share >= ENOUGH) & (rarer <= 1)
        return np.where(plenty, 0, np.ceil(-0.5 * np.log2(share) + 0.5 * rarer)).astype(np.int64)


def _is_asked(
    snapshot: Snapshot, index: Index, eligible: _Eligible, queries: int, k: int, pairwise: bool = True
) -> bool:
    """Whether the index is asked, sooner than records are compared."""
    costs, count = costs_of(snapshot, index), eligible.count
    if k > index.covered // 8 or count <= max(costs.few, 4 * k):
        return False
    if eligible.filtered:
        return count > FEW and not (pairwise and _one_by_one(costs, index, eligible, queries, k))
    return costs.blocks(count, queries) > costs.search(index, _effort(index, k), queries)


def _one_by_one(costs: Costs, index: Index, eligible: _Eligible, queries: int, k: int) -> bool:
    """Whether every match is scored for each query, one by one, sooner than the index is searched with more effort."""
    if eligible.listed is None or queries * eligible.count > PAIRS:
        return False
    return eligible.count <= FEW or costs.one_by_one(eligible.count) <= costs.search(index, 2 * _effort(index, k))


def _effort(index: Index, k: int) -> int:
    """How hard to look for so many: farther neighbours lie in more places."""
    return index.effort * max(1, -(-k // index.tuned_for))


def _exact_is_cheaper(costs: Costs, index: Index, effort: int, matches: int, queries: int) -> bool:
    """Whether comparing every match costs less than a search with that effort."""
    return costs.blocks(matches, queries) <= costs.search(index, effort, queries)
