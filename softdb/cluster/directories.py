"""Directories of shards on this machine: opened, made anew where they cannot be used, split where shards double."""

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
    """Lets answers pass side by side, and a change only while there is none."""

    def __init__(self) -> None:
        self._condition, self._passing, self._closing = threading.Condition(), 0, 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """For an answer: waits for changes that wait or go on."""
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
        """For a change: waits for the answers that go on."""
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
_UNUSABLE = (CorruptionError, NotADatabase, FormatTooNew, BadInput)  # directories that are made anew
_MOVED = 10_000  # records that leave a half at once
_writers = weakref.WeakValueDictionary[Path, SoftDB]()  # of this process


@dataclass(frozen=True)
class TakenFrom:
    """Origin of a directory's records, stored with them."""

    url: str
    columns: list[str | None]  # id, key and value
    place: list[int]  # shard and shards
    version: int
    identity: str  # of that version
    making: int  # a number of its own: rows are numbered otherwise in another directory, even at the same version
    rows: int | None = None  # how many rows of the table it has seen; None: all
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def text(self) -> str:
        """As it is kept."""
        return json.dumps(self.__dict__)

    @classmethod
    def of(cls, text: str | None) -> TakenFrom | None:
        """Parse a stored origin; None if it cannot be read."""
        with contextlib.suppress(TypeError, ValueError):
            noted = None if text is None else cls(**json.loads(text))
            return noted and replace(noted, left_out=[LeftOut(*row) for row in noted.left_out])
        return None


class Directories:
    """Some shards of a table below one folder of this machine, which is theirs as long as they are open."""

    def __init__(self, truth: Truth, folder: Path, mine: Sequence[int]) -> None:
        """Open them as they were left. Raises DatabaseLocked where another process has the folder."""
        self.truth, self.folder, self.mine = truth, folder, list(mine)
        self.gates = {shard: Gate() for shard in self.mine}
        self.databases: dict[int, SoftDB] = {}
        self._making = dict.fromkeys(self.mine, 0)
        self._origins: dict[int, tuple[tuple[SoftDB, int], TakenFrom | None]] = {}  # as of a generation
        self._unfit: dict[int, Callable[[int], None]] = {}  # shards that a write has failed in, and what mends each
        try:
            files.make_directory(folder)
        except OSError as error:
            raise WriteFailed(f"{folder} cannot be made ({error}); give another place for shards, cache=") from error
        try:
            with self._alone(), ThreadPoolExecutor(max(1, len(self.mine))) as pool:
                list(pool.map(self._split, self.mine))
                list(pool.map(self._open, self.mine))
        except BaseException:
            self.close()
            raise

    def origin(self, shard: int) -> TakenFrom | None:
        """Origin that a shard's directory notes; None if it is not of this table.

        It is read again for every generation: a flush that fails takes records and version back together.
        """
        db, noted = self.databases[shard], None
        state = db, db.generation
        if shard not in self._origins or self._origins[shard][0] != state:
            with contextlib.suppress(CorruptionError):
                noted = TakenFrom.of(db.core.store.source())
            ours = noted is not None and self._ours(noted, shard, self.truth.shards)
            self._origins[shard] = state, noted if ours else None
        return self._origins[shard][1]

    def version(self, shard: int) -> int:
        """The version that a shard is at; -1 while it is being made, or is to be mended."""
        origin = None if shard in self._unfit else self.origin(shard)
        return -1 if origin is None or origin.rows is not None else origin.version

    def tagged(self, shard: int) -> int:
        """The version, with the directory's own number in the high bits: what rows of a shard are valid for."""
        version = self.version(shard)
        return -1 if version < 0 else self._making[shard] << VERSION_BITS | version

    def path(self, shard: int, shards: int | None = None) -> Path:
        """A shard's directory."""
        return self.folder / f"{shard}-of-{shards or self.truth.shards}"

    def close(self) -> None:
        """Close the databases; the directories stay. What cannot be brought to disk is taken in again another time."""
        for shard, db in self.databases.items():
            try:
                db.close()
            except SoftDBError as error:
                _log.warning("shard %s is left behind: %s", shard, error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While directories are opened, or split, nobody else does so in this folder."""
        lock = files.acquire(self.folder / "lock")
        if lock is None:
            raise DatabaseLocked(f"{self.folder} is being opened by another process or handle; try again")
        try:
            for left in self.folder.glob(".softdb-" + 16 * "[0-9a-f]"):  # by a split that was killed
                remove_database(left)
            yield
        finally:
            lock.release()

    # -- one directory ---------------------------------------------------------------------------------------------

    def _open(self, shard: int) -> None:
        """Open a shard's directory, or make it, as it was left."""
        try:
            self.databases[shard] = self._opened(self.path(shard))
        except _UNUSABLE as error:
            _log.warning("shard %s is made anew: %s", shard, error)
            require_ours(self.path(shard))
            remove_database(self.path(shard))
            self.databases[shard] = self._opened(self.path(shard))
        origin = self.origin(shard)
        self._making[shard] = secrets.randbits(20) if origin is None else origin.making

    def _reopen(self, shard: int) -> None:
        """Open a directory again whose handle takes no more writes: it is at the version that came to disk last."""
        with self._closed(shard):
            self._open(shard)

    def _anew(self, shard: int) -> None:
        """An empty directory in place of a shard's."""
        with self._closed(shard):
            remove_database(self.path(shard))
            self._open(shard)

    @contextlib.contextmanager
    def _closed(self, shard: int) -> Iterator[None]:
        """Within it a shard answers nothing, and its database is closed."""
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

    def _ours(self, origin: TakenFrom, shard: int, shards: int) -> bool:
        """Return True if a directory holds a shard of this table, read alike."""
        fields = self.truth.fields
        columns = [fields.id, fields.key, fields.value]
        return origin == replace(origin, url=self.truth.url, columns=columns, place=[shard, shards])

    def _tidy(self) -> None:
        """Remove directories of fewer shards than the table has by now, unless somebody has them open."""
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
        """Make a shard of 2 P from shard s mod P of P that lies here, if it does: the table is not read.

        A copy of the newest generation, of which the other half's records leave, aside until it is whole; its version
        is that of the copied generation. Whoever has the other directory open answers, and writes, on.
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
            own.snapshot(aside)  # with what another process could not see yet
            return
        with opening.open(path, mode="r") as whole:
            whole.snapshot(aside)

    def _halved(self, aside: Path, shard: int, half: int) -> bool:
        """Let the records of the other half leave a copy; False where it is a copy of something else."""
        with self._opened(aside) as db:
            origin = TakenFrom.of(db.core.store.source())
            if origin is None or origin.rows is not None or not self._ours(origin, shard % half, half):
                return False
            rows = db.core.matching()
            for low in range(0, len(rows), _MOVED):
                ids = [one.id for one in db.core.store.read(rows[low : low + _MOVED], payloads=False).values()]
                leaving = [ids[i] for i in np.flatnonzero(shard_of(ids, 2 * half) != shard)]
                if leaving:
                    db.delete(leaving)
            db.compact()
            place, making = [shard, 2 * half], secrets.randbits(20)
            left_out = [row for row in origin.left_out if parts_of([row.id], 2 * half)[0] == shard]
            db.core.store.apply([], [], replace(origin, place=place, making=making, left_out=left_out).text)
        return True


def _shards(path: Path) -> int:
    """Of a directory's name; where it is none, more than there can be."""
    shards = path.name.rpartition("-of-")[2]
    return int(shards) if shards.isdecimal() else MOST + 1
