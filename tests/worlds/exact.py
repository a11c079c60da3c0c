"""Exact answers in a world of the suite, in float64 from the equations, in blocks of records. Nothing of softdb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worlds.suite import World

__all__ = ["Answer", "Count", "answers", "count_within", "log_density", "radius", "rms_value", "temperatures"]

Floats = NDArray[np.float64]
BLOCK = 1 << 22  # scores held at once: 32 MB
ABSOLUTE = tuple(10.0**power for power in range(-5, 4))
DIVISORS = (0.3, 1, 2, 4, 8, 16)  # of the deviation of the scores
SAMPLE = 20_000  # records that tell the deviation and the quantiles of the scores
ROUNDING = 1e-6  # of a score in float32, relative to what it was summed from


class Answer(NamedTuple):
    """The soft query at one temperature."""

    output: Floats  # (q, v), or (q, num_classes)
    lse: Floats  # (q,)


class Count(NamedTuple):
    """Counts of records within the radius."""

    value: Floats  # (q,)
    doubtful: Floats  # (q,) records so close to the radius that float32 may err about them


class _Sums(NamedTuple):
    top: Floats  # (q,) the largest logit so far
    total: Floats  # (q,) Σ exp(logit - top)
    pooled: Floats  # (q, v) Σ exp(logit - top) v


def answers(world: World, asked: Sequence[float]) -> list[Answer]:
    """o = Σ w_i v_i / Σ w_i and lse = log Σ w_i, w_i = exp(s_i / T), for each temperature. Cost q n (d + v) each."""
    q, width = len(world.queries), _width(world)
    sums = [_Sums(np.full(q, -np.inf), np.zeros(q), np.zeros((q, width))) for _ in asked]
    for rows, scores, _ in _blocks(world):
        values = _values(world, rows)
        sums = [_added(one, scores / temperature, values) for one, temperature in zip(sums, asked, strict=True)]
    return [Answer(one.pooled / one.total[:, None], one.top + np.log(one.total)) for one in sums]


def _added(
    sums: _Sums,
    logits: Floats,  # (q, b)
    values: Floats,  # (b, v)
) -> _Sums:
    top = np.maximum(sums.top, logits.max(1, initial=-np.inf))
    weights, before = np.exp(logits - top[:, None]), np.exp(sums.top - top)
    return _Sums(top, before * sums.total + weights.sum(1), before[:, None] * sums.pooled + weights @ values)


def count_within(world: World, limit: float) -> Count:
    """Records whose distance is at most the radius ("l2"), or whose score is at least that. Cost q n d."""
    least = -limit * limit if world.metric == "l2" else limit
    value, doubtful = np.zeros(len(world.queries)), np.zeros(len(world.queries))
    for _, scores, size in _blocks(world):
        value += (scores >= least).sum(1)
        doubtful += (np.abs(scores - least) <= ROUNDING * size).sum(1)
    return Count(value, doubtful)


def log_density(world: World, answer: Answer, temperature: float) -> Floats:  # (q,)
    """log p = lse - log n - d/2 log 2π - d log h of the Gaussian kernel with -‖q - k‖² / T = -u² / 2: h = √(T / 2)."""
    d = world.keys.shape[1]
    volume = d / 2 * math.log(2 * math.pi) + d / 2 * math.log(temperature / 2)
    return np.asarray(answer.lse - math.log(world.taking_part.sum()) - volume)


def temperatures(world: World) -> dict[str, float]:
    """By name: absolute ones, and the scores' deviation over the records, mean of the queries, divided ("sd/4")."""
    deviation = float(_sample(world).std(1).mean())
    absolute = {f"{temperature:g}": temperature for temperature in ABSOLUTE}
    return absolute | {f"sd/{divisor:g}": deviation / divisor for divisor in DIVISORS}


def radius(world: World, share: float) -> float:
    """The radius within which the median query has that share of the records."""
    least = float(np.median(np.quantile(_sample(world), 1 - share, axis=1)))
    return math.sqrt(max(-least, 1e-12)) if world.metric == "l2" else least


def rms_value(world: World) -> float:
    """√ of the mean of ‖v‖² over the records that take part; 1 for labels."""
    if world.num_classes is not None:
        return 1.0
    total = sum(float(np.square(_values(world, rows)).sum()) for rows in _parts(world))
    return math.sqrt(total / world.taking_part.sum())


def _parts(world: World) -> list[NDArray[np.int64]]:
    """The rows that take part, in blocks."""
    rows = np.flatnonzero(world.taking_part)
    numbers = max(len(world.queries), world.keys.shape[1], _width(world))
    return np.array_split(rows, max(1, -(-len(rows) * numbers // BLOCK)))


def _blocks(world: World) -> Iterator[tuple[NDArray[np.int64], Floats, Floats]]:
    """Rows (b,), their scores (q, b), and the size of what a score was summed from, (q, b)."""
    for rows in _parts(world):
        yield rows, *_scored(world, rows)


def _sample(world: World) -> Floats:  # (q, m)
    rows = np.flatnonzero(world.taking_part)
    return _scored(world, rows[:: max(1, len(rows) // SAMPLE)])[0]


def _scored(world: World, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:  # (q, b), (q, b)
    """Scores of the stored keys, and ‖q‖ ‖k‖ or, for "l2", ‖q‖² + ‖k‖²."""
    keys, queries = _stored(world.keys[rows], world), world.queries.astype(np.float64)
    squares, lengths = np.square(queries).sum(1)[:, None], np.square(keys).sum(1)
    products = queries @ keys.T
    if world.metric == "l2":
        return np.minimum(2 * products - squares - lengths, 0), squares + lengths
    size = np.sqrt(squares * lengths)
    if world.metric == "dot":
        return products, size
    return products / np.where(size > 0, size, 1), np.ones_like(size)


def _values(world: World, rows: NDArray[np.int64]) -> Floats:  # (b, v)
    if world.values is None:
        return _stored(world.keys[rows], world)
    if world.num_classes is None:
        return _stored(world.values[rows], world)
    return np.asarray(np.arange(world.num_classes) == world.values[rows, None], np.float64)


def _stored(columns: NDArray[np.float32], world: World) -> Floats:
    return columns.astype(world.dtype).astype(np.float64)


def _width(world: World) -> int:
    if world.num_classes is not None:
        return world.num_classes
    return int((world.keys if world.values is None else world.values).shape[1])
