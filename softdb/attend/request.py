"""The class `Request`, a checked soft query, and classes for its candidates. Answers are computed from a request."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric, Tolerance, holds, shown
from softdb.errors import BadInput
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.scoring import (
    Fold,
    Gaussian,
    Kernel,
    Normalised,
    Score,
    ScoreFunction,
    Softmax,
    Tempered,
    Uniform,
    Weighting,
    divided,
    fold,
    weighting,
    with_temperature,
)

Positions: TypeAlias = NDArray[np.int64]
Live: TypeAlias = NDArray[np.bool_]


class LogScore(torch.nn.Module):
    """The score log s of a score s ≥ 0, such as a kernel. Its softmax is s / Σ s, even if every s underflows."""

    def __init__(self, score: Score | ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (q, d), (n, d) or (q, k, d) -> (q, n) or (q, k)
        """Return log s, -inf for s = 0. Raises BadInput if a score is negative."""
        if isinstance(self.score, Kernel):
            return self.score.log(queries, keys)
        scores = self.score(queries, keys)
        if not holds(~(scores.detach() < 0).any()):
            raise BadInput(
                f"a score is {scores.detach().min().item()}; normalised weights need kernel values, at least 0: use "
                "softmax, or a score that is a kernel"
            )
        nothing = scores == 0
        return scores.masked_fill(nothing, 1).log().masked_fill(nothing, -torch.inf)

    def fold(self, queries: Tensor) -> Fold | None:  # (q, d)
        """Return the fold of s, as log s sorts keys as s does. The log of a gaussian is a scaled squared distance."""
        folded = fold(self.score, queries)
        if folded is not None and isinstance(self.score, Gaussian):
            return folded._replace(scale=0.5 / self.score.bandwidth.double() ** 2, bias=0.0)
        return None if folded is None else folded._replace(scale=None, bias=0.0)


def indifferent(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d_q), (…, n, d) -> (…, q, n)
    """Score every key 0, with gradients of 0, for average pooling."""
    return queries[..., :1] * 0 + keys[..., :1].mT * 0


@dataclass(frozen=True)
class Request(Query):
    """A soft query: a `Query` that weighs records by a score. `of` checks the arguments.

    `k` counts the nearest records by `score`, and 0 means all records; the field `metric` is not used.
    """

    score: Score | ScoreFunction  # the weighting turns its values into weights
    weighting: Weighting = Softmax()  # noqa: RUF009 - immutable
    temperature: float = 1.0  # of all queries; 1 for a `Tempered` score
    _: KW_ONLY
    k: int = 0
    metric: Metric = Metric.DOT
    allowed: Live | None = None
    mask: Tensor | None = None  # (q, live records) in row order, True = takes part
    tolerance: Tolerance | None = None  # tolerance of an estimate; if k is 0 and tolerance None, the answer is exact
    seed: int = 0  # seed of an estimate's draws
    need_weights: bool = False  # True: return the weights of all records with an exact answer
    pools: bool = True  # False: compute only the log-normaliser

    @classmethod
    def of(
        cls,
        queries: Tensor,
        score: Score | ScoreFunction,
        weights: str | Weighting | None = None,
        temperature: float | Tensor = 1.0,  # or (q,)
        **parts: Any,
    ) -> Request:
        """Check the arguments and return a request; `parts` are further fields of the class.

        If `weights` is None, they are "normalised" for a kernel, else "softmax". Normalised weights are computed as the
        softmax of log s, which cannot underflow. Temperatures of the queries become a coordinate of the queries.
        """
        by = weighting(("normalised" if isinstance(score, Kernel) else "softmax") if weights is None else weights)
        if isinstance(by, Normalised):
            if isinstance(temperature, Tensor) or temperature != 1:
                raise BadInput(
                    f"temperature is {shown(temperature)} but normalised weights have none; leave it at 1 and set the "
                    "kernel's bandwidth, or use softmax"
                )
            score, by = LogScore(score), Softmax()
        if isinstance(temperature, Tensor):
            queries, score, temperature = with_temperature(queries, temperature), Tempered(score), 1.0
        return cls(queries, score, by, temperature, **parts)

    def top(self, k: int, exact: bool = False) -> Request:
        """Return the request for the k nearest records only."""
        return replace(self, k=k, exact=exact)

    @property
    def vectors(self) -> Tensor:  # (q, d)
        """The queries as the user's score takes them, without temperatures."""
        return self.queries[..., :-1].contiguous() if isinstance(self.score, Tempered) else self.queries

    @property
    def plain_score(self) -> Score | ScoreFunction:
        """The score before the division by temperatures."""
        return self.score.score if isinstance(self.score, Tempered) else self.score

    @cached_property
    def folded(self) -> Fold | None:
        """The score as a metric of transformed queries, which carry gradients; None if no metric can replace it."""
        return fold(self.score, self.queries)

    @property
    def detached(self) -> Request:
        """The request with queries that require no gradient, for finding candidates and for measurements."""
        return self._detached if self.queries.requires_grad else self

    @cached_property
    def _detached(self) -> Request:
        return replace(self, queries=self.queries.detach())

    @property
    def streamed_score(self) -> Score | ScoreFunction:
        """The score to compute in a pass over all records; for average pooling a score of 0."""
        return indifferent if isinstance(self.weighting, Uniform) else self.score

    @property
    def wants_gradient(self) -> bool:
        """True if the queries require a gradient."""
        return self.queries.requires_grad and torch.is_grad_enabled()

    def masks(self, live: Live) -> tuple[Tensor | None, Tensor | None]:
        """Return the allowed positions (size,), and the mask (q, size) with a column for each position, live or not."""
        keep, mask = None if self.allowed is None else torch.from_numpy(self.allowed), self.mask
        if mask is not None and mask.shape[1] < len(live):
            spread = mask.new_zeros(len(mask), len(live))
            spread[:, torch.from_numpy(live).to(mask.device)] = mask
            mask = spread
        return keep, mask

    def at(self, which: Positions) -> Request:
        """Return the request for the queries with numbers `which`, ascending. They keep their gradients."""
        if len(which) == len(self.queries):
            return self
        chosen = torch.from_numpy(which).to(self.queries.device)
        mask = None if self.mask is None else self.mask[chosen.to(self.mask.device)]
        return replace(self, queries=self.queries[chosen], mask=mask)

    def shown_scores(self, scores: Tensor) -> Tensor:  # (…) -> (…)
        """Convert scores back to the scale of the score that the user passed (undo `LogScore` and `Tempered`)."""
        if isinstance(self.score, Tempered):
            return divided(scores, self.queries[..., -1:].reciprocal())
        return scores.exp() if isinstance(self.score, LogScore) else scores


class Candidates(NamedTuple):
    """Candidates that a search found for each query."""

    positions: Positions  # (q, k), -1 = none
    finder: str  # name of the finder that returned the candidates

    @property
    def certain(self) -> bool:
        """True if every record was compared, so that the candidates are the true nearest."""
        return self.finder in ("flat", "scan")


class Scored(NamedTuple):
    """Candidates of each query and their scores."""

    positions: Positions  # (q, k), -1 = none
    scores: Tensor  # (q, k), -inf for none, with gradients
    keys: Tensor | None = None  # (q, k, d) encoded keys, if pooling may need them
