"""Stored columns as linear maps, applied where they lie: scores and pooling with gradients, and no copy of the records.

For the rows A_q (k, w) of a column that a query's candidates are, `dots` is x -> A_q x and `sums` its transpose, so
each is the other's gradient, to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.compiled.threads import by_lines
from softdb.index.rerank import scores_at
from softdb.store import Snapshot

__all__ = ["Rowwise", "distances", "dots", "sums"]


class Rowwise(NamedTuple):
    """The candidates' records in one column, float32 or float16."""

    snapshot: Snapshot
    positions: NDArray[np.int64]  # (q, k), -1 = none
    values: bool  # of the values rather than the keys

    @property
    def place(self) -> tuple[Any, Any, int, bool]:
        """Where each segment begins, the segments' first positions, w, and whether the numbers are float16."""
        first = self.snapshot.segments[0]
        column = first.values_or_keys if self.values else first.keys
        addresses = self.snapshot.value_addresses if self.values else self.snapshot.key_addresses
        return addresses, self.snapshot.starts, column.shape[1], column.dtype == np.float16


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Rowwise) -> Tensor:
        from softdb.compiled import rerank

        ctx.column, positions, place = column, column.positions, column.place
        asked, found = np.ascontiguousarray(x.detach().numpy(), np.float32), np.empty(positions.shape, np.float32)

        def given(part: slice) -> tuple[Any, ...]:
            return asked[part].reshape(-1), positions[part], *place, rerank.DOT, found[part]

        by_lines(rerank.score, given, len(found), positions.size * asked.shape[1])
        found[positions < 0] = 0
        return torch.from_numpy(found).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sums(gradients[0], ctx.column), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, column: Rowwise) -> Tensor:
        from softdb.compiled import pooling

        ctx.column, positions = column, column.positions
        addresses, starts, width, halves = column.place
        factors, kind = np.ascontiguousarray(weights.detach().numpy()), pooling.HALF if halves else pooling.WIDE
        found = np.empty((len(factors), width), factors.dtype)

        def given(part: slice) -> tuple[Any, ...]:
            return factors[part], positions[part], addresses, starts, kind, found[part]

        by_lines(pooling.sums, given, len(found), positions.size * width)
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
