"""Exact order of candidates: the last step of finding, on the mapped keys, in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from softdb.check import Metric
from softdb.index.contract import Floats, Rows, faiss_module
from softdb.scores import score_of
from softdb.store import Snapshot

__all__ = ["best"]

GATHERED = 1 << 22  # numbers of half-precision keys converted at once: 16 MB


def best(
    snapshot: Snapshot,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
) -> Rows:  # (q, k)
    """Positions of the k best candidates by exact score, -1 = none. Cost q c d, without a copy of float32 keys."""
    if positions.shape[1] < k:
        positions = np.pad(positions, ((0, 0), (0, k - positions.shape[1])), constant_values=-1)
    half = any(segment.keys.dtype == np.float16 for segment in snapshot.segments)
    scores = torch.from_numpy((_gathered if half else _in_place)(snapshot, queries, positions, metric))
    order = scores.topk(k, dim=1).indices.numpy()
    return np.take_along_axis(positions, order, 1)


def _in_place(snapshot: Snapshot, queries: Floats, positions: Rows, metric: Metric) -> Floats:
    """Scores (q, c) by FAISS' kernels over the segments' own memory; -inf at -1."""
    faiss = faiss_module()
    if metric is Metric.L2:
        return -_by_segment(snapshot, queries, positions, faiss.fvec_L2sqr_by_idx, np.minimum)
    products = _by_segment(snapshot, queries, positions, faiss.fvec_inner_products_by_idx, np.maximum)
    if metric is Metric.COSINE:  # the distance from zero is the key's own length
        squares = _by_segment(snapshot, np.zeros_like(queries), positions, faiss.fvec_L2sqr_by_idx, np.minimum)
        np.divide(products, np.sqrt(squares), out=products, where=(squares > 0) & (positions >= 0))
    return products


def _by_segment(
    snapshot: Snapshot, queries: Floats, positions: Rows, kernel: Callable[..., None], combine: np.ufunc
) -> Floats:  # (q, c)
    """A kernel's results for candidates that lie in several segments; where a slot is -1 it writes its worst."""
    faiss, (q, c), d = faiss_module(), positions.shape, queries.shape[1]
    found: Floats | None = None
    for segment, start in zip(snapshot.segments, snapshot.starts, strict=False):
        slots = np.ascontiguousarray(positions - start)
        slots[(slots < 0) | (slots >= len(segment))] = -1
        part = np.empty((q, c), np.float32)
        arrays = part, queries, segment.keys, slots  # the pointers do not keep them alive
        kernel(*map(faiss.swig_ptr, arrays), d, q, c)
        found = part if found is None else combine(found, part, out=found)
    assert found is not None  # an index covers at least one segment
    return found


def _gathered(snapshot: Snapshot, queries: Floats, positions: Rows, metric: Metric) -> Floats:
    """Scores (q, c) of half-precision keys, converted some queries at a time; -inf at -1."""
    score, found = score_of(metric), np.empty(positions.shape, np.float32)
    chunk = max(1, GATHERED // max(1, positions.shape[1] * queries.shape[1]))
    for low in range(0, len(queries), chunk):
        part = slice(low, low + chunk)
        found[part] = score(torch.from_numpy(queries[part]), snapshot.keys_at(positions[part])).numpy()
    found[positions < 0] = -np.inf
    return found
