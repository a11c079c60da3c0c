"""Weights: what scores become. Nonnegative, and summing to 1 over the live candidates.

Every weighting keeps one contract, `Weighting`. With z = scores / temperature and H its entropy, all but `Normalised`
and `Uniform` give the p that maximises <p, z> + H(p) over the simplex of the live entries; that maximum is `lse`, a
smoothed largest z whose gradient in z is the weights (Blondel, Martins and Niculae 2020).
"""

from softdb.scoring import (
    Argmax,
    Entmax15,
    Normalised,
    Softmax,
    Sparse,
    Sparsemax,
    Uniform,
    Weighed,
    Weighting,
    divisor,
    normalised_log,
    softmax,
    valid_mask,
    weighting,
)

__all__ = [
    "Argmax",
    "Entmax15",
    "Normalised",
    "Softmax",
    "Sparse",
    "Sparsemax",
    "Uniform",
    "Weighed",
    "Weighting",
    "divisor",
    "normalised_log",
    "softmax",
    "valid_mask",
    "weighting",
]
