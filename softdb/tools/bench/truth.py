"""The true neighbours, and what an answer is worth: no clock starts before the answers were looked at."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric, finite
from softdb.errors import BadInput, SoftDBError
from softdb.index.contract import Floats, Rows, prepared
from softdb.tools.bench.datasets import BLOCK, Dataset

__all__ = ["Exam", "WrongAnswer", "exact_scores", "nearest", "true_nearest"]

MORE = 16  # candidates beyond k that are scored again in float64
SAMPLED = 50  # queries whose neighbours in a file are looked up again
GATHERED = 1 << 22  # numbers of keys that are scored at once
TIE = 1e-6  # scores that differ by less, of their own size, are ties
CLAIMED = 1e-4  # likewise for the neighbours in a file, whose arithmetic is not known
APART = 0.05  # recall by which the answers to single queries may fall short of those to the same queries in a batch


class WrongAnswer(SoftDBError):
    """An engine answered what cannot be; its speed means nothing."""


def true_nearest(data: Dataset, k: int) -> Rows:  # (q, k)
    """The true k nearest of each query: the file's where it has as many and a sample of them is right, else looked up.

    Raises BadInput where the file's neighbours are wrong, or k is more than there are keys.
    """
    if k > data.n:
        raise BadInput(f"k is {k}, but there are {data.n} keys; ask for at most that many")
    claimed = data.neighbours
    if claimed is None or claimed.shape[1] < k:
        return nearest(data, data.queries, k)
    which = np.unique(np.linspace(0, len(data.queries) - 1, SAMPLED).astype(np.int64))
    sample = data.queries[which]
    theirs = np.sort(exact_scores(data, sample, claimed[which, :k]), axis=1)
    ours = np.sort(exact_scores(data, sample, nearest(data, sample, k)), axis=1)
    wrong = ~(np.abs(theirs - ours) <= CLAIMED * np.abs(ours).max(axis=1, keepdims=True)).all(axis=1)
    repeated = (np.diff(np.sort(claimed[which, :k], axis=1)) == 0).any(axis=1)
    if (wrong | repeated).any():
        raise BadInput(
            f"{data.name}: for {int((wrong | repeated).sum())} of {len(which)} queries looked up, the file's neighbors "
            f"are not the {k} nearest by {data.metric.value}; say another metric, or make the file anew"
        )
    return claimed[:, :k]


def nearest(
    data: Dataset,
    queries: Floats,  # (q, d) prepared
    k: int,
    size: int = BLOCK,  # keys that are compared at once
) -> Rows:  # (q, k)
    """The k nearest by brute force, the nearest first: float32 in blocks, the best of them in float64. Cost q n d."""
    many = min(k + MORE, data.n)
    best = torch.full((len(queries), 0), -torch.inf)
    rows = torch.zeros(len(queries), 0, dtype=torch.int64)
    centre = None
    for low, block in data.blocks(size):
        finite(block, "keys")
        if data.metric is Metric.L2:  # around a centre the expansion of the square loses less
            centre = block.mean(axis=0) if centre is None else centre
            near = block - centre
            scores = torch.from_numpy(2 * (queries - centre) @ near.T - np.einsum("nd,nd->n", near, near))
        else:
            scores = torch.from_numpy(queries @ block.T)
        best = torch.cat([best, scores], 1)
        rows = torch.cat([rows, torch.arange(low, low + len(block)).expand(len(queries), -1)], 1)
        best, order = best.topk(min(many, best.shape[1]), dim=1)
        rows = rows.gather(1, order)
    found = np.sort(rows.numpy(), axis=1)  # ties by row
    places = np.argsort(-exact_scores(data, queries, found), axis=1, kind="stable")
    return np.take_along_axis(found, places[:, :k], axis=1)


def exact_scores(
    data: Dataset,
    queries: Floats,  # (q, d) prepared
    rows: Rows,  # (q, c), -1 = none
) -> NDArray[np.float64]:  # (q, c)
    """Scores in float64 from the keys themselves, larger is closer; -inf where there is no row."""
    found = np.empty(rows.shape, np.float64)
    step = max(1, GATHERED // max(1, rows.shape[1] * data.dim))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        keys = prepared(data.keys[np.maximum(part, 0).ravel()], data.metric).astype(np.float64)
        keys, asked = keys.reshape(*part.shape, -1), queries[low : low + step].astype(np.float64)
        if data.metric is Metric.L2:
            found[low : low + step] = -np.square(keys - asked[:, None]).sum(axis=2)
        else:
            found[low : low + step] = np.einsum("qcd,qd->qc", keys, asked)
    found[rows < 0] = -np.inf
    return found


class Exam:
    """Queries whose k nearest are known. Recall is worked out from the keys: a tie counts, whatever its row."""

    def __init__(self, data: Dataset, truth: Rows) -> None:
        self.data, self.k = data, truth.shape[1]
        worst = exact_scores(data, data.queries, truth).min(axis=1, keepdims=True)
        self._floor = worst - TIE * np.abs(worst)

    def recalls(
        self,
        found: Rows,  # (q, k), -1 = none
        engine: str,
        queries: slice = slice(None),
    ) -> NDArray[np.float64]:  # (q,)
        """Share of each query's k nearest that were found; WrongAnswer for what is no answer."""
        asked, floor = self.data.queries[queries], self._floor[queries]
        if found.shape != (len(asked), self.k) or found.dtype.kind not in "iu":
            raise WrongAnswer(
                f"{engine} answered with shape {found.shape} of {found.dtype}; expected rows, ({len(asked)}, {self.k})"
            )
        if found.min() < -1 or found.max() >= self.data.n:
            raise WrongAnswer(f"{engine} found rows from {found.min()} to {found.max()}, of {self.data.n} keys")
        ordered = np.sort(found, axis=1)
        if ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)).any():
            raise WrongAnswer(f"{engine} found the same row twice for one query")
        return np.asarray((exact_scores(self.data, asked, found) >= floor).mean(axis=1))

    def recall(self, found: Rows, engine: str) -> float:
        """Their mean."""
        return float(self.recalls(found, engine).mean())

    def alike(self, batch: Rows, alone: Rows, engine: str) -> None:
        """WrongAnswer where the first queries, asked one by one, find less than they do in the batch."""
        some = slice(0, len(alone))
        single, many = (float(self.recalls(found[some], engine, some).mean()) for found in (alone, batch))
        if single < many - APART:
            raise WrongAnswer(f"{engine} has recall {many:.3f} in a batch but {single:.3f} for the same queries alone")
