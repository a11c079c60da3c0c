"""Finding on a GPU with torch alone: the exact finder there, and the exact order of candidates.

Queries, keys and candidates stay on the device; what comes back are the positions found. The exact finder is that of
`flat`, step by step: blocked products keep a few more than k candidates, float64 puts them in order, and where the
bound on rounding lets another record in, the query is asked again, on the CPU, where `flat` decides.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index import flat
from softdb.index.contract import Live, Rows
from softdb.index.products import Best, BlockKeys, Probe
from softdb.index.rerank import best
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
        dtype = torch.promote_types(queries.dtype, torch.float64 if _coarse() else torch.float32)
        asked = queries.detach().to(self.device, dtype)
        near, unsure = _exact(view, asked, k, metric, kept, start, count)
        found[:, :k] = near.cpu().numpy()
        again = np.flatnonzero(unsure.cpu().numpy())
        if len(again):
            few = asked[torch.from_numpy(again).to(self.device)].cpu()
            found[again, :k] = flat.nearest(snapshot, few, k, metric, allowed, start)
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
            return best(view.snapshot, own, positions.cpu().numpy(), k, metric)
        positions = positions.masked_fill(positions < 0, view.snapshot.size).sort(dim=1).values  # none: last
        there = positions < view.snapshot.size
        scores = _scores(view, queries, positions.masked_fill(~there, 0), metric).masked_fill_(~there, -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        found = positions.masked_fill(~there, -1).gather(1, order)
        return np.asarray(torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1).cpu().numpy())


def _coarse() -> bool:
    """Whether a float32 product may have fewer digits than float32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by torch's newer words, which this question does not understand
        return True


def _exact(
    view: DeviceView,
    queries: Tensor,  # (q, d) float32 or float64, on the device
    k: int,  # at most count
    metric: Metric,
    kept: Kept,
    start: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # (q, k) positions, (q,) bool: rounding or a tie may have kept a better one out
    more = min(k + 8 + k // 8, count)
    probes = [Probe(metric, part) for part in torch.split(queries, QUERIES)]
    found, unsure = [], []
    for probe, top, asked in zip(
        probes, _candidates(view, probes, kept, start, more), torch.split(queries, QUERIES), strict=True
    ):
        positions = top.positions.sort(dim=1).values
        exact = _scores(view, asked.double(), positions, metric)
        exact, order = exact.sort(dim=1, descending=True, stable=True)
        found.append(positions.gather(1, order[:, :k]))
        doubt = ~kept.there[positions].all(1)  # a dead one is no worse than a product that overflows
        if more < count:
            worst, floor = exact[:, k - 1], probe.full(top.scores.amin(1))
            # negated, so that a NaN counts as unsure, as does an overflow, of which nothing is known
            doubt |= ~(worst > floor + probe.slack(worst, _longest(view, positions, metric))) | floor.isinf()
        unsure.append(doubt)
    return torch.cat(found), torch.cat(unsure)


def _candidates(view: DeviceView, probes: list[Probe], kept: Kept, start: int, more: int) -> list[Best]:
    """The best of each chunk of the queries by approximate score."""
    asked = len(probes[0].queries)
    dtype, dim = probes[0].queries.dtype, probes[0].queries.shape[1]
    block = max(4096, min(SCORED // asked, CONVERTED // dim, 1 << 20))
    best: list[Best | None] = [None] * len(probes)
    out, prepared = torch.empty(0, dtype=dtype, device=view.device), None
    for part in view.parts(kept, start, block):
        prepared = BlockKeys(probes[0].metric, part.keys.to(dtype), prepared)
        m = len(part.positions)
        if out.numel() < asked * m:
            out = out.new_empty(asked * m)
        for i, probe in enumerate(probes):
            scores = probe.approximate(prepared, out[: len(probe.queries) * m].view(-1, m))
            if part.dead is not None:
                scores.masked_fill_(part.dead, -torch.inf)
            best[i] = _top(best[i], scores, part.positions, more)
    return [one for one in best if one is not None]


def _top(
    best: Best | None,
    scores: Tensor,  # (q, m)
    positions: Tensor,  # (m,)
    kept: int,
) -> Best:
    """The best so far and a block's best, together."""
    top = scores.topk(min(kept, scores.shape[1]), sorted=False)
    here = Best(top.values, positions[top.indices])
    if best is None:
        return here
    scores, both = torch.cat([best.scores, here.scores], 1), torch.cat([best.positions, here.positions], 1)
    top = scores.topk(min(kept, scores.shape[1]), sorted=False)
    return Best(top.values, both.gather(1, top.indices))


def _scores(
    view: DeviceView,
    queries: Tensor,  # (q, d), in the dtype to compute in
    positions: Tensor,  # (q, c) none of them -1
    metric: Metric,
) -> Tensor:  # (q, c)
    """Scores pair by pair, without matrix products: the same for equal keys, and never in TF32."""
    if not positions.shape[1]:
        return queries.new_empty(positions.shape)
    chunk, found = max(1, GATHERED // (positions.shape[1] * queries.shape[1])), []
    for asked, own in zip(torch.split(queries, chunk), torch.split(positions, chunk), strict=True):
        keys, asked = view.keys_at(own).to(queries.dtype), asked.unsqueeze(1)
        if metric is Metric.L2:
            found.append((keys - asked).square_().sum(2).neg_())
            continue
        products = (keys * asked).sum(2)
        if metric is Metric.COSINE:
            lengths = torch.linalg.vector_norm(keys, dim=2) * torch.linalg.vector_norm(asked, dim=2)
            products = products / lengths.masked_fill(lengths == 0, torch.inf)
        found.append(products)
    return torch.cat(found)


def _longest(
    view: DeviceView,
    positions: Tensor,  # (q, c)
    metric: Metric,
) -> Tensor:  # (q,) float64
    """Length of the longest candidate; the others' scores are rounded alike."""
    if metric is not Metric.DOT:
        return torch.zeros(len(positions), dtype=torch.float64, device=view.device)
    chunk = max(1, GATHERED // max(1, positions.shape[1] * view.snapshot.segments[0].keys.shape[1]))
    lengths: list[Tensor] = [
        torch.linalg.vector_norm(view.keys_at(own), dim=2, dtype=torch.float64).amax(1)
        for own in torch.split(positions, chunk)
    ]
    return torch.cat(lengths)
