"""A shard's side of an estimate: it draws as many as it is told, and says what their error is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.attend import Request, Stored
from softdb.attend.error import ErrorEstimate, sure
from softdb.attend.request import Live, Positions
from softdb.attend.rounds import Estimator, Round
from softdb.cluster.shard import Draw, Drawn
from softdb.pool import State


def passed(request: Request, source: Stored, pools: bool) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
    """A pass over every record; (q, 0) where nothing is pooled. No queries by a known score need none."""
    if not len(request.queries) and request.folded is not None and request.folded.scale is not None:
        nothing = request.queries.sum(1)  # (0,), with their graph
        return nothing.unsqueeze(1).expand(-1, source.width if pools else 0), nothing
    return source.stream(replace(request, pools=pools))


class ShardDrawing(NamedTuple):
    """Source and message of a draw."""

    request: Request  # its seed is the shard's own
    source: Stored
    ask: Draw
    shard: int

    def drawn(self) -> Drawn:
        """Answers, and what their errors are made of, in the order of the queries."""
        parts, pooled, exactly = [], np.zeros(len(self.ask.budgets), np.int64), self._exactly()
        order = [np.arange(0)]
        for task, estimator in self._tasks(exactly):
            order.append(task.which)
            if estimator is None:
                parts.append(sure(*(_numbers(one) for one in self._passed(task.which))))
                continue
            spread, pooled[task.which] = self._drawn(task, estimator)[1:]
            parts.append(spread)
        back = np.argsort(np.concatenate(order))
        columns = (np.concatenate(column)[back] for column in zip(*parts, strict=True))
        return Drawn(tuple(columns), pooled, exactly, taking_part(self.request, self.source))

    def state(self) -> State:
        """The same answers, drawn alike again, with the graph of queries and score."""
        q, found, order = len(self.ask.budgets), list[State](), [np.arange(0)]
        for task, estimator in self._tasks(self._exactly()):
            order.append(task.which)
            found.append(self._passed(task.which) if estimator is None else self._drawn(task, estimator)[0])
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        assert len(back) == q
        output, lse = (torch.cat(column)[back] for column in zip(*found, strict=True))
        dtype = self.request.queries.dtype
        return State(output.to(dtype), lse.to(dtype))

    def _passed(self, which: Positions) -> State:
        return State(*passed(self.request.at(which), self.source, self.request.pools))

    def _drawn(self, task: Round, estimator: Estimator) -> tuple[State, ErrorEstimate, Positions]:
        """One round; how many are enough, no shard can tell alone."""
        sample = estimator.sample(task, salt=self.shard)
        state, spread, _ = estimator.spread(task, sample, estimator.pooled(task, sample)[1])
        return state, spread, sample.figures.drawn.astype(np.int64)

    def _exactly(self) -> Live:
        """For which queries every record is passed over: as it was decided, or where it costs less, if that may be."""
        ask = self.ask
        if ask.exactly is not None:
            return ask.exactly
        estimator = Estimator.of(self.request, self.source)
        if estimator is None:
            return np.ones(len(ask.budgets), np.bool_)
        found = np.zeros(len(ask.budgets), np.bool_)
        if not ask.bounded:
            for task in self._rounds(found):
                found[task.which] = estimator.too_dear(task)
        return found

    def _tasks(self, exactly: Live) -> Iterator[tuple[Round, Estimator | None]]:
        """Rounds of queries that are asked alike, and what draws for them; None: a pass over every record."""
        if exactly.any() or not len(exactly):
            yield Round(np.flatnonzero(exactly), 0), None
        estimator = Estimator.of(self.request, self.source) if not exactly.all() else None
        if estimator is not None:
            estimator = estimator._replace(least=0)  # the caller counts the draws of all shards together
            for task in self._rounds(exactly):
                for part in estimator.parts(task):
                    yield part, estimator

    def _rounds(self, exactly: Live) -> Iterator[Round]:
        ask = self.ask
        for budget in np.unique(ask.budgets[~exactly]).tolist():
            yield Round(np.flatnonzero((ask.budgets == budget) & ~exactly), budget)


def taking_part(request: Request, source: Stored) -> int:
    """Number of records that a request may weigh, whether it has queries or not."""
    return source.count if request.allowed is None else int(np.count_nonzero(request.keep(source.live)))


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return tensor.detach().double().numpy()
