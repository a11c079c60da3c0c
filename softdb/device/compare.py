"""Exact search on devices with torch, and the exact order of candidates.

Queries, keys and candidates stay on the device; only the positions of matches are copied to the host. The search
follows `softdb.index.flat`: if rounding errors leave a query's k nearest uncertain, a second round compares them more
precisely. With several devices, each device searches its own range of records, and the results are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.device.availability import usable
from softdb.device.pooled import nearest as kernel_nearest
from softdb.device.resident import Shard
from softdb.index import flat
from softdb.index.contract import Live, Rows
from softdb.index.products import Best, pair_scores, reduced, top
from softdb.index.query import Query
from softdb.index.rerank import ordered as ordered_on_host
from softdb.store.snapshot import Block

SCORED = 1 << 26  # number of scores computed at once: 256 MB
CONVERTED = 1 << 26  # number of half-precision elements converted at once
GATHERED = 1 << 25  # number of elements of candidates' keys gathered at once: 128 MB, or 256 MB as float64
QUERIES = 1024  # number of queries compared with a block of keys at once


def nearest(
    shards: tuple[Shard, ...],
    query: Query,
    start: int = 0,  # position of the first record to compare
) -> Rows:  # (q, k)
    """Return positions of the k nearest records, by exact search on the shards' devices; -1 pads missing records.

    If torch may round float32 products to TF32, computes in float64. Cost q n d, memory O(block + q k).
    """
    queries, k = query.queries, query.k
    matches = np.full((len(queries), k), -1, np.int64)
    dtype = torch.promote_types(queries.dtype, torch.float64 if reduced() else torch.float32)
    positions, scores = list[Rows](), list[NDArray[np.float64]]()
    for shard in shards if len(queries) else ():
        scan = DeviceScan(shard, shard.of(query.allowed), max(0, start - shard.low), query.metric)
        count = min(k, scan.count)
        if count:
            own = queries.detach().to(shard.device, dtype)
            near = scan.answer(own, count)
            if len(shards) == 1:
                matches[:, :count] = near
                return matches
            exact = scan.scores(own.double(), torch.from_numpy(near).to(shard.device))
            positions.append(near + shard.low)
            scores.append(exact.cpu().numpy())
    if positions:  # sort by exact score, equal scores by position
        every = np.concatenate(positions, axis=1)
        order = np.lexsort((every, -np.concatenate(scores, axis=1)), axis=1)[:, :k]
        matches[:, : order.shape[1]] = np.take_along_axis(every, order, 1)
    return matches


def radius_search(shards: tuple[Shard, ...], query: Query) -> Rows:  # (q, m), -1 = none
    """Return positions of all records within the query's radius. Searches one shard's device after the other."""
    queries = query.queries
    dtype, blocks = torch.promote_types(queries.dtype, torch.float32), [np.empty((len(queries), 0), np.int64)]
    for shard in shards:
        scan = DeviceScan(shard, shard.of(query.allowed), 0, query.metric)
        if scan.count and len(queries) and query.least is not None:
            near = scan.in_radius(queries.detach().to(shard.device, dtype), query.least)
            blocks.append(np.where(near < 0, -1, near + shard.low))
    return np.concatenate(blocks, axis=1)


def ordered(
    shard: Shard,
    queries: Tensor,  # (q, d) float32, on the shard's device
    positions: Tensor,  # (q, c), -1 = none, on the shard's device
    k: int,
    metric: Metric,
) -> Rows:  # (q, k)
    """Return the k candidates with the best exact scores, equal scores by position, padded with -1. Cost q c d."""
    if shard.keys is None:  # the keys are on the host: copy only positions, and read the keys there
        own = np.ascontiguousarray(queries.cpu().numpy())
        return ordered_on_host(shard.snapshot, own, positions.cpu().numpy(), k, metric)[0]
    size = shard.snapshot.size
    positions = positions.masked_fill(positions < 0, size).sort(dim=1).values  # `size` stands for -1, and comes last
    none = positions == size
    scores = scores_of_pairs(shard, queries, positions.masked_fill(none, 0), metric).masked_fill_(none, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    best = positions.masked_fill(none, -1).gather(1, order)
    return np.asarray(torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1).cpu().numpy())


class DeviceScan(flat.Scan):
    """Exact search in one shard on its device."""

    def __init__(self, shard: Shard, allowed: Live | None, start: int, metric: Metric) -> None:
        self.shard, self.live = shard, shard.live_mask(allowed)
        count = int(np.count_nonzero(self.live.mask[start:])) if start else self.live.number
        super().__init__(shard.snapshot, self.live.mask, start, count, metric)
        self.queries, self.gathered = QUERIES, GATHERED

    def compared(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `flat.Scan.nearest` returns, computed by Triton kernels; None if the kernels cannot run."""
        keys, few = self.shard.keys, 4 * self.count <= len(self.keep) - self.start
        if keys is None or few or queries.dtype is not torch.float32 or usable(self.shard.device) is not None:
            return None
        width, parts = min(k + 8 + k // 8, self.count), []
        keep = self.live.on_device[self.start :]
        for chunk in torch.split(queries, self.queries):
            scores, positions = kernel_nearest(chunk, keys[self.start :], width, metric=self.metric, keep=keep)
            exact, order = self._rescored(chunk, positions + self.start)
            worst, floor = exact[:, k - 1], scores[:, -1].double()
            unsure = ~floor.isfinite() | scores[:, 0].isnan()
            if width < self.count:  # `~(… > …)` is True for NaN
                unsure |= ~(worst > floor + self._slack(chunk, worst, order))
            parts.append((order[:, :k], worst, unsure))
        near, worst, unsure = (torch.cat(column) for column in zip(*parts, strict=True))
        return near, worst, unsure

    def _rescored(self, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # (q, c), (q, c)
        """Return exact scores and positions of candidates, best first, equal scores by position."""
        positions = positions.sort(dim=1).values
        exact, order = self.scores(queries.double(), positions).sort(dim=1, descending=True, stable=True)
        return exact, positions.gather(1, order)

    def _slack(self, queries: Tensor, worst: Tensor, positions: Tensor) -> Tensor:  # (q,) float64
        """Return an upper bound of the rounding error of each query's scores, for the kernels' sums in float32."""
        terms = torch.finfo(torch.float32).eps / 2 * (2 * self.dim + 16)
        lengths: Tensor = torch.linalg.vector_norm(queries.double(), dim=1)
        if self.metric is Metric.L2:
            lengths = (2 * lengths + (-worst).clamp(min=0).sqrt()).square()
        slack: Tensor = terms * lengths * (self._longest(positions) if self.metric is Metric.DOT else 1)
        return slack

    @staticmethod
    def merge(best: Best | None, scores: Tensor, positions: Tensor, width: int) -> Best:
        """Merge a block's scores into the best so far. Sorts the whole block, which is faster on a GPU."""
        block_best = top(None, scores, positions.expand(scores.shape), width)
        return block_best if best is None else top(best, *block_best, width)

    def blocks(self, queries: int) -> Iterator[Block]:
        """Yield blocks of keys, so small that the scores of `queries` queries fit into memory."""
        size = max(4096, min(SCORED // queries, CONVERTED // self.dim, 1 << 20))
        yield from self.shard.blocks(size, self.live, self.start, pools=False)

    def keys_at(self, positions: Tensor) -> Tensor:
        """Copy the keys at these positions."""
        return self.shard.keys_at(positions)

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return exact scores (q, c); -inf for records that do not take part (an overflow may have selected some)."""
        scores = scores_of_pairs(self.shard, queries, positions, self.metric)
        return scores.masked_fill_(~self.live.on_device[positions], -torch.inf)


def scores_of_pairs(shard: Shard, queries: Tensor, positions: Tensor, metric: Metric) -> Tensor:
    """Return exact scores (q, c) of queries (q, d) and the keys at positions (q, c), in the queries' dtype."""
    if not positions.shape[1]:
        return queries.new_empty(positions.shape)
    chunk = max(1, GATHERED // (positions.shape[1] * queries.shape[1]))
    parts = zip(torch.split(queries, chunk), torch.split(positions, chunk), strict=True)
    return torch.cat([pair_scores(q.unsqueeze(1), shard.keys_at(at).to(q.dtype), metric) for q, at in parts])
