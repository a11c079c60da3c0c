"""Scores made of inner products: dot, scaled dot, cosine, and the general bilinear form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric, integer
from softdb.scoring.score import Fold, alike, comparable, meet, wide


@dataclass(frozen=True)
class Dot:
    """The dot product, s = q·k (Luong et al. 2015, section 3.1, "dot"). Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """s = q·k."""
        return dot(queries, comparable(queries, keys))

    def fold(self, queries: Tensor) -> Fold:
        """The dot product itself."""
        return Fold(Metric.DOT, queries, 1.0)


@dataclass(frozen=True)
class ScaledDot:
    """The dot product over √d, s = q·k / √d (Vaswani et al. 2017, equation 1). Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """s = q·k / √d."""
        keys = comparable(queries, keys)
        return dot(queries * queries.shape[-1] ** -0.5, keys)

    def fold(self, queries: Tensor) -> Fold:
        """The dot product over √d."""
        return Fold(Metric.DOT, queries, queries.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Cosine:
    """The cosine of the angle, s = q·k / (‖q‖ ‖k‖), from -1 to 1; a zero vector scores 0. Cost q n d."""

    metric: ClassVar[Metric] = Metric.COSINE

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """s = q·k / (‖q‖ ‖k‖)."""
        keys = comparable(queries, keys)
        lengths = length(keys)  # (…, n) or (…, q, k)
        if keys.ndim == queries.ndim:
            lengths = lengths.unsqueeze(-2)
        return dot(queries / length(queries).unsqueeze(-1), keys) / lengths

    def fold(self, queries: Tensor) -> Fold:
        """The cosine itself."""
        return Fold(Metric.COSINE, queries, 1.0)


class General(torch.nn.Module):
    """The bilinear score s = qᵀ W k with a trained W (Luong et al. 2015, section 3.1, "general").

    Queries and keys may differ in width. W starts as the identity where it is square, so that the score starts as the
    dot product, else as a random matrix with orthonormal rows or columns, which keeps lengths as far as a change of
    width can. An index finds for it: s is the dot product of Wᵀq and k. Cost q d_q d_k + q n d_k.

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
        """W as it starts: the identity, or orthonormal where it is not square."""
        if self.query_dim == self.key_dim:
            torch.nn.init.eye_(self.weight)
        else:
            torch.nn.init.orthogonal_(self.weight)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """s = qᵀ W k."""
        meet(queries, keys)
        wide(keys, self.key_dim, "keys")
        return dot(self._moved(queries), alike(keys, queries))

    def fold(self, queries: Tensor) -> Fold:
        """The dot product with Wᵀq."""
        return Fold(Metric.DOT, self._moved(queries), 1.0)

    def extra_repr(self) -> str:
        """The widths."""
        return f"{self.query_dim}, {self.key_dim}"

    def _moved(self, queries: Tensor) -> Tensor:
        wide(queries, self.query_dim, "queries")
        return queries @ self.weight.to(queries)


def dot(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) or (…, q, k, d) -> (…, q, n) or (…, q, k)
    """q·k of shared or own keys, alike in dtype and device."""
    if keys.ndim > queries.ndim:
        if keys.device.type != "cpu":  # no faster as a product of matrices, which TF32 would round
            return (keys * queries.unsqueeze(-2)).sum(-1)
        return (keys @ queries.unsqueeze(-1)).squeeze(-1)
    return queries @ keys.mT


def length(vectors: Tensor) -> Tensor:  # (…, d) -> (…)
    """‖x‖, or infinity for a zero vector, so that dividing by it gives 0 and a gradient of 0."""
    # float64 holds the squares of every float32: neither 1e-30 nor 1e30 is lost
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).to(vectors.dtype)
    return found.masked_fill(found < torch.finfo(found.dtype).tiny, torch.inf)


def unit(vectors: NDArray[Any]) -> NDArray[np.float32]:  # (…, d) -> (…, d)
    """Vectors scaled to length 1; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)
