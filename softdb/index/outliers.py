"""Outliers of norm: the longest keys, which every search for the largest inner product compares exactly.

A key's length is a factor of its inner products, so the longest keys are most often among the nearest; and of the
error of its code, so an index finds them least surely. They are few: their rows are kept with the index, their keys are
copied when it is first searched, and every query is compared with all of them that its filter allows. Where lengths
hardly vary there are none; nor for the cosine and L2.
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

SHARE = 0.04  # of the time of a search that comparing them may take, alone and in a batch
LEAST = 32  # that are compared all the same: in half a microsecond
MOST = 0.01  # of the records
WIDEST = 16  # float32 of the widest vector there is
CLEARLY = 1.5  # times as long as the median key that an outlier is at least
BLOCK = 1 << 14  # keys measured at once
TIMED, BATCHES = 64, 5  # queries that are timed, one by one and together, and how often together


class Outliers:
    """The longest of the keys that an index holds. Never changed once made: safe to use from several threads."""

    def __init__(self, snapshot: Snapshot, rows: Rows) -> None:
        positions = snapshot.positions(rows)
        self.named = rows  # those asked for, some of which the snapshot may lack
        keys = snapshot.keys_at(positions).float().numpy()
        lengths = np.sqrt(np.einsum("md,md->m", keys, keys, dtype=np.float64))
        order = np.argsort(-lengths, kind="stable")
        order = order[positions[order] >= 0]
        self.count = len(order)
        self.rows, self.lengths = rows[order], lengths[order]  # the longest first
        self.keys = np.zeros((self.count, -(-keys.shape[1] // WIDEST) * WIDEST), np.float32)
        self.keys[:, : keys.shape[1]] = keys[order]

    def positions(self, snapshot: Snapshot, allowed: Live | None) -> Rows:  # (m,)
        """Positions of those that are live and allowed, -1 for the others."""
        found = _live(snapshot, self.rows)
        return found if allowed is None else np.where((found >= 0) & allowed[found], found, -1)

    def take_part(
        self,
        queries: Floats,  # (q, d)
        positions: Rows,  # (m,) from `positions`
        found: Rows,  # (q, k), changed: best first, -1 = none
        scores: Floats,  # (q, k), changed
    ) -> bool:
        """Make of the k best that were found the k best of those and of the outliers; nothing where fewer were found.

        Returns whether this changed anything. Cost 2 q m d at most, less where the longest are far longer than the
        others.
        """
        (m, width), (q, d) = self.keys.shape, queries.shape
        if not found.size or not self.count:
            return False
        if not available():
            before = found.copy()
            _take_part(queries @ self.keys[:, :d].T, positions, found, scores)
            return bool((before != found).any())
        asked = queries
        if d < width:
            asked = np.zeros((q, width), np.float32)
            asked[:, :d] = queries

        def given(part: slice) -> tuple[Any, ...]:
            return asked[part], positions, self.keys, self.lengths, found[part], scores[part]

        if q == 1:  # which feels microseconds
            return bool(native().take_in(asked, positions, self.keys, self.lengths, found, scores))
        return any(by_lines(native().take_in, given, q, q * m * width))


def _take_part(products: Floats, positions: Rows, found: Rows, scores: Floats) -> None:
    """`Outliers.take_part` without kernels, from the products (q, m)."""
    products[:, positions < 0] = -np.inf
    better = (products >= scores[:, -1:]) & (found[:, -1:] >= 0)
    k = found.shape[1]
    for i in np.flatnonzero(better.any(1)):
        new = np.flatnonzero(better[i])
        new = new[~np.isin(positions[new], found[i])]
        both = np.concatenate([found[i], positions[new]])
        values = np.concatenate([scores[i], products[i, new]])
        best = np.lexsort((both, -values))[:k]
        found[i], scores[i] = both[best], values[best]


def outliers_of(snapshot: Snapshot, index: Index, until: int, room: int, known: Outliers | None) -> Outliers:
    """The outliers of an index, at most `room` where they are looked for; `known`, those of an earlier search, may do.

    Looked for among the keys of the snapshot before a position, at a cost of n d, where they are not known: in a new
    index, in one to which records were added, and where half of them have been deleted.
    """
    longest = index.longest
    if longest is None or 2 * np.count_nonzero(_live(snapshot, longest) >= 0) < len(longest):
        longest = index.longest = longest_of(snapshot, lengths_of(snapshot, until), room)
    return known if known is not None and known.named is longest else Outliers(snapshot, longest)


def _live(snapshot: Snapshot, rows: Rows) -> Rows:
    """Positions of rows, -1 for those that are dead or gone."""
    found = snapshot.positions(rows)
    return np.where((found >= 0) & snapshot.live[found], found, -1)


def longest_of(snapshot: Snapshot, lengths: Floats, room: int) -> Rows:
    """Rows of the longest keys that are clearly longer than most, the longest first, at most so many."""
    there = lengths[~np.isnan(lengths)]
    if not len(there):
        return np.empty(0, np.int64)
    long = np.flatnonzero(lengths > CLEARLY * np.median(there))
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
        found = torch.linalg.vector_norm(block.keys, dim=1, dtype=torch.float64)
        lengths[positions[inside]] = found.numpy()[inside]
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
    """As many of the longest as are compared within SHARE of the search's time, LEAST at least: by the clock."""
    while len(longest) > LEAST:
        share = _share(snapshot, Outliers(snapshot, longest), queries[:TIMED], search)
        if share <= SHARE:
            break
        longest = longest[: max(LEAST, int(len(longest) * SHARE / share))]
    return longest


def _share(snapshot: Snapshot, outliers: Outliers, queries: Floats, search: Callable[[Floats], Rows]) -> float:
    """The time of comparing outliers over that of a search: of batches or of single queries, whichever is more."""
    positions, first = outliers.positions(snapshot, None), search(queries)
    found, scores = ordered(snapshot, queries, first, first.shape[1], Metric.DOT)

    def seconds(part: slice) -> tuple[float, float]:
        asked, arguments = queries[part], (positions, found[part].copy(), scores[part].copy())
        searched = timed(functools.partial(search, asked))[1]
        return timed(functools.partial(outliers.take_part, asked, *arguments))[1], searched

    batches = np.median([seconds(slice(None)) for _ in range(BATCHES)], axis=0)
    alone = np.median([seconds(slice(place, place + 1)) for place in range(len(queries))], axis=0)
    return float(max(batches[0] / batches[1], alone[0] / alone[1]))
