"""Finding wherever an index lies: on the CPU by `search` and `flat`, on a GPU around what FAISS cannot do there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index import flat, search
from softdb.index.contract import Found, Index, Live, Rows
from softdb.index.gpu import MOST, QUERIES, OnGPU, board_of
from softdb.index.resident import DeviceView
from softdb.index.search import indexed_until
from softdb.store import Snapshot

__all__ = ["find", "find_there"]

FEW = 1 << 16  # records that a GPU compares sooner than it asks an index
FLOOR = 64  # candidates that are looked at again at least
SURE = 3.0  # deviations by which more is fetched than a filter allows on average


def find(
    snapshot: Snapshot,
    index: Index | None,
    queries: Tensor,  # (q, d)
    k: int,
    metric: Metric,
    allowed: Live | None,  # (size,) over positions; None: every live record
) -> Found:  # (q, k), -1 only beyond the number of records that count
    """The k nearest that are allowed and live: by the index, or exactly where that costs less."""
    found = None
    if index is not None:
        found = (find_there if index.on_gpu else search.find)(snapshot, index, queries, k, allowed)
    exact = (board_of(index) or flat).nearest
    return found or Found(exact(snapshot, queries, k, metric, allowed), None, "flat")


def find_there(
    snapshot: Snapshot,
    index: Index,
    queries: Tensor,  # (q, d)
    k: int,
    allowed: Live | None,  # (size,) over positions; None: every live record
    certain: int | None = None,
    pairwise: bool = False,
) -> Found | None:  # (q, k)
    """As `search.find`, by an index on a GPU; None where to compare every record costs less, or is the only way.

    All k are as certain as the index finds them. Only the positions found travel to the host, where the keys fit on the
    GPU; else those of the candidates, too.
    """
    assert isinstance(index, OnGPU)
    if k > index.covered // 8:
        return None
    view, until = index.board.view(snapshot), indexed_until(snapshot, index)
    kept = view.kept(allowed)
    inside = kept.number if until == snapshot.size else int(np.count_nonzero(kept.mask[:until]))
    if inside <= max(FEW, 4 * k):
        return None
    plan = _DeviceSearch(view, index, k, allowed, until, inside)
    if plan.fetched > MOST:
        return None
    found = np.empty((len(queries), k), np.int64)
    for low in range(0, len(queries), QUERIES):
        part = slice(low, low + QUERIES)
        found[part] = plan.find(queries[part].detach(), k, allowed)
    return Found(found, None, index.kind)


class _DeviceSearch:
    """How to ask an index on a GPU, which knows nothing of filters and deletions."""

    def __init__(self, view: DeviceView, index: OnGPU, k: int, allowed: Live | None, until: int, inside: int) -> None:
        self.view, self.index, self.kept, self.until = view, index, view.kept(allowed), until
        self.share = inside / max(1, index.inner.ntotal)  # of the codes that count
        wanted = min(max(FLOOR, index.fetch_k * k), inside)
        spread = SURE * np.sqrt(wanted * (1 - min(1.0, self.share)))
        self.fetched = int(np.ceil((wanted + spread) / self.share))
        effort = index.effort * -(-k // index.tuned_for)  # farther neighbours lie in more places
        self.effort = min(index.effort_most, int(np.ceil(effort / self.share)))
        probed = inside * self.effort / index.inner.nlist  # of what counts, on average
        # a query with fewer lies where the filter allows fewer; without a filter the k are enough
        self.least = min(k, inside) if self.share >= 1 else max(min(k, inside), min(wanted, int(probed / 2)))

    def find(self, queries: Tensor, k: int, allowed: Live | None) -> Rows:  # (q, k) positions
        """The k best of the candidates that count; every record is compared where too few of them do."""
        view, index, board = self.view, self.index, self.index.board
        asked = queries.to(view.device, torch.float32)
        rows = index.near(asked, self.fetched, self.effort)  # a query's length changes no order
        positions = view.positions(rows)
        if self.share < 1:
            positions = positions.masked_fill(~self.kept.there[positions.clamp(min=0)], -1)
        thin = ((positions >= 0).sum(1) < self.least).cpu().numpy()
        if self.until < view.snapshot.size:
            newer = board.nearest(view.snapshot, queries, k, index.metric, allowed, self.until)
            positions = torch.cat([positions, torch.from_numpy(newer).to(view.device)], 1)
        found = board.ordered(view, asked, positions, k, index.metric)
        thin |= (found >= 0).sum(1) < min(k, self.kept.number)
        if thin.any():
            few = queries[torch.from_numpy(np.flatnonzero(thin)).to(queries.device)]
            found[thin] = board.nearest(view.snapshot, few, k, index.metric, allowed)
        return found
