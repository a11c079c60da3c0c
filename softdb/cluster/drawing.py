"""The shard's part of an estimate: draw about as many records as the caller asks for, and sum their errors."""

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
    """Pool all records; return output (q, v) and log-normaliser (q,). Without `pools` the output is (q, 0)."""
    if not len(request.queries) and request.folded is not None and request.folded.scale is not None:  # no pass
        nothing = request.queries.sum(1)  # (0,), with the graph of the queries
        return nothing.unsqueeze(1).expand(-1, source.width if pools else 0), nothing
    return source.stream(replace(request, pools=pools))


class ShardDrawing(NamedTuple):
    """Computes the reply to a `Draw` message."""

    request: Request  # with the shard's own seed
    source: Stored
    ask: Draw
    shard: int

    def drawn(self) -> Drawn:
        """Draw records, and return the reply: estimates and error sums, in the order of the queries."""
        spreads, pooled, exactly = [], np.zeros(len(self.ask.budgets), np.int64), self._exactly()
        order = [np.arange(0)]
        for which, state, spread, count in self._parts(exactly):
            order.append(which)
            pooled[which] = count
            spreads.append(sure(*map(_numbers, state)) if spread is None else spread)
        back = np.argsort(np.concatenate(order))
        columns = (np.concatenate(column)[back] for column in zip(*spreads, strict=True))
        return Drawn(tuple(columns), pooled, exactly, taking_part(self.request, self.source))

    def state(self) -> State:
        """Draw the same records again, and return output and lse with gradients to the queries and the score."""
        states, order = list[State](), [np.arange(0)]
        for which, state, *_ in self._parts(self._exactly()):
            order.append(which)
            states.append(state)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        output, lse = (torch.cat(column)[back] for column in zip(*states, strict=True))
        dtype = self.request.queries.dtype
        return State(output.to(dtype), lse.to(dtype))

    def _exactly(self) -> Live:
        """Return (q,) bool: True to pool all records for a query, as the message says or where that is faster."""
        ask = self.ask
        if ask.exactly is not None:
            return ask.exactly
        estimator = Estimator.of(self.request, self.source)
        if estimator is None:
            return np.ones(len(ask.budgets), np.bool_)
        exactly = np.zeros(len(ask.budgets), np.bool_)
        if not ask.bounded:
            for task in self._rounds(exactly):
                exactly[task.which] = estimator.too_dear(task)
        return exactly

    def _parts(self, exactly: Live) -> Iterator[tuple[Positions, State, ErrorEstimate | None, Positions | int]]:
        """Answer groups of queries; yield their indices, outputs and lses, error sums, and numbers of records drawn.

        The error sums are None where all records were pooled.
        """
        if exactly.any() or not len(exactly):
            which = np.flatnonzero(exactly)
            yield which, State(*passed(self.request.at(which), self.source, self.request.pools)), None, 0
        estimator = Estimator.of(self.request, self.source) if not exactly.all() else None
        if estimator is not None:
            estimator = estimator._replace(least=0)  # the caller checks the least number of draws over all shards
            for task in self._rounds(exactly):
                for piece in estimator.parts(task):
                    sample = estimator.sample(piece, salt=self.shard)
                    state, spread = estimator.spread(piece, sample, estimator.pooled(piece, sample)[1])
                    yield piece.which, state, spread, sample.figures.drawn.astype(np.int64)

    def _rounds(self, exactly: Live) -> Iterator[Round]:
        ask = self.ask
        for budget in np.unique(ask.budgets[~exactly]).tolist():
            yield Round(np.flatnonzero((ask.budgets == budget) & ~exactly), budget)


def taking_part(request: Request, source: Stored) -> int:
    """Return the number of records that take part in a request."""
    return source.count if request.allowed is None else int(np.count_nonzero(request.keep(source.live)))


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return tensor.detach().double().numpy()
