"""Exact order of candidates: the last step of finding, on the mapped keys, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from softdb.check import Metric
from softdb.index.contract import Floats, Rows, faiss_module
from softdb.scores import score_of
from softdb.store import Snapshot

__all__ = ["best"]

Kernel: TypeAlias = Callable[..., None]

SCORED = 1 << 18  # candidates scored at once: a few megabytes
GATHERED = 1 << 22  # numbers of half-precision keys converted at once: 16 MB


def best(
    snapshot: Snapshot,
    queries: Floats,  # (q, d) C-contiguous
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
) -> Rows:  # (q, k)
    """Positions of the k best candidates by exact score, ties by row, then -1. No copy of float32 keys. Cost q c d."""
    scored = _gathered if snapshot.segments[0].keys.dtype == np.float16 else _in_place
    found = np.full((len(positions), k), -1, np.int64)
    most = min(k, positions.shape[1])
    chunk = max(1, SCORED // positions.shape[1])
    for low in range(0, len(positions), chunk):
        part = np.where(positions[low : low + chunk] < 0, snapshot.size, positions[low : low + chunk])  # none: last
        part.sort(axis=1)
        ordered = _ordered(scored(snapshot, queries[low : low + chunk], part, metric), part)[:, :most]
        found[low : low + chunk, :most] = np.where(ordered == snapshot.size, -1, ordered)
    return found


def _ordered(
    scores: Floats,  # (q, c)
    positions: Rows,  # (q, c) below 2³²
) -> Rows:  # (q, c)
    """Positions by score, then row."""
    # one sort of whole numbers, the score's bits above the position's, is ten times faster than a stable one
    bits = np.subtract(0, scores, dtype=np.float32).view(np.int32).astype(np.int64)  # 0 - s: no negative zeros
    bits ^= (bits >> 31) & 0x7FFFFFFF  # whole numbers in the order of the floats
    bits = (bits << 32) | positions
    bits.sort(axis=1)
    return bits & 0xFFFFFFFF


def _in_place(snapshot: Snapshot, queries: Floats, positions: Rows, metric: Metric) -> Floats:
    """Scores (q, c) of sorted positions, by FAISS' kernels over the segments' own memory; -inf where there is none."""
    faiss = faiss_module()
    run = _run_one if len(queries) == 1 else _run_many
    if metric is Metric.L2:
        return np.negative(run(snapshot, queries, positions, faiss.fvec_L2sqr_by_idx, np.inf))
    products = run(snapshot, queries, positions, faiss.fvec_inner_products_by_idx, -np.inf)
    if metric is Metric.COSINE:  # the distance from zero is the key's own length
        squares = run(snapshot, np.zeros_like(queries), positions, faiss.fvec_L2sqr_by_idx, np.inf)
        np.divide(products, np.sqrt(squares), out=products, where=(squares > 0) & (positions < snapshot.size))
    return products


def _run_one(
    snapshot: Snapshot, queries: Floats, positions: Rows, kernel: Kernel, none: float
) -> Floats:  # (1, c), `none` where there is none
    """A kernel's results for one query: its candidates lie in each segment as a run."""
    faiss, (_, c), d = faiss_module(), positions.shape, queries.shape[1]
    found = np.full(c, none, np.float32)
    ends = np.searchsorted(positions[0], snapshot.starts).tolist()
    pointer, asked, threads = faiss.swig_ptr, faiss.swig_ptr(queries), faiss.omp_get_max_threads()
    # the kernel wakes every thread, whatever it has to do: for one query that costs more than the work
    faiss.omp_set_num_threads(1)
    try:
        for segment, start, low, high in zip(snapshot.segments, snapshot.starts, ends, ends[1:], strict=False):
            if low < high:
                out, slots = found[low:high], positions[0, low:high] - start
                kernel(pointer(out), asked, pointer(segment.keys), pointer(slots), d, 1, high - low)
    finally:
        faiss.omp_set_num_threads(threads)
    return found[None]


def _run_many(
    snapshot: Snapshot, queries: Floats, positions: Rows, kernel: Kernel, none: float
) -> Floats:  # (q, c), `none` where there is none
    """A kernel's results for many queries, segment by segment; it passes over -1 and writes `none` there."""
    pointer, (q, c), d = faiss_module().swig_ptr, positions.shape, queries.shape[1]
    found, combine = np.full((q, c), none, np.float32), np.minimum if none > 0 else np.maximum
    out = np.empty_like(found)
    for segment, start in zip(snapshot.segments, snapshot.starts, strict=False):
        slots = positions - start
        slots[(slots < 0) | (slots >= len(segment))] = -1
        kernel(pointer(out), pointer(queries), pointer(segment.keys), pointer(slots), d, q, c)
        combine(found, out, out=found)
    return found


def _gathered(snapshot: Snapshot, queries: Floats, positions: Rows, metric: Metric) -> Floats:
    """Scores (q, c) of half-precision keys, converted some queries at a time; -inf where there is none."""
    score, found = score_of(metric), np.empty(positions.shape, np.float32)
    there = np.where(positions == snapshot.size, -1, positions)
    chunk = max(1, GATHERED // (positions.shape[1] * queries.shape[1]))
    for low in range(0, len(queries), chunk):
        part = slice(low, low + chunk)
        found[part] = score(torch.from_numpy(queries[part]), snapshot.keys_at(there[part])).numpy()
    found[there < 0] = -np.inf
    return found
