"""Scores of keys (larger is closer), and weightings of scores (weights are nonnegative and sum to 1).

All functions work on tensors, without a database. Begin with the two protocols, `score.py` and `weighting.py`.
"""

from softdb.scoring.additive import Additive, LinearAdditive
from softdb.scoring.bandwidth import leave_one_out, scott, silverman
from softdb.scoring.dense import Normalised, Softmax, Uniform, softmax
from softdb.scoring.distance import DistanceScore, NegativeL2, score_of
from softdb.scoring.kernels import Boxcar, Constant, Epanechnikov, Gaussian, Kernel, Laplacian, Triangular
from softdb.scoring.named import valid_mask, weighting
from softdb.scoring.products import Cosine, Dot, General, ScaledDot, unit
from softdb.scoring.score import Fold, Score, ScoreFunction, fold, query_width
from softdb.scoring.sparse import Argmax, Entmax15, Sparse, Sparsemax
from softdb.scoring.tempered import Tempered, divided, with_temperature
from softdb.scoring.weighting import Weighed, Weighting, divisor

__all__ = [
    "Additive", "Argmax", "Boxcar", "Constant", "Cosine", "DistanceScore", "Dot", "Entmax15", "Epanechnikov", "Fold",
    "Gaussian", "General", "Kernel", "Laplacian", "LinearAdditive", "NegativeL2", "Normalised", "ScaledDot", "Score",
    "ScoreFunction", "Softmax", "Sparse", "Sparsemax", "Tempered", "Triangular", "Uniform", "Weighed", "Weighting",
    "divided", "divisor", "fold", "leave_one_out", "query_width", "score_of", "scott",
    "silverman", "softmax", "unit", "valid_mask", "weighting", "with_temperature",
]  # fmt: skip
