"""Score candidates and pool their values, in place by kernels or on copies by torch. Find the k best of all records.

Let A_q (k, w) be the rows of a column (keys or values) for the candidates of query q. `dots` computes A_q x and `sums`
the transpose A_qᵀ x, so each function is the gradient of the other, to any order.
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
from softdb.scoring import Constant, Dot, Kernel, Score, ScoreFunction, Tempered, divided, score_of
from softdb.store import Snapshot


def score_rows(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    snapshot: RecordColumns,
    positions: Positions,  # (q, k), -1 = none
) -> Tensor:  # (q, k), -inf for none
    """Return exact scores of candidates from the stored keys, with gradients for the queries. Cost q k d."""
    if isinstance(score, Tempered):
        return divided(score_rows(score.score, queries[:, :-1].contiguous(), snapshot, positions), queries)
    live = torch.from_numpy(positions >= 0).to(queries.device)
    metric = metric_in_place(score, queries, snapshot)
    if snapshot.placed is None and metric is not None:
        numbers = scores_at(snapshot.key_column, queries.detach().numpy(), positions, metric)
        if not np.isnan(numbers).any():  # NaN: too large for float32; torch scores instead
            return torch.from_numpy(numbers)
    metric = metric_in_place(score, queries, snapshot, gradient=True)
    if snapshot.placed is None and metric in (Metric.DOT, Metric.L2):
        scores = (dots if metric is Metric.DOT else distances)(queries, Rowwise(snapshot, positions, False))
        if bool(scores.detach().isfinite().all()):
            return scores.masked_fill(~live, -torch.inf)
    keys = queries.new_zeros(*positions.shape, queries.shape[1])
    if snapshot.size:  # pad with a live key, as a score might not accept a key of zeros
        first = np.argmax(snapshot.live)
        keys = snapshot.keys_at(np.where(positions < 0, first, positions))
    with torch.autocast(queries.device.type, enabled=False):
        scores = scores_of(score, queries, keys.to(queries.device))
    return scores.masked_fill(~live, -torch.inf)


def in_place(tensor: Tensor, snapshot: RecordColumns) -> bool:
    """Return True if kernels can read stored columns in place for this tensor; else torch reads copies."""
    fits = tensor.dtype is torch.float32 and tensor.device.type == "cpu" and snapshot.placed is None
    return fits and snapshot.size > 0 and available()


_METRICS = {id(score_of(metric)): metric for metric in Metric}  # by identity: these objects are never deleted


def metric_in_place(
    score: Score | ScoreFunction, queries: Tensor, snapshot: RecordColumns, gradient: bool = False
) -> Metric | None:
    """Return the metric by which kernels can score candidates in place. None: torch has to score copies."""
    if not in_place(queries, snapshot) or (queries.requires_grad and torch.is_grad_enabled()) is not gradient:
        return None
    return Metric.DOT if type(score) is Dot else _METRICS.get(id(score))


def pool_rows(
    weights: Tensor,  # (q, k)
    snapshot: RecordColumns,
    positions: Positions,  # (q, k), -1 = none
    num_classes: int | None,
) -> Tensor:  # (q, v), or (q, num_classes)
    """Return the weighted sums of candidates' values, as `softdb.pool.pool` does. Read values in place if possible."""
    if num_classes is None and snapshot.placed is None and in_place(weights, snapshot):
        return sums(weights, Rowwise(snapshot, positions, True))
    return pool(weights, snapshot.values_at(positions), num_classes)


@torch.no_grad()
def scan(request: Request, source: SourceRecords) -> Positions:  # (q, k)
    """Return positions of the k best by comparing all records, best first, ties by row, -1 = none. Cost q n d."""
    request, k = replace(request.detached, pools=False), min(request.k, source.count)
    queries = request.queries
    best = queries.new_full((len(queries), k), -torch.inf)
    best_positions = torch.full((len(queries), k), -1, device=queries.device)
    for tile, block_scores in scored_tiles(request, source):
        chunk = tile.chunk
        scores = torch.cat([best[chunk], block_scores], dim=1)
        places = _top(scores, k)
        best[chunk] = scores.gather(1, places)
        positions = torch.cat(
            [best_positions[chunk], tile.positions.to(best_positions.device).expand(len(scores), -1)], dim=1
        )
        best_positions[chunk] = positions.gather(1, places)
    return best_positions.masked_fill(best == -torch.inf, -1).cpu().numpy()


def plateaus(score: object) -> bool:
    """Return True if equal scores can belong to different distances, so that an index would break ties by distance."""
    return isinstance(score, Kernel) and (score.compact or isinstance(score, Constant))


def _top(scores: Tensor, k: int) -> Tensor:  # (q, m), m at least k -> (q, k)
    """Return the indices of the k largest scores, largest first, ties sorted by index."""
    values, places = scores.topk(k)
    last = values[:, -1:]
    unsure = (scores == last).sum(1) > (values == last).sum(1)  # ties beyond the k-th: topk chooses any of them
    for i in unsure.nonzero()[:, 0].tolist():
        places[i] = scores[i].sort(descending=True, stable=True).indices[:k]
    places = places.sort(dim=1).values
    order = scores.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return places.gather(1, order)


# -- columns that are read in place ------------------------------------------------------------------------------------


class Rowwise(NamedTuple):
    """The records of candidates in one stored column (keys or values), float32 or float16."""

    snapshot: Snapshot
    positions: NDArray[np.int64]  # (q, k), -1 = none
    values: bool  # True: the column of values; False: the column of keys

    @property
    def column(self) -> Any:
        """The native object by which kernels read the column."""
        return self.snapshot.value_column if self.values else self.snapshot.key_column

    @property
    def width(self) -> int:
        """Width w of the column."""
        first = self.snapshot.segments[0]
        return int((first.values_or_keys if self.values else first.keys).shape[1])


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Rowwise) -> Tensor:
        ctx.column, positions, code = column, column.positions, CODES[Metric.DOT]
        plain, result = np.ascontiguousarray(x.detach().numpy(), np.float32), np.empty(positions.shape, np.float32)

        def arguments(run: slice) -> tuple[Any, ...]:
            return plain[run], positions[run], column.column, code, result[run]

        by_lines(native().score, arguments, len(result), positions.size * plain.shape[1])
        result[positions < 0] = 0
        return torch.from_numpy(result).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sums(gradients[0], ctx.column), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, column: Rowwise) -> Tensor:
        ctx.column, positions, width = column, column.positions, column.width
        factors = np.ascontiguousarray(weights.detach().numpy())
        result = np.empty((len(factors), width), factors.dtype)

        def arguments(run: slice) -> tuple[Any, ...]:
            return factors[run], positions[run], column.column, result[run]

        by_lines(native().sums, arguments, len(result), positions.size * width)
        return torch.from_numpy(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return dots(gradients[0], ctx.column), None


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, column: Rowwise) -> Tensor:
        ctx.column = column
        ctx.save_for_backward(queries)
        result = scores_at(column.column, queries.numpy(), column.positions, Metric.L2)
        result[column.positions < 0] = 0
        return torch.from_numpy(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (queries,) = ctx.saved_tensors
        weights = gradients[0].masked_fill(torch.from_numpy(ctx.column.positions < 0), 0).double()
        result = sums(weights, ctx.column) - queries.double() * weights.sum(1, keepdim=True)  # close numbers
        return (2 * result).to(queries.dtype), None


dots: Callable[[Tensor, Rowwise], Tensor] = _Dots.apply
"""Return x · a (q, k) in float32, for x (q, w) and each candidate's record a in the column; 0 for none. Cost q k w."""

sums: Callable[[Tensor, Rowwise], Tensor] = _Sums.apply
"""Return Σ weight · a (q, w) over each query's candidates, from weights (q, k) in float32 or float64. Cost q k w."""

distances: Callable[[Tensor, Rowwise], Tensor] = _Distances.apply
"""Return -‖q - k‖² (q, k) of queries (q, d) float32 and candidates' keys, from differences; 0 for none. Cost q k d."""
