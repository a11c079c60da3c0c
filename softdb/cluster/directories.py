"""Directories of shards on this machine: open them, rebuild unusable ones, and split them when shards double."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from softdb import opening
from softdb.cluster.placement import MOST, parts_of, shard_of
from softdb.cluster.shard import VERSION_BITS, LeftOut
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.errors import (
    BadInput,
    CorruptionError,
    DatabaseLocked,
    FormatTooNew,
    NotADatabase,
    SoftDBError,
    WriteFailed,
)
from softdb.store import files
from softdb.store.ours import remove_database, require_ours


class Gate:
    """A readers-writer lock that prefers writers: many answers at once, or one change."""

    def __init__(self) -> None:
        self._condition, self._passing, self._closing = threading.Condition(), 0, 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Hold the lock for an answer, after running and waiting changes."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closing)
            self._passing += 1
        try:
            yield
        finally:
            with self._condition:
                self._passing -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Hold the lock for a change, after running answers."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closing)
            self._closing = 1
            self._condition.wait_for(lambda: not self._passing)
        try:
            yield
        finally:
            with self._condition:
                self._closing = 0
                self._condition.notify_all()


_log = logging.getLogger("softdb")
_UNUSABLE = (CorruptionError, NotADatabase, FormatTooNew, BadInput)  # errors upon which a directory is rebuilt
_MOVED = 10_000  # records deleted at once when a shard is split
_writers = weakref.WeakValueDictionary[Path, SoftDB]()  # open databases of this process


@dataclass(frozen=True)
class ShardOrigin:
    """Origin of a directory's records, stored with them."""

    url: str
    columns: list[str | None]  # names of the columns of id, key and value
    place: list[int]  # shard and number of shards
    version: int
    identity: str  # of the version
    making: int  # random number of the directory, since directories number the same records differently
    rows: int | None = None  # rows of the table read so far; None: all
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def text(self) -> str:
        """JSON that a directory stores."""
        return json.dumps(self.__dict__)

    @classmethod
    def of(cls, text: str | None) -> ShardOrigin | None:
        """Parse a stored origin; None if it cannot be read."""
        with contextlib.suppress(TypeError, ValueError):
            noted = None if text is None else cls(**json.loads(text))
            return noted and replace(noted, left_out=[LeftOut(*row) for row in noted.left_out])
        return None


class Directories:
    """Databases of some shards of a table, in one folder of this machine that no other process has open."""

    def __init__(self, truth: Truth, folder: Path, own_shards: Sequence[int]) -> None:
        """Open the directories. Raises DatabaseLocked if another process has the folder open."""
        self.truth, self.folder, self.own_shards = truth, folder, list(own_shards)
        self.gates = {shard: Gate() for shard in self.own_shards}
        self.databases: dict[int, SoftDB] = {}
        self._making = dict.fromkeys(self.own_shards, 0)
        self._origins: dict[int, tuple[tuple[SoftDB, int], ShardOrigin | None]] = {}  # by shard: (database, generation)
        self._unfit: dict[int, Callable[[int], None]] = {}  # shards with a failed write -> the method that repairs each
        try:
            files.make_directory(folder)
        except OSError as error:
            raise WriteFailed(f"{folder} cannot be made ({error}); give another folder for shards, cache=") from error
        try:
            with self._alone(), ThreadPoolExecutor(max(1, len(self.own_shards))) as pool:
                list(pool.map(self._split, self.own_shards))
                list(pool.map(self._open, self.own_shards))
        except BaseException:
            self.close()
            raise

    def origin(self, shard: int) -> ShardOrigin | None:
        """Return the origin that a shard's directory stores; None if it is not of this table.

        The cached origin holds for one generation: a failed flush rolls back records and version together.
        """
        db, noted = self.databases[shard], None
        state = db, db.generation
        if shard not in self._origins or self._origins[shard][0] != state:
            with contextlib.suppress(CorruptionError):
                noted = ShardOrigin.of(db.core.store.source())
            ours = noted is not None and self._ours(noted, shard, self.truth.shards)
            self._origins[shard] = state, noted if ours else None
        return self._origins[shard][1]

    def version(self, shard: int) -> int:
        """Return the version of a shard; -1 while it is incomplete or needs repair."""
        origin = None if shard in self._unfit else self.origin(shard)
        return -1 if origin is None or origin.rows is not None else origin.version

    def tagged(self, shard: int) -> int:
        """Return a shard's version with the directory's number in the high bits, for which its rows are valid."""
        version = self.version(shard)
        return -1 if version < 0 else self._making[shard] << VERSION_BITS | version

    def path(self, shard: int, shards: int | None = None) -> Path:
        """Return the path of a shard's directory."""
        return self.folder / f"{shard}-of-{shards or self.truth.shards}"

    def close(self) -> None:
        """Close the databases; the directories stay. Changes that cannot be flushed are read from the table again."""
        for shard, db in self.databases.items():
            try:
                db.close()
            except SoftDBError as error:
                _log.warning("shard %s was not flushed: %s", shard, error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock while directories are opened or split. Raises DatabaseLocked."""
        lock = files.acquire(self.folder / "lock")
        if lock is None:
            raise DatabaseLocked(f"{self.folder} is being opened by another process or handle; try again")
        try:
            for leftover in self.folder.glob(".softdb-" + 16 * "[0-9a-f]"):  # of a killed split
                remove_database(leftover)
            yield
        finally:
            lock.release()

    # -- one directory ---------------------------------------------------------------------------------------------

    def _open(self, shard: int) -> None:
        """Open a shard's directory; create it if it is missing, and replace it by an empty one if it is unusable."""
        try:
            self.databases[shard] = self._opened(self.path(shard))
        except _UNUSABLE as error:
            _log.warning("shard %s is rebuilt: %s", shard, error)
            require_ours(self.path(shard))
            remove_database(self.path(shard))
            self.databases[shard] = self._opened(self.path(shard))
        origin = self.origin(shard)
        self._making[shard] = secrets.randbits(20) if origin is None else origin.making

    def _reopen(self, shard: int) -> None:
        """Reopen a directory after a failed write, at the last version on disk."""
        with self._closed(shard):
            self._open(shard)

    def _anew(self, shard: int) -> None:
        """Replace a shard's directory by an empty one."""
        with self._closed(shard):
            remove_database(self.path(shard))
            self._open(shard)

    @contextlib.contextmanager
    def _closed(self, shard: int) -> Iterator[None]:
        """Close a shard's database, and let the shard answer nothing until the end of the block."""
        with self.gates[shard].closed():
            with contextlib.suppress(SoftDBError):
                self.databases[shard].close()
            yield

    def _opened(self, path: Path) -> SoftDB:
        db = opening.open(path, durability="relaxed", **self.truth.described)
        if self.truth.encoder is not None and db.encoder_name is None:
            db.core.store.note_encoder(self.truth.encoder)
        _writers[path] = db
        return db

    def _ours(self, origin: ShardOrigin, shard: int, shards: int) -> bool:
        """Return True if an origin is this shard of this table, read by the same columns."""
        fields = self.truth.fields
        columns = [fields.id, fields.key, fields.value]
        return origin == replace(origin, url=self.truth.url, columns=columns, place=[shard, shards])

    def _tidy(self) -> None:
        """Remove unused directories of fewer shards than the table has by now."""
        older = [path for path in self.folder.glob("*-of-*") if _shards(path) < self.truth.shards]
        if not older or not self.truth.own or self.truth.stored_shards() != self.truth.shards:
            return
        for path in older:
            with contextlib.suppress(OSError, BadInput):  # a folder of that name may be another's
                require_ours(path)
                lock = files.acquire(path / "lock")
                if lock is not None:
                    remove_database(path)
                    lock.release()

    # -- splitting -------------------------------------------------------------------------------------------------

    def _split(self, shard: int) -> None:
        """Build a shard of 2 P from the directory of shard s mod P of P, if there is one, without reading the table.

        The new directory is a copy of the newest generation at its version, without the other half's records. It is
        built aside and then renamed. The old directory stays in use.
        """
        half = self.truth.shards // 2
        if self.path(shard).exists() or not half or not self.path(shard % half, half).exists():
            return
        try:
            with files.aside(self.folder) as aside:
                self._copy(self.path(shard % half, half), aside)
                if self._halved(aside, shard, half):
                    files.publish(aside, self.path(shard))
        except (SoftDBError, OSError) as error:
            _log.warning("shard %s is made from the table: its half cannot be split off (%s)", shard, error)

    def _copy(self, path: Path, aside: Path) -> None:
        own = _writers.get(path)
        if own is not None and not own.closed:
            own.snapshot(aside)  # includes changes that are not on disk yet
            return
        with opening.open(path, mode="r") as db:
            db.snapshot(aside)

    def _halved(self, aside: Path, shard: int, half: int) -> bool:
        """Delete the other half's records from a copy; False if the copy is not of the expected shard."""
        with self._opened(aside) as db:
            origin = ShardOrigin.of(db.core.store.source())
            if origin is None or origin.rows is not None or not self._ours(origin, shard % half, half):
                return False
            rows = db.core.matching()
            for low in range(0, len(rows), _MOVED):
                ids = [entry.id for entry in db.core.store.read(rows[low : low + _MOVED], payloads=False).values()]
                leaving = [ids[i] for i in np.flatnonzero(shard_of(ids, 2 * half) != shard)]
                if leaving:
                    db.delete(leaving)
            db.compact()
            place, making = [shard, 2 * half], secrets.randbits(20)
            left_out = [row for row in origin.left_out if parts_of([row.id], 2 * half)[0] == shard]
            db.core.store.apply([], [], replace(origin, place=place, making=making, left_out=left_out).text)
        return True


def _shards(path: Path) -> int:
    """Return the number of shards in a directory's name; MOST + 1 if the name has none."""
    shards = path.name.rpartition("-of-")[2]
    return int(shards) if shards.isdecimal() else MOST + 1
