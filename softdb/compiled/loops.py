"""The fused soft query: scores, weights and products of a block while it lies in the cache.

For each block of records and each group of queries: S = K Qᵀ, the maximum, exp, Σ, and O += Pᵀ V, as in Dao et al. 2022
(algorithms 1 and 4), with the keys read in order where the queries stay. No loop here allocates or takes the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.compare import compare, inverse_lengths, scale_rows, scores, sums, times
from softdb.compiled.decorators import compiled, inlined
from softdb.compiled.parts import BLOCK, lanes_of, load, row_of
from softdb.compiled.tile import FEW, LANES, bits, real

__all__ = ["GROUPS", "backward", "forward"]

GROUPS = (1, FEW, LANES, 2 * LANES)  # queries that fill a tile; a smaller number is padded to one of these

_F = np.float32
_LOG2E, _ROUND = _F(1.44269504088896341), _F(12582912.0)  # 1.5 · 2²³: adding it rounds to a whole number
_LN2, _LN2_REST = _F(0.693359375), _F(-2.12194440e-4)
_P5, _P4, _P3 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_P2, _P1, _P0 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_ONE, _ZERO, _LEAST = _F(1), _F(0), _F(-87)


@inlined
def _exp(x: Any) -> Any:
    """e^x for x ≤ 0, to two units in the last place; 0 below -87 (Moshier's Cephes, expf)."""
    bounded = max(x, _LEAST)
    shifted = bounded * _LOG2E + _ROUND
    whole = shifted - _ROUND
    rest = bounded - whole * _LN2
    rest = rest - whole * _LN2_REST
    p = ((((_P5 * rest + _P4) * rest + _P3) * rest + _P2) * rest + _P1) * rest + _P0
    p = p * rest * rest + rest + _ONE
    found = real(np.int32(bits(p) + (bits(shifted) << np.int32(23))))
    return found if x >= _LEAST else _ZERO


@compiled
def _exponentials(size: Any, count: Any, top: Any, inverse_temperature: Any, scratch: Any) -> None:
    """Scores become weights exp((s - top) / T), in place; their sums, in `scratch.best`."""
    rows, lanes = lanes_of(scratch, size, count)
    tops, totals, out = scratch.doubt, scratch.best, scratch.scores
    for j in range(lanes):
        tops[j] = top[min(j, size - 1)]
    totals[:] = _ZERO
    for i in range(rows):
        for j in range(lanes):
            # at most 0, but a score computed twice may differ in its last digit
            weight = _exp(min(out[i * lanes + j] - tops[j], _ZERO) * inverse_temperature)
            out[i * lanes + j] = weight
            totals[j] += weight
    for j in range(size, lanes):
        totals[0] += totals[j]


@compiled
def _raise_top(size: Any, g: Any, task: Any, best: Any, total: Any, output: Any, wide: Any, labels: Any) -> None:
    """The sums so far, seen from a new largest score."""
    padded = len(total)
    for j in range(size):
        at = g * size + j
        if best[j] > task.top[at]:
            decay = np.exp(np.float64(task.top[at] - best[j]) * task.inverse_temperature)
            task.top[at] = best[j]
            total[at] *= decay
            if labels:
                for x in range(at, len(output), padded):
                    output[x] *= decay
            else:
                for x in range(at * wide, (at + 1) * wide):
                    output[x] *= decay


@compiled
def _add_labels(
    size: Any, g: Any, padded: Any, labels: Any, part: Any, first: Any, count: Any, weights: Any, output: Any
) -> None:
    """Each record's weights to its own class; a label that rot has made since it was looked at has none."""
    last = len(output) - size
    for i in range(count):
        to = np.int64(labels[row_of(part, first + i)]) * padded + g * size
        for j in range(size if 0 <= to <= last else 0):
            output[to + j] += weights[i * size + j]


@compiled
def _add(found: Any, size: Any, to: Any, total: Any) -> None:
    for x in range(size):
        total[to + x] += found[x]


@compiled
def forward(
    shape: Any,  # a tuple as long as a group of queries
    keys: Any,  # Column
    values: Any,  # Column; of no width where there are labels
    labels: Any,  # (n,) int32, or empty
    part: Any,  # Part
    task: Any,  # Task
    output: Any,  # (groups · group, pitch) float64, or (num_classes, groups · group) for labels; flat
    total: Any,  # (groups · group,) float64
    scratch: Any,  # Scratch
) -> None:
    """Takes the records of a part into the state (output, task.top, total) of an online softmax, in place."""
    size, few, wide = len(shape), len(shape) <= FEW, values.pitch
    for first in range(part.low, part.high, BLOCK):
        count = min(BLOCK, part.high - first)
        place, start, pitch = load(keys, part, first, count, task.centre, scratch.keys, few or task.cosine, few)
        if task.cosine:
            inverse_lengths(keys, place, start, pitch, count, scratch)
        v_place, v_start, v_pitch = -1, 0, 0  # not loaded yet
        for g in range(len(total) // size):
            if not scores(shape, keys, place, start, pitch, task, g, part, first, count, scratch):
                continue
            _raise_top(size, g, task, scratch.best, total, output, wide, labels.size > 0)
            _exponentials(size, count, task.top[g * size : (g + 1) * size], task.inverse_temperature, scratch)
            _add(scratch.best, size, g * size, total)
            if labels.size:
                _add_labels(size, g, len(total), labels, part, first, count, scratch.scores, output)
                continue
            if not wide:  # nothing is pooled
                continue
            if v_place < 0:
                v_place, v_start, v_pitch = load(values, part, first, count, task.nowhere, scratch.values, True, few)
            sums(shape, scratch.scores, values, v_place, scratch.values, v_start, v_pitch, count, scratch.sums)
            _add(scratch.sums, size * wide, g * size * wide, output)


@compiled
def _pulls(
    size: Any, count: Any, along: Any, weights: Any, inverse_total: Any, offset: Any, inverse_temperature: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Weights become ds = w (g·v + offset) / T, and `along`, which holds g·v, the weights; the sums of ds."""
    totals[:] = _ZERO
    for i in range(count):
        for j in range(size):
            weight = weights[i * size + j] * inverse_total[j]
            found = weight * (along[i * size + j] + offset[j]) * inverse_temperature
            weights[i * size + j] = found
            along[i * size + j] = weight
            totals[j] += found


@compiled
def _along_labels(
    size: Any, g: Any, padded: Any, labels: Any, part: Any, first: Any, count: Any, grads: Any, along: Any
) -> None:
    """g·v of a label: the gradient of its class."""
    last = len(grads) - size
    for i in range(count):
        start = np.int64(labels[row_of(part, first + i)]) * padded + g * size
        sound = 0 <= start <= last
        for j in range(size):
            along[i * size + j] = grads[start + j] if sound else np.float32(0)


@compiled
def backward(
    shape: Any,  # a tuple as long as a group of queries
    keys: Any,  # Column
    values: Any,  # Column; of no width where there are labels
    labels: Any,  # (n,) int32, or empty
    part: Any,  # Part
    task: Any,  # Task, with the final top
    grads: Any,  # gradient of the output as Task.queries, or (num_classes, groups · group) for labels; float32, flat
    offset: Any,  # (groups · group,) float32: g_lse - g·output
    inverse_total: Any,  # (groups · group,) float32
    query_grad: Any,  # (groups · group, pitch) float64, flat: Σ ds k
    mass: Any,  # (groups · group,) float64: Σ ds
    query_rows: Any,  # (groups · group, key pitch) float32, flat, where key_grad is wanted
    grad_rows: Any,  # (groups · group, value pitch) float32, flat, where value_grad is wanted
    key_grad: Any,  # (n, d) float32: Σ ds q, or empty
    value_grad: Any,  # (n, v) float32: Σ w g, or empty
    scratch: Any,  # Scratch
) -> None:
    """Adds the gradients that the records of a part send to the queries, and those that they receive."""
    size, few, wide, v_wide = len(shape), len(shape) <= FEW, keys.pitch, values.pitch
    for first in range(part.low, part.high, BLOCK):
        count = min(BLOCK, part.high - first)
        place, start, pitch = load(keys, part, first, count, task.centre, scratch.keys, True, few)
        if task.cosine:
            inverse_lengths(keys, place, start, pitch, count, scratch)
        v_place, v_start, v_pitch = -1, 0, 0  # not loaded yet
        for g in range(len(mass) // size):
            if not scores(shape, keys, place, start, pitch, task, g, part, first, count, scratch):
                continue
            mine, pull, along = slice(g * size, (g + 1) * size), scratch.scores, scratch.grads
            if labels.size:
                _along_labels(size, g, len(mass), labels, part, first, count, grads, along)
            else:
                if v_place < 0:
                    v_place, v_start, v_pitch = load(values, part, first, count, task.nowhere, scratch.values, few, few)
                compare(shape, values, v_place, scratch.values, v_start, v_pitch, count, grads, g, False, along)
            _exponentials(size, count, task.top[mine], task.inverse_temperature, scratch)
            _pulls(size, count, along, pull, inverse_total[mine], offset[mine], task.inverse_temperature, scratch.best)
            _add(scratch.best, size, g * size, mass)
            if value_grad.size:
                times(shape, along, size, 1, count, grad_rows, g * size * v_wide, v_wide, v_wide, size, scratch.rows)
                _add_rows(value_grad, part, first, count, values.width, v_wide, scratch.rows)
            if key_grad.size:
                times(shape, pull, size, 1, count, query_rows, g * size * wide, wide, wide, size, scratch.rows)
                _add_rows(key_grad, part, first, count, keys.width, wide, scratch.rows)
            if task.cosine:
                scale_rows(pull, scratch.inverse, size, count)
            sums(shape, pull, keys, place, scratch.keys, start, pitch, count, scratch.sums)
            _add(scratch.sums, size * wide, g * size * wide, query_grad)


@compiled
def _add_rows(grad: Any, part: Any, first: Any, count: Any, width: Any, pitch: Any, found: Any) -> None:
    for i in range(count):
        row = row_of(part, first + i)
        for x in range(width):
            grad[row, x] += found[i * pitch + x]
