"""Open the directories of shards on this machine, replace unusable directories, and remove old ones.

A directory is named "<shard>-of-<shards>", or "<shard>-of-<shards>.<n>" if it was built beside an older one. When a
folder is opened, the directory of the largest n counts, and the others are removed. A directory of an earlier version,
which a reader still needed, is named "<shard>-of-<shards>.at-<version>".
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from softdb import opening
from softdb.cluster.placement import MOST
from softdb.cluster.shard import VERSION_BITS
from softdb.database import SoftDB
from softdb.database.versions import Versions
from softdb.errors import (
    BadInput,
    CorruptionError,
    DatabaseLocked,
    FormatTooNew,
    NotADatabase,
    SoftDBError,
    StaleRead,
    WriteFailed,
)
from softdb.lance_table.truth import LeftOut, Truth
from softdb.store import files
from softdb.store.ours import remove_database, require_ours
from softdb.tables.hashing import HASH

_log = logging.getLogger("softdb")
_UNUSABLE = (CorruptionError, NotADatabase, FormatTooNew, BadInput)  # errors after which a directory is rebuilt


@dataclass(frozen=True)
class ShardOrigin:
    """Table and version from which a directory's records were read. The directory stores it as JSON."""

    url: str
    columns: list[str | None]  # names of the table's columns for id, key and value
    place: list[Any]  # [number of the shard, number of shards, name of the hash]
    version: int
    identity: str  # identity of the version (`Truth.identity`)
    making: int  # random number of the directory: two directories number the same records differently
    rows: int | None = None  # number of rows of the table read so far; None: all
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def text(self) -> str:
        """This origin as JSON."""
        return json.dumps(self.__dict__)

    @classmethod
    def of(cls, text: str | None) -> ShardOrigin | None:
        """Parse an origin from JSON; return None if `text` is None or invalid."""
        with contextlib.suppress(TypeError, ValueError):
            noted = None if text is None else cls(**json.loads(text))
            return noted and replace(noted, left_out=[LeftOut(*row) for row in noted.left_out])
        return None


@dataclass(frozen=True)
class Tagged:
    """Facts about a version that a shard serves."""

    origin: ShardOrigin
    tag: int  # the version, with the directory's random number in the high bits


class Directories:
    """Databases of some shards of a table, in one folder on this machine. Only one process may open each database."""

    def __init__(self, truth: Truth, folder: Path, own_shards: Sequence[int]) -> None:
        """Open or create the shards' directories. Raises DatabaseLocked if another process has them open."""
        self.truth, self.folder, self.own_shards = truth, folder, list(own_shards)
        self.versions = {shard: Versions[Tagged](_close_and_remove) for shard in self.own_shards}
        self.databases: dict[int, SoftDB] = {}
        self._making = dict.fromkeys(self.own_shards, 0)
        self._origins: dict[int, tuple[tuple[SoftDB, int], ShardOrigin | None]] = {}  # shard -> cached origin
        self._unfit: dict[int, Callable[[int], None]] = {}  # shard with a failed write -> method that repairs it
        try:
            files.make_directory(folder)
        except OSError as error:
            raise WriteFailed(f"{folder} cannot be made ({error}); give another folder for shards, cache=") from error
        try:
            with self._alone(), ThreadPoolExecutor(max(1, len(self.own_shards))) as pool:
                list(pool.map(self._open, self.own_shards))
        except BaseException:
            self.close()
            raise

    def origin(self, shard: int) -> ShardOrigin | None:
        """Return the origin that a shard's directory stores; None if the directory belongs to another table or shard.

        Caches the origin for one generation, because a failed flush rolls back the records and the origin together.
        """
        db, noted = self.databases[shard], None
        state = db, db.generation
        if shard not in self._origins or self._origins[shard][0] != state:
            with contextlib.suppress(CorruptionError):
                noted = ShardOrigin.of(db.core.store.source())
            ours = noted is not None and self._ours(noted, shard)
            self._origins[shard] = state, noted if ours else None
        return self._origins[shard][1]

    def version(self, shard: int) -> int:
        """Return the table's version that a shard holds; -1 while the shard is incomplete or needs repair."""
        origin = None if shard in self._unfit else self.origin(shard)
        return -1 if origin is None or origin.rows is not None else origin.version

    def tagged(self, shard: int) -> int:
        """Return a shard's version with the directory's random number in the high bits; -1 if there is no version."""
        version = self.version(shard)
        return -1 if version < 0 else self._making[shard] << VERSION_BITS | version

    def name(self, shard: int) -> str:
        """Return the name of a shard's first directory."""
        return f"{shard}-of-{self.truth.shards}"

    def path(self, shard: int, later: int = 0) -> Path:
        """Return the path of a shard's newest directory, or of the `later`th after it."""
        name = self.name(shard)
        number = max((_number(path) for path in self.folder.glob(f"{name}.*")), default=0) + later
        return self.folder / (f"{name}.{number}" if number else name)

    def close(self) -> None:
        """Close the databases; keep the directories. A failed flush is only logged: the next open reads the table."""
        replaced = [(shard, db) for shard, versions in self.versions.items() for db in versions.close()]
        for shard, db in [*replaced, *self.databases.items()]:
            try:
                db.close()
            except SoftDBError as error:
                _log.warning("shard %s was not flushed: %s", shard, error)

    def leave(self, shard: int) -> None:
        """Serve a shard no more, and remove its directories."""
        self.own_shards.remove(shard)
        for db in [*self.versions.pop(shard).close(), self.databases.pop(shard)]:
            _close_and_remove(db)

    def serve(self, shard: int) -> None:
        """Let questions read a shard's newest version, beside the older versions that readers still need."""
        version, origin = self.version(shard), self.origin(shard)
        if version >= 0 and origin is not None:
            self.versions[shard].add(version, self.databases[shard], Tagged(origin, self.tagged(shard)))

    def _serve_earlier(self, shard: int, version: int, path: Path) -> None:
        """Let questions read an earlier version from a directory of its own, which goes when nobody needs it."""
        db = self._opened(path)
        origin, versions = ShardOrigin.of(db.core.store.source()), self.versions[shard]
        if origin is None or origin.version != version:
            raise StaleRead(f"version {version} of {self.truth.url} could not be built for shard {shard}; refresh()")
        versions.add(version, db, Tagged(origin, origin.making << VERSION_BITS | version))
        versions.replace(db)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock in a `with` block. Raises DatabaseLocked if another process or handle holds it."""
        lock = files.acquire(self.folder / "lock")
        if lock is None:
            raise DatabaseLocked(f"{self.folder} is being opened by another process or handle; try again")
        try:
            yield
        finally:
            lock.release()

    # -- one directory ---------------------------------------------------------------------------------------------

    def _open(self, shard: int) -> None:
        """Open a shard's directory. Create a missing directory; replace an unusable one by an empty one."""
        try:
            self.databases[shard] = self._opened(self.path(shard))
        except _UNUSABLE as error:
            _log.warning("shard %s is rebuilt: %s", shard, error)
            require_ours(self.path(shard))
            remove_database(self.path(shard))
            self.databases[shard] = self._opened(self.path(shard))
        self._note_making(shard)

    def _note_making(self, shard: int) -> None:
        origin = self.origin(shard)
        self._making[shard] = secrets.randbits(20) if origin is None else origin.making

    def _reopen(self, shard: int) -> None:
        """Close and open a shard's database after a failed write, which returns to the last version on disk."""
        self._closed(shard)
        self._open(shard)
        self._making[shard] = secrets.randbits(20)  # rows that were not flushed get other numbers

    def _anew(self, shard: int) -> None:
        """Replace a shard's directory by an empty one."""
        self._closed(shard)
        remove_database(self.path(shard))
        self._open(shard)

    def _closed(self, shard: int) -> None:
        """Close a shard's database, which then serves no version any more. Running answers raise StaleRead."""
        base = self.databases[shard]
        self.versions[shard].close(base)
        with contextlib.suppress(SoftDBError):
            base.close()

    def _swap(self, shard: int, built: Path) -> None:
        """Answer from a directory that was built beside the old one, which goes when nobody needs its versions."""
        path = self.path(shard, later=1)
        files.publish(built, path)
        self.versions[shard].replace(self.databases[shard])
        self.databases[shard] = self._opened(path)
        self._note_making(shard)
        self.serve(shard)

    def _opened(self, path: Path) -> SoftDB:
        db = opening.open(path, durability="relaxed", **self.truth.schema.described)
        if self.truth.encoder is not None and db.encoder_name is None:
            db.core.store.note_encoder(self.truth.encoder)
        return db

    def _ours(self, origin: ShardOrigin, shard: int) -> bool:
        """Return True if `origin` names this table, this shard and the same columns."""
        fields, place = self.truth.fields, [shard, self.truth.shards, HASH]
        columns = [fields.id, fields.key, fields.value]
        return origin == replace(origin, url=self.truth.url, columns=columns, place=place)

    def _tidy(self) -> None:
        """Remove older directories of these shards, and those from before the shards doubled, unless they are open."""
        older = set[Path]()
        for shard in self.own_shards:
            name = self.name(shard)
            older |= {self.folder / name, *self.folder.glob(f"{name}.[0-9a]*")} - {self.path(shard)}
        if self.truth.own and self.truth.stored_shards() == self.truth.shards:
            older |= {path for path in self.folder.glob("*-of-*") if _shards(path) < self.truth.shards}
        for path in older:
            remove_unused(path)


def _shards(path: Path) -> int:
    """Return the number P from a directory's name "s-of-P" or "s-of-P.n"; MOST + 1 if there is no number."""
    shards = path.name.partition("-of-")[2].partition(".")[0]
    return int(shards) if shards.isdecimal() else MOST + 1


def _number(path: Path) -> int:
    """Return the number n from a directory's name "s-of-P.n"; 0 if there is no number."""
    number = path.name.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def _close_and_remove(db: SoftDB) -> None:
    """Close a directory's database, and remove the directory."""
    with contextlib.suppress(SoftDBError):
        db.close()
    remove_unused(Path(str(db.core.path)))


def remove_unused(path: Path) -> None:
    """Remove a shard's directory, unless a handle has it open, or it belongs to another program."""
    with contextlib.suppress(OSError, BadInput):
        require_ours(path)
        lock = files.acquire(path / "lock")
        if lock is not None:
            remove_database(path)
            lock.release()
