"""Shards on the ranks of a torch.distributed job: every rank asks with queries of its own, and answers for its shards.

Messages go by all-to-all over a gloo group beside the job's own, so that they never wait for its collectives, nor these
for them. Before they go, ranks exchange what each is about to ask: a call that only some of them make, or unlike ones,
become a typed error within the timeout. Nothing is averaged or summed over ranks, so no factor of the world size comes
in: each gets the gradients of its own queries.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from softdb.cluster.merge import of_owners, together
from softdb.cluster.shard import ClusterShard, Message, ShardReplies
from softdb.errors import BadInput, Closed, ShardUnavailable, SoftDBError

__all__ = ["Ranks"]

HEAD = struct.Struct(
    "<qqqq"
)  # turn, kind, bytes of the message, and the most that any of the sender's has beyond a slot
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
        """As `Transport.ask`. Two all-to-alls, of the messages and of the replies; two more where these are large."""
        kind = ", ".join(sorted({type(ask).__name__ for ask in asks.values()}))
        sent = [{shard: ask for shard, ask in asks.items() if self._owner[shard] == rank} for rank in range(self.ranks)]
        arrived = self._exchanged([pickle.dumps(one) for one in sent], kind)
        replies = [self._answered(pickle.loads(one)) for one in arrived]
        found: dict[tuple[int, ...], Any] = {}
        for one in self._exchanged([pickle.dumps(reply) for reply in replies], f"reply to {kind}"):
            found |= pickle.loads(one)
        missing = dict[int, str]()
        for mine, reply in sorted(found.items()):
            if isinstance(reply, SoftDBError):
                raise reply
            if isinstance(reply, Exception):
                missing[mine[0]] = f"{type(reply).__name__}: {reply}"
        return of_owners({mine: reply for mine, reply in found.items() if mine[0] not in missing}, missing)

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
        sizes = [max(0, len(one) - SLOT) for one in sent]  # of what no slot holds
        own = self._turn, zlib.crc32(kind.encode())
        slots = b"".join(HEAD.pack(*own, len(one), max(sizes)) + one[:SLOT].ljust(SLOT, b"\0") for one in sent)
        whole = self._swapped(slots, [HEAD.size + SLOT] * self.ranks, [HEAD.size + SLOT] * self.ranks)
        heads = [HEAD.unpack_from(one) for one in whole]
        if unlike := [rank for rank, one in enumerate(heads) if one[:2] != own]:
            self._turn = max(one[0] for one in heads)
            raise BadInput(
                f"rank {self.rank} asked {kind!r} and ranks {unlike} something else; every rank makes the same calls "
                "in the same order, with no queries (0, d) where it has none, and backward on all or none"
            )
        found = [one[HEAD.size : HEAD.size + length] for one, (_, _, length, _) in zip(whole, heads, strict=True)]
        if not any(most for *_, most in heads):  # which every rank sees alike
            return found
        expected = [max(0, length - SLOT) for _, _, length, _ in heads]
        rest = self._swapped(b"".join(one[SLOT:] for one in sent), sizes, expected)
        return [begun + more for begun, more in zip(found, rest, strict=True)]

    def _swapped(self, sent: bytes, sizes: list[int], expected: list[int]) -> list[bytes]:
        """An all-to-all of so many bytes to and from each rank."""
        given = torch.frombuffer(bytearray(sent), dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
        taken = torch.empty(sum(expected), dtype=torch.uint8)
        self._collectively(lambda: dist.all_to_all_single(taken, given, expected, sizes, group=self._group))
        whole, ends = taken.numpy().tobytes(), list(itertools.accumulate(expected))
        return [whole[end - size : end] for size, end in zip(expected, ends, strict=True)]

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
