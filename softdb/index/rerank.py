"""Exact order of candidates: the last step of finding, on the mapped keys, in place."""

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

CODES = {Metric.DOT: 0, Metric.COSINE: 1, Metric.L2: 2}  # what the kernels call a metric
GATHERED = 1 << 22  # numbers of keys copied at once, where there are no kernels: 16 MB


def ordered(
    snapshot: Snapshot,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
    asked: Floats | None = None,  # the queries as `prepared` gives them, where that is known
) -> tuple[Rows, Floats]:  # (q, k), (q, k)
    """Positions of the k best candidates by exact score, ties by row, then -1; and their scores, -inf for none.

    Keys are read where they lie. Cost q c d.
    """
    if not available() or not snapshot.size:
        return _gathered(snapshot, queries, positions, k, metric)
    asked = prepared(queries, metric) if asked is None else asked
    return best_of(snapshot, asked, np.ascontiguousarray(positions), k, metric)[:2]


def best_of(
    snapshot: Snapshot,
    asked: Floats,  # (q, d) as `prepared` gives them
    positions: Rows,  # (q, c), -1 = none
    k: int,
    metric: Metric,
) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
    """The same by the kernels; and whether there were k for every query, and all scores could be computed."""
    found, scores = np.empty((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
    rerank, keys, code = native().rerank, snapshot.key_column, CODES[metric]
    if workers(positions.size * asked.shape[1]) == 1:  # which feels microseconds
        return found, scores, rerank(asked, positions, keys, code, found, scores)
    given, products = _given(snapshot, asked, positions, metric, found, scores)
    return found, scores, all(by_lines(rerank, given, len(asked), products))


def scores_at(
    columns: RecordColumns,
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    metric: Metric,
    precise: bool = False,
) -> NDArray[Any]:  # (q, c)
    """Exact scores of candidates where they stand, -inf for none; in float32, or in float64 where `precise`.

    Needs the kernels, but where the columns lie on a device. Cost q c d.
    """
    if columns.placed is not None:
        return columns.scores_at(queries, positions, metric, torch.float64 if precise else torch.float32)
    scores = np.empty(positions.shape, np.float64 if precise else np.float32)
    if scores.size:
        asked, positions = prepared(queries, metric), np.ascontiguousarray(positions)
        given, products = _given(columns, asked, positions, metric, scores)
        if len(scores) == 1:  # threads share its candidates
            column = columns.key_column

            def some(part: slice) -> tuple[Any, ...]:
                return asked, positions[:, part], column, CODES[metric], scores[:, part]

            by_lines(native().score, some, positions.shape[1], products)
        else:
            by_lines(native().score, given, len(scores), products)
    return scores


def _given(
    snapshot: Snapshot, asked: Floats, positions: Rows, metric: Metric, *out: Any
) -> tuple[Callable[[slice], tuple[Any, ...]], int]:
    """Arguments of the kernels for a run of the queries, prepared; and the number of products of all."""
    keys, code = snapshot.key_column, CODES[metric]

    def given(part: slice) -> tuple[Any, ...]:
        return asked[part], positions[part], keys, code, *(one[part] for one in out)

    return given, positions.size * asked.shape[1]


def _gathered(
    snapshot: Snapshot, queries: Floats, positions: Rows, k: int, metric: Metric
) -> tuple[Rows, Floats]:  # (q, k), (q, k)
    """The same by torch, on copies of the keys."""
    score, kept = score_of(metric), min(k, positions.shape[1])
    found, scores = np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    chunk = max(1, GATHERED // max(1, positions.shape[1] * queries.shape[1]))
    for low in range(0, len(queries), chunk):
        part = slice(low, low + chunk)
        candidates = np.sort(positions[part], axis=1)
        own = score(torch.from_numpy(queries[part]), snapshot.keys_at(candidates).float())
        own = own.masked_fill(torch.from_numpy(candidates < 0), -torch.inf)
        top, order = own.sort(dim=1, descending=True, stable=True)
        found[part, :kept] = np.take_along_axis(candidates, order[:, :kept].numpy(), 1)
        scores[part, :kept] = top[:, :kept].numpy()
    return found, scores
