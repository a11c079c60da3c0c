"""The score that each metric of a database stands for."""

from __future__ import annotations

from softdb.check import Metric
from softdb.scores.contract import Score
from softdb.scores.distance import NegativeL2
from softdb.scores.products import Cosine, Dot

__all__ = ["score_of"]

_STANDARD: dict[Metric, Score] = {Metric.DOT: Dot(), Metric.COSINE: Cosine(), Metric.L2: NegativeL2()}


def score_of(metric: Metric) -> Score:
    """The score of a database's metric: Dot, Cosine or NegativeL2; always the same object."""
    return _STANDARD[metric]
