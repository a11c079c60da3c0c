"""Shards on the ranks of a torch.distributed job: every rank asks its own queries, and answers for its own shards.

Messages never wait for the job's collectives, nor the collectives for messages: they go over a gloo group of their own.
Each message names the kind of call; if ranks make different calls, softdb raises an error within the timeout. Gradients
are not averaged or summed over ranks: each rank gets the gradients of its own queries.
"""

from __future__ import annotations

import datetime
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from softdb.cluster.merge import of_owners, together
from softdb.cluster.shard import ClusterShard, Message, ShardReplies
from softdb.errors import BadInput, Closed, ShardUnavailable, SoftDBError

HEAD = struct.Struct("<qqq")  # number of the call, CRC-32 of the call's name, length of the message in bytes
SLOT = 4096  # number of bytes of a message that are sent together with HEAD; the rest follows

T = TypeVar("T")


class Ranks:
    """Transport to the shards of all ranks. The constructor and every question are collective: every rank calls them.

    If some ranks did not answer a question, the transport is broken: construct it again on all ranks. Ranks unpickle
    data that other ranks send, so they must trust each other.

    Args:
        own: {number: shard} of this rank, possibly empty. Each shard 0 … P - 1 must be on exactly one rank.
        timeout: seconds to wait for the other ranks, except in questions, for which the handle's timeout holds.

    Raises BadInput outside a job of torch.distributed, and on every rank if a shard is on none or on several.
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
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        sent = pickle.dumps(sorted(self._own))
        gathered = self._exchanged(dict.fromkeys(self._others, sent), "open") | {self.rank: sent}
        by_rank = [pickle.loads(gathered[rank]) for rank in range(self.ranks)]
        owners = [(shard, rank) for rank, shards in enumerate(by_rank) for shard in shards]
        self._owner = dict(owners)
        self.shards = len(owners)
        if sorted(shard for shard, _ in owners) != list(range(self.shards)) or not owners:
            raise BadInput(
                f"the {self.ranks} ranks hold the shards {by_rank}; expected 0 to P - 1, each on one rank; check the "
                "argument own= on every rank"
            )

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send messages, as `Transport.ask` says: the ranks exchange messages, then replies."""
        kind, end = ", ".join(sorted({type(ask).__name__ for ask in asks.values()})), time.monotonic() + timeout
        by_rank = {rank: dict[int, Message]() for rank in range(self.ranks)}
        for shard, ask in asks.items():
            by_rank[self._owner[shard]][shard] = ask
        arrived = self._exchanged({rank: pickle.dumps(by_rank[rank]) for rank in self._others}, kind, end)
        answers = self._answered(by_rank[self.rank])
        replies = {rank: pickle.dumps(self._answered(pickle.loads(data))) for rank, data in arrived.items()}
        for data in self._exchanged(replies, f"reply to {kind}", end).values():
            answers |= pickle.loads(data)
        return of_owners(answers, {})

    def _answered(self, asks: dict[int, Message]) -> dict[tuple[int, ...], Any]:
        """Return the replies of this rank's shards, merged by `together`; an error takes the place of a reply."""
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
        """Return True if any rank passes more=True."""
        flags = self._exchanged(dict.fromkeys(self._others, b"1" if more else b"0"), "anyone")
        return more or b"1" in flags.values()

    def close(self) -> None:
        """Close the group. The shards stay open."""
        if self._group is not None and not self._broken:
            dist.destroy_process_group(self._group)
        self._group = None

    # -- the wire --------------------------------------------------------------------------------------------------

    def _exchanged(self, sent: Mapping[int, bytes], kind: str, end: float | None = None) -> dict[int, bytes]:
        """Send a message to each other rank, and return {rank: message received}. `end`: time to give up.

        Raises ShardUnavailable if a rank is lost, and BadInput if the ranks make different calls.
        """
        if self._group is None:
            raise Closed("the cluster was closed; open it again")
        self._turn += 1
        end = time.monotonic() + self._limit if end is None else end
        own = self._turn, zlib.crc32(kind.encode())
        slots = self._slots({rank: HEAD.pack(*own, len(data)) + data[:SLOT] for rank, data in sent.items()}, end)
        heads = {rank: HEAD.unpack_from(data) for rank, data in slots.items()}
        if unlike := [rank for rank, head in heads.items() if head[:2] != own]:
            self._turn = max(self._turn, *(head[0] for head in heads.values()))
            raise BadInput(
                f"rank {self.rank} asked {kind!r} and ranks {unlike} other calls; every rank makes the same calls "
                "in the same order; pass queries (0, d) on a rank without queries, run backward on all ranks or none"
            )
        messages = {rank: data[HEAD.size : HEAD.size + heads[rank][2]] for rank, data in slots.items()}
        overflow = {rank: data[SLOT:] for rank, data in sent.items() if len(data) > SLOT}
        more = self._swapped(overflow, {rank: head[2] - SLOT for rank, head in heads.items() if head[2] > SLOT}, end)
        return {rank: first + more.get(rank, b"") for rank, first in messages.items()}

    def _slots(self, sent: Mapping[int, bytes], end: float) -> dict[int, bytes]:
        """Exchange at most HEAD.size + SLOT bytes with each other rank, in one all-to-all; return {rank: bytes}."""
        outgoing, incoming = (torch.zeros(self.ranks, HEAD.size + SLOT, dtype=torch.uint8) for _ in range(2))
        for rank, data in sent.items():
            outgoing[rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        options = dist.AllToAllOptions()  # all_to_all_single takes no timeout longer than its group's
        options.timeout = datetime.timedelta(seconds=max(0.001, end - time.monotonic()))
        self._collectively(lambda: self._group.alltoall_base(incoming, outgoing, [], [], options).wait())
        return {rank: incoming[rank].numpy().tobytes() for rank in sent}

    def _swapped(self, sent: Mapping[int, bytes], expected: Mapping[int, int], end: float) -> dict[int, bytes]:
        """Send messages to other ranks over gloo, and receive messages of the expected sizes in bytes."""
        received = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in expected.items()}
        buffers = {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in sent.items()}

        def swap() -> None:
            pending = [dist.irecv(buffer, rank, self._group) for rank, buffer in received.items()]
            pending += [dist.isend(buffer, rank, self._group) for rank, buffer in buffers.items()]
            for work in filter(None, pending):
                work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))

        self._collectively(swap)
        return {rank: buffer.numpy().tobytes() for rank, buffer in received.items()}

    def _collectively(self, call: Callable[[], T]) -> T:
        """Run a collective operation. If it fails, raise ShardUnavailable now and in every later call."""
        if self._broken:
            raise ShardUnavailable(
                f"the ranks are out of step since {self._broken}; construct the transport again on all ranks"
            )
        try:
            return call()
        except (RuntimeError, OSError) as error:
            self._broken = str(error).splitlines()[0][:200]
            raise ShardUnavailable(
                f"rank {self.rank} of {self.ranks} waited for others in vain ({self._broken}); a rank is lost, or "
                "slower than the timeout, or only some ranks made this call: if one rank asks, every rank must ask"
            ) from error
