"""Candidates pooled where their values lie, and how far that answer may be from the one over all records."""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled, inlined, summed
from softdb.compiled.draw import hashed
from softdb.compiled.memory import address_of, fetch, half, lines_of, whole, wide
from softdb.compiled.tile import LANES, ROWS, product

__all__ = [
    "HALF",
    "LABEL",
    "NONE",
    "SIGNS",
    "TILE",
    "WIDE",
    "directions",
    "f_quantile",
    "f_quantiles",
    "pooled",
    "spread",
    "sums",
]

WIDE, HALF, LABEL, NONE = 0, 1, 2, 3  # what a value is: float32, float16, a class, or of no interest
AHEAD = 6  # candidates whose values are on their way from memory while one is added
CHUNK = 256  # candidates added at once, whose values stay in cache
TILE = 2 * LANES  # columns added at once
SIGNS = 16  # random sums that the shape of an error is taken from

_tile = product(ROWS, 2)


@inlined
def _bytes(kind: Any, v: Any) -> Any:
    """How long a record's value is."""
    return 4 if kind == LABEL else (2 if kind == HALF else 4) * v


@summed
def _product(a: Any, b: Any) -> Any:
    """a·b."""
    total = 0.0
    for t in range(len(a)):
        total += np.float64(a[t]) * np.float64(b[t])
    return total


@compiled
def _add(factor: Any, address: Any, kind: Any, v: Any, out: Any) -> None:
    """Adds a value, so many times, to a sum of float64."""
    if kind == LABEL:
        label = whole(address, 0)
        if 0 <= label < v:  # rot may have made another since it was looked at
            out[label] += factor
    elif kind == HALF:
        for t in range(v):
            out[t] += factor * np.float64(half(address, t))
    else:
        for t in range(v):
            out[t] += factor * np.float64(wide(address, t))


@compiled
def _ask(positions: Any, j: Any, addresses: Any, starts: Any, size: Any) -> None:
    """Asks for the value of a candidate that comes later."""
    if j < len(positions) and positions[j] >= 0:
        fetch(address_of(positions[j], addresses, starts, size), lines_of(size))


@compiled
def pooled(
    logits: Any,  # (q, k) float32 or float64, log-weights included; -inf = takes no part
    positions: Any,  # (q, k) int64, -1 = none
    addresses: Any,  # (s,) int64 where the values of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    kind: Any,  # WIDE, HALF, LABEL or NONE
    output: Any,  # (q, v), written to
    lse: Any,  # (q,), written to
) -> None:
    """Softmax of the logits, and the values weighed by it. Bytes moved: q k v numbers; operations: 2 q k v."""
    (q, k), v = logits.shape, output.shape[1]
    size = _bytes(kind, v)
    total = np.empty(v)
    for i in range(q):
        top = logits[i, 0]
        for j in range(k):
            top = max(top, logits[i, j])
        total[:] = 0
        mass = 0.0
        if top > -np.inf:
            for j in range(k):
                mass += np.exp(np.float64(logits[i, j] - top))
            for j in range(-AHEAD, k if kind != NONE else -AHEAD):
                _ask(positions[i], j + AHEAD, addresses, starts, size)
                if j >= 0 and logits[i, j] > -np.inf:
                    weight = np.exp(np.float64(logits[i, j] - top)) / mass
                    _add(weight, address_of(positions[i, j], addresses, starts, size), kind, v, total)
        for t in range(v):
            output[i, t] = total[t]
        lse[i] = top + np.log(mass)


@compiled
def sums(
    weights: Any,  # (q, k) float32
    positions: Any,  # (q, k) int64, -1 = none
    addresses: Any,  # (s,) int64 where the values of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    kind: Any,  # WIDE or HALF
    output: Any,  # (q, v), written to
) -> None:
    """Values weighed and summed. Bytes moved: q k v numbers; operations: 2 q k v."""
    (q, k), v = weights.shape, output.shape[1]
    size, total = _bytes(kind, v), np.empty(v)
    for i in range(q):
        total[:] = 0
        for j in range(-AHEAD, k):
            _ask(positions[i], j + AHEAD, addresses, starts, size)
            if j >= 0 and positions[i, j] >= 0 and weights[i, j] != 0:
                place = address_of(positions[i, j], addresses, starts, size)
                _add(np.float64(weights[i, j]), place, kind, v, total)
        for t in range(v):
            output[i, t] = total[t]


@compiled
def spread(
    logits: Any,  # (q, k) float32 or float64, log-weights included; -inf = takes no part
    logs: Any,  # (q, k) float32, log of the inverse of each candidate's probability
    positions: Any,  # (q, k) int64, -1 = none
    addresses: Any,  # (s,) int64 where the values of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    kind: Any,  # WIDE, HALF, LABEL or NONE
    output: Any,  # (q, v) the answer
    lse: Any,  # (q,) its normaliser
    salt: Any,  # of the random signs: parts that are merged need their own
    weights: Any,  # (q, k), written to: shares of the answer
    found: Any,  # (3, q) float64, written to: Σ c, Σ c², Σ c ‖v - o‖², c = (1 - p) w²
    first: Any,  # (q, v) float64, written to: Σ c (v - o)
    signed: Any,  # (q, SIGNS, v') float32, written to: Σ ±√c (v - o)
    roots: Any,  # (q, SIGNS) float64, written to: Σ ±√c
) -> None:
    """What the error of an answer that was drawn is made of. Cost q k v SIGNS operations; values come from cache."""
    (q, k), v = logits.shape, output.shape[1]
    size, wide_v = _bytes(kind, v), signed.shape[2]
    signs, parts = np.empty((SIGNS, CHUNK), np.float32), np.zeros((CHUNK, wide_v), np.float32)
    some, centred = np.empty((SIGNS, wide_v), np.float32), np.empty(v)
    for i in range(q):
        signed[i] = 0
        first[i], roots[i] = 0.0, 0.0
        variance, noise, noises, filled = 0.0, 0.0, 0.0, 0
        for j in range(k):
            weight = np.exp(np.float64(logits[i, j] - lse[i])) if logits[i, j] > -np.inf else 0.0
            weights[i, j] = weight
            square = -np.expm1(-np.float64(logs[i, j])) * weight * weight
            if not square > 0:
                continue
            noise += square
            noises += square * square
            if kind == NONE:
                continue
            for t in range(v):
                centred[t] = -output[i, t]
            _add(1.0, address_of(positions[i, j], addresses, starts, size), kind, v, centred)
            variance += square * _product(centred, centred)
            bits, root = hashed(positions[i, j], salt), np.sqrt(square)
            for sign in range(SIGNS):
                one = np.float32(1) if (bits >> np.uint32(sign)) & np.uint32(1) else np.float32(-1)
                signs[sign, filled] = one
                roots[i, sign] += one * root
            for t in range(v):
                parts[filled, t] = root * centred[t]
                first[i, t] += square * centred[t]
            filled += 1
            if filled == CHUNK:
                _add_signed(signs, parts, filled, some, signed[i])
                filled = 0
        if filled:
            _add_signed(signs, parts, filled, some, signed[i])
        found[0, i], found[1, i], found[2, i] = noise, noises, variance


@compiled
def _add_signed(signs: Any, parts: Any, filled: Any, some: Any, sums: Any) -> None:
    """Adds Σ_j signs[·, j] parts[j] over the first so many to sums (SIGNS, v)."""
    v = parts.shape[1]
    for r in range(0, SIGNS, ROWS):
        for x in range(0, v, TILE):
            _tile((0,), signs, r * CHUNK, CHUNK, 1, parts, x, v, some, r * v + x, v, filled)
    for r in range(SIGNS):
        for x in range(v):
            sums[r, x] += some[r, x]


@compiled
def directions(signed: Any, variance: Any, out: Any) -> None:
    """Among how many directions each error is spread, tr(C)² / tr(C²), C its covariance."""
    for i in range(len(signed)):
        square = 0.0
        for a in range(SIGNS):
            for b in range(a):
                square += _product(signed[i, a], signed[i, b]) ** 2
        square /= SIGNS * (SIGNS - 1) / 2
        out[i] = max(variance[i] * variance[i] / square, 1.0) if square > 0 else 1.0


@compiled
def f_quantiles(z: Any, above: Any, below: Any, out: Any) -> None:
    """`f_quantile` of many degrees of freedom."""
    for i in range(len(out)):
        out[i] = f_quantile(z, above[i], below[i])


@compiled
def f_quantile(z: Any, above: Any, below: Any) -> Any:
    """The quantile of F, z that of the normal: the cube roots of both χ² are about normal (Paulson 1942)."""
    a, b = 2 / (9 * above), 2 / (9 * below)
    # ((1 - b) x - (1 - a))² = z² (b x² + a), x = F^(1/3)
    square, middle = max((1 - b) ** 2 - z * z * b, 1e-3), (1 - a) * (1 - b)
    root = np.sqrt(max(middle * middle - square * ((1 - a) ** 2 - z * z * a), 0.0))
    x = (middle + root) / square if z >= 0 else (middle - root) / square
    return max(x, 0.0) ** 3
