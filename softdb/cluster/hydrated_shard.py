"""A shard over a directory of this machine that follows a table."""

from __future__ import annotations

import weakref
from typing import Any

from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import Local
from softdb.cluster.shard import NEWEST, Describe, Message, Refresh, of_records
from softdb.errors import StaleRead

__all__ = ["Here", "HydratedShard"]


class HydratedShard:
    """One of the shards that are hydrated here. It is made anew, and asked again, where it is found to be damaged."""

    def __init__(self, hydrated: Hydrated, shard: int) -> None:
        self.hydrated, self.shard = hydrated, shard
        self._asked: DatabaseShard | None = None

    def answer(self, ask: Message) -> Any:
        """As `Shard.answer`."""
        if isinstance(ask, Refresh):
            version = self.hydrated.truth.newest() if ask.version == NEWEST else ask.version
            if ask.anew:
                self.hydrated.remake(self.shard)
            self.hydrated.follow(version)
            ask = Describe(NEWEST)
        elif not isinstance(ask, Describe) and 0 <= self.hydrated.version(self.shard) < of_records(ask.version):
            self.hydrated.follow(of_records(ask.version))  # as a replica that nobody has asked since
        return self.hydrated.guarded(self.shard, lambda: self._answered(ask))

    def _answered(self, ask: Message) -> Any:
        if self.hydrated.databases[self.shard].closed:
            raise StaleRead(f"shard {self.shard} could not be opened again after a write had failed; refresh()")
        own = self.hydrated.tagged(self.shard)
        if not isinstance(ask, Describe) and not ask.fits(own):
            mine, asked = of_records(own), of_records(ask.version)
            told = "was made anew, or a replica answers"
            if own >= 0 and mine != asked:
                told = f"is at version {mine} and was asked for {asked}"
            raise StaleRead(f"shard {self.shard} {told}; refresh() and ask again")
        db = self.hydrated.databases[self.shard]
        if self._asked is None or self._asked.db is not db:
            tagged, shards = self.hydrated.tagged, self.hydrated.truth.shards
            self._asked = DatabaseShard(db, self.shard, shards, lambda: tagged(self.shard))
        reply, origin = self._asked.answer(ask), self.hydrated.origin(self.shard)
        if isinstance(ask, Describe) and own >= 0 and origin is not None:
            return reply._replace(identity=origin.identity, left_out=tuple(origin.left_out))
        return reply


class Here(Local):
    """All shards of a table in this process. Their databases are closed with it, or when nothing refers to it."""

    def __init__(self, hydrated: Hydrated) -> None:
        super().__init__([HydratedShard(hydrated, shard) for shard in hydrated.mine])
        self.hydrated = hydrated
        weakref.finalize(self, hydrated.close)

    def close(self) -> None:
        """Ends the threads, and closes the databases."""
        super().close()
        self.hydrated.close()
