"""Scores and pooling of candidates, by compiled loops where the stored columns lie, else by torch from copies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.attend.inplace import Rowwise, distances, dots, sums
from softdb.attend.request import Positions
from softdb.check import Metric
from softdb.compiled.threads import available
from softdb.errors import BadInput
from softdb.index.rerank import scores_at
from softdb.pool import pool
from softdb.scores import Dot, Score, ScoreFunction, fold, score_of
from softdb.store import Snapshot

__all__ = ["Candidates", "Scored", "metric_in_place", "own_scores", "pool_rows", "score_rows"]

EXACT = ("flat", "scan")  # finders whose candidates are the nearest for sure


class Candidates(NamedTuple):
    """The records that a request may weigh."""

    positions: Positions  # (q, k), -1 = none
    finder: str  # which one found them

    @property
    def certain(self) -> bool:
        """Whether they are the nearest for sure."""
        return self.finder in EXACT


class Scored(NamedTuple):
    """Candidates and their scores."""

    positions: Positions  # (q, k), -1 = none
    scores: Tensor  # (q, k), -inf for none, with gradients
    keys: Tensor | None = None  # (q, k, d) as they were compared, where pooling may need them


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
        scores = (dots if metric is Metric.DOT else distances)(queries, Rowwise(snapshot, positions, False))
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
        return sums(weights, Rowwise(snapshot, positions, True))
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
