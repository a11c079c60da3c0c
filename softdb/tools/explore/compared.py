"""Every record compared with a question once: what exact search and the weights' squares are both made of."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Hits
from softdb.attend import Request, Stored
from softdb.check import Metric
from softdb.database import SoftDB
from softdb.kernels import available
from softdb.tools.explore.asked import Question

__all__ = ["Compared"]

SCORED = 1 << 24  # scores that are remembered, so that another filter or temperature compares nothing anew
RUN = 1024  # scores of which the best is looked at first

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class Compared:
    """The scores of all records for the last questions; safe to ask from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scores: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def serves(self, source: Stored) -> bool:
        """Whether records are compared here: where kernels do it, on the host, and their scores can be remembered."""
        return available() and source.there is None and 0 < source.snapshot.size <= SCORED

    def scores(self, request: Request, source: Stored) -> Tensor:  # (size,) float32
        """The score of each position, whatever the filter, -inf where no record is. Cost n d, once a question."""
        key = source.snapshot.generation, request.queries.numpy().tobytes()
        with self._lock:
            scores = self._scores.get(key)
        if scores is None:
            places = np.where(source.live, np.arange(source.snapshot.size), -1)
            scores = source.scored(request, places[None]).scores[0]
            with self._lock:
                self._scores[key] = scores
                while len(self._scores) > 1 and sum(map(len, self._scores.values())) > SCORED:
                    self._scores.popitem(last=False)
        return scores

    def nearest(self, db: SoftDB, question: Question, query: Tensor) -> Hits | None:  # (1, d)
        """As `db.search`, where that is exact; records are compared while SQLite looks for a filter's matches.

        None where there is an index to be asked, and where rounding leaves open which records are the nearest.
        """
        request, source = db.request(query)
        if source.finder.index is not None or not self.serves(source):
            return None
        if question.where:
            with ThreadPoolExecutor(1) as beside:
                ahead = beside.submit(self.scores, request, source)
                request, source = db.request(query, where=question.filter)
                ahead.result()
        scores, keep = self.scores(request, source).numpy(), request.keep(source)
        found = _best(np.where(keep, scores, -np.inf), question.shown, request, source)
        if found is None:
            return None
        rows = torch.from_numpy(source.rows(found))
        return Hits(rows, source.scored(request, found).scores, source.resolve)

    def effective(self, db: SoftDB, question: Question, query: Tensor, t: float, lse: float) -> float | None:
        """1 / Σ w² over all that take part; None where their scores are not kept here."""
        request, source = db.request(query, where=question.filter)
        if not self.serves(source):
            return None
        scores = self.scores(request, source)
        if request.allowed is not None:
            scores = scores.masked_fill(torch.from_numpy(~request.allowed), -torch.inf)
        top = scores.max().item()
        squares = (scores - top).mul_(2 / t).exp_().sum(dtype=torch.float64).item()
        return max(1.0, math.exp(-2 * min(0.0, top / t - lse)) / squares)


def _best(scores: Floats, k: int, request: Request, source: Stored) -> Positions | None:  # (size,) -> (1, k)
    """Positions of the best, fewer where fewer take part; -inf takes none. None where rounding leaves them open.

    A few more are compared exactly; those left out must score clearly less, by the bound that exact search has.
    """
    count = int(np.count_nonzero(scores > -np.inf))
    k, some = min(k, count), min(k + 8 + k // 8, count)
    if not k:
        return np.empty((1, 0), np.int64)
    tops = np.maximum.reduceat(scores, np.arange(0, len(scores), RUN))
    least = np.partition(tops, -some - 1)[-some - 1] if len(tops) > some else -np.inf  # so many are above it, and more
    places = np.flatnonzero((scores >= least) & (scores > -np.inf))
    places = places[np.argsort(-scores[places], kind="stable")]
    allowed = np.zeros(len(scores), np.bool_)
    allowed[places[:some]] = True
    found = source.find(replace(request, allowed=allowed), k, exact=True).positions
    if count > some:
        worst, floor = (float(scores[place]) for place in (found[0, -1], places[some]))
        if not worst - floor > 2 * _slack(worst, found, request, source):
            return None
    return found


def _slack(worst: float, found: Positions, request: Request, source: Stored) -> float:
    """How far a score about as large as the worst may be off, as in `softdb.index.flat`."""
    metric, scale = source.schema.metric, 1.0
    if metric is Metric.L2:
        scale = -worst
    elif metric is Metric.DOT:
        scale = float(request.queries.norm() * source.snapshot.keys_at(found).float().norm(dim=2).max())
    return 2.0**-24 * (2 * request.queries.shape[1] + 16) * scale
