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

__all__ = ["draw", "hashed", "hashes", "list_proposals", "log_normal", "subsample"]

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
def list_proposals(
    found: Any,  # (q,) int64 how many records are near, and looked at one by one
    near: Any,  # (5, q) float64 of the others in the lists searched, as `beyond.caps` has it, in logits:
    # the last of the near by its code (-inf: there are no others), cap, deviation from codes, share hidden, edge
    means: Any,  # (q, lists) float64 mean of the logits in a list
    deviations: Any,  # (q, lists) float64
    excess: Any,  # (q, lists) float64 how many times as far as others the farthest record of a list may lie
    sizes: Any,  # (lists,) int64
    searched: Any,  # (q, lists) bool
    visible: Any,  # deviations from which on too few draws would show a record
    least: Any,  # a record matters by its weight: NaN; or by its chance to reach this logit
    caps: Any,  # (q, lists) float64 the largest logit that a record of a list may have; lowered where it was searched
    logits: Any,  # (q, lists) float64, written to: log of how much a record of each list matters
    hiding: Any,  # (q, lists) float64, written to: half the log of the mean square of the weights not shown
    left: Any,  # (q, lists) float64, written to: about how many of it are not near
) -> None:
    """What is thought of the lists. Cost q lists."""
    q, lists = means.shape
    above, counts = np.empty(lists), not math.isnan(least)
    for i in range(q):
        last, cap, noise, share, edge = near[0, i], near[1, i], near[2, i], near[3, i], near[4, i]
        total = 0.0
        for j in range(lists):
            mean, deviation, inside = means[i, j], deviations[i, j], -np.inf
            log, wide = mean + deviation**2, deviation * excess[i, j]
            chance, away = 0.5 * math.erfc((least - mean) / deviation * math.sqrt(0.5)), (least - mean) / wide
            hidden = mean + wide**2 + 0.5 * log_normal(2 * wide - visible)
            above[j] = 0.0
            if searched[i, j] and last > -np.inf:
                coded = math.sqrt(max(deviation**2 - noise**2, 0.25 * deviation**2))
                below = (last - mean) / coded
                inside = log_normal(below)
                # the codes of those left lie below the last; what they weigh differs from that by the noise
                cut = 0.5 * min(log_normal(below - 2 * coded) - max(inside, -1e6), 0.0)
                log = min(mean + coded**2 + cut, last) + noise**2
                chance = max(chance + math.expm1(inside), 0.0) / max(math.exp(inside), 1e-300)
                hidden, away = min(log, edge + noise**2) + share, (least - edge) / max(noise, 1e-300)
                above[j] = sizes[j] * -math.expm1(inside)  # thought to be near
            elif searched[i, j]:
                above[j], hidden, away = sizes[j], -np.inf, np.inf
            else:  # of so many, the largest lies about here, and their mean square no higher
                log = min(log, mean + deviation * math.sqrt(2 * math.log(sizes[j] + 2)))
            if searched[i, j]:
                caps[i, j] = min(caps[i, j], cap)
            logits[i, j] = 0.5 * math.log(max(chance, 1e-12)) if counts else min(log, caps[i, j])
            hiding[i, j] = 0.5 * log_normal(-max(away, visible)) if counts else min(hidden, caps[i, j])
            total += above[j]
        for j in range(lists):
            left[i, j] = sizes[j] - above[j] * min(1.0, found[i] / max(total, 1.0))


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
def _shares(logits: Any, caps: Any, left: Any, plain: Any, capped: Any, shares: Any) -> None:
    """What a record of each list is worth of the draws: some by what it is thought to weigh, some by what it may."""
    lists = len(logits)
    top, most = -np.inf, -np.inf
    for j in range(lists):
        if left[j] > 0:
            top, most = max(top, logits[j]), max(most, caps[j])
    total, whole, largest = 0.0, 0.0, 0.0
    for j in range(lists):
        total += left[j] * np.exp(logits[j] - top) if top > -np.inf else 0.0
        largest += left[j] * np.exp(caps[j] - most) if most > -np.inf else 0.0
        whole += left[j]
    for j in range(lists):
        shares[j] = plain / max(whole, 1e-300)
        if total > 0:
            shares[j] += (1 - plain - capped) * np.exp(logits[j] - top) / total
        if largest > 0:
            shares[j] += capped * np.exp(caps[j] - most) / largest


@compiled
def _bound(
    logits: Any,
    caps: Any,
    hiding: Any,
    left: Any,
    shares: Any,
    factor: Any,
    starts: Any,
    least: Any,
    found: Any,
) -> None:
    """What records that are not drawn may add, for one query: see `draw`. Cost lists."""
    most, weighs = -np.inf, math.isnan(least)
    hidden_top, hidden, top, whole = -np.inf, 0.0, -np.inf, 0.0
    for j in range(len(logits)):
        if starts[j] < starts[j + 1]:
            hidden_top, top = max(hidden_top, hiding[j]), max(top, logits[j])
    for j in range(len(logits)):
        chance = min(1.0, factor * shares[j])
        if chance < 1 and (weighs or caps[j] >= least) and starts[j] < starts[j + 1]:
            most = max(most, (caps[j] if weighs else 0.0) - np.log(chance))
            if hidden_top > -np.inf:
                hidden += left[j] / chance * np.exp(2 * (hiding[j] - hidden_top))
            if top > -np.inf:
                whole += left[j] / chance * np.exp(2 * (logits[j] - top))
    found[0], found[1], found[2] = most, 2 * hidden_top + np.log(hidden), 2 * top + np.log(whole)


@compiled
def draw(
    near: Any,  # (q, c) int64 rows that are taken already, negative = none
    logits: Any,  # (q, lists) float64 log of how much a record of each list matters
    caps: Any,  # (q, lists) float64 the largest logit that one of its records may have
    hiding: Any,  # (q, lists) float64 half the log of the mean square of the weights that draws may not show
    left: Any,  # (q, lists) float64 about how many of a list are not near
    frame: Any,  # Frame: the rows of each list by their random numbers
    budget: Any,  # about how many to draw
    plain: Any,  # share of the budget that goes to all alike
    capped: Any,  # and that goes by the caps
    least: Any,  # a record that may not reach this logit adds nothing; NaN: all do, by their weight
    seeds: Any,  # (q,) uint64
    rows: Any,  # (q, w) int64, written to
    logs: Any,  # (q, w) float32, written to: log of the inverse of a row's probability
    counts: Any,  # (q,) int64, written to; above w where there was no room
    bounds: Any,  # (3, q) float64, written to: log of the largest term that a record not drawn may be; log of Σ y² / p
    # over what draws may not show, and over all
) -> None:
    """Rows drawn from the lists for each query. Every record has a positive probability. Cost q lists STEPS, the draws.

    The term of a record is its weight over its probability; where only those count that reach `least`, 1 over it. The
    sum is over the records that may hide, y² the mean square of what they may weigh, p their probability.
    """
    (q, c), lists = near.shape, logits.shape[1]
    length = 64
    while length < 2 * c:
        length *= 2
    table, shares = np.empty(length, np.int64), np.empty(lists)
    for i in range(q):
        table[:] = _EMPTY
        for j in range(c):
            if near[i, j] >= 0:
                _note(table, near[i, j])
        _shares(logits[i], hiding[i], left[i], plain, capped, shares)
        factor = _factor(shares, left[i], budget)
        _bound(logits[i], caps[i], hiding[i], left[i], shares, factor, frame.starts, least, bounds[:, i])
        count = 0
        for j in range(lists):
            if j + AHEAD < lists:
                start = _guess(frame.starts[j + AHEAD], frame.starts[j + AHEAD + 1], hashed(j + AHEAD, seeds[i]))
                fetch(frame.chances.ctypes.data + 4 * start, 1)
            if frame.starts[j] == frame.starts[j + 1]:
                continue
            chance = min(1.0, factor * shares[j])
            count = _from_list(frame, j, chance, hashed(j, seeds[i]), table, rows[i], logs[i], count)
        counts[i] = count


@compiled
def subsample(
    rows: Any,  # (q, w) int64
    logits: Any,  # (q, w) float64 how much each matters, its log-weight included; -inf = not at all
    scales: Any,  # (w,) float64 at least 1: by how much more the values of some matter
    logs: Any,  # (q, w) float32 log of the inverse of its probability
    budget: Any,  # about how many to keep
    seeds: Any,  # (q,) uint64
    kept: Any,  # (q, k) int64, written to: places of those that are kept
    kept_logs: Any,  # (q, k) float32, written to
    counts: Any,  # (q,) int64, written to; above k where there was no room
    largest: Any,  # (q,) float64, written to: log of the term of each that was not sure to be kept; -inf: all were
) -> None:
    """Keeps some of the rows drawn, each in proportion to its true weight. Cost q w STEPS."""
    q, w = rows.shape
    shares, sizes = np.empty(w), np.empty(w)
    for i in range(q):
        top, total = -np.inf, 0.0
        for j in range(w):
            top = max(top, logits[i, j])
        for j in range(w):
            shares[j] = np.exp(logits[i, j] - top) * scales[j] if logits[i, j] > -np.inf else 0.0
            total += shares[j]
        for j in range(w):
            shares[j] /= max(total, 1e-300)
            sizes[j] = 1.0 if shares[j] > 0 else 0.0  # lost beside the others, to the last digit
        factor = _factor(shares, sizes, budget)
        count, largest[i] = 0, -np.inf
        for j in range(w):
            if not sizes[j] > 0:
                continue
            chance = min(1.0, factor * shares[j])
            if chance < 1:
                largest[i] = top + np.log(total / factor)
            if np.float64(hashed(rows[i, j], seeds[i])) < chance * WHOLE:
                if count < kept.shape[1]:
                    kept[i, count], kept_logs[i, count] = j, logs[i, j] - np.log(chance)
                count += 1
        counts[i] = count
