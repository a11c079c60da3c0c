"""The verbs of a cluster that write: checked as a database checks, one commit of the table each, then seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from softdb import check, opening
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.database.embedding import telling
from softdb.errors import BadInput, ReadOnly, SoftDBError
from softdb.index.choose import Progress
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors

__all__ = ["WritingVerbs"]

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="WritingVerbs")


def _writes(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Every error names the verb, once."""

    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except SoftDBError as error:
            if not hasattr(error, "verb"):
                error.verb = method.__name__  # type: ignore[attr-defined]
                error.args = (f"{method.__name__}: {error.args[0]}", *error.args[1:])
            raise

    return call


class WritingVerbs:
    """What changes the table that a cluster is made from. A verb is one commit, whatever shards it touches.

    A record is safe when the verb returns, and the answers of this handle have it; another handle sees it after
    `refresh()`. Two that write at once are both served: Lance commits one after the other.
    """

    truth: Truth | None
    mode: str
    _door: SoftDB | None = None  # a database in memory, which checks as any database does

    def refresh(self) -> int:
        """See `softdb.cluster.handle.Cluster.refresh`."""
        raise NotImplementedError

    def require_open(self) -> None:
        """Raises Closed."""
        raise NotImplementedError

    @_writes
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

    @_writes
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

    @_writes
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

    @_writes
    def delete(self, ids: Ids) -> int:
        """Delete records by id, missing ones are fine, and return how many there were."""
        _, truth = self._writable()
        count, _ = truth.delete(check.identifiers(ids, unique=False))
        self._seen()
        return count

    @_writes
    def compact(self) -> None:
        """Write the table's many small files as few large ones, and index its ids. Answers stay what they are.

        Worth it after some hundred writes: each is a file, which a shard that is made anew reads.
        """
        _, truth = self._writable()
        truth.compact()
        self._seen()

    def _writable(self) -> tuple[SoftDB, Truth]:
        self.require_open()
        if self.truth is None or self.mode != "rw":
            raise ReadOnly("this cluster was opened for reading; open it with softdb.cluster.open(url) to write")
        if not self.truth.own:
            raise ReadOnly(f"{self.truth.url} was made by another program; write to it with that, then refresh()")
        if self._door is None:
            self._door = opening.open(None, **self.truth.described)
        return self._door, self.truth

    def _seen(self) -> None:
        """Bring the shards on. What fails now has been written all the same, and the error says so."""
        try:
            self.refresh()
        except BadInput:
            raise
        except SoftDBError as error:
            error.args = (f"it is written and safe, but not yet seen here: {error.args[0]}", *error.args[1:])
            raise
