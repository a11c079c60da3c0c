"""Score candidates exactly, from stored keys that are read in place, and sort them: the last step of a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Rows, prepared
from softdb.index.placement import RecordColumns
from softdb.kernels import available, native
from softdb.kernels.threads import by_lines, workers
from softdb.scoring import score_of
from softdb.store import Snapshot

CODES = {Metric.DOT: 0, Metric.COSINE: 1, Metric.L2: 2}  # the number that the kernels use for each metric
GATHERED = 1 << 22  # numbers that are copied at once if there are no kernels: 16 MB


def ordered(
    snapshot: Snapshot,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
    plain: Floats | None = None,  # `prepared(queries, metric)` if the caller has it
) -> tuple[Rows, Floats]:  # (q, k), (q, k)
    """Return the positions of the k best candidates by exact score, ties by row, -1 = none; and scores, -inf for none.

    Cost q c d.
    """
    if not available() or not snapshot.size:
        return _gathered(snapshot, queries, positions, k, metric)
    plain = prepared(queries, metric) if plain is None else plain
    return best_of(snapshot, plain, np.ascontiguousarray(positions), k, metric)[:2]


def best_of(
    snapshot: Snapshot,
    plain: Floats,  # (q, d) as `prepared` returns them
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
    """Return `ordered` from the kernels, and True if every query has k candidates and all scores are finite."""
    best, scores = np.empty((len(plain), k), np.int64), np.empty((len(plain), k), np.float32)
    rerank, keys, code = native().rerank, snapshot.key_column, CODES[metric]
    if workers(positions.size * plain.shape[1]) == 1:  # avoids the microseconds of `by_lines`
        return best, scores, rerank(plain, positions, keys, code, best, scores)
    given, products = _given(snapshot, plain, positions, metric, best, scores)
    return best, scores, all(by_lines(rerank, given, len(plain), products))


def scores_at(
    columns: RecordColumns,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    metric: Metric,
    precise: bool = False,
) -> NDArray[Any]:  # (q, c)
    """Return the exact score of each candidate, -inf for none, in float64 if `precise`, else in float32.

    Needs the kernels unless the columns lie on a device. Cost q c d.
    """
    if columns.placed is not None:
        return columns.scores_at(queries, positions, metric, torch.float64 if precise else torch.float32)
    scores = np.empty(positions.shape, np.float64 if precise else np.float32)
    if scores.size:
        plain, positions = prepared(queries, metric), np.ascontiguousarray(positions)
        given, products = _given(columns, plain, positions, metric, scores)
        if len(scores) == 1:  # threads share the candidates of the single query
            column = columns.key_column

            def some(run: slice) -> tuple[Any, ...]:
                return plain, positions[:, run], column, CODES[metric], scores[:, run]

            by_lines(native().score, some, positions.shape[1], products)
        else:
            by_lines(native().score, given, len(scores), products)
    return scores


def _given(
    snapshot: Snapshot, plain: Floats, positions: Rows, metric: Metric, *out: Any
) -> tuple[Callable[[slice], tuple[Any, ...]], int]:
    """Return a function from a slice of queries to kernel arguments, and the number of products for all queries."""
    keys, code = snapshot.key_column, CODES[metric]

    def given(run: slice) -> tuple[Any, ...]:
        return plain[run], positions[run], keys, code, *(array[run] for array in out)

    return given, positions.size * plain.shape[1]


def _gathered(
    snapshot: Snapshot, queries: Floats, positions: Rows, k: int, metric: Metric
) -> tuple[Rows, Floats]:  # (q, k), (q, k)
    """Return `ordered` from torch, with copies of the candidates' keys."""
    score, width = score_of(metric), min(k, positions.shape[1])
    best, scores = np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    chunk = max(1, GATHERED // max(1, positions.shape[1] * queries.shape[1]))
    for low in range(0, len(queries), chunk):
        run = slice(low, low + chunk)
        candidates = np.sort(positions[run], axis=1)
        own = score(torch.from_numpy(queries[run]), snapshot.keys_at(candidates).float())
        own = own.masked_fill(torch.from_numpy(candidates < 0), -torch.inf)
        top, order = own.sort(dim=1, descending=True, stable=True)
        best[run, :width] = np.take_along_axis(candidates, order[:, :width].numpy(), 1)
        scores[run, :width] = top[:, :width].numpy()
    return best, scores
