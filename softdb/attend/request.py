"""A soft query, checked: what is asked, of which records, and where its candidates are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.inplace import Column, scores_in_place, sums
from softdb.attend.scanning import scan
from softdb.check import Metric, shown
from softdb.compiled.threads import available
from softdb.errors import BadInput
from softdb.index.rerank import scores_at
from softdb.pool import pool
from softdb.scores import Dot, Fold, Gaussian, Kernel, Score, ScoreFunction, fold, score_of
from softdb.store import Snapshot
from softdb.weights import Normalised, Softmax, Weighting

__all__ = [
    "Candidates",
    "Finder",
    "LogScore",
    "SoftQuery",
    "candidates",
    "indifferent",
    "metric_in_place",
    "pool_rows",
    "score_rows",
    "soft_query",
]

Positions: TypeAlias = NDArray[np.int64]
Live: TypeAlias = NDArray[np.bool_]
Finder: TypeAlias = Callable[[Fold, int, "Live | None"], "tuple[Positions, str]"]  # -> positions (q, k), finder's name

EXACT = ("flat", "scan")  # finders whose candidates are the nearest for sure


class LogScore(torch.nn.Module):
    """log s of a score s ≥ 0, such as a kernel: the softmax of log s is s / Σ s, also where every s underflows."""

    def __init__(self, score: Score | ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(
        self,
        queries: Tensor,  # (q, d)
        keys: Tensor,  # (n, d) or (q, k, d)
    ) -> Tensor:  # (q, n) or (q, k)
        """log s, -inf where s is 0. Raises BadInput where it is negative."""
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

    def fold(
        self,
        queries: Tensor,  # (q, d)
    ) -> Fold | None:
        """The order is the score's own; a gaussian's log is a squared distance."""
        folded = fold(self.score, queries)
        if folded is not None and isinstance(self.score, Gaussian):
            return folded._replace(scale=0.5 / self.score.bandwidth.double() ** 2, bias=0.0)
        return None if folded is None else folded._replace(scale=None, bias=0.0)


@dataclass(frozen=True)
class SoftQuery:
    """A soft query's fixed parts, checked."""

    queries: Tensor  # (q, d)
    score: Score | ScoreFunction  # of which softmax, or another weighting, is taken
    weighting: Weighting
    temperature: float
    allowed: Live | None  # (size,) over positions
    mask: Tensor | None  # (q, live records) in row order, True = takes part
    num_classes: int | None
    pooled_dim: int  # v of the answer

    def of(self, which: Positions) -> SoftQuery:
        """The same for some of the queries (ascending), with their gradient."""
        if len(which) == len(self.queries):
            return self
        chosen = torch.from_numpy(which).to(self.queries.device)
        mask = None if self.mask is None else self.mask[chosen.to(self.mask.device)]
        return replace(self, queries=self.queries[chosen], mask=mask)

    def shown_scores(
        self,
        scores: Tensor,  # (…)
    ) -> Tensor:  # (…)
        """Scores as the user's own score gives them."""
        return scores.exp() if isinstance(self.score, LogScore) else scores

    def taking_part(self, snapshot: Snapshot) -> Tensor:
        """How many records each query may weigh, (q,)."""
        if self.mask is None:
            count = snapshot.count if self.allowed is None else int(np.count_nonzero(self.allowed & snapshot.live))
            return torch.full((len(self.queries),), count)
        mask = self.mask.cpu()
        if self.allowed is not None:
            mask = mask & torch.from_numpy(self.allowed[snapshot.live])
        return mask.sum(1)


def indifferent(
    queries: Tensor,  # (…, q, d_q)
    keys: Tensor,  # (…, n, d)
) -> Tensor:  # (…, q, n)
    """A score that tells no key from another, with gradients of 0: what average pooling asks."""
    return queries[..., :1] * 0 + keys[..., :1].mT * 0


def soft_query(
    queries: Tensor,  # (q, d)
    score: Score | ScoreFunction,
    weighting: Weighting,
    temperature: float,
    allowed: Live | None,
    mask: Tensor | None,
    num_classes: int | None,
    pooled_dim: int,
) -> SoftQuery:
    """A soft query. Normalised weights become the softmax of the score's logarithm, which cannot underflow."""
    if isinstance(weighting, Normalised):
        if temperature != 1:
            raise BadInput(
                f"temperature is {shown(temperature)} but normalised weights have none; leave it at 1 and set the "
                "kernel's bandwidth, or use softmax"
            )
        score, weighting = LogScore(score), Softmax()
    return SoftQuery(queries, score, weighting, temperature, allowed, mask, num_classes, pooled_dim)


class Candidates(NamedTuple):
    """The records that a soft query weighs."""

    positions: Positions  # (q, k), -1 = none
    finder: str  # which one found them

    @property
    def certain(self) -> bool:
        """Whether they are the nearest for sure."""
        return self.finder in EXACT


def candidates(query: SoftQuery, snapshot: Snapshot, k: int, find: Finder) -> Candidates:
    """The k nearest of each query by its score. With a mask each query searches its own records.

    A score without an index form (`fold` gives None) is compared with every record.
    """
    queries = query.queries.detach()
    with torch.no_grad():
        folded = fold(query.score, queries)
    if folded is None:
        return Candidates(scan(queries, snapshot, query.score, k, allowed=query.allowed, mask=query.mask), "scan")
    if query.mask is None:
        return Candidates(*find(folded, k, query.allowed))
    found = np.full((len(queries), k), -1, np.int64)
    names = set()
    for i, mine in enumerate(query.mask.cpu().numpy()):
        allowed = np.zeros(snapshot.size, np.bool_)
        allowed[snapshot.live] = mine
        if query.allowed is not None:
            allowed &= query.allowed
        one, name = find(folded._replace(queries=folded.queries[i : i + 1]), k, allowed)
        found[i] = one[0]
        names.add(name)
    return Candidates(found, "flat" if not names - {"flat"} else (names - {"flat"}).pop())


def score_rows(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
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
    if metric in (Metric.DOT, Metric.L2):
        scores = scores_in_place(queries, snapshot, positions, metric)
        if bool(scores.detach().isfinite().all()):
            return scores.masked_fill(~live, -torch.inf)
    keys = queries.new_zeros(*positions.shape, queries.shape[1])
    if snapshot.size:  # a live key stands where there is none: a score may not bear a key of zeros
        first = np.argmax(snapshot.live)
        keys = snapshot.keys_at(np.where(positions < 0, first, positions))
    with torch.autocast(queries.device.type, enabled=False):
        scores = own_scores(score, queries, keys.to(queries.device))
    return scores.masked_fill(~live, -torch.inf)


def in_place(tensor: Tensor, snapshot: Snapshot) -> bool:
    """Whether compiled loops read stored columns where they lie for it; else torch has to, from copies."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and snapshot.size > 0 and available()


def metric_in_place(
    score: Score | ScoreFunction, queries: Tensor, snapshot: Snapshot, gradient: bool = False
) -> Metric | None:
    """The metric by which compiled loops score candidates where the keys lie; None where torch has to."""
    if not in_place(queries, snapshot) or (queries.requires_grad and torch.is_grad_enabled()) is not gradient:
        return None
    if type(score) is Dot:
        return Metric.DOT
    return next((metric for metric in Metric if score is score_of(metric)), None)


def pool_rows(
    weights: Tensor,  # (q, k)
    snapshot: Snapshot,
    positions: Positions,  # (q, k), -1 = none
    num_classes: int | None,
) -> Tensor:  # (q, v), or (q, num_classes)
    """The weighted sum of the candidates' stored values, as `softdb.pool.pool`, without a copy where none is needed."""
    if num_classes is None and in_place(weights, snapshot):
        return sums(weights, Column(snapshot, positions, True))
    return pool(weights, snapshot.values_at(positions), num_classes)


def own_scores(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    keys: Tensor,  # (q, k, d), each query's own
) -> Tensor:  # (q, k)
    """A score of each query's own keys. A plain callable need only know shared keys: then each query is asked alone."""
    expected = tuple(keys.shape[:2])
    if fold(score, queries[:1].detach()) is not None or isinstance(score, torch.nn.Module):
        scores = score(queries, keys)
    else:
        keys = keys.to(queries.dtype)
        each = [score(one.unsqueeze(0), own) for one, own in zip(queries, keys, strict=True)]
        scores = torch.cat(each) if each else queries.new_zeros(expected)
    if tuple(scores.shape) != expected:
        raise BadInput(
            f"the score returned shape {tuple(scores.shape)} for queries {tuple(queries.shape)} and their own keys "
            f"{tuple(keys.shape)}; expected {expected}"
        )
    if bool(scores.detach().isnan().any()):
        raise BadInput("the score returned NaN; a score must be a number for every query and stored key")
    return scores.to(queries.dtype)
