"""Weightings turn scores into weights, which are nonnegative and sum to 1 over the candidates that take part.

Every weighting follows one contract, `Weighting`. With z = scores / temperature and H the weighting's entropy, all but
`Normalised` and `Uniform` give the p that maximises <p, z> + H(p) over the simplex of these candidates. That maximum is
`lse`, a smoothed maximum of z whose gradient in z is the weights (Blondel, Martins and Niculae 2020).
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
    softmax,
    valid_mask,
    weighting,
)

__all__ = [
    "Argmax", "Entmax15", "Normalised", "Softmax", "Sparse", "Sparsemax", "Uniform", "Weighed", "Weighting",
    "divisor", "softmax", "valid_mask", "weighting",
]  # fmt: skip
