"""`Versions`: pinned versions of a database, which answer questions while it changes, for readers who need them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from softdb.database.handle import SoftDB
from softdb.filters import PinnedStore

T = TypeVar("T")

RECENT = 8  # number of newest versions that stay even if no reader needs them: a refresh may overtake another
MOST = 256  # largest number of versions; the oldest one goes
LEASE = 3600.0  # seconds after its last message for which a reader counts


def pinned(db: SoftDB) -> SoftDB:
    """Return a handle that goes on to read this moment's generation, with its index, while `db` writes."""
    core = copy.copy(db.core)
    core.store = PinnedStore(db.core.store)
    core.finder = db.core.finder.pinned(core.store)
    return SoftDB(core)


@dataclass(frozen=True)
class PinnedVersion(Generic[T]):
    """A version that answers questions."""

    db: SoftDB  # pinned
    base: SoftDB  # the database that was pinned
    origin: T  # facts about the version


class Versions(Generic[T]):
    """Pinned versions by number, of one database, or of several that replaced one another. Safe to use from threads."""

    def __init__(self, unused: Callable[[SoftDB], None]) -> None:
        """`unused`: called with a replaced database when its last version has gone."""
        self.numbers: dict[int, PinnedVersion[T]] = {}
        self._readers: dict[int, tuple[float, frozenset[int]]] = {}  # reader -> time of its last message, and needs
        self._replaced: list[SoftDB] = []
        self._retained: dict[SoftDB, int] = {}  # database -> generation after which it retains deleted records
        self._lock, self._unused = threading.Lock(), unused

    def add(self, number: int, base: SoftDB, origin: T) -> None:
        """Pin the newest generation of a database as a version, in place of an older version of that number."""
        version = PinnedVersion(pinned(base), base, origin)
        with self._lock:
            self.numbers[number] = version
        self._release()

    def at(self, number: int | None) -> PinnedVersion[T] | None:
        """Return a version, None for the newest. Return None if it has gone, or its commit was undone by a failure."""
        numbers = self.numbers
        version = numbers.get(max(numbers, default=0) if number is None else number)
        if version is None or version.base.closed or version.base.generation < version.db.generation:
            return None
        return version

    def note(self, reader: int, needed: Iterable[int]) -> None:
        """Note the numbers of the versions that a reader needs from now on; none: it has left."""
        with self._lock:
            self._readers[reader] = time.monotonic(), frozenset(needed)
        self._release()

    def replace(self, base: SoftDB) -> None:
        """Note that a database gets no further versions; it is `unused` when those that it has are no longer needed."""
        self._replaced.append(base)

    def close(self, base: SoftDB | None = None) -> list[SoftDB]:
        """Drop all versions of `base`; None: of all databases. Return the replaced databases that were still in use."""
        with self._lock:
            self.numbers = {n: version for n, version in self.numbers.items() if base not in (None, version.base)}
            return [] if base is not None else self._replaced

    def _release(self) -> None:
        """Drop the versions that no reader needs."""
        with self._lock:
            now = time.monotonic()
            self._readers = {r: own for r, own in self._readers.items() if own[1] and own[0] >= now - LEASE}
            needed = set[int]().union(*(numbers for _, numbers in self._readers.values()))
            for number in sorted(self.numbers)[:-RECENT]:
                if number not in needed or len(self.numbers) > MOST:
                    del self.numbers[number]
            versions = [*self.numbers.values()]
            bases = [version.base for version in versions]
            unused = [db for db in self._replaced if db not in bases]
            self._replaced = [db for db in self._replaced if db in bases]
            before = self._retained
            self._retained = {db: min(v.db.generation for v in versions if v.base is db) for db in dict.fromkeys(bases)}
            moved = [(db, since) for db, since in self._retained.items() if before.get(db) != since]
        for database, since in moved:
            if not database.closed:
                database.core.store.retain(since)
        for database in unused:
            self._unused(database)
