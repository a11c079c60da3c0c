"""Shards on the ranks of a torch.distributed job: every rank asks with queries of its own, and answers for its shards.

Messages go by all-to-all over a gloo group beside the job's own, so that they never wait for its collectives, nor these
for them. Before they go, ranks exchange what each is about to ask: a call that only some of them make, or unlike ones,
become a typed error within the timeout. Nothing is averaged or summed over ranks, so no factor of the world size comes
in: each gets the gradients of its own queries.
"""

from __future__ import annotations

import datetime
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from softdb.cluster.shard import ClusterShard, Message, ShardReplies
from softdb.errors import BadInput, Closed, ShardUnavailable, SoftDBError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The shards that all ranks hold, as one transport. Making it, and every question, is a call that all ranks make.

    After a question that not all of them answered, the ranks are out of step: make it anew. Ranks trust each other:
    what they send is unpickled.

    Args:
        own: this rank's shards by their numbers, maybe none; together the ranks hold 0 … P - 1, each once.
        timeout: seconds after which a rank that is waited for counts as lost; questions may ask for less.
    """

    collective = True

    def __init__(self, own: Mapping[int, ClusterShard], timeout: float = 30.0) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise BadInput(
                "torch.distributed is not initialised; start with torchrun and call init_process_group first"
            )
        self.rank, self.ranks, self._own = dist.get_rank(), dist.get_world_size(), dict(own)
        self._limit, self._broken, self._turn = timeout, "", 0
        wait = datetime.timedelta(seconds=timeout)
        self._group: Any = self._collectively(lambda: dist.new_group(backend="gloo", timeout=wait))
        held = [pickle.loads(one) for one in self._exchanged([pickle.dumps(sorted(self._own))] * self.ranks, "open")]
        owners = [(shard, rank) for rank, mine in enumerate(held) for shard in mine]
        self._owner = dict(owners)
        self.shards = len(owners)
        if sorted(shard for shard, _ in owners) != list(range(self.shards)) or not owners:
            raise BadInput(
                f"the {self.ranks} ranks hold the shards {held}; expected 0 to P - 1, each on one rank: start as many "
                "ranks as the shards were shared out for"
            )

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """As `Transport.ask`. Two all-to-alls, of the messages and of the replies."""
        kind = ", ".join(sorted({type(ask).__name__ for ask in asks.values()}))
        sent = [{shard: ask for shard, ask in asks.items() if self._owner[shard] == rank} for rank in range(self.ranks)]
        arrived = self._exchanged([pickle.dumps(one) for one in sent], kind)
        replies = [self._answered(pickle.loads(one)) for one in arrived]
        found: dict[int, Any] = {}
        for one in self._exchanged([pickle.dumps(reply) for reply in replies], f"reply to {kind}"):
            found |= pickle.loads(one)
        missing = dict[int, str]()
        for shard, reply in sorted(found.items()):
            if isinstance(reply, SoftDBError):
                raise reply
            if isinstance(reply, Exception):
                missing[shard] = f"{type(reply).__name__}: {reply}"
        return ShardReplies({shard: reply for shard, reply in found.items() if shard not in missing}, missing)

    def _answered(self, asks: dict[int, Message]) -> dict[int, Any]:
        """Replies of this rank's shards, or why there are none."""
        replies = dict[int, Any]()
        for shard, ask in asks.items():
            try:
                replies[shard] = self._own[shard].answer(ask)
            except SoftDBError as error:
                replies[shard] = error
            except Exception as error:
                replies[shard] = RuntimeError(f"{type(error).__name__}: {error}")
        return replies

    def anyone(self, more: bool) -> bool:
        """Whether any rank has more to ask."""
        return any(one == b"1" for one in self._exchanged([b"1" if more else b"0"] * self.ranks, "anyone"))

    def close(self) -> None:
        """Let go of the group; the shards are their owner's."""
        if self._group is not None and not self._broken:
            dist.destroy_process_group(self._group)
        self._group = None

    # -- the wire --------------------------------------------------------------------------------------------------

    def _exchanged(self, sent: list[bytes], kind: str) -> list[bytes]:
        """One message to each rank, and one from each. Raises ShardUnavailable, and BadInput for unlike calls."""
        if self._group is None:
            raise Closed("the cluster was closed; open it again")
        self._turn += 1
        head = torch.tensor([self._turn, zlib.crc32(kind.encode()), *map(len, sent)])
        heads = [torch.empty_like(head) for _ in range(self.ranks)]
        self._collectively(lambda: dist.all_gather(heads, head, group=self._group))
        if any(not torch.equal(one[:2], head[:2]) for one in heads):
            unlike = [rank for rank, one in enumerate(heads) if not torch.equal(one[:2], head[:2])]
            self._turn = max(int(one[0]) for one in heads)
            raise BadInput(
                f"rank {self.rank} asked {kind!r} and ranks {unlike} something else; every rank makes the same calls "
                "in the same order, with no queries (0, d) where it has none, and backward on all or none"
            )
        inputs, sizes = list(map(len, sent)), [int(one[2 + self.rank]) for one in heads]
        given = torch.from_numpy(np.frombuffer(b"".join(sent) or b"", np.uint8).copy())
        taken = torch.empty(sum(sizes), dtype=torch.uint8)
        self._collectively(lambda: dist.all_to_all_single(taken, given, sizes, inputs, group=self._group))
        whole, ends = taken.numpy().tobytes(), np.cumsum(sizes).tolist()
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _collectively(self, call: Callable[[], T]) -> T:
        """What all ranks do together. Raises ShardUnavailable where one does not, now and from then on."""
        if self._broken:
            raise ShardUnavailable(
                f"the ranks are out of step since {self._broken}; make the transport anew on all of them"
            )
        try:
            return call()
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0][:200]
            raise ShardUnavailable(
                f"rank {self.rank} of {self.ranks} waited {self._limit:g} s at most for the others ({self._broken}); a "
                "rank is lost, or only some ranks made this call: every rank asks whenever one asks"
            ) from error
