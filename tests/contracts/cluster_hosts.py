"""Shards of this process as if they lay on hosts: pickled, merged and counted, as actors and ranks do it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from softdb.cluster.merge import of_owners, together
from softdb.cluster.shard import ClusterShard, Message, ShardReplies


def nbytes(message: Any) -> int:
    """The bytes of the arrays in a message or reply: what grows with queries, candidates and widths."""
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, bytes):
        return len(message)
    if dataclasses.is_dataclass(message):
        return sum(nbytes(getattr(message, field.name)) for field in dataclasses.fields(message))
    return sum(map(nbytes, message)) if isinstance(message, tuple | list) else 0


class Hosts:
    """A transport without a wire: shard s lies on host s mod hosts, which sends one reply for all of its shards.

    `numbers` are the bytes of the arrays that went up and came back; `wire` is all that was pickled.
    """

    collective = False

    def __init__(self, shards: Sequence[ClusterShard], hosts: int) -> None:
        self.own, self.shards, self.hosts = list(shards), len(shards), hosts
        self.cleared()

    def cleared(self) -> None:
        """Count from nothing."""
        self.numbers, self.wire, self.asked = [0, 0], [0, 0], 0

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """As `Transport.ask`."""
        found = dict[tuple[int, ...], Any]()
        self.asked += 1
        for host in sorted({shard % self.hosts for shard in asks}):
            sent = pickle.dumps({shard: ask for shard, ask in asks.items() if shard % self.hosts == host})
            mine: dict[int, Message] = pickle.loads(sent)
            replies = together(mine, {shard: self.own[shard].answer(ask) for shard, ask in mine.items()})
            back = pickle.dumps(replies)
            for i, (whole, what) in enumerate(((sent, [*mine.values()]), (back, [*replies.values()]))):
                self.wire[i] += len(whole)
                self.numbers[i] += nbytes(what)
            found |= pickle.loads(back)
        return of_owners(found, {})

    def anyone(self, more: bool) -> bool:
        """Itself."""
        return more

    def close(self) -> None:
        """Nothing to let go of."""
