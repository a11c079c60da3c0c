"""`Caller`: sends messages to shards, each with the version that it expects, and checks that the shards reply."""

from __future__ import annotations

import contextlib
import copy
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from softdb.cluster.shard import NEWEST, Describe, Description, Message, Refresh, ShardReplies, Transport, of_records
from softdb.errors import BadInput, ShardUnavailable, SoftDBError, StaleRead

LEAVING = 1.0  # seconds that `close` waits for shards
TAKEOVERS = 3  # number of times that a question is asked again as shards were rebuilt, or replicas took over


class Known(dict[int, Description]):
    """Descriptions of the shards at one version, by shard. Answers at that version refer to this object."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Caller:
    """The shards as one handle sees them: `known` has the last description of each shard, with its version.

    The shards keep the versions of all `Known` that an answer, a hit or a pending backward still refers to.
    """

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        partial: bool,
        intact: Callable[[Mapping[int, Description]], bool] = lambda _: False,  # True if they have all records
    ) -> None:
        self.transport, self.timeout, self.partial, self._intact = transport, timeout, partial, intact
        self.known = Known()
        self._reader, self._needed = secrets.randbits(62) + 1, weakref.WeakSet[Known]()
        self.look(lambda _: Describe(NEWEST))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.transport.shards

    @property
    def first(self) -> Description:
        """Description of the first shard, to read properties that all shards share."""
        return next(iter(self.known.values()))

    @property
    def count(self) -> int:
        """Number of records with a key in all known shards."""
        return sum(shard.keyed for shard in self.known.values())

    @property
    def value_size(self) -> float:
        """Root mean square of ‖v‖ over the values v of all known shards."""
        squares = sum(shard.keyed * shard.value_size**2 for shard in self.known.values())
        return float(np.sqrt(squares / max(1, self.count)))

    def now(self) -> Caller:
        """Return a copy that goes on to ask for the versions of this moment, whatever this caller sees later."""
        return copy.copy(self)

    def leave(self) -> None:
        """Tell the shards that this caller needs no version any more; wait LEAVING seconds at most."""
        if not self.transport.collective:
            with contextlib.suppress(SoftDBError):
                asks: dict[int, Message] = {
                    shard: Describe(NEWEST, reader=self._reader, leaves=True) for shard in self.known
                }
                self.transport.ask(asks, LEAVING)

    def complete(self) -> Caller:
        """Return a copy that raises ShardUnavailable if a shard does not reply, even if `partial` was True."""
        caller = copy.copy(self)
        caller.partial = False
        return caller

    def look(self, make: Callable[[int], Describe]) -> None:
        """Ask all shards for descriptions, and store the descriptions in `known`. Raises the errors of `described`."""
        self.known = self.described(make)
        self._needed.add(self.known)

    def described(self, make: Callable[[int], Describe]) -> Known:
        """Send `make(shard)` to every shard, and return the shards' descriptions.

        Raises BadInput if a shard has another number than expected or the schemas differ, and StaleRead if a shard is
        at an older version than this handle has seen.
        """
        versions = {of_records(shard.version) for known in list(self._needed) for shard in known.values()}
        needed = tuple(sorted(versions))
        asks: dict[int, Message] = {
            shard: replace(make(shard), reader=self._reader, needed=needed) for shard in range(self.shards)
        }
        answers = self._replies(asks, self.partial)
        descriptions = Known(answers.replies)
        schema = next(iter(descriptions.values())).schema
        for shard, description in descriptions.items():
            number, shards = description.shard, description.shards
            if (number, shards) != (shard, self.shards):
                raise BadInput(
                    f"shard {shard} of {self.shards} says that it is {number} of {shards}; expected equal numbers"
                )
            if description.schema != schema:
                raise BadInput(
                    f"shard {shard} holds {description.schema} but another shard holds {schema}; expected equal schemas"
                )
            seen, version = self.known.get(shard), of_records(description.version)
            if seen is not None and version < of_records(seen.version):
                raise StaleRead(
                    f"shard {shard} is at version {version}, but this handle has seen version "
                    f"{of_records(seen.version)}; call refresh()"
                )
        return descriptions

    def ask(
        self,
        make: Callable[[int, int], Message],  # (shard, version) -> message
        which: Iterable[int] | None = None,  # numbers of the shards; None: all. A collective transport always asks all
        complete: bool = False,  # True: raise ShardUnavailable if a shard is missing, even if `partial` is True
    ) -> ShardReplies:
        """Send shards messages for the versions that this handle sees; return the replies.

        If shards were rebuilt, asks again. Raises ShardUnavailable if a shard is missing, unless `partial` is True.
        """
        for _ in range(TAKEOVERS):
            try:
                return self._ask(make, which, complete)
            except StaleRead:
                if not self.taken_over():
                    raise
        return self._ask(make, which, complete)

    def taken_over(self) -> bool:
        """Switch to rebuilt shards or replicas; return False if they are at another version or lack records.

        A shard that has lost the version builds it again from the table.
        """
        before = max(of_records(description.version) for description in self.known.values())
        shards = self.described(lambda _: Refresh(before, again=True))
        if {of_records(shard.version) for shard in shards.values()} != {before} or not self._intact(shards):
            return False
        self.known.update(shards)
        return True

    def _ask(self, make: Callable[[int, int], Message], which: Iterable[int] | None, complete: bool) -> ShardReplies:
        known = self.known
        targets = range(self.shards) if which is None or self.transport.collective else list(which)
        partial = self.partial and not complete
        absent = {shard: "it did not answer when the cluster was opened" for shard in targets if shard not in known}
        asks = {shard: make(shard, known[shard].version) for shard in targets if shard in known}
        return self._replies(asks, partial, absent)

    def _replies(
        self, asks: dict[int, Message], partial: bool, absent: Mapping[int, str] | None = None
    ) -> ShardReplies:
        started = time.monotonic()
        answers = self.transport.ask(asks, self.timeout) if asks else ShardReplies({}, {})
        missing, waited = {**(absent or {}), **answers.missing}, time.monotonic() - started
        if missing and not (partial and answers.replies):
            causes = "; ".join(f"shard {shard}: {why}" for shard, why in sorted(missing.items()))
            more = "give more time (timeout=), " if waited >= self.timeout else ""
            others = "or open with partial=True to omit these shards" if not self.partial else "or wait for the shards"
            raise ShardUnavailable(
                f"{len(missing)} of {self.shards} shards did not answer (waited {round(waited, 2):g} s of at most "
                f"{self.timeout:g} s; {causes}); ask again, {more}{others}"
            )
        return answers._replace(missing=missing)
