"""How hard an index must look: the least effort and candidates whose measured recall meets a goal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from softdb.index.contract import Floats, Index, Live, Rows

__all__ = ["Exam", "Setting", "hits_of", "recall_of", "recalls_of", "seconds_of", "settle", "steadied"]

LEVELS = (6, 10, 20, 40, 80, 160)  # candidates for each of the k: beyond, the codes are not worth their scan
FLAT = 0.002  # recall that two doublings of effort must bring, or no more effort will
STEADY = 0.001  # recall that more effort may lose
TIMED = 9  # single queries whose median counts


class Setting(NamedTuple):
    """An effort and candidates, what they reach, and the seconds a query takes: alone and in a batch, their mean."""

    effort: int
    candidates: int
    recall: float
    seconds: float


class Exam(Protocol):
    """Questions whose answers are known."""

    def recall(self, effort: int, candidates: int) -> float:
        """The share of the true nearest that are found."""

    def seconds(self, effort: int, candidates: int) -> float:
        """What a query costs."""


def settle(exam: Exam, index: Index, goal: float, say: Callable[[int, int], None]) -> Setting:
    """The fastest setting that meets the goal, or, where none does, the one of the highest recall.

    For each number of candidates the least effort, by doubling, then bisection.
    """
    best, highest = None, Setting(1, LEVELS[0], -1.0, np.inf)
    for done, candidates in enumerate(LEVELS):
        say(done, len(LEVELS))
        effort, reached = _least(exam, index.effort_most, candidates, goal)
        if reached < goal:
            if reached > highest.recall + FLAT or highest.recall < 0:
                highest = Setting(effort, candidates, reached, np.inf)
            continue
        this = Setting(effort, candidates, reached, exam.seconds(effort, candidates))
        if best is not None and this.seconds >= best.seconds:
            break
        best = this
    say(len(LEVELS), len(LEVELS))
    return best or highest


def _least(exam: Exam, most: int, candidates: int, goal: float) -> tuple[int, float]:
    """The least effort that meets the goal and its recall, or the most that still gains and its."""
    effort, trail = 1, [exam.recall(1, candidates)]
    while trail[-1] < goal and effort < most:
        if len(trail) > 4 and trail[-1] - trail[-3] < FLAT:
            break
        effort = min(2 * effort, most)
        trail.append(exam.recall(effort, candidates))
    low, reached = effort // 2, trail[-1]
    while reached >= goal and effort - low > max(1, effort // 8):
        middle = (low + effort) // 2
        recall = exam.recall(middle, candidates)
        low, effort, reached = (low, middle, recall) if recall >= goal else (middle, effort, reached)
    return effort, reached


def steadied(exam: Exam, most: int, setting: Setting) -> Setting:
    """With as many candidates more as it takes for a greater effort not to lose recall.

    Probing more lists brings more wrong codes, too, which push true neighbours out of too few candidates.
    """
    effort, candidates, reached, seconds = setting
    while candidates < LEVELS[-1] and _loses(exam, effort, most, candidates):
        candidates = min(LEVELS[-1], candidates + -(-candidates // 2))
        reached = exam.recall(effort, candidates)
    return Setting(effort, candidates, reached, seconds)


def _loses(exam: Exam, effort: int, most: int, candidates: int) -> bool:
    """Whether recall falls somewhere as the effort is doubled."""
    highest = 0.0
    while True:
        reached = exam.recall(effort, candidates)
        if reached < highest - STEADY:
            return True
        if effort >= most:
            return False
        highest, effort = max(highest, reached), min(2 * effort, most)


def recall_of(
    found: Rows,  # (q, c)
    truth: Rows,  # (q, k), -1 = none
    own: Rows | None = None,  # (q,) positions that do not count
) -> float:
    """Share of the true nearest that were found."""
    return float(recalls_of(found, truth, own).mean()) if len(found) else 0.0


def recalls_of(
    found: Rows,  # (q, c)
    truth: Rows,  # (q, k), -1 = none
    own: Rows | None = None,  # (q,) positions that do not count
) -> NDArray[np.float64]:  # (q,)
    """The same for each query; 0 where there is nothing to find."""
    hit, counts = hits_of(found, truth, own)
    recalls: NDArray[np.float64] = hit.sum(1) / np.maximum(1, counts.sum(1))
    return recalls


def hits_of(
    found: Rows,  # (q, c)
    truth: Rows,  # (q, k), -1 = none
    own: Rows | None = None,  # (q,) positions that do not count
) -> tuple[Live, Live]:  # (q, k), (q, k)
    """Which of the true nearest were found, and which of them count."""
    counts = truth >= 0
    if own is not None:
        counts &= truth != own[:, None]
    return (truth[:, :, None] == found[:, None, :]).any(2) & counts, counts


def seconds_of(search: Callable[[Floats], object], queries: Floats) -> float:
    """Seconds a query, the geometric mean of a batch's and of a single one's."""
    batch, single = [], []
    for _ in range(2):
        start = time.perf_counter()
        search(queries)
        batch.append(time.perf_counter() - start)
    for place in range(min(TIMED, len(queries))):
        start = time.perf_counter()
        search(queries[place : place + 1])
        single.append(time.perf_counter() - start)
    return float(np.sqrt(min(batch) / len(queries) * np.median(single)))
