"""Scores: how close a key is to a query. Larger is closer, always; every score a user sees is computed here."""

from softdb.scores.additive import Additive, LinearAdditive
from softdb.scores.bandwidth import leave_one_out, scott, silverman
from softdb.scores.contract import Fold, Score, ScoreFunction, fold, metric_of, query_width
from softdb.scores.distance import DistanceScore, NegativeL2, score_of
from softdb.scores.kernels import Boxcar, Constant, Epanechnikov, Gaussian, Kernel, Laplacian, Triangular
from softdb.scores.products import Cosine, Dot, General, ScaledDot, unit

__all__ = [
    "Additive",
    "Boxcar",
    "Constant",
    "Cosine",
    "DistanceScore",
    "Dot",
    "Epanechnikov",
    "Fold",
    "Gaussian",
    "General",
    "Kernel",
    "Laplacian",
    "LinearAdditive",
    "NegativeL2",
    "ScaledDot",
    "Score",
    "ScoreFunction",
    "Triangular",
    "fold",
    "leave_one_out",
    "metric_of",
    "query_width",
    "score_of",
    "scott",
    "silverman",
    "unit",
]
