"""True neighbours, and the recall of answers, which are checked before any time is measured."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric, finite
from softdb.errors import BadInput, SoftDBError
from softdb.index.contract import Floats, Rows, prepared
from softdb.tools.bench.datasets import Dataset

COMPARED = 1 << 14  # number of keys compared at once
MORE = 16  # number of candidates beyond k that are rescored, so that ties are sorted by row
SAMPLED = 50  # largest number of queries for which a file's neighbours are checked
GATHERED = 1 << 22  # largest count of numbers in the keys that are gathered at once
TIE = 1e-6  # largest relative difference at which two scores count as equal
CLAIMED = 1e-4  # as TIE, for neighbours from a file, whose precision is unknown
APART = 0.05  # largest allowed loss of recall when the queries of a batch are searched one by one


class WrongAnswer(SoftDBError):
    """An engine gave an impossible answer, so its speed would mean nothing."""


def true_nearest(data: Dataset, k: int) -> Rows:  # (q, k)
    """Return the true k nearest of each query: the file's neighbours if it has k, else computed by brute force.

    Raises BadInput if a sample of the file's neighbours is wrong, or if k exceeds the number of keys.
    """
    if k > data.n:
        raise BadInput(f"k is {k}, but there are {data.n} keys; give k at most that number")
    claimed = data.neighbours
    if claimed is None or claimed.shape[1] < k:
        return nearest(data, data.queries, k)
    sample = np.unique(np.linspace(0, len(data.queries) - 1, SAMPLED).astype(np.int64))
    queries = data.queries[sample]
    theirs = np.sort(exact_scores(data, queries, claimed[sample, :k]), axis=1)
    ours = np.sort(exact_scores(data, queries, nearest(data, queries, k)), axis=1)
    wrong = ~(np.abs(theirs - ours) <= CLAIMED * np.abs(ours).max(axis=1, keepdims=True)).all(axis=1)
    wrong |= (np.diff(np.sort(claimed[sample, :k], axis=1)) == 0).any(axis=1)
    if wrong.any():
        raise BadInput(
            f"{data.name}: for {int(wrong.sum())} of {len(sample)} queries checked, the file's neighbours "
            f"are not the {k} nearest by {data.metric.value}; give another metric, or make the file again"
        )
    return claimed[:, :k]


def nearest(
    data: Dataset,
    queries: Floats,  # (q, d), normalised for the cosine
    k: int,
    size: int = COMPARED,
) -> Rows:  # (q, k)
    """Return the k nearest by brute force in float64, the nearest first, ties by row. Cost q n d."""
    wide = torch.from_numpy(queries.astype(np.float64))
    best, rows = torch.zeros(len(queries), 0, dtype=torch.float64), torch.zeros(len(queries), 0, dtype=torch.int64)
    for low, block in data.blocks(size):
        finite(block, "keys")
        keys = torch.from_numpy(block.astype(np.float64))
        scores = wide @ keys.T
        if data.metric is Metric.L2:  # the query's squared length is left out, as it changes no order
            scores.mul_(2).sub_(keys.square().sum(1))
        best = torch.cat([best, scores], 1)
        rows = torch.cat([rows, torch.arange(low, low + len(block)).expand(len(queries), -1)], 1)
        best, order = best.topk(min(k + MORE, best.shape[1]), dim=1)
        rows = rows.gather(1, order)
    candidates = np.sort(rows.numpy(), axis=1)
    places = np.argsort(-exact_scores(data, queries, candidates), axis=1, kind="stable")
    return np.take_along_axis(candidates, places[:, :k], axis=1)


def exact_scores(
    data: Dataset,
    queries: Floats,  # (q, d), normalised for the cosine
    rows: Rows,  # (q, c), -1 = none
) -> NDArray[np.float64]:  # (q, c)
    """Return the exact scores of rows by key, in float64: larger is closer; -inf for row -1."""
    scores = np.empty(rows.shape, np.float64)
    step = max(1, GATHERED // max(1, rows.shape[1] * data.dim))
    for low in range(0, len(rows), step):
        chunk = rows[low : low + step]
        keys = prepared(data.keys[np.maximum(chunk, 0).ravel()], data.metric).astype(np.float64)
        keys, wide = keys.reshape(*chunk.shape, -1), queries[low : low + step].astype(np.float64)
        if data.metric is Metric.L2:
            scores[low : low + step] = -np.square(keys - wide[:, None]).sum(axis=2)
        else:
            scores[low : low + step] = np.einsum("qcd,qd->qc", keys, wide)
    scores[rows < 0] = -np.inf
    return scores


class Exam:
    """Measure recall with queries whose k nearest are known. A record that scores as much as the k-th is right, too."""

    def __init__(self, data: Dataset, truth: Rows) -> None:
        self.data, self.k = data, truth.shape[1]
        worst = exact_scores(data, data.queries, truth).min(axis=1, keepdims=True)
        self._floor = worst - TIE * np.abs(worst)

    def recalls(
        self,
        rows: Rows,  # (q, k), -1 = none
        engine: str,
        first: int | None = None,  # number of queries, from the first, that `rows` belong to; None: all
    ) -> NDArray[np.float64]:  # (q,)
        """Return the recall of each query. Raises WrongAnswer for impossible rows."""
        queries, floor = self.data.queries[:first], self._floor[:first]
        if rows.shape != (len(queries), self.k) or rows.dtype.kind not in "iu":
            expected = f"rows, ({len(queries)}, {self.k})"
            raise WrongAnswer(f"{engine} answered with shape {rows.shape} of {rows.dtype}; expected {expected}")
        if rows.min() < -1 or rows.max() >= self.data.n:
            raise WrongAnswer(f"{engine} found rows from {rows.min()} to {rows.max()}, of {self.data.n} keys")
        ordered = np.sort(rows, axis=1)
        if ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)).any():
            raise WrongAnswer(f"{engine} found the same row twice for one query")
        return np.asarray((exact_scores(self.data, queries, rows) >= floor).mean(axis=1))

    def recall(self, rows: Rows, engine: str) -> float:
        """Return the mean recall."""
        return float(self.recalls(rows, engine).mean())

    def alike(self, batch: Rows, alone: Rows, engine: str) -> None:
        """Raise WrongAnswer if queries have a much lower recall when searched one by one (`alone`) than in a batch."""
        first = len(alone)
        single, many = (float(self.recalls(rows[:first], engine, first).mean()) for rows in (alone, batch))
        if single < many - APART:
            raise WrongAnswer(f"{engine} has recall {many:.3f} in a batch but {single:.3f} for the same queries alone")
