"""The equations as loops in float64. Imports nothing of softdb, so that the two can disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Score: TypeAlias = Callable[[Floats, Floats], float]


def floats(array: ArrayLike) -> Floats:
    return np.asarray(array, np.float64)


def dot(query: Floats, key: Floats) -> float:
    return sum(float(a) * float(b) for a, b in zip(query, key, strict=True))


def scaled_dot(query: Floats, key: Floats) -> float:
    return dot(query, key) / math.sqrt(len(query))


def cosine(query: Floats, key: Floats) -> float:
    lengths = math.sqrt(dot(query, query)) * math.sqrt(dot(key, key))
    return dot(query, key) / lengths if lengths else 0.0


def negative_l2(query: Floats, key: Floats) -> float:
    return -sum((float(a) - float(b)) ** 2 for a, b in zip(query, key, strict=True))


KERNELS: dict[str, Callable[[float], float]] = {  # K(u), u the distance over the bandwidth
    "gaussian": lambda u: math.exp(-u * u / 2),
    "laplacian": lambda u: math.exp(-u),
    "boxcar": lambda u: 1.0 if u <= 1 else 0.0,
    "epanechnikov": lambda u: max(0.0, 1 - u * u),
    "triangular": lambda u: max(0.0, 1 - u),
    "constant": lambda u: 1.0,
}


def scores(
    score: Score,
    queries: ArrayLike,  # (q, d)
    keys: ArrayLike,  # (n, d)
) -> Floats:  # (q, n)
    queries, keys = floats(queries), floats(keys)
    return np.array([[score(query, key) for key in keys] for query in queries]).reshape(len(queries), len(keys))


def softmax(
    scores: Sequence[float] | Floats,  # (k,)
    temperature: float,
    live: Sequence[bool] | NDArray[np.bool_],  # (k,)
) -> tuple[Floats, float]:  # (k,), log of the normaliser
    logits = [float(s) / temperature for s, alive in zip(scores, live, strict=True) if alive]
    if not logits:
        return np.zeros(len(scores)), -math.inf
    top = max(logits)
    lse = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
    weights = [math.exp(float(s) / temperature - lse) if alive else 0.0 for s, alive in zip(scores, live, strict=True)]
    return np.array(weights), lse


def one_hot(labels: ArrayLike, num_classes: int) -> Floats:
    """Labels (n,) as values (n, num_classes)."""
    return floats([[float(label == c) for c in range(num_classes)] for label in np.asarray(labels).tolist()])


def soft_query(
    score: Score,
    queries: ArrayLike,  # (q, d)
    keys: ArrayLike,  # (n, d)
    values: ArrayLike,  # (n, v)
    temperature: float,
    live: NDArray[np.bool_] | None = None,  # (q, n): which records take part in which query
) -> tuple[Floats, Floats]:  # (q, v), (q,)
    table, values = scores(score, queries, keys), floats(values)
    live = np.ones(table.shape, np.bool_) if live is None else live
    outputs, lses = [], []
    for row, alive in zip(table, live, strict=True):
        weights, lse = softmax(row, temperature, alive)
        output = np.zeros(values.shape[1])
        for weight, value in zip(weights, values, strict=True):
            output = output + weight * value
        outputs.append(output)
        lses.append(lse)
    return np.array(outputs).reshape(len(table), values.shape[1]), np.array(lses)


def nearest(
    score: Score,
    queries: ArrayLike,  # (q, d)
    keys: ArrayLike,  # (n, d)
    k: int,
    live: Any = None,  # (n,) bool
) -> list[list[int]]:  # q lists of min(k, live) places, best first; ties go to the lower place
    table = scores(score, queries, keys)
    alive = [i for i in range(table.shape[1]) if live is None or live[i]]
    return [[i for _, i in sorted((-row[i], i) for i in alive)[:k]] for row in table]


def bm25(phrases: list[list[str]], texts: dict[Any, list[str]]) -> dict[Any, float]:
    """Of the texts (tokens) with one of the phrases: Robertson and Zaragoza 2009, with FTS5's constants."""
    mean = sum(map(len, texts.values())) / max(1, len(texts)) or 1.0
    found: dict[Any, float] = {}
    for phrase in phrases:
        counts = {one: _occurrences(phrase, tokens) for one, tokens in texts.items()}
        having = sum(map(bool, counts.values()))
        idf = max(math.log((len(texts) - having + 0.5) / (having + 0.5)), 0) or 1e-6
        for one, count in counts.items():
            if count:
                norm = 1.2 * (1 - 0.75 + 0.75 * len(texts[one]) / mean)
                found[one] = found.get(one, 0.0) + idf * count * 2.2 / (count + norm)
    return found


def _occurrences(phrase: list[str], tokens: list[str]) -> int:
    width = len(phrase)
    return sum(tokens[i : i + width] == phrase for i in range(len(tokens) - width + 1)) if phrase else 0
