"""Exact search on devices with torch, and the exact order of candidates.

Queries, keys and candidates stay on the device; only the positions of matches are copied to the host. Exact search
works as in `flat`, including the second round for queries that rounding leaves undecided. Of several devices each
searches its own range of positions, and the best matches of all are the answer.
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
from softdb.index.products import Best, KeyBlock, pair_scores, reduced, top
from softdb.index.query import Query
from softdb.index.rerank import ordered as ordered_on_host

SCORED = 1 << 26  # scores computed at once: 256 MB
CONVERTED = 1 << 26  # numbers of half-precision keys converted at once
GATHERED = 1 << 25  # numbers of candidate keys gathered at once: 128 MB, twice that in float64
QUERIES = 1024  # queries compared with a block at once


def nearest(
    shards: tuple[Shard, ...],
    query: Query,
    start: int = 0,  # first position
) -> Rows:  # (q, k)
    """Return positions of the k nearest as `flat.nearest`, on the shards' devices. Cost q n d, memory O(block + q k).

    If torch may round float32 products to TF32, the products are computed in float64, since TF32 is too imprecise.
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
    if positions:  # by exact score, ties by position
        every = np.concatenate(positions, axis=1)
        order = np.lexsort((every, -np.concatenate(scores, axis=1)), axis=1)[:, :k]
        matches[:, : order.shape[1]] = np.take_along_axis(every, order, 1)
    return matches


def radius_search(shards: tuple[Shard, ...], query: Query) -> Rows:  # (q, m), -1 = none
    """Return positions within a radius as `flat.radius_search`, from one shard's device after the other."""
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
    """Return positions of the k best candidates by exact score, ties by row, padded with -1. Cost q c d."""
    if shard.keys is None:  # copy only the candidates' positions to the host, and read the mapped keys in place
        own = np.ascontiguousarray(queries.cpu().numpy())
        return ordered_on_host(shard.snapshot, own, positions.cpu().numpy(), k, metric)[0]
    size = shard.snapshot.size
    positions = positions.masked_fill(positions < 0, size).sort(dim=1).values  # -1 comes last
    none = positions == size
    scores = scores_of_pairs(shard, queries, positions.masked_fill(none, 0), metric).masked_fill_(none, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    best = positions.masked_fill(none, -1).gather(1, order)
    return np.asarray(torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1).cpu().numpy())


class DeviceScan(flat.Scan):
    """Records of one exact search on a device."""

    def __init__(self, shard: Shard, allowed: Live | None, start: int, metric: Metric) -> None:
        self.shard, self.live = shard, shard.live_mask(allowed)
        count = int(np.count_nonzero(self.live.mask[start:])) if start else self.live.number
        super().__init__(shard.snapshot, self.live.mask, start, count, metric)
        self.queries, self.gathered = QUERIES, GATHERED

    def compared(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Search as `nearest` by the device's kernels, which read the keys once; None if they cannot be used."""
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
            if width < self.count:  # negated, so that a NaN counts as unsure
                unsure |= ~(worst > floor + self._slack(chunk, worst, order))
            parts.append((order[:, :k], worst, unsure))
        near, worst, unsure = (torch.cat(column) for column in zip(*parts, strict=True))
        return near, worst, unsure

    def _rescored(self, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # (q, c), (q, c)
        """Return exact scores and positions of candidates, best first, ties by position."""
        positions = positions.sort(dim=1).values
        exact, order = self.scores(queries.double(), positions).sort(dim=1, descending=True, stable=True)
        return exact, positions.gather(1, order)

    def _slack(self, queries: Tensor, worst: Tensor, positions: Tensor) -> Tensor:  # (q,) float64
        """Return a bound of the rounding errors of scores, as `Probe.slack`, for the kernels' float32 sums."""
        terms = torch.finfo(torch.float32).eps / 2 * (2 * self.dim + 16)
        lengths: Tensor = torch.linalg.vector_norm(queries.double(), dim=1)
        if self.metric is Metric.L2:
            lengths = (2 * lengths + (-worst).clamp(min=0).sqrt()).square()
        slack: Tensor = terms * lengths * (self._longest(positions) if self.metric is Metric.DOT else 1)
        return slack

    def second_round(self, queries: Tensor, worst: Tensor, k: int) -> Rows:
        """Decide undecided queries on the device if it holds the keys, else on the CPU."""
        if self.shard.keys is not None:
            return super().second_round(queries, worst, k)
        return flat.nearest(self.snapshot, Query(queries.cpu(), k, self.metric, self.live.mask), self.start)

    @staticmethod
    def merge(best: Best | None, scores: Tensor, positions: Tensor, width: int) -> Best:
        """Merge as `products.merge`, but sort whole blocks, which is faster on a GPU."""
        block_best = top(None, scores, positions.expand(scores.shape), width)
        return block_best if best is None else top(best, *block_best, width)

    def blocks(self, queries: int) -> Iterator[KeyBlock]:
        """Yield blocks of the records, sized to the memory for their scores."""
        size = max(4096, min(SCORED // queries, CONVERTED // self.dim, 1 << 20))
        for positions, keys, _ in self.shard.blocks(size, self.live, self.start, pools=False):
            yield KeyBlock(positions, keys)

    def keys_at(self, positions: Tensor) -> Tensor:
        """Copy keys."""
        return self.shard.keys_at(positions)

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return exact scores (q, c), -inf for records that do not take part, which overflowing products may select."""
        scores = scores_of_pairs(self.shard, queries, positions, self.metric)
        return scores.masked_fill_(~self.live.on_device[positions], -torch.inf)


def scores_of_pairs(shard: Shard, queries: Tensor, positions: Tensor, metric: Metric) -> Tensor:
    """Return exact scores of positions (q, c), none of them -1, in the dtype of the queries (q, d)."""
    if not positions.shape[1]:
        return queries.new_empty(positions.shape)
    chunk = max(1, GATHERED // (positions.shape[1] * queries.shape[1]))
    parts = zip(torch.split(queries, chunk), torch.split(positions, chunk), strict=True)
    return torch.cat([pair_scores(q.unsqueeze(1), shard.keys_at(at).to(q.dtype), metric) for q, at in parts])
