"""Candidates by exact score: stored keys are read where they lie, in one pass, and the best k of each query kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled, summed
from softdb.compiled.memory import address_of, fetch, half, lines_of, wide
from softdb.compiled.tile import bits, real

__all__ = ["COSINE", "DOT", "L2", "rerank", "score", "score_precisely"]

DOT, COSINE, L2 = 0, 1, 2  # metrics
AHEAD = 6  # candidates whose keys are on their way from memory while one is scored

_INFINITY = np.float32(np.inf)
_LAST = np.int64((1 << 63) - 1)


@summed
def _square(address: Any, halves: Any, d: Any) -> Any:
    """‖k‖², as float64, which holds the squares of every float32."""
    total = 0.0
    if halves:
        for j in range(d):
            total += np.float64(half(address, j)) * np.float64(half(address, j))
    else:
        for j in range(d):
            total += np.float64(wide(address, j)) * np.float64(wide(address, j))
    return total


@summed
def _score(address: Any, halves: Any, metric: Any, query: Any, d: Any) -> Any:
    """The score of a query and a key, both at their addresses."""
    total = np.float32(0)
    if metric == L2:
        if halves:
            for j in range(d):
                apart = wide(query, j) - half(address, j)
                total += apart * apart
        else:
            for j in range(d):
                apart = wide(query, j) - wide(address, j)
                total += apart * apart
        return -total
    if halves:
        for j in range(d):
            total += wide(query, j) * half(address, j)
    else:
        for j in range(d):
            total += wide(query, j) * wide(address, j)
    if metric == COSINE:
        square = _square(address, halves, d)
        return np.float32(total / np.sqrt(square)) if square > 0 else np.float32(0)
    return total


@compiled
def _sink(heap: Any, size: Any, place: Any, entry: Any) -> None:
    """Puts an entry into a heap, whose greatest lies first, from a place downwards."""
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] > heap[below]:
            below += 1
        if heap[below] <= entry:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = entry


@compiled
def _entry(score: Any, position: Any) -> Any:
    """Score and position in one number, the less the better."""
    order = np.int64(bits(np.float32(0) - score))  # 0 - s: no negative zeros
    if order < 0:
        order ^= 0x7FFFFFFF  # whole numbers in the order of the floats
    return (order << 32) | position


@compiled
def _score_in(entry: Any) -> Any:
    """The score that an entry holds."""
    order = entry >> 32
    if order < 0:
        order ^= 0x7FFFFFFF
    return np.float32(0) - real(np.int32(order))


@compiled
def _sort(heap: Any) -> None:
    """Turns a heap into ascending order: its greatest goes to the end, again and again."""
    for last in range(len(heap) - 1, 0, -1):
        entry = heap[last]
        heap[last] = heap[0]
        _sink(heap, last, 0, entry)


@compiled
def rerank(
    queries: Any,  # (q · d,) float32; of length 1 for the cosine
    positions: Any,  # (q, c) int64, negative = none
    addresses: Any,  # (s,) int64 where the keys of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    d: Any,
    halves: Any,  # whether keys are float16, else float32
    metric: Any,  # DOT, COSINE or L2
    found: Any,  # (q, k) int64, written to: positions, best first, ties by position, -1 = none
    scores: Any,  # (q, k) float32, written to: -inf = none
) -> None:
    """The best of each query's candidates by exact score. Bytes moved: q c d numbers; operations: 2 q c d."""
    (q, c), k = positions.shape, found.shape[1]
    size = d * (2 if halves else 4)
    lines = lines_of(size)
    heap = np.empty(k, np.int64)  # the k best so far, the worst of them first
    for i in range(q):
        heap[:] = _LAST
        query = queries.ctypes.data + 4 * i * d
        for candidate in range(-AHEAD, c):
            if candidate + AHEAD < c and positions[i, candidate + AHEAD] >= 0:
                fetch(address_of(positions[i, candidate + AHEAD], addresses, starts, size), lines)
            if candidate < 0 or positions[i, candidate] < 0:
                continue
            address = address_of(positions[i, candidate], addresses, starts, size)
            entry = _entry(_score(address, halves, metric, query, d), positions[i, candidate])
            if entry < heap[0]:
                _sink(heap, k, 0, entry)
        _sort(heap)
        for place in range(k):
            none = heap[place] == _LAST
            found[i, place] = -1 if none else heap[place] & 0xFFFFFFFF
            scores[i, place] = -_INFINITY if none else _score_in(heap[place])


@compiled
def score(
    queries: Any,  # (q · d,) float32; of length 1 for the cosine
    positions: Any,  # (q, c) int64, negative = none
    addresses: Any,  # (s,) int64 where the keys of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    d: Any,
    halves: Any,  # whether keys are float16, else float32
    metric: Any,  # DOT, COSINE or L2
    scores: Any,  # (q, c) float32, written to: -inf = none
) -> None:
    """Exact scores of candidates, where they stand. Bytes moved: q c d numbers; operations: 2 q c d."""
    q, c = positions.shape
    size = d * (2 if halves else 4)
    lines = lines_of(size)
    for i in range(q):
        query = queries.ctypes.data + 4 * i * d
        for candidate in range(-AHEAD, c):
            if candidate + AHEAD < c and positions[i, candidate + AHEAD] >= 0:
                fetch(address_of(positions[i, candidate + AHEAD], addresses, starts, size), lines)
            if candidate >= 0:
                scores[i, candidate] = -_INFINITY
                if positions[i, candidate] >= 0:
                    address = address_of(positions[i, candidate], addresses, starts, size)
                    scores[i, candidate] = _score(address, halves, metric, query, d)


@summed
def _precise_score(address: Any, halves: Any, metric: Any, query: Any, d: Any) -> Any:
    """As `_score`, summed in float64."""
    total = 0.0
    if metric == L2:
        for j in range(d):
            key = half(address, j) if halves else wide(address, j)
            apart = np.float64(wide(query, j)) - np.float64(key)
            total += apart * apart
        return -total
    if halves:
        for j in range(d):
            total += np.float64(wide(query, j)) * np.float64(half(address, j))
    else:
        for j in range(d):
            total += np.float64(wide(query, j)) * np.float64(wide(address, j))
    if metric == COSINE:
        square = _square(address, halves, d)
        return total / np.sqrt(square) if square > 0 else 0.0
    return total


@compiled
def score_precisely(
    queries: Any,  # (q · d,) float32; of length 1 for the cosine
    positions: Any,  # (q, c) int64, negative = none
    addresses: Any,  # (s,) int64 where the keys of each segment begin
    starts: Any,  # (s + 1,) int64 position of each segment's first record
    d: Any,
    halves: Any,  # whether keys are float16, else float32
    metric: Any,  # DOT, COSINE or L2
    scores: Any,  # (q, c) float64, written to: -inf = none
) -> None:
    """As `score`, in float64: at a low temperature the last digits of a score decide."""
    q, c = positions.shape
    size = d * (2 if halves else 4)
    lines = lines_of(size)
    for i in range(q):
        query = queries.ctypes.data + 4 * i * d
        for candidate in range(-AHEAD, c):
            if candidate + AHEAD < c and positions[i, candidate + AHEAD] >= 0:
                fetch(address_of(positions[i, candidate + AHEAD], addresses, starts, size), lines)
            if candidate >= 0:
                scores[i, candidate] = -np.inf
                if positions[i, candidate] >= 0:
                    address = address_of(positions[i, candidate], addresses, starts, size)
                    scores[i, candidate] = _precise_score(address, halves, metric, query, d)
