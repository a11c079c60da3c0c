"""The longest keys among the k best: a copy of them is compared with every query, tile by tile, from the longest on."""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled, inlined, summed
from softdb.compiled.tile import FEW, LANES, ROWS, inner, inner_rows

__all__ = ["LANES", "ROWS", "take_in"]

ROUNDING = 2.0**-23  # of float32, for each of the products in a score

_SINGLE, _GROUP = (0,), (0,) * FEW
_products, _inner_rows = inner(False, False), inlined(inner_rows)


@compiled
def _put(found: Any, scores: Any, i: Any, position: Any, score: Any) -> None:
    """Puts one record where it belongs among the k best of query i, unless it is there."""
    k = found.shape[1]
    for place in range(k):
        if found[i, place] == position:
            return
    place = k
    while place and (
        scores[i, place - 1] < score or (scores[i, place - 1] == score and found[i, place - 1] > position)
    ):
        place -= 1
    for other in range(k - 1, place, -1):
        found[i, other] = found[i, other - 1]
        scores[i, other] = scores[i, other - 1]
    if place < k:
        found[i, place] = position
        scores[i, place] = score


@summed
def _square(queries: Any, start: Any, width: Any) -> Any:
    """‖q‖², as float64, which holds the squares of every float32."""
    total = 0.0
    for x in range(start, start + width):
        total += np.float64(queries[x]) * np.float64(queries[x])
    return total


@compiled
def _least(queries: Any, start: Any, width: Any, worst: Any) -> Any:
    """The length below which no key scores so much as the worst, by Cauchy and Schwarz."""
    if not worst > 0:
        return -1.0
    return worst / (np.sqrt(_square(queries, start, width)) * (1 + width * ROUNDING))


@compiled
def _compared(
    shape: Any,  # a tuple as long as there are queries
    queries: Any,
    first: Any,
    positions: Any,
    keys: Any,
    lengths: Any,
    found: Any,
    scores: Any,
    width: Any,
    products: Any,
) -> None:
    """The same for a few queries, from the first of them on."""
    size, rows, least = len(shape), _inner_rows(len(shape)), np.inf
    k = found.shape[1]
    for i in range(first, first + size):
        least = min(least, _least(queries, i * width, width, scores[i, k - 1]))
    for j in range(0, len(positions), rows):
        if lengths[j] < least:
            break
        _products(shape, keys, j * width, width, queries, first * width, width, products, 0, width)
        for x in range(rows * size):
            i, which = first + x % size, j + x // size
            if products[x] >= scores[i, k - 1] and positions[which] >= 0 and found[i, k - 1] >= 0:
                _put(found, scores, i, positions[which], products[x])


@compiled
def take_in(
    queries: Any,  # (q · w,) float32; w, whole vectors, is the width, filled up with zeros
    positions: Any,  # (m,) int64, negative = takes no part; m is a multiple of ROWS
    keys: Any,  # (m · w,) float32
    lengths: Any,  # (m,) float64 ‖k‖, descending
    found: Any,  # (q, k) int64, written to: positions, best first, ties by position, negative = none
    scores: Any,  # (q, k) float32, written to
) -> None:
    """The k best of those found and of these keys, where k were found. Operations: 2 q m d at most.

    A key shorter than every query's k-th score over ‖q‖ cannot come in, nor can those after it.
    """
    q, first = len(found), 0
    width, products = len(queries) // q, np.empty(ROWS * FEW, np.float32)
    while first < q:
        if first + FEW <= q:
            _compared(_GROUP, queries, first, positions, keys, lengths, found, scores, width, products)
            first += FEW
        else:
            _compared(_SINGLE, queries, first, positions, keys, lengths, found, scores, width, products)
            first += 1
