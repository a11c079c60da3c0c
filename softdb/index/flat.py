"""The exact finder: every allowed record is compared, in blocks straight from the segments.

Two steps. Blocked matrix products give approximate scores, from which a few more than k candidates are kept; those are
scored again in float64, pair by pair, and ordered by score, then row. A bound on the rounding of the products says
whether anything left out could have come in: where it could (ties by the dozen, near duplicates far from the others),
a second round in float64 decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.products import Best, BlockKeys, Probe, merge
from softdb.store.snapshot import Snapshot

__all__ = ["nearest", "radius_search"]

Rows = NDArray[np.int64]
Live = NDArray[np.bool_]

_BLOCK = 1 << 20  # numbers a block of keys holds: 4 MB of float32, 8 MB where few queries make little of each
_QUERIES = 256  # compared with a block at once
_SECOND = 16  # queries of the second round at once


def nearest(
    snapshot: Snapshot,
    queries: Tensor,  # (q, d) floating point, any device
    k: int,
    metric: Metric,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
    start: int = 0,  # first position
) -> Rows:  # (q, k)
    """Positions of the k nearest allowed live records, ties by row, then -1. Cost q n d, memory O(block + q k)."""
    keep = snapshot.live if allowed is None else snapshot.live & allowed
    count = int(np.count_nonzero(keep[start:]))
    found = np.full((len(queries), k), -1, np.int64)
    k = min(k, count)
    if not k or not len(queries):
        return found
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries = queries.detach().to("cpu", dtype)
    scan = _Scan(snapshot, keep, start, count, metric)
    found[:, :k] = scan.nearest(queries, k)
    return found


def radius_search(
    snapshot: Snapshot,
    queries: Tensor,  # (q, d) floating point, any device
    least: float,
    metric: Metric,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
) -> Rows:  # (q, m) ascending, then -1, where m is the most that a query has
    """Positions of every allowed live record whose score may reach `least`, in whatever precision it is computed.

    None is missed; those that rounding may bring in are there too. Cost q n d, memory O(block + hits).
    """
    keep = snapshot.live if allowed is None else snapshot.live & allowed
    count = int(np.count_nonzero(keep))
    if not count or not len(queries):
        return np.empty((len(queries), 0), np.int64)
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    # a distance summed from differences is off by d roundings at most; what a product misplaced farther drops out here
    slack = torch.finfo(queries.dtype).eps * (queries.shape[1] + 8) * abs(least) if metric is Metric.L2 else np.inf
    scan = _Scan(snapshot, keep, 0, count, metric)
    which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for low in range(0, len(queries), _QUERIES):
        part = queries[low : low + _QUERIES]
        for query, places, scores in scan.reaching(part, torch.full((len(part),), least, dtype=torch.float64)):
            near = scores >= least - slack
            which.append(query[near] + low)
            found.append(places[near])
    return _padded(np.concatenate(which), np.concatenate(found), len(queries))


def _padded(
    which: Rows,  # (p,) query of each hit
    found: Rows,  # (p,)
    queries: int,
) -> Rows:  # (q, m)
    """One line of hits for each query."""
    counts = np.bincount(which, minlength=queries)
    order = np.lexsort((found, which))
    column = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    lines = np.full((queries, int(counts.max())), -1, np.int64)
    lines[which[order], column] = found[order]
    return lines


def _block_for(queries: int, dim: int) -> int:
    """Records a block."""
    return min(max(_BLOCK * (2 if queries <= 8 else 1) // dim, 256), 1 << 16)


class _Scan:
    """The records that take part in one exact search."""

    def __init__(self, snapshot: Snapshot, keep: Live, start: int, count: int, metric: Metric) -> None:
        self.snapshot, self.keep, self.start, self.count, self.metric = snapshot, keep, start, count, metric
        self.dim = snapshot.segments[0].keys.shape[1]
        self.block = _block_for(_QUERIES, self.dim)

    def nearest(
        self,
        queries: Tensor,  # (q, d)
        k: int,  # at most count
    ) -> Rows:  # (q, k)
        """Positions of the k nearest, ties by row."""
        kept = min(k + 8 + k // 8, self.count)
        self.block = _block_for(len(queries), self.dim)
        best = self._candidates([Probe(self.metric, part) for part in torch.split(queries, _QUERIES)], kept)
        positions = best.positions.sort(dim=1).values.numpy()
        exact = self._rescore(queries, positions)
        order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(positions, order, 1)
        if kept < self.count:
            worst = torch.from_numpy(np.take_along_axis(exact, order[:, -1:], 1)[:, 0])
            unsure = self._unsure(queries, found, worst, best.scores.amin(1)).nonzero()[:, 0]
            for few in torch.split(unsure, _SECOND) if len(unsure) else ():
                found[few.numpy()] = self._second_round(queries[few].double(), worst[few], k)
        if self.metric is not Metric.L2:  # every record scores 0: nothing but the row decides
            found[~queries.any(1).numpy()] = np.flatnonzero(self.keep[self.start :])[:k] + self.start
        return found

    def _candidates(self, probes: list[Probe], kept: int) -> Best:
        best: list[Best | None] = [None] * len(probes)
        scores, prepared = torch.empty(0), None
        for positions, keys in self._blocks(probes[0].queries.dtype):
            prepared = BlockKeys(self.metric, keys, prepared)
            if scores.numel() < len(probes[0].queries) * len(keys):
                scores = keys.new_empty(len(probes[0].queries) * len(keys))
            for i, probe in enumerate(probes):
                out = scores[: len(probe.queries) * len(keys)].view(-1, len(keys))
                best[i] = merge(best[i], probe.approximate(prepared, out), positions, kept)
        parts = [part for part in best if part is not None]
        return Best(torch.cat([p.scores for p in parts]), torch.cat([p.positions for p in parts]))

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and keys, a few megabytes at a time."""
        if 4 * self.count > len(self.keep) - self.start:
            for positions, keys, _ in self.snapshot.blocks(self.block, self.keep, self.start):
                yield positions, keys.to(dtype)
        else:
            sparse = np.flatnonzero(self.keep[self.start :]) + self.start
            for low in range(0, len(sparse), self.block):
                part = sparse[low : low + self.block]
                yield torch.from_numpy(part), self.snapshot.keys_at(part).to(dtype)

    def _rescore(self, queries: Tensor, positions: Rows) -> NDArray[np.float64]:
        """Exact scores (q, c) of positions (q, c)."""
        which = np.repeat(np.arange(len(positions)), positions.shape[1])
        return self._score(queries.double(), which, positions.reshape(-1)).reshape(positions.shape)

    def _score(
        self,
        queries: Tensor,  # (q, d) float64
        which: Rows,  # (p,) query of each pair
        positions: Rows,  # (p,)
    ) -> NDArray[np.float64]:  # (p,)
        """Scores of pairs in float64, the same for equal keys wherever they stand."""
        scores = np.empty(len(positions))
        chunk = max(1, _BLOCK // 4 // self.dim)
        for low in range(0, len(positions), chunk):
            pairs = slice(low, low + chunk)
            keys = self.snapshot.keys_at(positions[pairs]).double()
            asked = queries[torch.from_numpy(which[pairs])]
            if self.metric is Metric.L2:
                scores[pairs] = -(keys - asked).square().sum(1).numpy()
            elif self.metric is Metric.DOT:
                scores[pairs] = (keys * asked).sum(1).numpy()
            else:
                lengths = (keys.square().sum(1) * asked.square().sum(1)).sqrt()
                lengths[lengths == 0] = torch.inf
                scores[pairs] = ((keys * asked).sum(1) / lengths).numpy()
        return scores

    def _unsure(
        self,
        queries: Tensor,  # (q, d)
        found: Rows,  # (q, k)
        worst: Tensor,  # (q,) float64, score of the last found
        floor: Tensor,  # (q,) best approximate score that a record left out can have
    ) -> Tensor:  # (q,) bool
        """Which queries may have lost a record to rounding, or to a tie."""
        unsure: list[Tensor] = []
        for low in range(0, len(queries), _QUERIES):
            part = slice(low, low + _QUERIES)
            probe = Probe(self.metric, queries[part])
            slack = probe.slack(worst[part], self._longest(found[part]))
            # negated, so that a NaN counts as unsure
            unsure.append(~(worst[part] > probe.full(floor[part]) + slack))
        return torch.cat(unsure)

    def _longest(self, found: Rows) -> Tensor:
        """Length of the longest key found for each query (q,); the others' scores are rounded alike."""
        if self.metric is not Metric.DOT:
            return torch.zeros(len(found), dtype=torch.float64)
        keys = self.snapshot.keys_at(found[:, : max(1, _BLOCK // self.dim // len(found))])
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float64)
        return lengths.amax(1)

    def _second_round(
        self,
        queries: Tensor,  # (q, d) float64
        worst: Tensor,  # (q,) float64: no better k-th score exists below it
        k: int,
    ) -> Rows:  # (q, k)
        """The second round: every record that may reach the k-th score, scored exactly."""
        which, found, scores = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        for near, places, exact in self.reaching(queries, worst):
            which, found = np.concatenate([which, near]), np.concatenate([found, places])
            scores = np.concatenate([scores, exact])
            order = np.lexsort((found, -scores, which))
            first = np.searchsorted(which[order], np.arange(len(queries)))
            order = order[np.arange(len(order)) - first[which[order]] < k]
            which, found, scores = which[order], found[order], scores[order]
        return found.reshape(-1, k)

    def reaching(
        self,
        queries: Tensor,  # (q, d); products are made in their dtype
        least: Tensor,  # (q,) float64
    ) -> Iterator[tuple[Rows, Rows, NDArray[np.float64]]]:
        """Pairs that may reach their query's least score, block by block: query, position, float64 score, each (p,)."""
        probe, prepared = Probe(self.metric, queries), None
        constant = probe.full(torch.zeros(len(queries)))  # (q,) that approximate scores lack
        scores = torch.empty(0)
        for positions, keys in self._blocks(queries.dtype):
            prepared = BlockKeys(self.metric, keys, prepared)
            longest = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64).amax().expand(len(queries))
            if scores.numel() < len(queries) * len(keys):
                scores = keys.new_empty(len(queries) * len(keys))
            out = scores[: len(queries) * len(keys)].view(-1, len(keys))
            floor = (least - probe.slack(least, longest) - constant).to(keys.dtype)
            floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf))  # rounding must not raise it
            # negated, so that a NaN counts as near
            pairs = (~(probe.approximate(prepared, out) < floor.unsqueeze(1))).nonzero().numpy()
            if len(pairs):
                which, places = pairs[:, 0], positions.numpy()[pairs[:, 1]]
                yield which, places, self._score(queries.double(), which, places)
