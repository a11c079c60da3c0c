"""Shards in this process: a thread for each message."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping, Sequence

from softdb.cluster.shard import ClusterShard, Message, ShardReplies
from softdb.errors import Closed, SoftDBError

__all__ = ["Local"]


class Local:
    """Several shards of this process as one transport. Kernels share out their work among the same cores."""

    collective = False

    def __init__(self, shards: Sequence[ClusterShard]) -> None:
        self._shards = list(shards)
        self.shards = len(self._shards)
        self._threads = concurrent.futures.ThreadPoolExecutor(max(1, self.shards), "softdb-shard")

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """As `Transport.ask`. A shard that takes too long goes on in its thread."""
        end = time.monotonic() + timeout
        try:
            sent = {shard: self._threads.submit(self._shards[shard].answer, ask) for shard, ask in asks.items()}
        except RuntimeError as error:
            raise Closed("the cluster was closed; open it again") from error
        replies, missing = {}, {}
        for shard, reply in sent.items():
            try:
                replies[shard] = reply.result(max(0.0, end - time.monotonic()))
            except SoftDBError:
                raise
            except concurrent.futures.TimeoutError:
                reply.cancel()
                missing[shard] = "it is too slow"
            except Exception as error:
                missing[shard] = f"{type(error).__name__}: {error}"
        return ShardReplies(replies, missing)

    def anyone(self, more: bool) -> bool:
        """Itself."""
        return more

    def close(self) -> None:
        """Ends the threads; the shards are their owner's."""
        self._threads.shutdown(wait=False, cancel_futures=True)
