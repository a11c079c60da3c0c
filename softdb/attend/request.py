"""The Request, a checked soft query, and its candidates. Every answer is a function of a Request and a Source."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric, Tolerance, shown
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
    Uniform,
    Weighting,
    fold,
    weighting,
)

Positions: TypeAlias = NDArray[np.int64]
Live: TypeAlias = NDArray[np.bool_]


class LogScore(torch.nn.Module):
    """log s of a score s ≥ 0, such as a kernel. Its softmax is s / Σ s, even if every s underflows."""

    def __init__(self, score: Score | ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (q, d), (n, d) or (q, k, d) -> (q, n) or (q, k)
        """Return log s, -inf for s = 0. Raises BadInput if a score is negative."""
        if isinstance(self.score, Kernel):
            return self.score.log(queries, keys)
        scores = self.score(queries, keys)
        if bool((scores.detach() < 0).any()):
            raise BadInput(
                f"a score is {scores.detach().min().item()}; normalised weights need kernel values, at least 0: use "
                "softmax, or a score that is a kernel"
            )
        nothing = scores == 0
        return scores.masked_fill(nothing, 1).log().masked_fill(nothing, -torch.inf)

    def fold(self, queries: Tensor) -> Fold | None:  # (q, d)
        """The fold of the score, which orders keys alike; the log of a gaussian is a squared distance."""
        folded = fold(self.score, queries)
        if folded is not None and isinstance(self.score, Gaussian):
            return folded._replace(scale=0.5 / self.score.bandwidth.double() ** 2, bias=0.0)
        return None if folded is None else folded._replace(scale=None, bias=0.0)


def indifferent(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d_q), (…, n, d) -> (…, q, n)
    """Score 0 of every key, with gradients of 0, for average pooling."""
    return queries[..., :1] * 0 + keys[..., :1].mT * 0


class Population(Protocol):
    """Records that a request counts."""

    @property
    def live(self) -> Live:
        """Positions that hold a record, (size,) bool."""

    @property
    def count(self) -> int:
        """Number of records."""


@dataclass(frozen=True)
class Request(Query):
    """A soft query: a `Query` that weighs records by a score. `of` checks the arguments.

    Its k, 0 for all records, are the nearest by the score, whatever the metric.
    """

    score: Score | ScoreFunction  # of which softmax, or another weighting, is taken
    weighting: Weighting = Softmax()  # noqa: RUF009 - immutable
    temperature: float = 1.0
    _: KW_ONLY
    k: int = 0
    metric: Metric = Metric.DOT
    allowed: Live | None = None
    mask: Tensor | None = None  # (q, live records) in row order, True = takes part
    tolerance: Tolerance | None = None  # of an estimate; without k and tolerance the answer is exact
    seed: int = 0  # of an estimate's draws
    need_weights: bool = False  # hold the weights of an exact answer
    pools: bool = True  # False: the log-normaliser alone is wanted

    @classmethod
    def of(
        cls,
        queries: Tensor,
        score: Score | ScoreFunction,
        weights: str | Weighting | None = None,
        temperature: float = 1.0,
        **parts: Any,
    ) -> Request:
        """Return a request; `parts` are further fields. Weights None: "normalised" for a kernel, else "softmax".

        Normalised weights become the softmax of the score's logarithm, which cannot underflow.
        """
        by = weighting(("normalised" if isinstance(score, Kernel) else "softmax") if weights is None else weights)
        if isinstance(by, Normalised):
            if temperature != 1:
                raise BadInput(
                    f"temperature is {shown(temperature)} but normalised weights have none; leave it at 1 and set the "
                    "kernel's bandwidth, or use softmax"
                )
            score, by = LogScore(score), Softmax()
        return cls(queries, score, by, temperature, **parts)

    def top(self, k: int, exact: bool = False) -> Request:
        """Return the request truncated to the k nearest."""
        return replace(self, k=k, exact=exact)

    @cached_property
    def folded(self) -> Fold | None:
        """The score as a metric of transformed queries, with their graph; None if no index can find its nearest."""
        return fold(self.score, self.queries)

    @cached_property
    def detached(self) -> Request:
        """The request without a graph, for finding candidates and for figures without a gradient."""
        return replace(self, queries=self.queries.detach())

    @property
    def streamed_score(self) -> Score | ScoreFunction:
        """The score of a pass over all records; average pooling needs none."""
        return indifferent if isinstance(self.weighting, Uniform) else self.score

    @property
    def wants_gradient(self) -> bool:
        """True if the queries require a gradient."""
        return self.queries.requires_grad and torch.is_grad_enabled()

    def masks(self, live: Live) -> tuple[Tensor | None, Tensor | None]:
        """The allowed positions (size,) and the mask (q, size), both over positions."""
        keep, mask = None if self.allowed is None else torch.from_numpy(self.allowed), self.mask
        if mask is not None and mask.shape[1] < len(live):
            spread = mask.new_zeros(len(mask), len(live))
            spread[:, torch.from_numpy(live).to(mask.device)] = mask
            mask = spread
        return keep, mask

    def at(self, which: Positions) -> Request:
        """The request for some of the queries (ascending), with their gradient."""
        if len(which) == len(self.queries):
            return self
        chosen = torch.from_numpy(which).to(self.queries.device)
        mask = None if self.mask is None else self.mask[chosen.to(self.mask.device)]
        return replace(self, queries=self.queries[chosen], mask=mask)

    def shown_scores(self, scores: Tensor) -> Tensor:  # (…) -> (…)
        """Scores as the user's own score gives them."""
        return scores.exp() if isinstance(self.score, LogScore) else scores

    def taking_part(self, source: Population) -> Tensor:  # (q,)
        """Number of records that each query may weigh."""
        device = self.queries.device
        if self.mask is None:
            count = source.count if self.allowed is None else int(np.count_nonzero(self.keep(source.live)))
            return torch.full((len(self.queries),), count, device=device)
        mask = self.mask.cpu()
        if self.allowed is not None:
            mask = mask & torch.from_numpy(self.allowed[source.live])
        return mask.sum(1).to(device)


class Candidates(NamedTuple):
    """Candidates of a search."""

    positions: Positions  # (q, k), -1 = none
    finder: str  # kind of the finder that returned them

    @property
    def certain(self) -> bool:
        """True if every record was compared, so that these are the nearest."""
        return self.finder in ("flat", "scan")


class Scored(NamedTuple):
    """Candidates and their scores."""

    positions: Positions  # (q, k), -1 = none
    scores: Tensor  # (q, k), -inf for none, with gradients
    keys: Tensor | None = None  # (q, k, d) as compared, if pooling may need them
