"""A cluster over a table: it writes, follows what others write, and grows."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from softdb import check, opening
from softdb.cluster import shard as say
from softdb.cluster.caller import Caller
from softdb.cluster.columns import occupied
from softdb.cluster.copying import copied, of_table
from softdb.cluster.handle import Cluster
from softdb.cluster.invariant import is_kept, verified
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.database.embedding import telling
from softdb.database.handle import verb
from softdb.errors import BadInput, Closed, CorruptionError, ReadOnly, ShardUnavailable, SoftDBError, StaleRead
from softdb.index.choose import Progress
from softdb.reports import CompactReport, SnapshotReport, Stats
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors

__all__ = ["TableCluster"]

PATIENCE = 3600.0  # seconds that new shards may take to be made
_TRIES = 20  # of a refresh that others overtake

P = ParamSpec("P")
R = TypeVar("R")


def _again(method: Callable[Concatenate[Cluster, P], R]) -> Callable[Concatenate[Cluster, P], R]:
    """Ask once more where a replica, or a shard that was made anew, has taken over at the same version."""

    @functools.wraps(method)
    def call(self: Cluster, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except StaleRead:
            if not isinstance(self, TableCluster) or not self.taken_over():
                raise
            return method(self, *args, **kwargs)

    return call


class TableCluster(Cluster):
    """SoftDB's verbs on a Lance table of any size: its shards answer, the table keeps.

        db = softdb.cluster.create("records.lance", dim=128, shards=4)
        db.insert(ids, keys)
        db.attend(queries)

    A verb that writes is one commit of the table, whatever shards it touches. The records are safe when it returns, and
    the answers of this handle have them; another handle sees them after `refresh()`. Two that write at once are both
    served: Lance commits one after the other.
    """

    def __init__(
        self,
        connect: Callable[[Truth], say.Transport],
        truth: Truth,
        timeout: float,
        partial: bool,
        mode: str,
        encoder: check.Encoder | None,
    ) -> None:
        self.table = truth
        self._connect, self._encoder = connect, encoder
        self._door: SoftDB | None = None  # in memory: it checks as any database does
        self._before = weakref.WeakSet[say.Transport]()  # of fewer shards, which answers still refer to
        self._moving = threading.RLock()
        super().__init__(connect(truth), timeout, partial, truth)
        self.mode = mode
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TableCluster:
        return self

    @property
    def url(self) -> str:
        """Where the table is."""
        return self.table.url

    @property
    def id_types(self) -> set[str]:
        """{"integer"} or {"text"}, as the table has them."""
        return {self.table.id_type}

    @property
    def version(self) -> int:
        """The version of the table that this handle sees."""
        return max(map(_version, self.caller.known.values()))

    def as_queries(self, queries: Vectors, width: int | None = None) -> Tensor:
        """As `Cluster.as_queries`; texts by the encoder that this handle was opened with."""
        given: Any = queries
        if self._encoder is not None:
            given = check.encoded(queries, "queries", lambda: check.query_encoder(self._encoder))
        return super().as_queries(given, width)

    @verb
    def refresh(self) -> int:
        """See what was committed since, by whomever, and return the version. Cost: what has changed is read once.

        Raises ShardUnavailable where a shard is not there in time: one that is being made goes on with it meanwhile.
        """
        with self._moving:
            shards = self.table.stored_shards()
            caller = self.caller if shards == self.table.shards else self._joined(shards, self.caller.timeout)
            self._go_on(caller)
            self._take(caller)
        return self.version

    @property
    def left_out(self) -> tuple[say.LeftOut, ...]:
        """Rows of the table that no record can be made of, each by its id and the reason; other programs wrote them.

        They take part in no answer. `upsert` or `delete` mends them; where an id comes twice, delete one of its rows.
        """
        return tuple(row for _, shard in sorted(self.caller.known.items()) for row in shard.left_out)

    @verb
    def verify(self) -> int:
        """Compare every record of every shard with the table, and return how many there are.

        It is of the version that this handle sees. Cost: one pass over the table, and over the records.

        Raises CorruptionError naming shard and id of what differs, is missing, or is left out; shards that differ are
        made anew from the table.
        """
        with self._moving:
            return verified(self, self.table, self.version, self.left_out)

    def _go_on(self, caller: Caller) -> None:
        """Bring shards to the newest version, and make them anew where they break `softdb.cluster.invariant`."""
        table, anew = self.table.with_shards(caller.shards), False
        for _ in range(_TRIES):
            newest = table.newest()
            if newest < self.version:
                raise StaleRead(f"another table has taken the place of {self.url}; open it again")
            caller.look(lambda _: say.Refresh(newest, anew))  # noqa: B023
            if len(set(map(_version, caller.known.values()))) > 1:  # another handle refreshes, too
                continue
            if is_kept(table, caller.known):
                return
            if anew:
                raise CorruptionError(
                    f"the shards hold other records than {self.url}, made anew, too; verify() names them"
                )
            anew = True
        raise StaleRead(f"the shards went on {_TRIES} times while they were looked at; refresh() again")

    def taken_over(self) -> bool:
        """Whether every shard is still at the version that this handle sees; then it asks those that are there now."""
        before = self.version
        found = self.caller.described(lambda _: say.Refresh(before))
        if {_version(one) for one in found.values()} != {before} or not is_kept(self.table, found):
            return False
        self.caller.known = self.caller.known | found
        return True

    @verb
    def grow(self) -> int:
        """Answer by twice as many shards from now on, and return how many: shard s becomes s and s + P.

        Where its directory lies on the host that makes the two, each is a copy of that which half of the records leave;
        the table is read where there is none. Questions are answered by the old shards until the new ones are there,
        and what they have answered stays good; other handles go over with their next `refresh()`. On Ray the old actors
        live on for these until `softdb.cluster.stop`. It may take long, and is not bounded by the timeout; one that was
        cut short is gone on with by the next. Raises DatabaseLocked where another handle does the same at once.
        """
        _, table = self._writable()
        with self._moving:
            shards = 2 * table.shards
            caller = self._joined(shards, max(PATIENCE, self.caller.timeout))
            try:
                table.put_shards(shards)
                self._go_on(caller)
            except BaseException:
                caller.transport.close()
                raise
            self._take(caller)
        return shards

    def _joined(self, shards: int, timeout: float) -> Caller:
        """So many shards of the table, ready to be asked."""
        transport = self._connect(self.table.with_shards(shards))
        try:
            caller = Caller(transport, timeout, self.caller.partial)
        except BaseException:
            transport.close()
            raise
        caller.timeout = self.caller.timeout
        return caller

    def _take(self, caller: Caller) -> None:
        """Ask these shards from now on. The old ones stay open for what refers to them: questions, hits, gradients."""
        if caller is self.caller:
            return
        self._before.add(self.caller.transport)
        self.truth = self.table = self.table.with_shards(caller.shards)
        self.caller = caller

    def close(self) -> None:
        """Let go of the shards. Safe to call twice."""
        for transport in list(self._before):
            transport.close()
        super().close()

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records, as of the version that this handle sees, to one ordinary database in a new directory.

        It is read from the table, batch by batch, so that memory does not grow with it and writing goes on. Indexes are
        not copied: `build_index()` there makes one.

        Args:
            path: a directory that does not exist or is empty; it is there whole, or not at all.

        Raises BadInput for another path, StaleRead where the version was cleaned up, and WriteFailed where the disk
        refuses: then nothing of the copy is left.
        """
        target, version = check.folder(path, "path", "the path of a new directory"), self.version
        return copied(target, lambda folder: of_table(self.table, version, folder))

    @verb
    def insert(
        self,
        ids: Ids,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """As `SoftDB.insert`: all of a batch or none, safe when this returns.

        Of two that insert one id at once, wherever they are, exactly one gets DuplicateId. Cost: a commit of the table
        (some ms in a folder, some requests of an object store), and a refresh.
        """
        door, truth = self._writable()
        with telling(progress) as say:
            truth.insert(door.batch(ids, keys, values, payloads, texts, say))
        self._seen()

    @verb
    def upsert(
        self,
        ids: Ids,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """As `insert`, but a record whose id is stored already is replaced whole."""
        door, truth = self._writable()
        with telling(progress) as say:
            truth.upsert(door.batch(ids, keys, values, payloads, texts, say))
        self._seen()

    @verb
    def update(
        self,
        ids: Ids,
        keys: Vectors | None = None,
        values: Numbers | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """As `SoftDB.update`: replace the given parts of stored records, all or none."""
        door, truth = self._writable()
        with telling(progress) as say:
            parts = door.parts(ids, keys, values, payloads, texts, say)
        columns = {"key": parts.keys, "value": parts.values, "payload": parts.payloads, "text": parts.texts}
        truth.update(parts.ids, {name: column for name, column in columns.items() if column is not None})
        self._seen()

    @verb
    def delete(self, ids: Ids | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete records by id, missing ones are fine, or by filter, and return how many there were.

        A filter names the records of the version that this handle sees.
        """
        _, truth = self._writable()
        if (ids is None) == (where is None):
            raise BadInput("give ids or where, one of them; where={} deletes every record")
        if ids is None:
            ids = [one for records in self.scan(10_000, where) for one in records.ids]
        count, _ = truth.delete(check.identifiers(ids, unique=False))
        self._seen()
        return count

    @verb
    def compact(self) -> CompactReport:
        """Write the table's many small files as few large ones, and index its ids. Answers stay what they are.

        Worth it after some hundred writes: each is a file, which a shard that is made anew reads. The report is of the
        newest version: its files, and the rows of deleted and replaced records in them; older versions keep theirs.
        """
        _, truth = self._writable()
        before = occupied(truth.now())
        truth.compact()
        after = occupied(truth.now())
        self._seen()
        return CompactReport(
            after.records, before.dead - after.dead, before.files, after.files, before.bytes, after.bytes
        )

    @verb
    def stats(self) -> Stats:
        """As `Cluster.stats`; the path is the table's address, and what is acknowledged is in the table."""
        return dataclasses.replace(super().stats(), path=self.url, durability="full")

    def _writable(self) -> tuple[SoftDB, Truth]:
        if self.mode != "rw" or not self.table.own:
            way = "open it with mode='rw'" if self.table.own else "write to it with what made it, then refresh()"
            raise ReadOnly(f"this handle of {self.table.url} only reads; {way}")
        if self._door is None:
            self._door = opening.open(None, encoder=self._encoder, **self.table.described)
        return self._door, self.table

    def _seen(self) -> None:
        """Bring the shards on. What fails now has been written all the same, and the error says so."""
        try:
            self.refresh()
        except SoftDBError as error:
            message = f"it is written and safe, but not yet seen here: {error.args[0]}"
            if isinstance(error, Closed | ShardUnavailable | StaleRead):
                error.args = (message, *error.args[1:])
                raise
            raise StaleRead(message) from error  # of another type it would tell of a write that was refused


def _version(one: say.Description) -> int:
    return say.of_records(one.version)


for _name in (
    "attend", "count_within", "get", "located", "log_density", "log_partition", "sample", "sample_keys", "search"
):  # fmt: skip
    setattr(TableCluster, _name, _again(getattr(Cluster, _name)))
