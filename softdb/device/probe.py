"""Search an index on a GPU, with filters and deletions, which FAISS does not support on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.device.compare import nearest, ordered
from softdb.device.faiss_lists import MOST, QUERIES, OnGPU
from softdb.device.resident import Shard
from softdb.index.contract import FinderResult, Rows
from softdb.index.query import Query
from softdb.index.search import indexed_until

FEW = 1 << 16  # number of records that a GPU compares faster than it searches an index
FLOOR = 64  # least number of rescored candidates
SURE = 3.0  # number of standard deviations by which the fetched candidates exceed the mean number needed


def find(
    shard: Shard,  # all records of the snapshot
    index: OnGPU,
    query: Query,
) -> FinderResult | None:  # (q, k)
    """Return positions of the k nearest records, by the index; None if all records should be compared instead.

    Copies only the matches' positions to the host if the keys fit on the GPU, else also the candidates' positions.
    """
    queries, k = query.queries, query.k
    if k > index.covered // 8:
        return None
    plan = _DeviceSearch(shard, index, query)
    if plan.inside <= max(FEW, 4 * k) or plan.fetched > MOST:
        return None
    positions = np.empty((len(queries), k), np.int64)
    for low in range(0, len(queries), QUERIES):
        batch = slice(low, low + QUERIES)
        positions[batch] = plan.find(queries[batch].detach())
    return FinderResult(positions, None, index.kind)


class _DeviceSearch:
    """Parameters of one search: number of candidates to fetch, lists to scan, and the mask that filters candidates."""

    def __init__(self, shard: Shard, index: OnGPU, query: Query) -> None:
        self.shard, self.index, self.query, k = shard, index, query, query.k
        self.live, self.until = shard.live_mask(query.allowed), indexed_until(shard.snapshot, index)
        all_indexed = self.until == shard.snapshot.size
        self.inside = inside = self.live.number if all_indexed else int(np.count_nonzero(self.live.mask[: self.until]))
        self.share = max(inside, 1) / max(1, index.count)  # fraction of the index's codes whose records take part
        wanted = min(max(FLOOR, index.fetch_k * k), inside)
        spread = SURE * np.sqrt(wanted * (1 - min(1.0, self.share)))
        self.fetched = int(np.ceil((wanted + spread) / self.share))
        self.effort = min(index.effort_most, int(np.ceil(index.effort_for(k) / self.share)))
        probed = inside * self.effort / index.inner.nlist  # mean number of scanned records that take part
        # a query with fewer candidates than this compares all records; without a filter, k candidates are enough
        self.least = min(k, inside) if self.share >= 1 else max(min(k, inside), min(wanted, int(probed / 2)))

    def find(self, queries: Tensor) -> Rows:  # (q, d) -> (q, k) positions
        """Return the k best candidates that take part. For a query with too few candidates, compare all records."""
        shard, index, k = self.shard, self.index, self.query.k
        moved = queries.to(shard.device, torch.float32)
        rows = index.near(moved, self.fetched, self.effort)  # for cosine, a query's length does not change the order
        positions = shard.positions(rows)
        if self.share < 1:
            positions = positions.masked_fill(~self.live.on_device[positions.clamp(min=0)], -1)
        thin = ((positions >= 0).sum(1) < self.least).cpu().numpy()
        if self.until < shard.snapshot.size:
            newer = nearest((shard,), replace(self.query, queries=queries), self.until)
            positions = torch.cat([positions, torch.from_numpy(newer).to(shard.device)], 1)
        best = ordered(shard, moved, positions, k, index.metric)
        thin |= (best >= 0).sum(1) < min(k, self.live.number)
        if thin.any():
            few = queries[torch.from_numpy(np.flatnonzero(thin)).to(queries.device)]
            best[thin] = nearest((shard,), replace(self.query, queries=few))
        return best
