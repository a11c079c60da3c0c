"""Shards on the ranks of a torch.distributed job: every rank asks with queries of its own, and answers for its shards.

Messages never wait for the job's collectives, nor these for them: small ones go from rank to rank over sockets, large
ones, and all where the ranks cannot connect, over a gloo group beside the job's own. With each goes what the rank asks:
a call that only some of them make, or unlike ones, become a typed error within the timeout. Nothing is averaged or
summed over ranks, so no factor of the world size comes in: each gets the gradients of its own queries.
"""

from __future__ import annotations

import datetime
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from softdb.cluster.connections import Connections
from softdb.cluster.merge import of_owners, together
from softdb.cluster.shard import ClusterShard, Message, ShardReplies
from softdb.errors import BadInput, Closed, ShardUnavailable, SoftDBError

HEAD = struct.Struct("<qqq")  # turn, kind, and bytes of the message
SLOT = 4096  # bytes of a message that travel with its head

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
        self._connections: Connections | None = None
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        held = [pickle.loads(one) for one in self._told(pickle.dumps(sorted(self._own)))]
        owners = [(shard, rank) for rank, mine in enumerate(held) for shard in mine]
        self._owner = dict(owners)
        self.shards = len(owners)
        if sorted(shard for shard, _ in owners) != list(range(self.shards)) or not owners:
            raise BadInput(
                f"the {self.ranks} ranks hold the shards {held}; expected 0 to P - 1, each on one rank: start as many "
                "ranks as the shards were shared out for"
            )
        self._connections = Connections.made(self.rank, self.ranks, self._told)

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """As `Transport.ask`. Two exchanges, of the messages and of the replies; a rank's own do not travel."""
        kind = ", ".join(sorted({type(ask).__name__ for ask in asks.values()}))
        by_rank = {rank: dict[int, Message]() for rank in range(self.ranks)}
        for shard, ask in asks.items():
            by_rank[self._owner[shard]][shard] = ask
        arrived = self._exchanged({rank: pickle.dumps(by_rank[rank]) for rank in self._others}, kind)
        found = self._answered(by_rank[self.rank])
        replies = {rank: pickle.dumps(self._answered(pickle.loads(one))) for rank, one in arrived.items()}
        for one in self._exchanged(replies, f"reply to {kind}").values():
            found |= pickle.loads(one)
        return of_owners(found, {})

    def _answered(self, asks: dict[int, Message]) -> dict[tuple[int, ...], Any]:
        """Replies of this rank's shards by whose they are (`together`), or why there are none."""
        replies = dict[int, Any]()
        for shard, ask in asks.items():
            try:
                replies[shard] = self._own[shard].answer(ask)
            except SoftDBError as error:
                replies[shard] = error
            except Exception as error:
                replies[shard] = RuntimeError(f"{type(error).__name__}: {error}")
        return together(asks, replies)

    def anyone(self, more: bool) -> bool:
        """Return True if any rank has more to ask."""
        told = self._exchanged(dict.fromkeys(self._others, b"1" if more else b"0"), "anyone")
        return more or b"1" in told.values()

    def close(self) -> None:
        """Let go of the group; the shards are their owner's."""
        if self._connections is not None:
            self._connections.close()
        if self._group is not None and not self._broken:
            dist.destroy_process_group(self._group)
        self._group = None

    def _told(self, mine: bytes) -> list[bytes]:
        """Data of each rank, by its number."""
        found = self._exchanged(dict.fromkeys(self._others, mine), "open") | {self.rank: mine}
        return [found[rank] for rank in range(self.ranks)]

    # -- the wire --------------------------------------------------------------------------------------------------

    def _exchanged(self, sent: Mapping[int, bytes], kind: str) -> dict[int, bytes]:
        """A message to each other rank, and one from each. Raises ShardUnavailable, and BadInput for unlike calls."""
        if self._group is None:
            raise Closed("the cluster was closed; open it again")
        self._turn += 1
        own = self._turn, zlib.crc32(kind.encode())
        whole = self._slots({rank: HEAD.pack(*own, len(one)) + one[:SLOT] for rank, one in sent.items()})
        heads = {rank: HEAD.unpack_from(one) for rank, one in whole.items()}
        if unlike := [rank for rank, one in heads.items() if one[:2] != own]:
            self._turn = max(self._turn, *(one[0] for one in heads.values()))
            raise BadInput(
                f"rank {self.rank} asked {kind!r} and ranks {unlike} something else; every rank makes the same calls "
                "in the same order, with no queries (0, d) where it has none, and backward on all or none"
            )
        found = {rank: one[HEAD.size : HEAD.size + heads[rank][2]] for rank, one in whole.items()}
        rest = {rank: one[SLOT:] for rank, one in sent.items() if len(one) > SLOT}
        more = self._swapped(rest, {rank: head[2] - SLOT for rank, head in heads.items() if head[2] > SLOT})
        return {rank: begun + more.get(rank, b"") for rank, begun in found.items()}

    def _slots(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Exchange data that fits in a slot with each other rank."""
        connections = self._connections
        if connections is not None:
            return self._collectively(lambda: connections.exchanged(sent, self._limit))
        size = HEAD.size + SLOT
        return self._swapped({rank: one.ljust(size, b"\0") for rank, one in sent.items()}, dict.fromkeys(sent, size))

    def _swapped(self, sent: Mapping[int, bytes], expected: Mapping[int, int]) -> dict[int, bytes]:
        """Messages to other ranks, and messages of so many bytes from others."""
        taken = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in expected.items()}
        given = {rank: torch.frombuffer(bytearray(one), dtype=torch.uint8) for rank, one in sent.items()}

        def swap() -> None:
            waited = [dist.irecv(one, rank, self._group) for rank, one in taken.items()]
            waited += [dist.isend(one, rank, self._group) for rank, one in given.items()]
            for one in filter(None, waited):
                one.wait()

        self._collectively(swap)
        return {rank: one.numpy().tobytes() for rank, one in taken.items()}

    def _collectively(self, call: Callable[[], T]) -> T:
        """Run a collective operation of all ranks. Raises ShardUnavailable where one does not, now and from then on."""
        if self._broken:
            raise ShardUnavailable(
                f"the ranks are out of step since {self._broken}; make the transport anew on all of them"
            )
        try:
            return call()
        except (RuntimeError, OSError) as error:
            self._broken = str(error).splitlines()[0][:200]
            if self._connections is not None:
                self._connections.close()  # who waits for this rank hears of it
            raise ShardUnavailable(
                f"rank {self.rank} of {self.ranks} waited {self._limit:g} s at most for the others ({self._broken}); a "
                "rank is lost, or only some ranks made this call: every rank asks whenever one asks"
            ) from error
