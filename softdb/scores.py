"""Scores of queries and keys: larger is closer, always."""

from softdb.scoring import (
    Additive,
    Boxcar,
    Constant,
    Cosine,
    DistanceScore,
    Dot,
    Epanechnikov,
    Fold,
    Gaussian,
    General,
    Kernel,
    Laplacian,
    LinearAdditive,
    NegativeL2,
    ScaledDot,
    Score,
    ScoreFunction,
    Triangular,
    fold,
    leave_one_out,
    query_width,
    score_of,
    scott,
    silverman,
    unit,
)

__all__ = [
    "Additive", "Boxcar", "Constant", "Cosine", "DistanceScore", "Dot", "Epanechnikov", "Fold", "Gaussian",
    "General", "Kernel", "Laplacian", "LinearAdditive", "NegativeL2", "ScaledDot", "Score", "ScoreFunction",
    "Triangular", "fold", "leave_one_out", "query_width", "score_of", "scott", "silverman", "unit",
]  # fmt: skip
