"""A shard over a directory of this machine that follows a table."""

from __future__ import annotations

from typing import Any

from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hydrate import VERSION_BITS, Hydrated
from softdb.cluster.local import Local
from softdb.cluster.shard import NEWEST, Describe, Message, Refresh
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
            self.hydrated.follow(version)
            ask = Describe(NEWEST)
        return self.hydrated.guarded(self.shard, lambda: self._answered(ask))

    def _answered(self, ask: Message) -> Any:
        own = self.hydrated.tagged(self.shard)
        if not isinstance(ask, Describe) and ask.version != own:
            mine, asked = (version & ((1 << VERSION_BITS) - 1) for version in (own, ask.version))
            told = f"is at version {mine} and was asked for {asked}" if mine != asked and own >= 0 else "was made anew"
            raise StaleRead(f"shard {self.shard} {told}; refresh() and ask again")
        db = self.hydrated.databases[self.shard]
        if self._asked is None or self._asked.db is not db:
            tagged, shards = self.hydrated.tagged, self.hydrated.truth.shards
            self._asked = DatabaseShard(db, self.shard, shards, lambda: tagged(self.shard))
        return self._asked.answer(ask)


class Here(Local):
    """All shards of a table in this process."""

    def __init__(self, hydrated: Hydrated) -> None:
        super().__init__([HydratedShard(hydrated, shard) for shard in hydrated.mine])
        self.hydrated = hydrated

    def close(self) -> None:
        """Ends the threads, and closes the databases."""
        super().close()
        self.hydrated.close()
