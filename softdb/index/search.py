"""Candidates for queries: by the index where it is worth it, exactly otherwise, and always as many as there can be."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Live, Rows, Selected, prepared
from softdb.index.flat import nearest
from softdb.index.outliers import LEAST, SHARE, Outliers, outliers_of
from softdb.index.rerank import best, ordered
from softdb.store import Snapshot

__all__ = ["among", "border_of", "find", "serves"]

FEW = 4096  # records that are compared exactly sooner than an index is asked
FLOOR = 64  # candidates that are looked at again at least
MOSTLY = 0.9  # of the records: a filter that lets so many through moves no query's neighbours
LISTED = 1 << 16  # matches of a filter whose positions are kept
PAIRS = 1 << 19  # queries times matches that are compared one by one sooner than in blocks
CODES = 8  # that are compared in the time of one exact score
FETCHED = 40  # and in the time in which a match is fetched, once for all queries, where they are compared in blocks
ENOUGH = 0.25  # share of a query's neighbours that count, from which on the usual effort finds enough
VISITED = 256  # codes' worth of work for each record that a graph keeps in view
FILTERS = 4  # of which an index remembers the rows, n / 8 bytes each


def find(
    snapshot: Snapshot,
    index: Index | None,
    queries: Tensor,  # (q, d)
    k: int,
    metric: Metric,
    allowed: Live | None,  # (size,) over positions; None: every live record. Not changed between calls
    certain: int | None = None,
) -> Rows:  # (q, k)
    """Positions of the k nearest that are allowed and live, -1 only beyond their number.

    `certain`: how many of them shall be found with the recall that the index was tuned to, all k where it is None; the
    others are what is found on the way. Rows younger than the index, and outliers of norm, are compared exactly and
    merged. Cost of the index's search, its candidates for each certain one in exact scores, the young rows and the
    outliers.
    """
    if index is None or not serves(snapshot, index, k, allowed):
        return nearest(snapshot, queries, k, metric, allowed)
    fit = _fit(snapshot, index)
    chosen = fit.choice(snapshot, index, allowed)
    vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
    found = _covered(snapshot, index, fit, vectors, k, chosen, allowed, min(certain or k, k))
    if fit.border < snapshot.size:
        young = nearest(snapshot, queries, min(k, snapshot.size - fit.border), metric, allowed, start=fit.border)
        found = best(snapshot, vectors, np.concatenate([found, young], axis=1), k, metric)
    short = found.min(axis=1) < 0  # the index gave out before the records did
    if short.any():
        found[short] = nearest(snapshot, queries[np.flatnonzero(short)], k, metric, allowed)
    return found


def serves(snapshot: Snapshot, index: Index, k: int, allowed: Live | None) -> bool:
    """Whether the index is worth asking; else the records are compared exactly."""
    return k <= index.covered // 8 and _fit(snapshot, index).choice(snapshot, index, allowed).count > max(FEW, 4 * k)


def border_of(snapshot: Snapshot, index: Index) -> int:
    """The first position whose row is younger than the index."""
    return _fit(snapshot, index).border


def among(
    snapshot: Snapshot,
    index: Index,
    queries: Tensor,  # (q, d)
    k: int,
    metric: Metric,
    allowed: Live | None,  # (size,) over positions; None: every live record. Not changed between calls
) -> Rows | None:  # (q, k)
    """As `find`, where so few records count that they are scored one by one; None where they are many. Cost q m d."""
    listed = _fit(snapshot, index).choice(snapshot, index, allowed).listed
    if listed is None or len(queries) * len(listed) > PAIRS or not _exact_is_cheaper_alone(index, k, len(listed)):
        return None
    vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
    return best(snapshot, vectors, np.tile(listed, (len(vectors), 1)), k, metric)


class _Choice:
    """The records of a snapshot that may be found."""

    def __init__(self, keep: Live, inside: int, held: int, selected: Selected | None) -> None:
        count = int(np.count_nonzero(keep))
        self.listed = np.flatnonzero(keep) if count <= LISTED else None  # their positions, where they are few
        self.count = count
        self.inside = inside  # of them in the index
        self.share = max(1, inside) / max(1, held)  # of the rows that the index holds
        self.selected = selected  # None: all of them
        self.outliers: tuple[Outliers, Rows] | None = None  # those of the index, and their positions, once looked for


class _Fit:
    """An index as one snapshot sees it: what takes O(n) to work out, kept from one search to the next."""

    def __init__(self, snapshot: Snapshot, index: Index) -> None:
        self.snapshot = weakref.ref(snapshot)  # an old one must not keep its segments mapped
        self.covered = index.covered
        self.contiguous = snapshot.contiguous
        self.border = sum(_below(s.first_row, s.rows, len(s), index.covered) for s in snapshot.segments)
        self._everything = self._choose(snapshot, index, None)
        self._filtered: list[tuple[weakref.ref[Live], _Choice]] = []

    def choice(self, snapshot: Snapshot, index: Index, allowed: Live | None) -> _Choice:
        """Which rows the index may return for a filter."""
        if allowed is None:
            return self._everything
        remembered = self._filtered  # another thread may replace the list, none changes it
        for known, choice in remembered:
            if known() is allowed:
                return choice
        choice = self._choose(snapshot, index, allowed)
        kept = [(known, old) for known, old in remembered if known() is not None][-FILTERS + 1 :]
        self._filtered = [*kept, (weakref.ref(allowed), choice)]
        return choice

    def _choose(self, snapshot: Snapshot, index: Index, allowed: Live | None) -> _Choice:
        keep = snapshot.live if allowed is None else snapshot.live & allowed
        count, inside = int(np.count_nonzero(keep)), int(np.count_nonzero(keep[: self.border]))
        if count <= FEW:
            return _Choice(keep, inside, index.inner.ntotal, None)
        if inside == index.inner.ntotal:  # it holds nothing else
            return _Choice(keep, inside, inside, None)
        rows = np.zeros(index.covered, np.bool_)
        rows[snapshot.rows(np.flatnonzero(keep[: self.border]))] = True
        return _Choice(keep, inside, index.inner.ntotal, Selected(rows))


_FITS: weakref.WeakKeyDictionary[Index, _Fit] = weakref.WeakKeyDictionary()


def _fit(snapshot: Snapshot, index: Index) -> _Fit:
    fit = _FITS.get(index)
    if fit is None or fit.snapshot() is not snapshot or fit.covered != index.covered:
        fit = _FITS[index] = _Fit(snapshot, index)
    return fit


def _below(first: int, rows: Rows | None, length: int, covered: int) -> int:
    """How many of a segment's rows are older than an index."""
    return int(np.clip(covered - first, 0, length) if rows is None else np.searchsorted(rows, covered))


def _covered(
    snapshot: Snapshot,
    index: Index,
    fit: _Fit,
    queries: Floats,
    k: int,
    chosen: _Choice,
    allowed: Live | None,
    certain: int,
) -> Rows:  # (q, k) positions
    """The k best of the rows that the index holds."""
    effort = index.effort * max(1, -(-certain // index.tuned_for))  # farther neighbours lie in more places
    c, vectors = max(FLOOR, index.candidates * certain, k), prepared(queries, index.metric)
    outliers = _outliers(snapshot, index, fit, chosen, allowed)
    if chosen.selected is None:
        found = _placed(snapshot, index, index.find(vectors, c, None, effort))
        return _best(snapshot, queries, found, k, index.metric, outliers)
    c = min(c, max(1, chosen.inside))
    if chosen.share >= MOSTLY:
        found = _placed(snapshot, index, index.find(vectors, c, chosen.selected, int(np.ceil(effort / chosen.share))))
        return _best(snapshot, queries, found, k, index.metric, outliers)
    found = np.full((len(queries), k), -1, np.int64)
    exactly = np.ones(len(queries), np.bool_)
    steps = _steps(snapshot, index, vectors, effort, chosen, allowed)
    for step in np.unique(steps).tolist():
        mine = np.flatnonzero(steps == step)
        own = _selected(snapshot, index, vectors[mine], c, chosen, effort << step)
        if own is not None:
            found[mine] = _best(snapshot, queries[mine], own, k, index.metric, outliers)
            exactly[mine] = False
    if exactly.any():
        asked = torch.from_numpy(queries[exactly])
        found[exactly] = nearest(snapshot, asked, k, index.metric, _older(snapshot, fit, allowed))
    return found


def _outliers(
    snapshot: Snapshot, index: Index, fit: _Fit, chosen: _Choice, allowed: Live | None
) -> tuple[Outliers, Rows] | None:
    """The outliers of norm and their positions, -1 for those that do not count."""
    known = chosen.outliers
    if index.metric is not Metric.DOT or (known is not None and known[0].named is index.longest):
        return known
    room = index.room
    if room is None:  # of an older softdb, or tuned on a GPU: by operations
        scored = index.candidates * index.tuned_for
        room = max(LEAST, int(SHARE * (scored + _codes(index, index.effort) / CODES)))
    outliers = outliers_of(snapshot, index, fit.border, room)
    chosen.outliers = known = outliers, outliers.positions(snapshot, allowed)
    return known


def _best(
    snapshot: Snapshot,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
    outliers: tuple[Outliers, Rows] | None,
) -> Rows:  # (q, k)
    """The k best candidates and, where there are k, outliers of norm that are better."""
    found, scores = ordered(snapshot, queries, positions, k, metric)
    if outliers is not None:
        outliers[0].take_part(queries, outliers[1], found, scores)
    return found


def _placed(snapshot: Snapshot, index: Index, rows: Rows) -> Rows:
    """Where the rows lie; an index of another database may name rows that are nowhere."""
    return rows if snapshot.contiguous and index.covered <= snapshot.size else snapshot.positions(rows)


def _older(snapshot: Snapshot, fit: _Fit, allowed: Live | None) -> Live | None:
    """The records (size,) that count and are in the index."""
    if fit.border == snapshot.size:
        return allowed
    keep = np.zeros(snapshot.size, np.bool_)
    keep[: fit.border] = True if allowed is None else allowed[: fit.border]
    return keep


def _selected(
    snapshot: Snapshot, index: Index, vectors: Floats, c: int, chosen: _Choice, effort: int
) -> Rows | None:  # (q, c) positions
    """Candidates among the rows that count; None where to compare all of these is the lesser work."""
    found = np.full((len(vectors), c), -1, np.int64)
    thin = np.arange(len(vectors))
    while not _exact_is_cheaper(index, effort, chosen.inside, len(vectors)):
        found[thin] = index.find(vectors[thin], c, chosen.selected, effort)
        thin = thin[found[thin].min(axis=1) < 0]  # what counts lies elsewhere: look farther
        if not len(thin) or effort >= index.effort_most:
            return _placed(snapshot, index, found)
        effort *= 8
    return None


def _steps(
    snapshot: Snapshot, index: Index, vectors: Floats, effort: int, chosen: _Choice, allowed: Live | None
) -> Rows:  # (q,)
    """How often to double the effort for each query.

    The rarer the records that count, the farther a query's nearest lie; the effort that finds them grows about as the
    root of that, as measured on sentence embeddings and on clusters, but in full where they are rarer around the query
    than elsewhere: a filter that goes with the keys has another share on each side of the world. The share around a
    query is taken from the nearest codes of all.
    """
    if _exact_is_cheaper(index, effort, chosen.inside, len(vectors)):
        return np.zeros(len(vectors), np.int64)
    near = snapshot.positions(index.find(vectors, FLOOR, None, max(1, effort // 4)))
    counts = snapshot.live[near] & (near >= 0)
    if allowed is not None:
        counts &= allowed[near]
    share = np.maximum(counts.sum(axis=1), 0.25) / FLOOR  # none seen: fewer than one
    rarer = np.maximum(0, np.log2(chosen.share / share))
    plenty = (share >= ENOUGH) & (rarer <= 1)
    steps = np.where(plenty, 0, np.ceil(-0.5 * np.log2(share) + 0.5 * rarer))
    return steps.astype(np.int64)


def _exact_is_cheaper_alone(index: Index, k: int, matches: int) -> bool:
    """Whether to score every match one by one costs less than to look for them with twice the usual effort."""
    effort = 2 * index.effort * max(1, -(-k // index.tuned_for))
    return CODES * matches <= max(CODES * FEW, _codes(index, effort))


def _exact_is_cheaper(index: Index, effort: int, matches: int, queries: int) -> bool:
    """Whether to compare every match costs less than to look for them with that effort."""
    return matches * (CODES + FETCHED / max(1, queries)) <= _codes(index, effort)


def _codes(index: Index, effort: int) -> float:
    """About how many codes a search with that effort compares."""
    effort = min(effort, index.effort_most)
    return effort / index.effort_most * index.inner.ntotal if index.effort_name == "nprobe" else VISITED * effort
