"""Draws of records by their permanent random numbers: which of them stand for the others, and with what chance.

Poisson sampling: every record enters by itself with a probability of its own, so a sum over all records is estimated
without bias by the sum over those drawn, each divided by its probability (Horvitz and Thompson 1952).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled, summed
from softdb.compiled.memory import fetch

__all__ = ["draw", "far", "hashed", "hashes", "log_normal", "thin"]

STEPS = 16  # of the bisection for how many are drawn: to a few thousandths of them
AHEAD = 8  # lists whose random numbers are on their way from memory while one is drawn from
WHOLE = 4294967296.0  # 2³²: random numbers are its fractions

_EMPTY = np.int64(-1)


@compiled
def hashed(number: Any, seed: Any) -> Any:
    """A number's own random uint32: the mixing of SplitMix64 (Steele, Lea and Flood 2014, figure 17)."""
    x = np.uint64(number) + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(seed) + np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint32((x ^ (x >> np.uint64(31))) >> np.uint64(32))


@compiled
def hashes(numbers: Any, seed: Any, out: Any) -> None:
    """The same for many."""
    for i in range(len(numbers)):
        out[i] = hashed(numbers[i], seed)


@compiled
def log_normal(x: Any) -> Any:
    """log Φ(x); far below 0 by its asymptotic series (Abramowitz and Stegun 1964, 26.2.12)."""
    if x > 0:
        return math.log1p(-0.5 * math.erfc(x * math.sqrt(0.5)))
    if x > -10:
        return math.log(0.5 * math.erfc(-x * math.sqrt(0.5)))
    square = 1 / (x * x)
    series = 1 - square * (1 - square * (3 - 15 * square))
    return -0.5 * x * x - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)


@compiled
def far(
    near: Any,  # (q, c) int64 rows that are considered one by one, negative = none
    codes: Any,  # (q, c) float32 their logits, as their codes have it
    means: Any,  # (q, lists) float32 mean of the logits in a list
    deviations: Any,  # (q, lists) float32
    sizes: Any,  # (lists,) float32
    probed: Any,  # how many lists were searched: those that look best
    least: Any,  # a record matters by its weight: NaN; or by its chance to reach this logit
    logits: Any,  # (q, lists) float32, written to: log of how much a record of each list matters
    left: Any,  # (q, lists) float32, written to: about how many of it are not near
) -> None:
    """What is thought of the lists. Cost q lists."""
    (q, c), lists = near.shape, len(sizes)
    above = np.empty(lists)
    for i in range(q):
        count, last = 0, np.inf
        for j in range(c):
            if near[i, j] >= 0:
                count += 1
                last = min(last, np.float64(codes[i, j]))
        last_probed, total = np.partition(means[i], lists - probed)[lists - probed], 0.0
        for j in range(lists):
            mean, deviation, inside = np.float64(means[i, j]), np.float64(deviations[i, j]), 0.0
            log, chance = mean + deviation**2, 0.5 * math.erfc((least - mean) / deviation * math.sqrt(0.5))
            if means[i, j] >= last_probed:
                inside = -np.inf  # unless the search found as many as it was asked for
                if count == c:
                    below = (last - mean) / deviation
                    inside = log_normal(below)
                    log += 0.5 * min(log_normal(below - 2 * deviation) - max(inside, -1e6), 0.0)
                    chance = max(chance + math.expm1(inside), 0.0) / max(math.exp(inside), 1e-300)
            # of so many, the largest lies about here, and their mean square no higher
            log = min(log, mean + deviation * math.sqrt(2 * math.log(sizes[j] + 2)))
            logits[i, j] = log if math.isnan(least) else 0.5 * math.log(max(chance, 1e-12))
            above[j] = sizes[j] * -math.expm1(inside)  # thought to be near; in all there are `count`
            total += above[j]
        for j in range(lists):
            left[i, j] = sizes[j] - above[j] * min(1.0, count / max(total, 1.0))


@summed
def _expected(shares: Any, sizes: Any, factor: Any) -> Any:
    """How many are drawn, about."""
    total = 0.0
    for i in range(len(shares)):
        total += sizes[i] * min(1.0, factor * shares[i])
    return total


@compiled
def _factor(shares: Any, sizes: Any, budget: Any) -> Any:
    """λ so that Σ sizes min(1, λ shares) is the budget."""
    whole = 0.0
    least = np.inf
    for i in range(len(shares)):
        whole += sizes[i]
        if sizes[i] > 0:
            least = min(least, shares[i])
    if budget >= whole or not least > 0:
        return np.inf
    low, high = np.log(budget), -np.log(least)
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        if _expected(shares, sizes, np.exp(middle)) > budget:
            high = middle
        else:
            low = middle
    return np.exp(high)


@compiled
def _note(table: Any, row: Any) -> None:
    """Puts a row into an open-addressed table, whose length is a power of two."""
    place = hashed(row, 0) & (len(table) - 1)
    while table[place] != _EMPTY and table[place] != row:
        place = (place + 1) & (len(table) - 1)
    table[place] = row


@compiled
def _noted(table: Any, row: Any) -> Any:
    place = hashed(row, 0) & (len(table) - 1)
    while table[place] != _EMPTY and table[place] != row:
        place = (place + 1) & (len(table) - 1)
    return table[place] == row


@compiled
def _guess(start: Any, stop: Any, least: Any) -> Any:
    """About where they reach so much."""
    return start + int(np.float64(least) / WHOLE * (stop - start))


@compiled
def _from(chances: Any, start: Any, stop: Any, least: Any) -> Any:
    """The first place from start to stop whose chance is at least so much. They are about equally far apart."""
    place = _guess(start, stop, least)
    while place > start and chances[place - 1] >= least:
        place -= 1
    while place < stop and chances[place] < least:
        place += 1
    return place


@compiled
def _from_list(frame: Any, which: Any, chance: Any, shift: Any, table: Any, rows: Any, logs: Any, count: Any) -> Any:
    """Draws from one list: those whose random number, seen from the shift, lies below the chance. Returns the count."""
    start, stop = frame.starts[which], frame.starts[which + 1]
    limit = chance * WHOLE
    place = _from(frame.chances, start, stop, shift)
    for _ in range(stop - start):
        if place == stop:
            place = start
        if np.float64(np.uint32(frame.chances[place] - shift)) >= limit:
            break
        if not _noted(table, frame.rows[place]):
            if count < len(rows):
                rows[count], logs[count] = frame.rows[place], -np.log(chance)
            count += 1
        place += 1
    return count


@compiled
def _share(near: Any, near_logits: Any, far_logits: Any, far_sizes: Any, plain: Any, shares: Any, sizes: Any) -> None:
    """How much of the draws each near row, and each record of a list, is worth; and how many of each there are."""
    c, lists = len(near), len(far_logits)
    top = np.float32(-np.inf)
    for j in range(c):
        if near[j] >= 0:
            top = max(top, near_logits[j])
    for j in range(lists):
        top = max(top, far_logits[j])
    total, whole = 0.0, 0.0
    for j in range(c):
        there = near[j] >= 0
        sizes[j], shares[j] = (1.0, np.exp(np.float64(near_logits[j] - top))) if there else (0.0, 0.0)
        total += shares[j]
        whole += sizes[j]
    for j in range(lists):
        sizes[c + j], shares[c + j] = far_sizes[j], np.exp(np.float64(far_logits[j] - top))
        total += sizes[c + j] * shares[c + j]
        whole += sizes[c + j]
    for j in range(c + lists):
        shares[j] = (1 - plain) * shares[j] / total + plain / whole


@compiled
def _from_near(near: Any, shares: Any, factor: Any, seed: Any, table: Any, rows: Any, logs: Any) -> Any:
    """Draws of the near rows, which are noted, too. Returns their count."""
    count = 0
    for j in range(len(near)):
        if near[j] >= 0:
            _note(table, near[j])
            chance = min(1.0, factor * shares[j])
            if np.float64(hashed(near[j], seed)) < chance * WHOLE:
                if count < len(rows):
                    rows[count], logs[count] = near[j], -np.log(chance)
                count += 1
    return count


@compiled
def draw(
    near: Any,  # (q, c) int64 rows that are considered one by one, negative = none
    near_logits: Any,  # (q, c) float32 log of how much each matters
    far_logits: Any,  # (q, lists) float32 log of how much a record of each list matters
    far_sizes: Any,  # (q, lists) float32 about how many of a list are not near
    frame: Any,  # Frame: the rows of each list by their random numbers
    budget: Any,  # about how many to draw
    plain: Any,  # share of the budget that goes to all alike
    seeds: Any,  # (q,) uint64
    rows: Any,  # (q, w) int64, written to
    logs: Any,  # (q, w) float32, written to: log of the inverse of a row's probability
    counts: Any,  # (q,) int64, written to; above w where there was no room
) -> None:
    """Rows drawn for each query. Every record has a positive probability. Cost q (c + lists) STEPS, and the draws."""
    (q, c), lists = near.shape, far_logits.shape[1]
    length = 64
    while length < 2 * c:
        length *= 2
    table, shares, sizes = np.empty(length, np.int64), np.empty(c + lists), np.empty(c + lists)
    for i in range(q):
        table[:] = _EMPTY
        _share(near[i], near_logits[i], far_logits[i], far_sizes[i], plain, shares, sizes)
        factor = _factor(shares, sizes, budget)
        count = _from_near(near[i], shares, factor, seeds[i], table, rows[i], logs[i])
        for j in range(lists):
            if j + AHEAD < lists:
                start = _guess(frame.starts[j + AHEAD], frame.starts[j + AHEAD + 1], hashed(j + AHEAD, seeds[i]))
                fetch(frame.chances.ctypes.data + 4 * start, 1)
            if frame.starts[j] < frame.starts[j + 1]:
                chance = min(1.0, factor * shares[c + j])
                count = _from_list(frame, j, chance, hashed(j, seeds[i]), table, rows[i], logs[i], count)
        counts[i] = count


@compiled
def thin(
    rows: Any,  # (q, w) int64
    logits: Any,  # (q, w) float32 how much each matters, its log-weight included; -inf = not at all
    logs: Any,  # (q, w) float32 log of the inverse of its probability
    budget: Any,  # about how many to keep
    seeds: Any,  # (q,) uint64
    kept: Any,  # (q, k) int64, written to: places of those that are kept
    kept_logs: Any,  # (q, k) float32, written to
    counts: Any,  # (q,) int64, written to; above k where there was no room
) -> None:
    """Keeps some of the rows drawn, each by its true weight."""
    q, w = rows.shape
    shares, sizes = np.empty(w), np.empty(w)
    for i in range(q):
        top = np.float32(-np.inf)
        for j in range(w):
            top = max(top, logits[i, j])
        total = 0.0
        for j in range(w):
            there = logits[i, j] > -np.inf
            shares[j] = np.exp(np.float64(logits[i, j] - top)) if there else 0.0
            sizes[j] = 1.0 if shares[j] > 0 else 0.0
            total += shares[j]
        for j in range(w):
            shares[j] /= max(total, 1e-300)
        factor = _factor(shares, sizes, budget)
        count = 0
        for j in range(w):
            chance = min(1.0, factor * shares[j]) if sizes[j] > 0 else 0.0
            if np.float64(hashed(rows[i, j], seeds[i])) < chance * WHOLE:
                if count < kept.shape[1]:
                    kept[i, count], kept_logs[i, count] = j, logs[i, j] - np.log(chance)
                count += 1
        counts[i] = count
