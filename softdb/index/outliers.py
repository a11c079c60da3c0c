"""Outliers of norm: the longest keys, which every search for the largest inner product compares exactly.

A key's length is a factor of its inner products, so the longest keys are often among the nearest, and of the error of
its code, so an index misses them most often. They are few: the index stores their rows, their keys are copied at the
first search, and every query is compared with all of them that its filter allows. If lengths hardly vary, and for the
cosine and L2, there are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Live, Rows
from softdb.index.rerank import ordered
from softdb.index.timing import timed
from softdb.kernels import available, native
from softdb.kernels.threads import by_lines
from softdb.store import Snapshot

SHARE = 0.04  # largest share of a search's time for comparing them, of single queries and of batches
LEAST = 32  # outliers that are compared in any case, in half a microsecond
MOST = 0.01  # largest share of the records
WIDEST = 16  # float32 of the widest SIMD vector
CLEARLY = 1.5  # least length of an outlier, in median lengths
BLOCK = 1 << 14  # keys measured at once
TIMED, BATCHES = 64, 5  # queries that are timed one by one and as a batch; timings of the batch


class Outliers:
    """The longest of the keys that an index holds. Immutable: safe to use from several threads."""

    def __init__(self, snapshot: Snapshot, rows: Rows) -> None:
        positions = snapshot.positions(rows)
        self.named = rows  # as requested; the snapshot may lack some
        keys = snapshot.keys_at(positions).float().numpy()
        lengths = np.sqrt(np.einsum("md,md->m", keys, keys, dtype=np.float64))
        order = np.argsort(-lengths, kind="stable")
        order = order[positions[order] >= 0]
        self.count = len(order)
        self.rows, self.lengths = rows[order], lengths[order]  # the longest first
        self.keys = np.zeros((self.count, -(-keys.shape[1] // WIDEST) * WIDEST), np.float32)
        self.keys[:, : keys.shape[1]] = keys[order]

    def positions(self, snapshot: Snapshot, allowed: Live | None) -> Rows:  # (m,)
        """Positions of the outliers that are live and allowed, -1 for the others."""
        positions = _live(snapshot, self.rows)
        return positions if allowed is None else np.where((positions >= 0) & allowed[positions], positions, -1)

    def take_part(
        self,
        queries: Floats,  # (q, d)
        positions: Rows,  # (m,) from `positions`
        matches: Rows,  # (q, k), changed: best first, -1 = none
        scores: Floats,  # (q, k), changed
    ) -> bool:
        """Merge the outliers into the k best of each query; queries with fewer than k are not changed.

        Return True if anything changed. Cost 2 q m d at most, less if the longest are far longer than the others.
        """
        (m, width), (q, d) = self.keys.shape, queries.shape
        if not matches.size or not self.count:
            return False
        if not available():
            before = matches.copy()
            _take_part(queries @ self.keys[:, :d].T, positions, matches, scores)
            return bool((before != matches).any())
        padded = queries
        if d < width:
            padded = np.zeros((q, width), np.float32)
            padded[:, :d] = queries

        def given(run: slice) -> tuple[Any, ...]:
            return padded[run], positions, self.keys, self.lengths, matches[run], scores[run]

        if q == 1:  # saves the microseconds of `by_lines`
            return bool(native().take_in(padded, positions, self.keys, self.lengths, matches, scores))
        return any(by_lines(native().take_in, given, q, q * m * width))


def _take_part(products: Floats, positions: Rows, matches: Rows, scores: Floats) -> None:
    """`Outliers.take_part` without kernels, from the products (q, m)."""
    products[:, positions < 0] = -np.inf
    better = (products >= scores[:, -1:]) & (matches[:, -1:] >= 0)
    k = matches.shape[1]
    for i in np.flatnonzero(better.any(1)):
        new = np.flatnonzero(better[i])
        new = new[~np.isin(positions[new], matches[i])]
        both = np.concatenate([matches[i], positions[new]])
        values = np.concatenate([scores[i], products[i, new]])
        best = np.lexsort((both, -values))[:k]
        matches[i], scores[i] = both[best], values[best]


def outliers_of(snapshot: Snapshot, index: Index, until: int, room: int, known: Outliers | None) -> Outliers:
    """The outliers of an index, at most `room`; `known`, those of an earlier search, if they are still the same.

    A scan of the keys before position `until`, cost n d, finds them for a new index, after records were added, and if
    half of them have been deleted.
    """
    longest = index.longest
    if longest is None or 2 * np.count_nonzero(_live(snapshot, longest) >= 0) < len(longest):
        longest = index.longest = longest_of(snapshot, lengths_of(snapshot, until), room)
    return known if known is not None and known.named is longest else Outliers(snapshot, longest)


def _live(snapshot: Snapshot, rows: Rows) -> Rows:
    """Positions of rows, -1 for those that are dead or gone."""
    positions = snapshot.positions(rows)
    return np.where((positions >= 0) & snapshot.live[positions], positions, -1)


def longest_of(snapshot: Snapshot, lengths: Floats, room: int) -> Rows:
    """Rows of at most `room` keys that are clearly longer than the median, the longest first."""
    of_live = lengths[~np.isnan(lengths)]
    if not len(of_live):
        return np.empty(0, np.int64)
    long = np.flatnonzero(lengths > CLEARLY * np.median(of_live))
    if len(long) > room:
        long = long[np.argpartition(-lengths[long], room - 1)[:room]]
    return snapshot.rows(long[np.lexsort((long, -lengths[long]))])


def lengths_of(snapshot: Snapshot, until: int) -> Floats:  # (until,)
    """‖k‖ of the live keys before a position, NaN for dead ones. Cost n d."""
    lengths = np.full(until, np.nan, np.float32)
    for block in snapshot.blocks(BLOCK):
        positions = block.positions.numpy()
        if positions[0] >= until:
            break
        inside = positions < until
        measured = torch.linalg.vector_norm(block.keys, dim=1, dtype=torch.float64)
        lengths[positions[inside]] = measured.numpy()[inside]
    return lengths


def most_of(snapshot: Snapshot) -> int:
    """Largest number of outliers, whatever they cost."""
    return max(LEAST, round(MOST * snapshot.count))


def affordable(
    snapshot: Snapshot,
    longest: Rows,  # (m,) the longest first
    queries: Floats,  # (q, d)
    search: Callable[[Floats], Rows],  # queries -> (q, k) positions, without the outliers
) -> Rows:
    """The longest keys that are compared within SHARE of a search's time, as measured, and at least LEAST."""
    while len(longest) > LEAST:
        share = _share(snapshot, Outliers(snapshot, longest), queries[:TIMED], search)
        if share <= SHARE:
            break
        longest = longest[: max(LEAST, int(len(longest) * SHARE / share))]
    return longest


def _share(snapshot: Snapshot, outliers: Outliers, queries: Floats, search: Callable[[Floats], Rows]) -> float:
    """Time of comparing outliers over that of a search, the larger ratio of batches and single queries."""
    positions, first = outliers.positions(snapshot, None), search(queries)
    candidates, scores = ordered(snapshot, queries, first, first.shape[1], Metric.DOT)

    def seconds(run: slice) -> tuple[float, float]:
        some, arguments = queries[run], (positions, candidates[run].copy(), scores[run].copy())
        searched = timed(functools.partial(search, some))[1]
        return timed(functools.partial(outliers.take_part, some, *arguments))[1], searched

    batches = np.median([seconds(slice(None)) for _ in range(BATCHES)], axis=0)
    alone = np.median([seconds(slice(place, place + 1)) for place in range(len(queries))], axis=0)
    return float(max(batches[0] / batches[1], alone[0] / alone[1]))
