"""Transports to shards in this process (`Local`, `LocalTable`), which answer each message in a thread."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.metrics import Meter
from softdb.cluster.shard import (
    NEWEST,
    CallVerb,
    ClusterShard,
    Describe,
    Message,
    Refresh,
    ShardReplies,
    Transport,
    of_records,
)
from softdb.errors import Closed, CorruptionError, SoftDBError, StaleRead
from softdb.reports import ShardReport

_log = logging.getLogger("softdb")


class Local(Transport):
    """Transport to several shards in this process. The shards share the process's cores."""

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

    def close(self) -> None:
        """End the threads. The shards stay open."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class HydratedShard:
    """A shard of a table, in a directory of this machine, which answers at every version that its readers hold."""

    def __init__(self, hydrated: Hydrated, shard: int) -> None:
        self.hydrated, self.shard = hydrated, shard
        self._meter = Meter(hydrated.truth.url, shard)

    def answer(self, ask: Message) -> Any:
        """Return the reply to a message; see `ClusterShard.answer`. Rebuilds a damaged directory, and tries again."""
        hydrated, shard, version = self.hydrated, self.shard, ask.version
        if isinstance(ask, Refresh):
            version = hydrated.truth.newest() if version == NEWEST else version
            if ask.rebuild:
                hydrated.remake(shard)
            if hydrated.versions[shard].at(version) is None:
                hydrated.follow(version)
            if ask.again and hydrated.versions[shard].at(version) is None:
                hydrated.versions[shard].note(ask.reader, {version, *ask.needed})
                hydrated.serve_again(shard, version)
        elif version != NEWEST and hydrated.version(shard) < of_records(version):
            _log.warning("shard %s of %s is behind, at version %s", shard, hydrated.truth.url, hydrated.version(shard))
            hydrated.follow(of_records(version))
        started = time.perf_counter()
        try:
            reply = self._answered(ask, version)
            self._meter.answered(type(ask).__name__, time.perf_counter() - started)
            return reply
        except CorruptionError as error:
            _log.warning("shard %s of %s is rebuilt: %s", shard, hydrated.truth.url, error)
        hydrated.remake(shard)
        return self._answered(ask, version)

    def _answered(self, ask: Message, version: int) -> Any:
        hydrated, shard = self.hydrated, self.shard
        versions = hydrated.versions[shard]
        own = versions.at(None if version == NEWEST else of_records(version))
        if isinstance(ask, Describe):
            own = own or versions.at(None)
        if own is None or not (isinstance(ask, Describe) or ask.fits(own.origin.tag)):
            reason = "was rebuilt, or a replica answers" if own else f"no longer serves version {of_records(version)}"
            raise StaleRead(f"shard {shard} {reason}; refresh() and ask again")
        if isinstance(ask, CallVerb) and ask.verb == "build_index":
            return hydrated.indexed(shard, ask.arguments)
        tag, origin = own.origin.tag, own.origin.origin
        try:
            database = DatabaseShard(own.db, shard, hydrated.truth.shards, lambda: tag)
            reply = database.answer(Describe(NEWEST) if isinstance(ask, Describe) else ask)
        except Closed:
            raise StaleRead(f"shard {shard} was replaced while it answered; refresh() and ask again") from None
        if isinstance(ask, Describe):
            if ask.reader:
                versions.note(ask.reader, () if ask.leaves else {of_records(tag), *ask.needed})
            return reply._replace(identity=origin.identity, left_out=tuple(origin.left_out))
        if isinstance(ask, CallVerb) and ask.verb == "stats":
            return replace(reply, shards=[replace(self.report(), bytes=reply.bytes)])
        return reply

    def work(self, ask: Message) -> float:
        """Return about how many products of numbers a reply takes; infinity for `build_index`."""
        if isinstance(ask, CallVerb) and ask.verb == "build_index":
            return math.inf
        return ask.numbers * self.hydrated.databases[self.shard].core.store.snapshot.count

    def report(self) -> ShardReport:
        """Return a report of the shard's newest version. In an actor of Ray, its metrics get the numbers, too."""
        hydrated, shard = self.hydrated, self.shard
        db, version = hydrated.databases[shard], hydrated.version(shard)
        lag, served = hydrated.truth.newest() - version, len(hydrated.versions[shard].numbers)
        return self._meter.report(db.core.finder.report(), len(db), version, lag, served)


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
