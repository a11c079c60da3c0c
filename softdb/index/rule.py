"""The rule that chooses the lists that a query scans, from the scores of their centroids. It is fitted to queries.

The number of a query's k nearest records in a list of N records is modelled as Poisson with mean N times

    exp(a g + b z + c z² + d)     g = (s - t) / (ρ u) is the gap of the list's records above t, the score of the k-th
                                  best in the first lists: s is their mean score, for l2 lower than their centroid's by
                                  ρ²; ρ u is its deviation (ρ of the residuals, u = |q|, for l2 2 |q - c|); z is the
                                  centroid's score standardised over the lists
    Φ(a' g + d')                  with a filter: matches lie in lists of any z, and their scores are about normal

A list is scanned if a match is expected among `records_per_match` of its records (lists.cc, step 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.index.contract import Floats, Live, Rows

FIRST = 4  # number of lists that are always scanned (kFirst of lists.cc)
MOSTLY = 0.9  # if a filter allows a smaller share of the records, it may exclude most of the nearest
RARE = 0.05  # value of min(1, 2 s) at which the linear threshold is exact (`of_kernels`)
ROUNDS = 25  # largest number of steps of Newton's method

Doubles: TypeAlias = NDArray[np.float64]
Link: TypeAlias = Callable[[Doubles], tuple[Doubles, Doubles]]  # linear predictor -> log of the rate, its derivative


class Rule(NamedTuple):
    """Coefficients of the fitted rule: a, b, c and d of the module's docstring; with a filter a' and d'."""

    gap: float = 1.0
    linear: float = 0.0
    square: float = 0.0
    constant: float = 0.0
    filtered_gap: float = 3.0  # typical of fits
    filtered_constant: float = -1.0

    def of_kernels(self, records_per_match: float, share: float) -> tuple[float, float, float, float, float]:
        """Return a, b, c and the threshold t, u: a list is scanned if a g + b z + c z² > t + u log min(1, 2 s).

        s is the share of the records in a query's first lists that a filter allows, `share` that of all records. With
        fewer allowed records, matches are spread more widely, and fewer records per match suffice: √min(1, 2 s) times
        as many keep recall about the same, whether or not the filter depends on the keys (measured on five worlds;
        three are in tests/unit/index/test_filtered_lists.py). The threshold is taken to be linear in log s. With 0
        records per match only the first lists are scanned.
        """
        if not records_per_match:
            return 1.0, 0.0, 0.0, math.inf, 0.0
        if share < MOSTLY:
            most, least = (_normal_edge(records_per_match * math.sqrt(share_allowed)) for share_allowed in (1.0, RARE))
            return self.filtered_gap, 0.0, 0.0, most - self.filtered_constant, (least - most) / math.log(RARE)
        return self.gap, self.linear, self.square, -math.log(records_per_match) - self.constant, 0.0


def _normal_edge(records_per_match: float) -> float:
    """Return the quantile of the standard normal distribution at 1 / records_per_match, at most the median."""
    return NormalDist().inv_cdf(min(1 / records_per_match, 0.5))


def fitted(
    scores: Floats,  # (q, lists) scores of the centroids
    gaps: Floats,  # (q, lists) g of the module's docstring; not finite if a query has no threshold t
    sizes: Rows,  # (lists,)
    nearest: Rows,  # (q, k) the list that holds each of the k nearest, -1 = none
) -> tuple[Rule, float]:
    """Fit the rule by maximum likelihood. Return the rule, and the least `records_per_match` at which half of the
    queries scan more than the first lists. The fit ignores the lists that are always scanned.
    """
    lines, widths = np.arange(len(scores))[:, None], scores.std(1, keepdims=True)
    counts, seen = np.zeros(scores.shape, np.float32), nearest >= 0
    np.add.at(counts, (np.broadcast_to(lines, nearest.shape)[seen], nearest[seen]), 1)
    first = min(FIRST, scores.shape[1] - 1)
    takes_part: Live = (sizes > 0) & np.isfinite(gaps) & (widths > 0)
    takes_part[lines, np.argpartition(-scores, first, axis=1)[:, :first]] = False
    matches = counts[takes_part]
    if not matches.any():
        return Rule(), 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        away = ((scores - scores.mean(1, keepdims=True)) / widths)[takes_part].astype(np.float64)
    gap = gaps[takes_part].astype(np.float64)
    records = np.broadcast_to(sizes, scores.shape)[takes_part]
    usual = float(matches.sum() / records.sum())
    facts = np.column_stack([gap, away, np.square(away)])
    weights, constant = _poisson(facts, matches, records, _exponential, np.log(usual))
    far, far_constant = _poisson(gap[:, None], matches, records, _normal, NormalDist().inv_cdf(min(usual, 0.5)))
    rates = np.full(scores.shape, -np.inf)
    rates[takes_part] = facts @ weights + constant
    # rounded far beyond the bits in which sums depend on the number of threads
    rule = Rule(*(round(float(number), 3) for number in (*weights, constant, *far, far_constant)))
    return rule, round(float(np.exp(np.clip(-np.median(rates.max(1)), 0, 20))), 1)


def _exponential(numbers: Doubles) -> tuple[Doubles, Doubles]:
    return np.minimum(numbers, 50), np.ones_like(numbers)


def _normal(numbers: Doubles) -> tuple[Doubles, Doubles]:
    logs: Doubles = torch.special.log_ndtr(torch.from_numpy(numbers)).numpy()
    return logs, np.exp(-np.square(numbers) / 2 - logs) / np.sqrt(2 * np.pi)


def _poisson(
    facts: Doubles,  # (m, f)
    counts: Floats,  # (m,)
    records: Rows,  # (m,)
    link: Link,
    usual: float,
) -> tuple[Doubles, float]:  # (f,)
    """Fit weights and a constant by maximum likelihood: counts ~ Poisson(records · rate(facts · weights + constant)).

    The method is Fisher scoring; a step is halved until the likelihood rises (McCullagh and Nelder 1989, section 2.5).
    If the weight of the gap (the first) is not positive, return weight 1 for it, 0 for others, and constant `usual`.
    """
    middle, spread = facts.mean(0), facts.std(0) + 1e-9
    given, sizes = np.column_stack([np.ones(len(facts)), (facts - middle) / spread]), np.log(records)

    def likelihood(weights: Doubles) -> tuple[float, Doubles, Doubles]:
        logs, slopes = link(given @ weights)
        expected = np.exp(logs + sizes)
        return float((counts * logs - expected).sum()), expected, slopes

    weights = np.array([usual, *np.zeros(len(middle))])
    reached, expected, slopes = likelihood(weights)
    for _ in range(ROUNDS):
        curvature = (given * (expected * np.square(slopes))[:, None]).T @ given + 1e-9 * np.eye(len(weights))
        step = np.linalg.solve(curvature, given.T @ ((counts - expected) * slopes))
        for halving in range(ROUNDS):
            likely, *moved = likelihood(weights + step / 2**halving)
            if likely > reached:
                break
        else:
            break
        weights, gained, reached, (expected, slopes) = weights + step / 2**halving, likely - reached, likely, moved
        if gained < 1e-6 * abs(reached):
            break
    rates = weights[1:] / spread
    if not np.isfinite(weights).all() or rates[0] <= 0:
        return np.eye(1, len(rates))[0], usual
    return rates, float(weights[0] - rates @ middle)
