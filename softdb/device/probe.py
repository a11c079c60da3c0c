"""Searching an index on a GPU, around what FAISS cannot do there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.device.compare import nearest, ordered
from softdb.device.faiss_lists import MOST, QUERIES, OnGPU
from softdb.device.resident import Shard
from softdb.index.contract import Found, Rows
from softdb.index.query import Query
from softdb.index.search import indexed_until

FEW = 1 << 16  # records that a GPU compares sooner than it asks an index
FLOOR = 64  # candidates that are looked at again at least
SURE = 3.0  # deviations by which more is fetched than a filter allows on average


def find(
    shard: Shard,  # every record
    index: OnGPU,
    query: Query,
) -> Found | None:  # (q, k)
    """As `softdb.index.search.Searcher.find`; None where comparing every record costs less, or is the only way.

    All k are as certain as the index finds them. Only the positions found travel to the host, where the keys fit on the
    GPU; else those of the candidates, too.
    """
    queries, k = query.queries, query.k
    if k > index.covered // 8:
        return None
    plan = _DeviceSearch(shard, index, query)
    if plan.inside <= max(FEW, 4 * k) or plan.fetched > MOST:
        return None
    positions = np.empty((len(queries), k), np.int64)
    for low in range(0, len(queries), QUERIES):
        part = slice(low, low + QUERIES)
        positions[part] = plan.find(queries[part].detach())
    return Found(positions, None, index.kind)


class _DeviceSearch:
    """A search of an index on a GPU, which knows nothing of filters and deletions."""

    def __init__(self, shard: Shard, index: OnGPU, query: Query) -> None:
        self.shard, self.index, self.query, k = shard, index, query, query.k
        self.kept, self.until = shard.kept(query.allowed), indexed_until(shard.snapshot, index)
        whole = self.until == shard.snapshot.size
        self.inside = inside = self.kept.number if whole else int(np.count_nonzero(self.kept.mask[: self.until]))
        self.share = max(inside, 1) / max(1, index.count)  # of the codes that count
        wanted = min(max(FLOOR, index.fetch_k * k), inside)
        spread = SURE * np.sqrt(wanted * (1 - min(1.0, self.share)))
        self.fetched = int(np.ceil((wanted + spread) / self.share))
        self.effort = min(index.effort_most, int(np.ceil(index.effort_for(k) / self.share)))
        probed = inside * self.effort / index.inner.nlist  # of what counts, on average
        # a query with fewer lies where the filter allows fewer; without a filter the k are enough
        self.least = min(k, inside) if self.share >= 1 else max(min(k, inside), min(wanted, int(probed / 2)))

    def find(self, queries: Tensor) -> Rows:  # (q, d) -> (q, k) positions
        """The k best of the candidates that count; every record is compared where too few of them do."""
        shard, index, k = self.shard, self.index, self.query.k
        moved = queries.to(shard.device, torch.float32)
        rows = index.near(moved, self.fetched, self.effort)  # a query's length changes no order
        positions = shard.positions(rows)
        if self.share < 1:
            positions = positions.masked_fill(~self.kept.there[positions.clamp(min=0)], -1)
        thin = ((positions >= 0).sum(1) < self.least).cpu().numpy()
        if self.until < shard.snapshot.size:
            newer = nearest((shard,), replace(self.query, queries=queries), self.until)
            positions = torch.cat([positions, torch.from_numpy(newer).to(shard.device)], 1)
        best = ordered(shard, moved, positions, k, index.metric)
        thin |= (best >= 0).sum(1) < min(k, self.kept.number)
        if thin.any():
            few = queries[torch.from_numpy(np.flatnonzero(thin)).to(queries.device)]
            best[thin] = nearest((shard,), replace(self.query, queries=few))
        return best
