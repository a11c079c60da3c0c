"""Tune an index: find the least effort and the fewest candidates whose measured recall meets a goal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from softdb.index.contract import Floats, Index, Live, Rows
from softdb.index.timing import fastest as least_seconds
from softdb.index.timing import timed

FLAT = 0.002  # the search for an effort ends if two doublings of the effort raise recall by less
FINE = 8  # the effort is found to a precision of effort / FINE
STEADY = 0.001  # recall may fall by this much when the effort grows
PAIRED = 1 << 17  # if pairs of positions are at most this number, comparing them is cheaper than sorting
TIMED = 9  # number of queries that are timed one by one


class Setting(NamedTuple):
    """An effort and a `fetch_k`, with their recall, and the seconds of a query or another measure of cost."""

    effort: int
    fetch_k: int
    recall: float
    seconds: float


class Trial(Protocol):
    """Measures settings of an index by queries with known answers."""

    def recall(self, effort: int, fetch_k: int) -> float:
        """Return the mean recall of a setting."""

    def seconds(self, effort: int, fetch_k: int) -> float:
        """Return the seconds of a query, or another measure of cost."""


def fastest(trial: Trial, index: Index, goal: float, progress: Callable[[int, int], None]) -> Setting:
    """Return the fastest setting that meets the goal. If none does, return the setting with the highest recall.

    For each number of candidates, doubling and then bisection find the least effort.
    """
    best, highest = None, Setting(index.effort_least, index.levels[0], -1.0, np.inf)
    for done, fetch_k in enumerate(index.levels):
        progress(done, len(index.levels))
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
    progress(1, 1)
    return best or highest


def least_effort(
    recall: Callable[[int], float],  # effort -> recall
    low: int,
    high: int,
    goal: float,
    fine: int,  # precision: effort / fine
) -> tuple[int, float]:
    """Find the least effort that meets the goal, by doubling, then bisection. Return the effort and its recall.

    If no effort meets the goal, return the last effort tried: two doublings before it gained less than FLAT.
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
        middle_recall = recall(middle)
        below, effort, reached = (below, middle, middle_recall) if middle_recall >= goal else (middle, effort, reached)
    return effort, reached


def steadied(trial: Trial, index: Index, setting: Setting, goal: float) -> Setting:
    """Return the setting with so many candidates that more effort loses no recall, and with the effort it then needs.

    More effort scans more lists. Records in them that rank too high by code can displace true neighbours.
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


def recalls_of(matches: Rows, truth: Rows, own: Rows | None) -> NDArray[np.float64]:  # (q,)
    """Return the recall of each query, 0 for a query without true nearest records. Arguments as for `hits_of`."""
    hit, counts = hits_of(matches, truth, own)
    recalls: NDArray[np.float64] = hit.sum(1) / np.maximum(1, counts.sum(1))
    return recalls


def hits_of(
    matches: Rows,  # (q, c)
    truth: Rows,  # (q, k), -1 = none
    own: Rows | None,  # (q,) position of each query's own record, which does not count; None: no query is a stored key
) -> tuple[Live, Live]:  # (q, k), (q, k)
    """Return two masks of `truth`: the true nearest that were found, and all true nearest that count."""
    counts = truth >= 0
    if own is not None:
        counts &= truth != own[:, None]
    if not len(truth) or truth.shape[1] * matches.shape[1] <= PAIRED:
        return (truth[:, :, None] == matches[:, None, :]).any(2) & counts, counts
    return np.stack([np.isin(*pair) for pair in zip(truth, matches, strict=True)]) & counts, counts


def seconds_of(search: Callable[[Floats], object], queries: Floats) -> float:
    """Return the seconds per query: the geometric mean of its time in a batch and its time alone."""
    batch = least_seconds(functools.partial(search, queries), 2)
    alone = np.split(queries[:TIMED], range(1, min(TIMED, len(queries))))
    return float(np.sqrt(batch / len(queries) * np.median([timed(functools.partial(search, q))[1] for q in alone])))
