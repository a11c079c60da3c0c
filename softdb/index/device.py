"""Finding on a GPU with torch alone: exact search, and the exact order of candidates.

Queries, keys and candidates stay on the device; what comes back are the positions found. Exact search is that of
`flat`, but a query whose answer rounding leaves open is asked again on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index import flat
from softdb.index.contract import Live, Rows
from softdb.index.products import Best, KeyBlock, pair_scores, reduced, top
from softdb.index.rerank import ordered
from softdb.index.resident import DeviceView, Kept, KeyColumn, Seen
from softdb.store import Snapshot

__all__ = ["Board"]

SCORED = 1 << 26  # scores at once: 256 MB
CONVERTED = 1 << 26  # numbers of half-precision keys converted at once
GATHERED = 1 << 25  # numbers of candidate keys gathered at once: 128 MB, twice that in float64
QUERIES = 1024  # compared with a block at once
SMALL = 1 << 27  # numbers that are compared in about a millisecond by a GPU that reads 0.5 TB/s


class Board:
    """A GPU as one database uses it: its keys, as far as they fit, and what is known of the newest snapshot."""

    def __init__(self, device: torch.device) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.column = KeyColumn(device)
        self._seen: Seen | None = None

    @classmethod
    def of(cls, device: torch.device | None) -> Board | None:
        """The board of a device; None for the CPU."""
        return None if device is None or device.type == "cpu" else cls(device)

    def view(self, snapshot: Snapshot) -> DeviceView:
        """A snapshot, as it lies here."""
        seen = self._seen
        if seen is None or seen.snapshot() is not snapshot:
            seen = self._seen = Seen(snapshot, self.column)
        return DeviceView(snapshot, seen)

    def small(self, snapshot: Snapshot) -> bool:
        """Whether a search of every record takes a moment: the keys are here, and few."""
        if not snapshot.size:
            return True
        numbers = snapshot.size * snapshot.segments[0].keys.shape[1]
        return numbers <= SMALL and self.view(snapshot).seen.keys is not None

    def nearest(
        self,
        snapshot: Snapshot,
        queries: Tensor,  # (q, d) floating point, any device
        k: int,
        metric: Metric,
        allowed: Live | None = None,  # (size,) over positions; None: every live record
        start: int = 0,  # first position
    ) -> Rows:  # (q, k)
        """As `flat.nearest`, computed here. Cost q n d, memory O(block + q k) beside the keys.

        Where torch may multiply float32 in TF32, the products are made in float64: TF32 leaves too little to tell.
        """
        found = np.full((len(queries), k), -1, np.int64)
        if not snapshot.count or not len(queries):
            return found
        view = self.view(snapshot)
        kept = view.kept(allowed)
        count = int(np.count_nonzero(kept.mask[start:])) if start else kept.number
        k = min(k, count)
        if not k:
            return found
        dtype = torch.promote_types(queries.dtype, torch.float64 if reduced() else torch.float32)
        asked = queries.detach().to(self.device, dtype)
        near, _, unsure = _DeviceScan(view, kept, start, count, metric).nearest(asked, k)
        found[:, :k] = near.cpu().numpy()
        again = unsure.nonzero()[:, 0]
        if len(again):
            found[again.cpu().numpy(), :k] = flat.nearest(snapshot, asked[again].cpu(), k, metric, allowed, start)
        return found

    def ordered(
        self,
        view: DeviceView,
        queries: Tensor,  # (q, d) float32, here
        positions: Tensor,  # (q, c), -1 = none, here
        k: int,
        metric: Metric,
    ) -> Rows:  # (q, k)
        """Positions of the k best candidates by exact score, ties by row, then -1. Cost q c d."""
        if view.seen.keys is None:  # only the candidates' numbers travel; the mapped keys are read in place
            own = np.ascontiguousarray(queries.cpu().numpy())
            return ordered(view.snapshot, own, positions.cpu().numpy(), k, metric)[0]
        positions = positions.masked_fill(positions < 0, view.snapshot.size).sort(dim=1).values  # none: last
        there = positions < view.snapshot.size
        scores = _scores(view, queries, positions.masked_fill(~there, 0), metric).masked_fill_(~there, -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        found = positions.masked_fill(~there, -1).gather(1, order)
        return np.asarray(torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1).cpu().numpy())


class _DeviceScan(flat.Scan):
    """The records of one exact search, on a GPU."""

    def __init__(self, view: DeviceView, kept: Kept, start: int, count: int, metric: Metric) -> None:
        super().__init__(view.snapshot, kept.mask, start, count, metric)
        self.view, self.kept = view, kept
        self.queries, self.gathered = QUERIES, GATHERED

    @staticmethod
    def merge(best: Best | None, scores: Tensor, positions: Tensor, kept: int) -> Best:
        """As `products.merge`: a GPU sorts whole blocks."""
        here = top(None, scores, positions.expand(scores.shape), kept)
        return here if best is None else top(best, *here, kept)

    def blocks(self, queries: int) -> Iterator[KeyBlock]:
        """The records, as many at a time as their scores leave room for."""
        return self.view.parts(self.kept, self.start, max(4096, min(SCORED // queries, CONVERTED // self.dim, 1 << 20)))

    def keys_at(self, positions: Tensor) -> Tensor:
        """Keys, copied."""
        return self.view.keys_at(positions)

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Exact scores (q, c)."""
        return _scores(self.view, queries, positions, self.metric)


def _scores(view: DeviceView, queries: Tensor, positions: Tensor, metric: Metric) -> Tensor:
    """Exact scores of positions (q, c), none of them -1, in the dtype of the queries (q, d)."""
    if not positions.shape[1]:
        return queries.new_empty(positions.shape)
    chunk = max(1, GATHERED // (positions.shape[1] * queries.shape[1]))
    parts = zip(torch.split(queries, chunk), torch.split(positions, chunk), strict=True)
    return torch.cat([pair_scores(q.unsqueeze(1), view.keys_at(at).to(q.dtype), metric) for q, at in parts])
