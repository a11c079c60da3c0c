"""Caller of the shards: the versions that it asks, its timeout, and if it takes partial answers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from softdb.cluster.shard import NEWEST, Describe, Description, Message, Refresh, ShardReplies, Transport, of_records
from softdb.errors import BadInput, ShardUnavailable, StaleRead


class Caller:
    """The shards as one handle sees them: each at the version that it was at when it was last looked at."""

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        partial: bool,
        intact: Callable[[Mapping[int, Description]], bool] = lambda _: False,  # of shards that may take over
    ) -> None:
        self.transport, self.timeout, self.partial, self._intact = transport, timeout, partial, intact
        self.known: dict[int, Description] = {}  # by shard
        self.look(lambda _: Describe(NEWEST))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.transport.shards

    @property
    def first(self) -> Description:
        """Of one of the shards; they are of one kind."""
        return next(iter(self.known.values()))

    @property
    def count(self) -> int:
        """Records with a key, of the shards that are known."""
        return sum(one.keyed for one in self.known.values())

    @property
    def value_size(self) -> float:
        """The root mean square of ‖v‖."""
        squares = sum(one.keyed * one.value_size**2 for one in self.known.values())
        return float(np.sqrt(squares / max(1, self.count)))

    def complete(self) -> Caller:
        """The same, which takes no part for the whole."""
        whole = copy.copy(self)
        whole.partial = False
        return whole

    def look(self, make: Callable[[int], Describe | Refresh]) -> None:
        """Read the descriptions of all shards, in place of the known ones. As `described`."""
        self.known = self.described(make)

    def described(self, make: Callable[[int], Describe | Refresh]) -> dict[int, Description]:
        """Descriptions of all shards. Raises BadInput for shards that are no parts of one whole.

        Raises StaleRead for one that is behind what this handle has seen: nobody reads backwards.
        """
        answers = self._asked({shard: make(shard) for shard in range(self.shards)}, self.partial)
        found: dict[int, Description] = answers.replies
        whole = next(iter(found.values())).schema
        for shard, one in found.items():
            if (one.shard, one.shards) != (shard, self.shards):
                raise BadInput(
                    f"shard {shard} of {self.shards} says that it is {one.shard} of {one.shards}; open them all alike"
                )
            if one.schema != whole:
                raise BadInput(
                    f"shard {shard} holds {one.schema} but another one {whole}; shards are parts of one whole"
                )
            seen, own = self.known.get(shard), of_records(one.version)
            if seen is not None and own < of_records(seen.version):
                raise StaleRead(
                    f"shard {shard} is at version {own}, behind {of_records(seen.version)} that was seen; refresh()"
                )
        return found

    def ask(
        self,
        make: Callable[[int, int], Message],  # shard, version
        which: Iterable[int] | None = None,  # None: all; a collective transport always asks all
        whole: bool = False,  # a part of the answer will not do
    ) -> ShardReplies:
        """Ask shards at the versions that this handle sees; once more where others have taken over (`taken_over`).

        Raises ShardUnavailable as the handle was told.
        """
        try:
            return self._ask(make, which, whole)
        except StaleRead:
            if not self.taken_over():
                raise
            return self._ask(make, which, whole)

    def taken_over(self) -> bool:
        """Return True, and ask these shards from now on, where replicas or shards made anew are at the same version."""
        before = max(of_records(one.version) for one in self.known.values())
        shards = self.described(lambda _: Refresh(before))
        if {of_records(shard.version) for shard in shards.values()} != {before} or not self._intact(shards):
            return False
        self.known.update(shards)
        return True

    def _ask(self, make: Callable[[int, int], Message], which: Iterable[int] | None, whole: bool) -> ShardReplies:
        known = self.known
        asked = range(self.shards) if which is None or self.transport.collective else list(which)
        partial = self.partial and not whole
        absent = {shard: "it did not answer when the cluster was opened" for shard in asked if shard not in known}
        asks = {shard: make(shard, known[shard].version) for shard in asked if shard in known}
        return self._asked(asks, partial, absent)

    def _asked(self, asks: dict[int, Message], partial: bool, absent: Mapping[int, str] | None = None) -> ShardReplies:
        begun = time.monotonic()
        answers = self.transport.ask(asks, self.timeout) if asks else ShardReplies({}, {})
        missing, waited = {**(absent or {}), **answers.missing}, time.monotonic() - begun
        if missing and not (partial and answers.replies):
            causes = "; ".join(f"shard {shard}: {why}" for shard, why in sorted(missing.items()))
            more = "give more time (timeout=), " if waited >= self.timeout else ""
            raise ShardUnavailable(
                f"{len(missing)} of {self.shards} shards did not answer (waited {round(waited, 2):g} s of at most "
                f"{self.timeout:g} s; {causes}); ask again, {more}or open with partial=True for answers without them"
            )
        return answers._replace(missing=missing)
