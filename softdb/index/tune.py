"""Tuning of an index: the least effort and candidates whose measured recall meets a goal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from softdb.index.contract import Floats, Index, Live, Rows
from softdb.index.timing import fastest as least_seconds
from softdb.index.timing import timed

FLAT = 0.002  # recall that two doublings of effort must gain, else no more effort is tried
FINE = 8  # the effort is found to within one part in so many
STEADY = 0.001  # recall that more effort may lose
PAIRED = 1 << 17  # positions of a query that are compared pair by pair: beyond, to sort is cheaper
TIMED = 9  # single queries whose median counts


class Setting(NamedTuple):
    """An effort and candidates, what they reach, and the seconds a query takes, or another cost of it."""

    effort: int
    fetch_k: int
    recall: float
    seconds: float


class Trial(Protocol):
    """Questions whose answers are known."""

    def recall(self, effort: int, fetch_k: int) -> float:
        """The share of the true nearest that are found."""

    def seconds(self, effort: int, fetch_k: int) -> float:
        """Seconds of a query."""


def fastest(trial: Trial, index: Index, goal: float, say: Callable[[int, int], None]) -> Setting:
    """The fastest setting that meets the goal, or, where none does, the one of the highest recall.

    For each number of candidates the least effort, by doubling, then bisection.
    """
    best, highest = None, Setting(index.effort_least, index.levels[0], -1.0, np.inf)
    for done, fetch_k in enumerate(index.levels):
        say(done, len(index.levels))
        recall = functools.partial(trial.recall, fetch_k=fetch_k)
        effort, reached = least_effort(recall, index.effort_least, index.effort_most, goal, FINE)
        if reached < goal:
            if reached > highest.recall + FLAT or highest.recall < 0:
                highest = Setting(effort, fetch_k, reached, np.inf)
            continue
        this = Setting(effort, fetch_k, reached, trial.seconds(effort, fetch_k))
        if best is not None and this.seconds >= best.seconds:
            break
        best = this
    say(1, 1)
    return best or highest


def least_effort(
    recall: Callable[[int], float],  # of an effort
    low: int,
    high: int,
    goal: float,
    fine: int,  # the effort is found to within one part in so many
) -> tuple[int, float]:
    """The least effort that meets the goal and its recall, by doubling, then bisection.

    Where none does, the effort beyond which two doublings bring next to nothing, and its recall.
    """
    effort, trail = low, [recall(low)]
    while trail[-1] < goal and effort < high:
        if len(trail) > 4 and trail[-1] - trail[-3] < FLAT:
            break
        effort = min(2 * effort, high)
        trail.append(recall(effort))
    below, reached = effort if len(trail) == 1 else effort // 2, trail[-1]
    while reached >= goal and effort - below > max(1, effort // fine):
        middle = (below + effort) // 2
        found = recall(middle)
        below, effort, reached = (below, middle, found) if found >= goal else (middle, effort, reached)
    return effort, reached


def steadied(trial: Trial, index: Index, setting: Setting, goal: float) -> Setting:
    """With as many candidates more as it takes for a greater effort not to lose recall, and the effort they need.

    More probed lists also bring more wrong codes, which push true neighbours out of too few candidates.
    """
    effort, fetch_k, reached, seconds = setting
    most = index.levels[-1]
    while fetch_k < most and _loses(trial, effort, index.effort_most, fetch_k):
        fetch_k = min(most, fetch_k + -(-fetch_k // 2))
        recall = functools.partial(trial.recall, fetch_k=fetch_k)
        effort, reached = least_effort(recall, index.effort_least, effort, goal, FINE)
    return Setting(effort, fetch_k, reached, seconds)


def _loses(trial: Trial, effort: int, most: int, fetch_k: int) -> bool:
    """Return True if recall falls somewhere as the effort is doubled."""
    highest = 0.0
    while True:
        reached = trial.recall(effort, fetch_k)
        if reached < highest - STEADY:
            return True
        if effort >= most:
            return False
        highest, effort = max(highest, reached), min(2 * effort, most)


def recalls_of(found: Rows, truth: Rows, own: Rows | None) -> NDArray[np.float64]:  # (q,)
    """The share of each query's true nearest that were found, 0 where there are none; arguments as `hits_of`."""
    hit, counts = hits_of(found, truth, own)
    recalls: NDArray[np.float64] = hit.sum(1) / np.maximum(1, counts.sum(1))
    return recalls


def hits_of(
    found: Rows,  # (q, c)
    truth: Rows,  # (q, k), -1 = none
    own: Rows | None,  # (q,) positions that do not count
) -> tuple[Live, Live]:  # (q, k), (q, k)
    """Masks of the true nearest that were found, and of those that count."""
    counts = truth >= 0
    if own is not None:
        counts &= truth != own[:, None]
    if not len(truth) or truth.shape[1] * found.shape[1] <= PAIRED:
        return (truth[:, :, None] == found[:, None, :]).any(2) & counts, counts
    return np.stack([np.isin(*pair) for pair in zip(truth, found, strict=True)]) & counts, counts


def seconds_of(search: Callable[[Floats], object], queries: Floats) -> float:
    """Seconds a query, the geometric mean of a batch's and of a single one's."""
    batch = least_seconds(functools.partial(search, queries), 2)
    alone = np.split(queries[:TIMED], range(1, min(TIMED, len(queries))))
    return float(np.sqrt(batch / len(queries) * np.median([timed(functools.partial(search, q))[1] for q in alone])))
