"""Score candidates exactly, from stored keys that are read in place, and sort them: the last step of a search."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from softdb.check import Metric
from softdb.index.contract import Floats, Rows, prepared
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
    seen, positions = prepared(queries, metric) if plain is None else plain, np.ascontiguousarray(positions)
    best, scores = np.empty((len(seen), k), np.int64), np.empty((len(seen), k), np.float32)
    keys, code, products = snapshot.key_column, CODES[metric], positions.size * seen.shape[1]
    if workers(products) == 1:  # avoids the microseconds of `by_lines`
        native().rerank(seen, positions, keys, code, best, scores)
        return best, scores

    def some(run: slice) -> tuple[Any, ...]:
        return seen[run], positions[run], keys, code, best[run], scores[run]

    by_lines(native().rerank, some, len(seen), products)
    return best, scores


def scores_at(
    column: Any,  # of keys or values, as `Snapshot.key_column`
    queries: Floats,  # (q, d)
    positions: Rows,  # (q, c), -1 = none
    metric: Metric,
) -> Floats:  # (q, c)
    """Return the exact score of each candidate, -inf for none. Needs the kernels. Cost q c d."""
    scores = np.empty(positions.shape, np.float32)
    if not scores.size:
        return scores
    plain, positions = prepared(queries, metric), np.ascontiguousarray(positions)
    code, single = CODES[metric], len(scores) == 1

    def some(run: slice) -> tuple[Any, ...]:
        if single:  # threads share the candidates of the single query
            return plain, positions[:, run], column, code, scores[:, run]
        return plain[run], positions[run], column, code, scores[run]

    by_lines(native().score, some, scores.size if single else len(scores), positions.size * plain.shape[1])
    return scores


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
