"""Transports to shards in this process (`Local`, `LocalTable`), which answer each message in a thread."""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.shard import NEWEST, ClusterShard, Describe, Message, Refresh, ShardReplies, of_records
from softdb.errors import Closed, SoftDBError, StaleRead


class Local:
    """Transport to several shards in this process. The shards share the process's cores."""

    collective = False

    def __init__(self, shards: Sequence[ClusterShard]) -> None:
        self._shards = list(shards)
        self.shards = len(self._shards)
        self._threads = concurrent.futures.ThreadPoolExecutor(max(1, self.shards), "softdb-shard")

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send messages, as `Transport.ask` says. A shard that exceeds the timeout continues in its thread."""
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
        """Return `more`, because there are no other ranks (see `Transport.anyone`)."""
        return more

    def close(self) -> None:
        """End the threads. The shards stay open."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class HydratedShard:
    """A shard of a table, in a directory of this machine. `answer` rebuilds a damaged directory, and tries again."""

    def __init__(self, hydrated: Hydrated, shard: int) -> None:
        self.hydrated, self.shard = hydrated, shard

    def answer(self, ask: Message) -> Any:
        """Return the reply to a message; see `ClusterShard.answer`."""
        if isinstance(ask, Refresh):
            version = self.hydrated.truth.newest() if ask.version == NEWEST else ask.version
            if ask.rebuild:
                self.hydrated.remake(self.shard)
            self.hydrated.follow(version)
            ask = Describe(NEWEST)
        elif not isinstance(ask, Describe) and 0 <= self.hydrated.version(self.shard) < of_records(ask.version):
            self.hydrated.follow(of_records(ask.version))  # an idle replica may be at an older version
        return self.hydrated.guarded(self.shard, lambda: self._answered(ask))

    def _answered(self, ask: Message) -> Any:
        db, own = self.hydrated.databases[self.shard], self.hydrated.tagged(self.shard)
        if db.closed:
            raise StaleRead(f"shard {self.shard} could not be reopened after a failed write; refresh()")
        if not isinstance(ask, Describe) and not ask.fits(own):
            version, wanted = of_records(own), of_records(ask.version)
            reason = "was rebuilt, or a replica answers"
            if own >= 0 and version != wanted:
                reason = f"is at version {version} and was asked for {wanted}"
            raise StaleRead(f"shard {self.shard} {reason}; refresh() and ask again")
        shards = self.hydrated.truth.shards
        reply = DatabaseShard(db, self.shard, shards, lambda: self.hydrated.tagged(self.shard)).answer(ask)
        origin = self.hydrated.origin(self.shard)
        if isinstance(ask, Describe) and own >= 0 and origin is not None:
            return reply._replace(identity=origin.identity, left_out=tuple(origin.left_out))
        return reply


class LocalTable(Local):
    """Transport to all shards of a table in this process; it closes the databases on `close` or garbage collection."""

    def __init__(self, hydrated: Hydrated) -> None:
        super().__init__([HydratedShard(hydrated, shard) for shard in hydrated.own_shards])
        self.hydrated = hydrated
        weakref.finalize(self, hydrated.close)

    def close(self) -> None:
        """End the threads, and close the databases."""
        super().close()
        self.hydrated.close()
