"""Candidates: found by comparing all, scored and pooled by kernels where the stored columns lie, else by torch.

For the rows A_q (k, w) of a column that a query's candidates are, `dots` is x -> A_q x and `sums` its transpose, so
each is the other's gradient, to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.blocks import scored_tiles, scores_of
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Positions, Request
from softdb.check import Metric
from softdb.index.placement import RecordColumns
from softdb.index.rerank import CODES, scores_at
from softdb.kernels import available, native
from softdb.kernels.threads import by_lines
from softdb.pool import pool
from softdb.scoring import Constant, Dot, Kernel, Score, ScoreFunction, score_of
from softdb.store import Snapshot


def score_rows(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    snapshot: RecordColumns,
    positions: Positions,  # (q, k), -1 = none
) -> Tensor:  # (q, k), -inf for none
    """Exact scores of candidates, from the stored keys, with gradient to the queries. Cost q k d."""
    live = torch.from_numpy(positions >= 0).to(queries.device)
    metric = metric_in_place(score, queries, snapshot)
    if metric is not None:
        found = scores_at(snapshot, queries.detach().numpy(), positions, metric)
        if not np.isnan(found).any():  # too large for float32: torch says so
            return torch.from_numpy(found)
    metric = metric_in_place(score, queries, snapshot, gradient=True)
    if snapshot.placed is None and metric in (Metric.DOT, Metric.L2):
        scores = (dots if metric is Metric.DOT else distances)(queries, Rowwise(snapshot, positions, False))
        if bool(scores.detach().isfinite().all()):
            return scores.masked_fill(~live, -torch.inf)
    keys = queries.new_zeros(*positions.shape, queries.shape[1])
    if snapshot.size:  # a live key stands where there is none: a score may not bear a key of zeros
        first = np.argmax(snapshot.live)
        keys = snapshot.keys_at(np.where(positions < 0, first, positions))
    with torch.autocast(queries.device.type, enabled=False):
        scores = scores_of(score, queries, keys.to(queries.device))
    return scores.masked_fill(~live, -torch.inf)


def in_place(tensor: Tensor, snapshot: RecordColumns) -> bool:
    """Return True if kernels read stored columns where they lie for it; else torch has to, from copies."""
    fits = tensor.dtype is torch.float32 and tensor.device.type == "cpu" and snapshot.placed is None
    return fits and snapshot.size > 0 and available()


_METRICS = {id(score_of(metric)): metric for metric in Metric}  # these objects stay


def metric_in_place(
    score: Score | ScoreFunction, queries: Tensor, snapshot: RecordColumns, gradient: bool = False
) -> Metric | None:
    """The metric by which kernels score candidates where the keys lie; None where torch has to."""
    if not in_place(queries, snapshot) or (queries.requires_grad and torch.is_grad_enabled()) is not gradient:
        return None
    return Metric.DOT if type(score) is Dot else _METRICS.get(id(score))


def pool_rows(
    weights: Tensor,  # (q, k)
    snapshot: RecordColumns,
    positions: Positions,  # (q, k), -1 = none
    num_classes: int | None,
) -> Tensor:  # (q, v), or (q, num_classes)
    """The weighted sum of the candidates' stored values, as `softdb.pool.pool`, without a copy where none is needed."""
    if num_classes is None and snapshot.placed is None and in_place(weights, snapshot):
        return sums(weights, Rowwise(snapshot, positions, True))
    return pool(weights, snapshot.values_at(positions), num_classes)


@torch.no_grad()
def scan(request: Request, source: SourceRecords) -> Positions:  # (q, k)
    """Positions of the k best, best first, ties by row, then -1. For scores that no index finds for. Cost q n d."""
    request, k = replace(request.detached, pools=False), min(request.k, source.count)
    queries = request.queries
    best = queries.new_full((len(queries), k), -torch.inf)
    found = torch.full((len(queries), k), -1, device=queries.device)
    for tile, found_here in scored_tiles(request, source):
        chunk = tile.chunk
        scores = torch.cat([best[chunk], found_here], dim=1)
        places = _top(scores, k)
        best[chunk] = scores.gather(1, places)
        positions = torch.cat([found[chunk], tile.positions.to(found.device).expand(len(scores), -1)], dim=1)
        found[chunk] = positions.gather(1, places)
    return found.masked_fill(best == -torch.inf, -1).cpu().numpy()


def plateaus(score: object) -> bool:
    """True if records at unlike distances score alike, so that an index orders more finely than the score does."""
    return isinstance(score, Kernel) and (score.compact or isinstance(score, Constant))


def _top(scores: Tensor, k: int) -> Tensor:  # (q, m), m at least k -> (q, k)
    """Places of the k largest, largest first, ties by place."""
    values, places = scores.topk(k)
    last = values[:, -1:]
    unsure = (scores == last).sum(1) > (values == last).sum(1)  # topk takes any of the ties
    for i in unsure.nonzero()[:, 0].tolist():
        places[i] = scores[i].sort(descending=True, stable=True).indices[:k]
    places = places.sort(dim=1).values
    order = scores.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return places.gather(1, order)


# -- columns where they lie --------------------------------------------------------------------------------------------


class Rowwise(NamedTuple):
    """The candidates' records in one column, float32 or float16."""

    snapshot: Snapshot
    positions: NDArray[np.int64]  # (q, k), -1 = none
    values: bool  # of the values rather than the keys

    @property
    def column(self) -> Any:
        """It, as kernels read it."""
        return self.snapshot.value_column if self.values else self.snapshot.key_column

    @property
    def width(self) -> int:
        """Numbers of a record."""
        first = self.snapshot.segments[0]
        return int((first.values_or_keys if self.values else first.keys).shape[1])


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Rowwise) -> Tensor:
        ctx.column, positions, code = column, column.positions, CODES[Metric.DOT]
        asked, found = np.ascontiguousarray(x.detach().numpy(), np.float32), np.empty(positions.shape, np.float32)

        def given(part: slice) -> tuple[Any, ...]:
            return asked[part], positions[part], column.column, code, found[part]

        by_lines(native().score, given, len(found), positions.size * asked.shape[1])
        found[positions < 0] = 0
        return torch.from_numpy(found).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sums(gradients[0], ctx.column), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, column: Rowwise) -> Tensor:
        ctx.column, positions, width = column, column.positions, column.width
        factors = np.ascontiguousarray(weights.detach().numpy())
        found = np.empty((len(factors), width), factors.dtype)

        def given(part: slice) -> tuple[Any, ...]:
            return factors[part], positions[part], column.column, found[part]

        by_lines(native().sums, given, len(found), positions.size * width)
        return torch.from_numpy(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return dots(gradients[0], ctx.column), None


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, column: Rowwise) -> Tensor:
        ctx.column = column
        ctx.save_for_backward(queries)
        found = scores_at(column.snapshot, queries.numpy(), column.positions, Metric.L2)
        found[column.positions < 0] = 0
        return torch.from_numpy(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (queries,) = ctx.saved_tensors
        weights = gradients[0].masked_fill(torch.from_numpy(ctx.column.positions < 0), 0).double()
        found = sums(weights, ctx.column) - queries.double() * weights.sum(1, keepdim=True)  # of close numbers
        return (2 * found).to(queries.dtype), None


dots: Callable[[Tensor, Rowwise], Tensor] = _Dots.apply
"""x (q, w) -> (q, k): x · a in float32 for each candidate's record a, 0 for none. Cost q k w."""

sums: Callable[[Tensor, Rowwise], Tensor] = _Sums.apply
"""Weights (q, k), float32 or float64 -> (q, w): Σ w a over each query's candidates. Cost q k w."""

distances: Callable[[Tensor, Rowwise], Tensor] = _Distances.apply
"""Queries (q, d) float32 -> (q, k): -‖q - k‖² by differences, 0 for none. Of keys. Cost q k d."""
