"""The rule of lists: which of them may hold a match, by the score of their centroid. Fitted to queries.

The number of a query's k nearest in list j, of N records, is taken as Poisson, with the logarithm of its mean

    log N + a g + b z + c z² + d        g = (s - t) / (ρ u) is how far the list's score s lies above t, the score of
                                        the k-th best in the first lists, in deviations ρ u of the scores in the list
                                        (ρ of the residuals, u = |q|, for l2 2 |q - c|); z is s standardised over the
                                        lists

A list is scanned where a match is expected among `records_per_match` of its records (lists.cc, step 3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.index.contract import Floats, Live, Rows

FIRST = 4  # lists that are scanned whatever the rule (kFirst of lists.cc)
ROUNDS = 25  # of Newton's method at most


class Rule(NamedTuple):
    """The coefficients a, b, c and d."""

    gap: float = 1.0
    linear: float = 0.0
    square: float = 0.0
    constant: float = 0.0


def fitted(
    scores: Floats,  # (q, lists) of the centroids
    edges: Floats,  # (q, 1) t
    deviations: Floats,  # (q, lists) ρ u
    sizes: Rows,  # (lists,)
    nearest: Rows,  # (q, k) the list of each of the nearest, -1 = none
) -> tuple[Rule, float]:
    """The rule of the greatest likelihood, and the least records per match by which half of the queries scan more.

    Lists that are scanned in any case take no part.
    """
    lines, widths = np.arange(len(scores))[:, None], scores.std(1, keepdims=True)
    counts, seen = np.zeros(scores.shape, np.float32), nearest >= 0
    np.add.at(counts, (np.broadcast_to(lines, nearest.shape)[seen], nearest[seen]), 1)
    first = min(FIRST, scores.shape[1] - 1)
    takes_part: Live = (sizes > 0) & np.isfinite(edges) & (widths > 0)
    takes_part[lines, np.argpartition(-scores, first, axis=1)[:, :first]] = False
    if not counts[takes_part].any():
        return Rule(), 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        away = ((scores - scores.mean(1, keepdims=True)) / widths)[takes_part]
        gaps = ((scores - edges) / deviations)[takes_part]
    facts = np.column_stack([gaps, away, np.square(away)]).astype(np.float64)
    records = np.broadcast_to(np.log(np.maximum(sizes, 1)), scores.shape)[takes_part]
    rule = _poisson(facts, counts[takes_part], records)
    rates = np.full(scores.shape, -np.inf)
    rates[takes_part] = facts @ rule[:3] + rule.constant
    return rule, float(np.exp(np.clip(-np.median(rates.max(1)), 0, 20)))


def _poisson(facts: NDArray[np.float64], counts: Floats, records: NDArray[np.float64]) -> Rule:  # (m, 3), (m,), (m,)
    """The rule of the greatest likelihood: counts ~ Poisson(exp(facts · weights + constant + records)).

    By Newton's method, the step halved until the likelihood rises (McCullagh and Nelder 1989, section 2.5).
    """
    middle, spread = facts.mean(0), facts.std(0) + 1e-9
    given = np.column_stack([np.ones(len(facts)), (facts - middle) / spread])

    def likelihood(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logs = np.minimum(given @ weights + records, 50)
        expected = np.exp(logs)
        return float((counts * logs - expected).sum()), expected

    weights = np.array([np.log(max(counts.sum(), 1) / np.exp(records).sum()), 0, 0, 0])
    reached, expected = likelihood(weights)
    for _ in range(ROUNDS):
        curvature = (given * expected[:, None]).T @ given + 1e-9 * np.eye(4)
        step = np.linalg.solve(curvature, given.T @ (counts - expected))
        for halving in range(ROUNDS):
            likely, moved = likelihood(weights + step / 2**halving)
            if likely > reached:
                break
        else:
            break
        weights, gained, (reached, expected) = weights + step / 2**halving, likely - reached, (likely, moved)
        if gained < 1e-6 * abs(reached):
            break
    rates = weights[1:] / spread
    if not np.isfinite(weights).all() or rates[0] <= 0:
        return Rule(constant=float(np.log(max(counts.sum(), 1) / np.exp(records).sum())))
    gap, linear, square = map(float, rates)
    return Rule(gap, linear, square, float(weights[0] - rates @ middle))
