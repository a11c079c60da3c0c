"""`QueriedShards`: base of a source whose records are on shards; it asks the shards and notes missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from softdb.attend import Request, Source
from softdb.attend.request import Live, Positions
from softdb.check import Schema
from softdb.cluster.caller import Caller
from softdb.cluster.posed import Parts, Posed, posed
from softdb.cluster.shard import Message, PassOver, ShardQuery, ShardReplies
from softdb.errors import BadInput
from softdb.pool import State
from softdb.store.snapshot import Block

A = TypeVar("A", bound="QueriedShards")


class QueriedShards(Source):
    """Source of the records on all shards that match a filter."""

    def __init__(self, caller: Caller, where: dict[str, Any] | None) -> None:
        self.caller, self.where = caller.now(), where
        self._count: int | None = None if where else caller.count

    @property
    def live(self) -> Live:
        """Raise BadInput, because this process holds no record."""
        raise self._elsewhere()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Raise BadInput, because this process holds no record."""
        raise self._elsewhere()

    @staticmethod
    def _elsewhere() -> BadInput:
        return BadInput("this needs every record in one place, but they are on a cluster's shards; use one database")

    def positions(self, rows: Positions) -> Positions:
        """Return `rows` unchanged: a cluster uses row numbers as positions."""
        return rows

    @property
    def schema(self) -> Schema:
        """Schema of every shard."""
        return self.caller.first.schema

    @property
    def width(self) -> int:
        """Width v of a pooled answer."""
        return self.schema.pooled_dim

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if the values are not labels."""
        return self.schema.num_classes

    @property
    def count(self) -> int:
        """Number of records that match the filter. Asks the shards if no earlier reply has said it."""
        if self._count is None:
            no_queries = np.zeros((0, self.schema.dim), np.float32)
            question = ShardQuery(no_queries, self.schema.metric, where=self.where)
            answers = self.ask(lambda shard, version: PassOver(version, question, pools=False))
            self._count = sum(reply.taking_part for reply in answers.replies.values())
        return self._count

    def took_part(self, count: int) -> None:
        """Cache the number of records that match the filter, unless it is known already."""
        self._count = count if self._count is None else self._count

    def whole(self: A) -> A:
        """Refuse partial answers from now on, because a loss needs all shards; return this source."""
        if self.caller.partial:
            self.caller = self.caller.complete()
        return self

    def ask(self, make: Callable[[int, int], Message], which: Iterable[int] | None = None) -> ShardReplies:
        """Ask the shards through `Caller.ask`, and add shards that do not reply to `missing`."""
        answers = self.caller.ask(make, which)
        self.missing = tuple(sorted({*self.missing, *answers.missing}))
        return answers

    def posed(self, request: Request) -> Posed:
        """Convert a request to a query for shards, with this source's filter."""
        return posed(request, self.schema.metric, self.schema.dim, self.where)

    @staticmethod
    def wants_gradient(question: Posed) -> bool:
        """Return True if the queries or the parameters of a question need gradients."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (question.queries, *question.parameters))

    def states(
        self, question: Posed, states: State, asks: Any, places: Any, used: Any, owners: Sequence[tuple[int, ...]]
    ) -> State:
        """Connect the shards' outputs and lses to autograd if gradients are needed. Arguments as in `Parts.forward`."""
        if not self.wants_gradient(question):
            return states
        answered = Parts.apply(  # type: ignore[no-untyped-call]
            self.caller.complete(), asks, states, places, used, owners, question.queries, *question.parameters
        )
        return State(*answered)
