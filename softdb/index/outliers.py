"""Outliers of norm: the longest keys, which every search for the largest inner product compares exactly.

A key's inner products and the error of its code are proportional to its length. So the longest keys are often among the
nearest, and an index misses them most often. The longest keys are few: the index stores their rows, the first search
copies their keys, and every query is compared with all outliers that its filter allows. There are no outliers if the
lengths hardly vary, or if the metric is the cosine or L2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from softdb.index.contract import Floats, Index, Live, Numbers, Rows
from softdb.kernels import available, native
from softdb.kernels.threads import by_lines
from softdb.store import Snapshot

SHARE = 0.04  # largest share of the bytes of a search that comparing the outliers may read
LEAST = 32  # this number of outliers is compared in any case: it takes half a microsecond
MOST = 0.01  # largest number of outliers, as a share of the records
WIDEST = 16  # number of float32 in the widest SIMD vector
CLEARLY = 1.5  # least length of an outlier, over the median length of keys
BLOCK = 1 << 14  # keys measured at once


class Outliers:
    """The longest of the keys that an index holds. Immutable: safe to use from several threads."""

    def __init__(self, snapshot: Snapshot, rows: Rows) -> None:
        positions = snapshot.positions(rows)
        self.named = rows  # the rows asked for; the snapshot may lack some of them
        keys = snapshot.keys_at(positions).float().numpy()
        lengths = np.sqrt(np.einsum("md,md->m", keys, keys, dtype=np.float64))
        order = np.argsort(-lengths, kind="stable")
        order = order[positions[order] >= 0]
        self.count = len(order)
        self.rows, self.lengths = rows[order], lengths[order]  # sorted, the longest key first
        self.keys = np.zeros((self.count, -(-keys.shape[1] // WIDEST) * WIDEST), np.float32)
        self.keys[:, : keys.shape[1]] = keys[order]

    def positions(self, snapshot: Snapshot, allowed: Live | None) -> Rows:  # (m,)
        """Return the position of each outlier, -1 if it is dead or the filter excludes it."""
        positions = _live(snapshot, self.rows)
        return positions if allowed is None else np.where((positions >= 0) & allowed[positions], positions, -1)

    def take_part(
        self,
        queries: Floats,  # (q, d)
        positions: Rows,  # (m,) from `positions`
        matches: Rows,  # (q, k) matches, best first, -1 = none; changed in place
        scores: Floats,  # (q, k), changed in place
    ) -> bool:
        """Merge the outliers into the k best of each query. A query with fewer than k matches is not changed.

        Return True if any match changed. Cost at most 2 q m d, less if a few outliers are far longer than the others.
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
    """Merge the outliers as `Outliers.take_part` does, without kernels, from their inner products (q, m)."""
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
    """Return at most `room` outliers of an index. Return `known`, from an earlier search, if they are the same.

    A scan of the keys before position `until`, cost n d, finds the outliers of a new index, after records were added,
    and after half of the outliers were deleted.
    """
    longest = index.longest
    if longest is None or 2 * np.count_nonzero(_live(snapshot, longest) >= 0) < len(longest):
        longest = index.longest = longest_of(snapshot, lengths_of(snapshot, until), room)
    return known if known is not None and known.named is longest else Outliers(snapshot, longest)


def _live(snapshot: Snapshot, rows: Rows) -> Rows:
    """Return the positions of rows, -1 for rows that are dead or not in the snapshot."""
    positions = snapshot.positions(rows)
    return np.where((positions >= 0) & snapshot.live[positions], positions, -1)


def longest_of(snapshot: Snapshot, lengths: Floats, room: int) -> Rows:
    """Return the rows of at most `room` keys longer than CLEARLY times the median length, the longest first."""
    of_live = lengths[~np.isnan(lengths)]
    if not len(of_live):
        return np.empty(0, np.int64)
    long = np.flatnonzero(lengths > CLEARLY * np.median(of_live))
    if len(long) > room:
        long = long[np.argpartition(-lengths[long], room - 1)[:room]]
    return snapshot.rows(long[np.lexsort((long, -lengths[long]))])


def lengths_of(snapshot: Snapshot, until: int) -> Floats:  # (until,)
    """Return ‖k‖ of the keys before position `until`, NaN for dead records. Cost n d."""
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
    """Return the largest number of outliers that a snapshot may have."""
    return max(LEAST, round(MOST * snapshot.count))


def affordable(
    lengths: Numbers,  # (m,) of the outliers, the longest first
    least: Numbers,  # (q,) length that a key needs to be among a query's k nearest
    cost: float,  # bytes that a search reads for one query
    width: int,
) -> int:
    """Return how many outliers can be compared in at most SHARE of a search, but at least LEAST.

    A query reads the longest keys up to its `least`. Bytes are counted, not timed, so that equal builds agree.
    """
    compared = np.cumsum((lengths[:, None] >= least).mean(1))
    return max(LEAST, int(np.searchsorted(4 * width * compared, SHARE * cost, "right")))
