"""Scores made of inner products: dot, scaled dot, cosine, and the general bilinear form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric, integer
from softdb.scoring.score import Fold, alike, comparable, require_shapes, require_width


@dataclass(frozen=True)
class Dot:
    """The dot product, s = q·k (Luong et al. 2015, section 3.1, "dot"). Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = q·k."""
        return dot(queries, comparable(queries, keys))

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: the same queries, compared by dot product."""
        return Fold(Metric.DOT, queries, 1.0)


@dataclass(frozen=True)
class ScaledDot:
    """The dot product divided by √d, s = q·k / √d (Vaswani et al. 2017, equation 1). Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = q·k / √d."""
        keys = comparable(queries, keys)
        return dot(queries * queries.shape[-1] ** -0.5, keys)

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: the same queries, compared by dot product with the scale 1 / √d."""
        return Fold(Metric.DOT, queries, queries.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Cosine:
    """The cosine of the angle, s = q·k / (‖q‖ ‖k‖), from -1 to 1; a zero vector scores 0. Cost q n d."""

    metric: ClassVar[Metric] = Metric.COSINE

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = q·k / (‖q‖ ‖k‖)."""
        keys = comparable(queries, keys)
        norms = length(keys)  # (…, n) or (…, q, k)
        if keys.ndim == queries.ndim:
            norms = norms.unsqueeze(-2)
        return dot(queries / length(queries).unsqueeze(-1), keys) / norms

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: the same queries, compared by cosine."""
        return Fold(Metric.COSINE, queries, 1.0)


class General(torch.nn.Module):
    """The bilinear score s = qᵀ W k with a trained W (Luong et al. 2015, section 3.1, "general").

    Queries and keys may differ in width. A square W starts as the identity, so the score starts as the dot product; any
    other W starts as a random matrix with orthonormal rows or columns, which keeps lengths as far as a change of width
    allows. An index can find the nearest records: s is the dot product of Wᵀq and k. Cost q d_q d_k + q n d_k.

    >>> score = General(2, 3)
    >>> score(torch.ones(4, 2), torch.ones(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim = integer(query_dim, "query_dim"), integer(key_dim, "key_dim")
        self.weight = torch.nn.Parameter(torch.empty(self.query_dim, self.key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W to the identity, or to random orthonormal rows or columns if it is not square."""
        if self.query_dim == self.key_dim:
            torch.nn.init.eye_(self.weight)
        else:
            torch.nn.init.orthogonal_(self.weight)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = qᵀ W k."""
        require_shapes(queries, keys)
        require_width(keys, self.key_dim, "keys")
        return dot(self._projected(queries), alike(keys, queries))

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: the queries Wᵀq, compared by dot product."""
        return Fold(Metric.DOT, self._projected(queries), 1.0)

    def extra_repr(self) -> str:
        """Return the widths, for `repr`."""
        return f"{self.query_dim}, {self.key_dim}"

    def _projected(self, queries: Tensor) -> Tensor:
        require_width(queries, self.query_dim, "queries")
        return queries @ self.weight.to(queries)


def dot(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) or (…, q, k, d) -> (…, q, n) or (…, q, k)
    """Return q·k, for shared keys or each query's own keys; queries and keys must have the same dtype and device."""
    if keys.ndim > queries.ndim:
        if keys.device.type != "cpu":  # a matrix product is no faster there, and TF32 would round it
            return (keys * queries.unsqueeze(-2)).sum(-1)
        return (keys @ queries.unsqueeze(-1)).squeeze(-1)
    return queries @ keys.mT


def length(vectors: Tensor) -> Tensor:  # (…, d) -> (…)
    """Return ‖x‖, or infinity for a zero vector: a division by it then gives 0 and a gradient of 0."""
    # in float64 the square of a float32 neither overflows nor underflows
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).to(vectors.dtype)
    return norms.masked_fill(norms < torch.finfo(norms.dtype).tiny, torch.inf)


def unit(vectors: NDArray[Any]) -> NDArray[np.float32]:  # (…, d) -> (…, d)
    """Return the vectors scaled to length 1; a zero vector stays zero."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(norms == 0, 1, norms), np.float32)
