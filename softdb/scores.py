"""Scores: how close a key is to a query. Larger is closer, always; every score a user sees is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.errors import BadInput

__all__ = ["Cosine", "Dot", "NegativeL2", "ScaledDot", "Score", "ScoreFunction", "metric_of", "score_of"]

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Anything that compares queries (q, d) with shared keys (n, d) and returns (q, n); enough for an exact soft query."""

WIDENED = 4096  # keys held in float64 at once: a few MB, which stay in cache


class Score(Protocol):
    """A score that an index can find for.

    Keys come in the column's dtype, on any device, and are compared in the queries' dtype, on the queries' device.
    Differentiable in both arguments, with finite gradients everywhere.
    """

    @property
    def metric(self) -> Metric:
        """The metric whose nearest records are this score's nearest records."""

    def __call__(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) shared by all queries, or (q, k, d) each query's own
    ) -> Tensor:  # (q, n) or (q, k)
        """Scores of keys; larger is closer."""


@dataclass(frozen=True)
class Dot:
    """The dot product, s = q·k. Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) or (q, k, d)
    ) -> Tensor:  # (q, n) or (q, k)
        """s = q·k."""
        return _dot(queries, _alike(keys, queries))


@dataclass(frozen=True)
class ScaledDot:
    """The dot product over √d, s = q·k / √d (Vaswani et al. 2017, equation 1). Cost q n d."""

    metric: ClassVar[Metric] = Metric.DOT

    def __call__(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) or (q, k, d)
    ) -> Tensor:  # (q, n) or (q, k)
        """s = q·k / √d."""
        return _dot(queries * queries.shape[-1] ** -0.5, _alike(keys, queries))


@dataclass(frozen=True)
class Cosine:
    """The cosine of the angle, s = q·k / (‖q‖ ‖k‖), from -1 to 1; a zero vector scores 0. Cost q n d."""

    metric: ClassVar[Metric] = Metric.COSINE

    def __call__(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) or (q, k, d)
    ) -> Tensor:  # (q, n) or (q, k)
        """s = q·k / (‖q‖ ‖k‖)."""
        keys = _alike(keys, queries)
        return _dot(queries / _length(queries).unsqueeze(-1), keys) / _length(keys)


@dataclass(frozen=True)
class NegativeL2:
    """Minus the squared Euclidean distance, s = -‖q - k‖². Cost q n d.

    No square root, whose gradient is not finite at 0. Each query's own keys are compared by differences, shared keys
    by ‖q‖² + ‖k‖² - 2 q·k in float64: in float32 that form loses near duplicates, and so does centring it as soon as
    the records are spread wide (a column in metres, two far groups).
    """

    metric: ClassVar[Metric] = Metric.L2

    def __call__(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) or (q, k, d)
    ) -> Tensor:  # (q, n) or (q, k)
        """s = -‖q - k‖²."""
        keys = _alike(keys, queries)
        if keys.ndim == 3:
            return -(queries.unsqueeze(1) - keys).square().sum(-1)
        wide = queries.double()
        parts = [_expanded_l2(wide, part.double()).to(queries.dtype) for part in torch.split(keys, WIDENED)]
        return torch.cat(parts, dim=1)


def score_of(metric: Metric) -> Score:
    """The score of a database's metric: Dot, Cosine or NegativeL2."""
    scores: dict[Metric, Score] = {Metric.DOT: Dot(), Metric.COSINE: Cosine(), Metric.L2: NegativeL2()}
    return scores[metric]


def metric_of(score: Score | ScoreFunction) -> Metric:
    """The metric an index must use to find for a score. Raises BadInput for a plain callable, which names none."""
    metric = getattr(score, "metric", None)
    if not isinstance(metric, Metric):
        raise BadInput(
            f"the score {score!r} names no metric, so no index can find its nearest records; ask for the exact answer "
            "over every record (leave out k), or give the score an attribute `metric`, a softdb.check.Metric that "
            "ranks records as it does"
        )
    return metric


def _alike(keys: Tensor, queries: Tensor) -> Tensor:
    # two steps: the narrow column is what travels between devices
    return keys.to(queries.device).to(queries.dtype)


def _dot(
    queries: Tensor,  # (q, d)
    keys: Tensor,  # (n, d) or (q, k, d)
) -> Tensor:  # (q, n) or (q, k)
    if keys.ndim == 3:
        return (keys @ queries.unsqueeze(-1)).squeeze(-1)
    return queries @ keys.mT


def _expanded_l2(
    queries: Tensor,  # (q, d)
    keys: Tensor,  # (n, d)
) -> Tensor:  # (q, n)
    lengths = queries.square().sum(-1, keepdim=True) + keys.square().sum(-1)
    return (2 * _dot(queries, keys) - lengths).clamp(max=0)


def _length(
    vectors: Tensor,  # (…, d)
) -> Tensor:  # (…)
    """‖x‖, or infinity for a zero vector, so that dividing by it gives 0 and a gradient of 0."""
    # float64 holds the squares of every float32: neither 1e-30 nor 1e30 is lost
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).to(vectors.dtype)
    return length.masked_fill(length < torch.finfo(length.dtype).tiny, torch.inf)
