"""Shards of a table on this machine: ordinary database directories, brought to a version, and nothing but caches.

Guarantee: the version that a directory is at is committed in the same transaction as its records, so a kill at any
moment leaves it at one version or the other. One that is being made says how many rows of the table it has seen, and is
made on from there. One that is lost, damaged, or of another table is made anew. What reads a shard never sees a version
in part: bringing it on waits for the answers that are being worked out, and they for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from softdb import opening
from softdb.check import Id
from softdb.cluster.placement import shard_of
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.errors import BadInput, CorruptionError, FormatTooNew, NotADatabase, SoftDBError, StaleRead, WriteFailed

__all__ = ["VERSION_BITS", "Gate", "Hydrated", "TakenFrom"]

_log = logging.getLogger("softdb")
_BYTES = 1 << 25  # of rows that are taken in at once
VERSION_BITS = 40
_UNUSABLE = (CorruptionError, NotADatabase, FormatTooNew, BadInput)  # directories that are made anew


@dataclass(frozen=True)
class TakenFrom:
    """What a directory holds: kept with its records."""

    url: str
    columns: list[str | None]  # id, key and value
    place: list[int]  # shard and shards
    version: int
    identity: str  # of that version
    making: int  # a number of its own: rows are numbered otherwise in another directory, even at the same version
    rows: int | None = None  # how many rows of the table it has seen; None: all

    @property
    def text(self) -> str:
        """As it is kept."""
        return json.dumps(self.__dict__)

    @classmethod
    def of(cls, text: str | None) -> TakenFrom | None:
        """What was kept, if it can be read."""
        with contextlib.suppress(TypeError, ValueError):
            return None if text is None else cls(**json.loads(text))
        return None


def _silent(what: str, done: int, whole: int) -> None:
    """Tell nobody."""


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


class Hydrated:
    """Some shards of a table, below one folder of this machine, which is theirs as long as they are open."""

    def __init__(self, truth: Truth, folder: Path, mine: Sequence[int], version: int | None = None) -> None:
        """Open, and bring to a version; None: they stay where they are, and what is missing is made at the newest.

        Raises DatabaseLocked where another process has the folder; BadInput, naming the row, where the table holds what
        is no record; StaleRead where the version was cleaned up.
        """
        self.truth, self.folder, self.mine = truth, folder, list(mine)
        self._making = dict.fromkeys(self.mine, 0)
        self.gates = {shard: Gate() for shard in self.mine}
        self.databases: dict[int, SoftDB] = {}
        self._origins: dict[int, TakenFrom | None] = {}
        self._moving = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteFailed(f"{folder} cannot be made ({error}); give another place for shards, cache=") from error
        try:
            for shard in self.mine:
                self._open(shard)
            for at in {self.version(shard) for shard in self.mine} - {-1}:
                shards = [shard for shard in self.mine if self.version(shard) == at]
                for shard in shards if self._same(shards, at) is None else ():  # another table has taken its place
                    self._anew(shard)
            if version is not None or any(self.version(shard) < 0 for shard in self.mine):
                self.follow(truth.newest() if version is None else version)
        except BaseException:
            self.close()
            raise

    def version(self, shard: int) -> int:
        """The version that a shard is at; -1 while it is being made."""
        origin = self._origins.get(shard)
        return -1 if origin is None or origin.rows is not None else origin.version

    def tagged(self, shard: int) -> int:
        """The version, with the directory's own number in the high bits: what rows of a shard are valid for."""
        origin, version = self._origins.get(shard), self.version(shard)
        return -1 if origin is None or version < 0 else origin.making << VERSION_BITS | version

    def path(self, shard: int) -> Path:
        """A shard's directory."""
        return self.folder / f"{shard}-of-{self.truth.shards}"

    def close(self) -> None:
        """Close the databases; the directories stay."""
        for db in self.databases.values():
            db.close()

    # -- following -------------------------------------------------------------------------------------------------

    def follow(self, version: int) -> None:
        """Bring every shard to a version, in parallel; those that are beyond it stay. Raises StaleRead, BadInput."""
        with self._moving, ThreadPoolExecutor(max(1, len(self.mine))) as pool:
            if all(self.version(shard) >= version for shard in self.mine):
                return
            dataset = self.truth.at(version)
            self._go_on(pool)
            for since in {self.version(shard) for shard in self.mine}:
                shards = [shard for shard in self.mine if self.version(shard) == since]
                if since < version:
                    self._catch_up(pool, shards, since, dataset)

    def remake(self, shard: int) -> None:
        """Make a damaged shard anew, at the version that it was at, or where that is gone, at the newest."""
        with self._moving, ThreadPoolExecutor(1) as pool:
            was = self.version(shard)
            try:
                dataset = self.truth.now() if was < 0 else self.truth.at(was)
            except StaleRead:
                dataset = self.truth.now()
            self._anew(shard)
            self._fill(pool, [shard], dataset)

    def _go_on(self, pool: ThreadPoolExecutor) -> None:
        """Finish what was being made, if its version is there."""
        begun: dict[int, list[int]] = {}
        for shard, origin in self._origins.items():
            if origin is not None and origin.rows is not None:
                begun.setdefault(origin.version, []).append(shard)
        for version, shards in begun.items():
            dataset = self._same(shards, version)
            if dataset is None:
                for shard in shards:
                    self._anew(shard)
            else:
                self._fill(pool, shards, dataset)

    def _same(self, shards: list[int], version: int) -> Any:
        """The dataset at a version, None where that is no more what these shards were made from."""
        try:
            dataset = self.truth.at(version)
        except StaleRead:
            return None
        identity = self.truth.identity(dataset)
        origins = [self._origins[shard] for shard in shards]
        return dataset if all(one is not None and one.identity == identity for one in origins) else None

    def _catch_up(self, pool: ThreadPoolExecutor, shards: list[int], since: int, dataset: Any) -> None:
        """From one version to another, by what has changed; anew where that cannot be told."""
        same = since >= 0 and self._same(shards, since) is not None
        changes = self.truth.changes(since, dataset) if same else None
        if changes is None:
            for shard in shards:
                self._anew(shard)
            self._fill(pool, shards, dataset)
            return
        origin, removed = self._origin(dataset), self._parts(changes.removed)
        added = self._parts(changes.added[self.truth.fields.id].to_pylist())

        def apply(shard: int) -> None:
            gone = [changes.removed[i] for i in np.flatnonzero(removed == shard)]
            rows = changes.added.take(np.flatnonzero(added == shard))
            self._apply(shard, gone, rows, origin)

        list(pool.map(apply, shards))

    def _fill(self, pool: ThreadPoolExecutor, shards: list[int], dataset: Any) -> None:
        """Take in all rows, or those that are still missing."""
        seen = {shard: self._seen(shard) for shard in shards}
        at, origin = min(seen.values()), self._origin(dataset)
        for batch in self.truth.batches(dataset, self._batch_size(), at):
            ids = batch.column(self.truth.fields.id).to_pylist()
            if None in ids:
                raise BadInput(
                    f"{self.truth.url}: column {self.truth.fields.id!r} is null in row {at + ids.index(None)}"
                )
            parts, places = self._parts(ids), np.arange(at, at + len(ids))
            at += len(ids)

            def apply(shard: int) -> None:
                if seen[shard] < at:  # noqa: B023
                    rows = batch.take(np.flatnonzero((parts == shard) & (places >= seen[shard])))  # noqa: B023
                    self._apply(shard, [], rows, replace(origin, rows=at))  # noqa: B023

            list(pool.map(apply, shards))
        for shard in shards:
            self._apply(shard, [], None, origin)

    def _apply(self, shard: int, removed: list[Id], rows: Any, origin: TakenFrom) -> None:
        """One transaction, in which the version moves on with the records."""
        db = self.databases[shard]
        origin = replace(origin, place=[shard, self.truth.shards], making=self._making[shard])
        found = None if rows is None else self.truth.rows(rows)
        batches = []
        if found is not None:
            batches = [db.batch(found.ids, found.keys, found.values, found.payloads, found.texts, _silent)]
        with self.gates[shard].closed():
            try:
                db.apply(removed, batches, origin.text)
            except (WriteFailed, CorruptionError):
                self._origins[shard] = None
                raise
            self._origins[shard] = origin

    def _parts(self, ids: list[Id]) -> Any:
        return shard_of(ids, self.truth.shards)

    def _seen(self, shard: int) -> int:
        origin = self._origins[shard]
        return 0 if origin is None or origin.rows is None else origin.rows

    def _batch_size(self) -> int:
        schema = self.truth.schema
        return max(256, _BYTES // ((schema.dim + schema.pooled_dim) * schema.dtype.itemsize + 256))

    def _origin(self, dataset: Any) -> TakenFrom:
        """Of a shard that has all of a version; the shard's number comes with it."""
        fields, version, identity = self.truth.fields, int(dataset.version), self.truth.identity(dataset)
        return TakenFrom(self.truth.url, [fields.id, fields.key, fields.value], [], version, identity, 0)

    # -- directories -----------------------------------------------------------------------------------------------

    def _open(self, shard: int) -> None:
        """Open a shard's directory, or make it, as it was left."""
        try:
            db = self._opened(shard)
        except _UNUSABLE as error:
            _log.warning("shard %s is made anew: %s", shard, error)
            shutil.rmtree(self.path(shard), ignore_errors=True)
            db = self._opened(shard)
        origin, fields = TakenFrom.of(db.taken_from), self.truth.fields
        self.databases[shard], self._origins[shard] = db, origin
        self._making[shard] = secrets.randbits(20) if origin is None else origin.making
        columns, place = [fields.id, fields.key, fields.value], [shard, self.truth.shards]
        of_another = origin is not None and origin != replace(origin, url=self.truth.url, columns=columns, place=place)
        if of_another or (origin is None and len(db)):
            self._anew(shard)

    def _opened(self, shard: int) -> SoftDB:
        db = opening.open(self.path(shard), durability="relaxed", **self.truth.described)
        if self.truth.encoder is not None and db.encoder_name is None:
            db.note_encoder(self.truth.encoder)
        return db

    def _anew(self, shard: int) -> None:
        """An empty directory in place of a shard's."""
        with self.gates[shard].closed():
            with contextlib.suppress(SoftDBError):
                self.databases[shard].close()
            shutil.rmtree(self.path(shard), ignore_errors=True)
            self.databases[shard] = self._opened(shard)
            self._origins[shard], self._making[shard] = None, secrets.randbits(20)

    def guarded(self, shard: int, answer: Callable[[], Any]) -> Any:
        """An answer of a shard, at one version from its beginning to its end; made anew first where it is damaged."""
        for _ in range(2):
            with self.gates[shard].passing():
                try:
                    return answer()
                except CorruptionError as error:
                    damaged = error
            _log.warning("shard %s is made anew: %s", shard, damaged)
            self.remake(shard)
        raise damaged
