"""Blocks against groups of queries: scores, and sums of a block's rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled, inlined
from softdb.compiled.parts import COPIED, HALVES, lanes_of
from softdb.compiled.tile import (
    FEW,
    LANES,
    ROWS,
    inner,
    inner_rows,
    product,
    square_distance,
    wide_vectors,
    widen,
)  # fmt: skip

__all__ = ["compare", "inverse_lengths", "scale_rows", "scores", "sums", "times"]

_F = np.float32
_ZERO, _ONE, _DEAD = _F(0), _F(1), _F(-np.inf)
_SMALL, _LARGE = _F(1e-30), _F(1e30)
_SINGLE = (0,)

_products, _product = product(ROWS, None), product(1, None)
_distances, _distance = square_distance(ROWS, None), square_distance(1, None)
_wide_sums, _pair_sums, _sums = product(None, None), product(None, 2), product(None, 1)
_inner_products, _inner_product = inner(False, False), inner(True, False)
_inner_distances, _inner_distance = inner(False, True), inner(True, True)
_inner_rows, _wide_vectors = inlined(inner_rows), inlined(wide_vectors)


@compiled
def inverse_lengths(keys: Any, place: Any, start: Any, pitch: Any, count: Any, scratch: Any) -> None:
    """1/‖k‖ of a block's keys, 0 for a zero vector; rows are whole vectors."""
    found = scratch.inverse
    for i in range(count):
        at = start + i * pitch
        if place == HALVES:
            _inner_product(_SINGLE, keys.halves, at, pitch, keys.halves, at, pitch, found, i, pitch)
        elif place == COPIED:
            _inner_product(_SINGLE, scratch.keys, at, pitch, scratch.keys, at, pitch, found, i, pitch)
        else:
            _inner_product(_SINGLE, keys.wide, at, pitch, keys.wide, at, pitch, found, i, pitch)
    for i in range(count):
        if _SMALL < found[i] < _LARGE:
            found[i] = _ONE / np.sqrt(found[i])
        else:
            found[i] = _inverse_length(keys, place, start + i * pitch, scratch.keys)


@compiled
def _inverse_length(keys: Any, place: Any, start: Any, copied: Any) -> Any:
    """The same of one key whose square float32 does not hold: float64 holds that of every float32."""
    total = 0.0
    for x in range(start, start + keys.width):
        one = widen(keys.halves[x]) if place == HALVES else copied[x] if place == COPIED else keys.wide[x]
        total += np.float64(one) * np.float64(one)
    return _F(1 / np.sqrt(total)) if total > 1e-76 else _ZERO


@compiled
def _few(shape: Any, block: Any, start: Any, pitch: Any, count: Any, queries: Any, difference: Any, out: Any) -> None:
    """out[i, j] = Σ_x block[i, x] queries[j, x], or Σ_x (block[i, x] - queries[j, x])²."""
    size, rows, i = len(shape), _inner_rows(len(shape)), 0
    while i + rows <= count:
        if difference:
            _inner_distances(shape, block, start + i * pitch, pitch, queries, 0, pitch, out, i * size, pitch)
        else:
            _inner_products(shape, block, start + i * pitch, pitch, queries, 0, pitch, out, i * size, pitch)
        i += rows
    while i < count:
        if difference:
            _inner_distance(shape, block, start + i * pitch, pitch, queries, 0, pitch, out, i * size, pitch)
        else:
            _inner_product(shape, block, start + i * pitch, pitch, queries, 0, pitch, out, i * size, pitch)
        i += 1


@compiled
def _many(
    shape: Any,
    block: Any,
    start: Any,
    pitch: Any,
    width: Any,
    count: Any,
    group: Any,
    g: Any,
    difference: Any,
    out: Any,
) -> None:
    """out[i, j] = Σ_x block[i, x] group[g, x, j], or Σ_x (block[i, x] - group[g, x, j])²."""
    size, first, i = len(shape), g * width * len(shape), 0
    while i + ROWS <= count:
        if difference:
            _distances(shape, block, start + i * pitch, pitch, 1, group, first, size, out, i * size, size, width)
        else:
            _products(shape, block, start + i * pitch, pitch, 1, group, first, size, out, i * size, size, width)
        i += ROWS
    while i < count:
        if difference:
            _distance(shape, block, start + i * pitch, pitch, 1, group, first, size, out, i * size, size, width)
        else:
            _product(shape, block, start + i * pitch, pitch, 1, group, first, size, out, i * size, size, width)
        i += 1


@compiled
def compare(
    shape: Any, column: Any, place: Any, copied: Any, start: Any, pitch: Any, count: Any, queries: Any, g: Any,
    difference: Any, out: Any,
) -> None:  # fmt: skip
    """Products (or squared distances) of a block's rows with a group of vectors, (count, group)."""
    if len(shape) > FEW:
        block = copied if place == COPIED else column.wide
        _many(shape, block, start, pitch, column.width, count, queries, g, difference, out)
    elif place == HALVES:
        _few(shape, column.halves, start, pitch, count, queries, difference, out)
    else:
        _few(shape, copied if place == COPIED else column.wide, start, pitch, count, queries, difference, out)


@compiled
def times(
    shape: Any, a: Any, row: Any, step: Any, rows: Any, b: Any, start: Any, pitch: Any, width: Any, steps: Any, out: Any
) -> None:
    """out[r, x] = Σ_t a[r row + t step] b[start + t pitch + x]; rows are rounded up to whole tiles."""
    height, breadth, x = min(len(shape), ROWS), _wide_vectors(len(shape)) * LANES, 0
    while x < width:
        while x + breadth > width:  # at first as many vectors as fit the registers, then what is left
            breadth = 2 * LANES if breadth > 2 * LANES else LANES
        for r in range(0, rows, height):
            if breadth > 2 * LANES:
                _wide_sums(shape, a, r * row, row, step, b, start + x, pitch, out, r * width + x, width, steps)
            elif breadth > LANES:
                _pair_sums(shape, a, r * row, row, step, b, start + x, pitch, out, r * width + x, width, steps)
            else:
                _sums(shape, a, r * row, row, step, b, start + x, pitch, out, r * width + x, width, steps)
        x += breadth


@compiled
def sums(
    shape: Any, weights: Any, column: Any, place: Any, copied: Any, start: Any, pitch: Any, count: Any, out: Any
) -> None:
    """out[j, x] = Σ_i weights[i, j] block[i, x]."""
    size = len(shape)
    if place == HALVES:
        times(shape, weights, 1, size, size, column.halves, start, pitch, column.pitch, count, out)
    else:
        block = copied if place == COPIED else column.wide
        times(shape, weights, 1, size, size, block, start, pitch, column.pitch, count, out)


@compiled
def scores(
    shape: Any, keys: Any, place: Any, start: Any, pitch: Any, task: Any, g: Any, part: Any, first: Any, count: Any,
    scratch: Any,
) -> Any:  # fmt: skip
    """Scores of a block for a group of queries, (count, group) in scratch, and whether any of them matters."""
    size, out = len(shape), scratch.scores
    compare(shape, keys, place, scratch.keys, start, pitch, count, task.queries, g, task.difference, out)
    if task.difference:
        for x in range(count * size):
            out[x] = -out[x]
    if task.cosine:
        scale_rows(out, scratch.inverse, size, count)
    if part.places.size:
        _mask(size, count, out, part, first, g, scratch.doubt)
    rows, lanes = lanes_of(scratch, size, count)
    _best(lanes, rows, out, scratch.best, scratch.doubt, part.places.size > 0)
    if size == 1:
        for x in range(1, LANES):
            scratch.best[0] = max(scratch.best[0], scratch.best[x])
            scratch.doubt[0] += scratch.doubt[x]
    for j in range(size):
        if scratch.doubt[j] != 0:
            task.top[g * size + j] = scratch.doubt[j]
    found = False
    for j in range(size):
        found = found or (scratch.best[j] - task.top[g * size + j]) * task.inverse_temperature > task.negligible
    return found


@compiled
def scale_rows(table: Any, factors: Any, size: Any, count: Any) -> None:
    """table[i, j] *= factors[i]."""
    for i in range(count):
        for j in range(size):
            table[i * size + j] *= factors[i]


@compiled
def _best(lanes: Any, rows: Any, out: Any, best: Any, doubt: Any, doubted: Any) -> None:
    """The largest of each lane, and NaN in `doubt` for one that is not finite."""
    best[:] = _DEAD
    if doubted:  # already, before a mask made scores infinite
        for i in range(rows):
            for j in range(lanes):
                best[j] = max(best[j], out[i * lanes + j])
        return
    doubt[:] = _ZERO
    for i in range(rows):
        for j in range(lanes):
            best[j] = max(best[j], out[i * lanes + j])
            doubt[j] += out[i * lanes + j] * _ZERO


@compiled
def _mask(size: Any, count: Any, out: Any, part: Any, first: Any, g: Any, doubt: Any) -> None:
    """Scores of -inf for records that take no part, and NaN in `doubt` for a query with one that was not finite."""
    doubt[:] = _ZERO
    for i in range(count):
        for j in range(size):
            doubt[j] += out[i * size + j] * _ZERO
    for j in range(min(size, len(part.mask) - g * size)):
        for i in range(count):
            if not part.mask[g * size + j, part.places[first + i]]:
                out[i * size + j] = _DEAD
