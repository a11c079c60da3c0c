"""A cluster over a table: it writes, follows what others write, and grows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from softdb import check, opening
from softdb.cluster import shard as say
from softdb.cluster.handle import Cluster
from softdb.cluster.hydrate import VERSION_BITS
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.database.embedding import telling
from softdb.database.handle import verb
from softdb.errors import BadInput, ReadOnly, SoftDBError, StaleRead
from softdb.index.choose import Progress
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors

__all__ = ["TableCluster"]

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
        self.table, self.mode = truth, mode
        self._connect, self._encoder = connect, encoder
        self._door: SoftDB | None = None  # in memory: it checks as any database does
        super().__init__(connect(truth), timeout, partial, truth)
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
        shards = self.table.stored_shards()
        if shards != self.table.shards:
            self._move(shards)
        for _ in range(_TRIES):
            newest = self.table.newest()
            if newest < self.version:
                raise StaleRead(f"another table has taken the place of {self.url}; open it again")
            self.caller.look(lambda _: say.Refresh(newest))  # noqa: B023
            if len(set(map(_version, self.caller.known.values()))) == 1:  # else another handle refreshes, too
                return self.version
        raise StaleRead(f"the shards went on {_TRIES} times while they were looked at; refresh() again")

    def taken_over(self) -> bool:
        """Whether every shard is still at the version that this handle sees; then it asks those that are there now."""
        before = self.version
        self.caller.look(lambda _: say.Describe(say.NEWEST))
        return {_version(one) for one in self.caller.known.values()} == {before}

    @verb
    def grow(self) -> int:
        """Answer by twice as many shards from now on, and return how many: shard s becomes s and s + P.

        This handle answers as before until the new shards are there; others go over to them with their next
        `refresh()`. On Ray the old actors live on for these until `softdb.cluster.stop`. Raises DatabaseLocked where
        another handle does the same at once.
        """
        _, table = self._writable()
        shards = 2 * table.shards
        transport = self._connect(table.with_shards(shards))
        try:
            table.put_shards(shards)
        except BaseException:
            transport.close()
            raise
        self._take(transport, shards)
        self.refresh()
        return shards

    def _move(self, shards: int) -> None:
        self._take(self._connect(self.table.with_shards(shards)), shards)

    def _take(self, transport: say.Transport, shards: int) -> None:
        before, self.caller.transport = self.caller.transport, transport
        self.truth = self.table = self.table.with_shards(shards)
        before.close()

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
    def compact(self) -> None:
        """Write the table's many small files as few large ones, and index its ids. Answers stay what they are.

        Worth it after some hundred writes: each is a file, which a shard that is made anew reads.
        """
        _, truth = self._writable()
        truth.compact()
        self._seen()

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
        except BadInput:
            raise
        except SoftDBError as error:
            error.args = (f"it is written and safe, but not yet seen here: {error.args[0]}", *error.args[1:])
            raise


def _version(one: say.Description) -> int:
    return one.version & ((1 << VERSION_BITS) - 1)


for _name in ("attend", "count_within", "get", "log_density", "log_partition", "sample", "search"):
    setattr(TableCluster, _name, _again(getattr(Cluster, _name)))
