"""The shards that one request asks: who takes part, who is missing, and their states with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from softdb.attend import Request, Source
from softdb.attend.request import Live, Positions
from softdb.check import Schema
from softdb.cluster import shard as say
from softdb.cluster.caller import Caller
from softdb.cluster.posed import Parts, Posed, posed
from softdb.errors import BadInput
from softdb.pool import State
from softdb.store.snapshot import Block

A = TypeVar("A", bound="AskedShards")


class AskedShards(Source):
    """The shards, and the filter that says which of their records take part."""

    def __init__(self, caller: Caller, where: dict[str, Any] | None) -> None:
        self.caller, self.where = caller, where
        self._count: int | None = None if where else caller.count

    @property
    def live(self) -> Live:
        """Raises BadInput: nobody here knows."""
        raise self._elsewhere()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Raises BadInput: records do not travel."""
        raise self._elsewhere()

    @staticmethod
    def _elsewhere() -> BadInput:
        return BadInput(
            "this needs every record in one place, but they lie on the shards of a cluster; ask it another way"
        )

    def positions(self, rows: Positions) -> Positions:
        """The rows: they are the positions."""
        return rows

    @property
    def schema(self) -> Schema:
        """Of every shard."""
        return self.caller.first.schema

    @property
    def width(self) -> int:
        """v."""
        return self.schema.pooled_dim

    @property
    def num_classes(self) -> int | None:
        """Of labels."""
        return self.schema.num_classes

    @property
    def count(self) -> int:
        """Number of records that take part; asked if no answer told it yet."""
        if self._count is None:
            nobody = say.ShardQuery(np.zeros((0, self.schema.dim), np.float32), self.schema.metric, where=self.where)
            answers = self.ask(lambda shard, version: say.PassOver(version, nobody, pools=False))
            self._count = sum(part.taking_part for part in answers.replies.values())
        return self._count

    def took_part(self, count: int) -> None:
        """Note the number of records that take part; the first round of an estimate asks every shard."""
        self._count = count if self._count is None else self._count

    def whole(self: A) -> A:
        """The same, which gives no partial answer: a loss needs all."""
        if self.caller.partial:
            self.caller = self.caller.complete()
        return self

    def ask(self, make: Callable[[int, int], say.Message], which: Iterable[int] | None = None) -> say.ShardReplies:
        """As `Caller.ask`; who is missing is noted."""
        answers = self.caller.ask(make, which)
        self.missing = tuple(sorted({*self.missing, *answers.missing}))
        return answers

    def posed(self, request: Request) -> Posed:
        """A request as shards take it."""
        return posed(request, self.schema.metric, self.schema.dim, self.where)

    @staticmethod
    def wants_gradient(asked: Posed) -> bool:
        """Return True if the queries, or parameters whose gradients the shards give, do."""
        return torch.is_grad_enabled() and any(one.requires_grad for one in (asked.queries, *asked.parameters))

    def states(
        self, asked: Posed, states: State, asks: Any, places: Any, kept: Any, owners: Sequence[tuple[int, ...]]
    ) -> State:
        """States of shards, with gradients to the queries that were asked and to the parameters."""
        if not self.wants_gradient(asked):
            return states
        answered = Parts.apply(  # type: ignore[no-untyped-call]
            self.caller.complete(), asks, states, places, kept, owners, asked.queries, *asked.parameters
        )
        return State(*answered)
