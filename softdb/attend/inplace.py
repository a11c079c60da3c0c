"""Stored columns as linear maps, applied where they lie: scores and pooling with gradients, and no copy of the records.

For the rows A_q (k, w) of a column that a query's candidates are, `dots` is x -> A_q x and `sums` its transpose, so
each is the other's gradient, to any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.compiled.threads import by_lines
from softdb.index.rerank import scores_at
from softdb.store import Snapshot

__all__ = ["Rowwise", "dots", "scores_in_place", "sums"]


class Rowwise(NamedTuple):
    """The candidates' records in one column, float32 or float16."""

    snapshot: Snapshot
    positions: NDArray[np.int64]  # (q, k), -1 = none
    values: bool  # of the values rather than the keys

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Where each segment begins, the segments' first positions, and what the numbers are."""
        first = self.snapshot.segments[0]
        if self.values:
            return self.snapshot.value_addresses, self.snapshot.starts, first.values_or_keys.dtype
        return self.snapshot.key_addresses, self.snapshot.starts, first.keys.dtype

    @property
    def width(self) -> int:
        """w."""
        first = self.snapshot.segments[0]
        return int((first.values_or_keys if self.values else first.keys).shape[1])


def dots(
    x: Tensor,  # (q, w); as float32
    column: Rowwise,
) -> Tensor:  # (q, k), 0 for none
    """x · a for each candidate's record a. Cost q k w."""
    return _Dots.apply(x, column)  # type: ignore[no-any-return, no-untyped-call]


def sums(
    weights: Tensor,  # (q, k) float32 or float64
    column: Rowwise,
) -> Tensor:  # (q, w) as the weights
    """Σ w a over each query's candidates. Cost q k w."""
    return _PooledInPlace.apply(weights, column)  # type: ignore[no-any-return, no-untyped-call]


def scores_in_place(
    queries: Tensor,  # (q, d) float32
    snapshot: Snapshot,
    positions: NDArray[np.int64],  # (q, k), -1 = none
    metric: Metric,  # DOT or L2
) -> Tensor:  # (q, k), 0 for none
    """Scores of candidates with gradient to the queries. Cost q k d."""
    column = Rowwise(snapshot, positions, False)
    if metric is Metric.DOT:
        return dots(queries, column)
    return _Distances.apply(queries, column)  # type: ignore[no-any-return, no-untyped-call]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Rowwise) -> Tensor:
        ctx.column = column
        return _dots(x, column)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sums(gradients[0], ctx.column), None


class _PooledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, column: Rowwise) -> Tensor:
        ctx.column = column
        return _sums(weights, column)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return dots(gradients[0], ctx.column), None


class _Distances(torch.autograd.Function):
    """-‖q - k‖² by differences."""

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


def _dots(x: Tensor, column: Rowwise) -> Tensor:
    from softdb.compiled import rerank

    addresses, starts, dtype = column.place
    asked, positions = np.ascontiguousarray(x.detach().numpy(), np.float32), column.positions
    found = np.empty(positions.shape, np.float32)

    def work(part: slice) -> None:
        of = addresses, starts, asked.shape[1], dtype == np.float16, rerank.DOT
        rerank.score(asked[part].reshape(-1), positions[part], *of, found[part])

    by_lines(work, len(positions), positions.size * asked.shape[1])
    found[positions < 0] = 0
    return torch.from_numpy(found).to(x.dtype)


def _sums(weights: Tensor, column: Rowwise) -> Tensor:
    from softdb.compiled import pooling

    addresses, starts, dtype = column.place
    factors, kind = (
        np.ascontiguousarray(weights.detach().numpy()),
        pooling.HALF if dtype == np.float16 else pooling.WIDE,
    )
    found, positions = np.empty((len(factors), column.width), factors.dtype), column.positions

    def work(part: slice) -> None:
        pooling.sums(factors[part], positions[part], addresses, starts, kind, found[part])

    by_lines(work, len(positions), positions.size * column.width)
    return torch.from_numpy(found)
