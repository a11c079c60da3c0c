"""`ClusterCore`: implements `Core`, the internal interface of a database, for a cluster of shards."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Records
from softdb.attend import Request
from softdb.check import Id, Schema
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.merge import joined_records
from softdb.cluster.sharded import Sharded
from softdb.database import Core
from softdb.database.core import ALL, SearchArguments
from softdb.database.incoming import Given, WriteKind
from softdb.encoders import of_name
from softdb.errors import BadInput, Closed, ReadOnly, UnknownId
from softdb.index.choose import Progress
from softdb.index.contract import Rows
from softdb.index.query import Query
from softdb.reports import Stats

_ALONE = ("texts", "mode", "fusion", "diversity", "fetch_k", "group_by", "group_size")  # only for one database


class ClusterCore(Core[Sharded]):
    """Core of a read-only cluster in which each shard is a database of its own."""

    mode = "r"
    path = None
    fields = ()
    closed = False

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    # -- the handle ------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise Closed if the cluster was closed."""
        if self.closed:
            raise Closed("the cluster was closed; open it again")

    def close(self) -> None:
        """Close the transport. Calling `close` twice is allowed."""
        if not self.closed:
            self.closed = True
            self.caller.leave()
            self.caller.transport.close()

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric of every shard."""
        return self.caller.first.schema

    @property
    def encoder_name(self) -> str | None:
        """Name of the encoder that made the keys; None if unknown."""
        return self.caller.first.encoder

    @property
    def id_types(self) -> set[str]:
        """Types of the stored ids: "integer", "text" or both."""
        return set().union(*self._called("id_types", {}))

    @property
    def keyed(self) -> int:
        """Number of records with a key."""
        return self.caller.count

    @property
    def version(self) -> int:
        """Newest version among the shards."""
        return max(shard.version for shard in self.caller.known.values())

    def encoder(self) -> check.Encoder | None:
        """Return the encoder that made the keys; None if the database names none."""
        name = self.encoder_name
        return None if name is None else of_name(name, self.schema.dim)

    def stats(self) -> Stats:
        """Return statistics summed over all shards. The index statistics are those of the first shard."""
        shards = self._called("stats", {})
        sums = {name: sum(getattr(shard, name) for shard in shards) for name in ("records", "keyless", "dead", "bytes")}
        total: Stats = dataclasses.replace(
            shards[0], path=None, mode=self.mode, generation=self.version, **sums,
            segments=sum(shard.segments for shard in shards), unflushed=0,
            shards=[report for shard in shards for report in shard.shards],
        )  # fmt: skip
        return total

    # -- records ---------------------------------------------------------------------------------------------------

    def _called(self, name: str, words: dict[str, Any], caller: Caller | None = None) -> list[Any]:
        answers = (caller or self.caller).ask(lambda _, version: messages.CallVerb(version, name, words), complete=True)
        return [reply for _, reply in sorted(answers.replies.items())]

    def get(self, ids: list[Id] | None, where: dict[str, Any] | None = None, page: slice = ALL) -> Records:
        """Return a part of the records with these ids, or of all, that `where` matches; see `Core.get`."""
        caller = self.caller.now()  # one version for all messages
        if ids is None:
            batches = [*self.scan(10_000, where, page), *self._called("get", {"ids": []}, caller)[:1]]
            return joined_records(batches, np.arange(sum(map(len, batches))))
        home = np.full(len(ids), -1)
        for shard, stored in enumerate(self._called("stored", {"ids": ids}, caller)):
            home[stored] = shard
        if (home < 0).any():
            raise UnknownId(f"id {check.shown(ids[int((home < 0).argmax())])} is not stored")
        if where is not None or page != ALL:
            chosen = np.flatnonzero(home >= 0 if where is None else self.stored(ids, where))[page]
            ids, home = [ids[i] for i in chosen], home[chosen]
        places = {shard: np.flatnonzero(home == shard) for shard in np.unique(home).tolist()}

        def own(shard: int, version: int) -> messages.CallVerb:
            return messages.CallVerb(version, "get", {"ids": [ids[i] for i in places.get(shard, ())]})

        replies = caller.ask(own, places, complete=True).replies
        parts = [(places[shard], records) for shard, records in replies.items() if shard in places]
        if not parts:
            return self._called("get", {"ids": []})[0]  # type: ignore[no-any-return]
        order = np.argsort(np.concatenate([where for where, _ in parts]))
        return joined_records([records for _, records in parts], order)

    def stored(self, ids: list[Id], where: dict[str, Any] | None = None) -> NDArray[np.bool_]:
        """Return an array (n,): True for each id that is stored, with a key or without, and matched by `where`."""
        stored: NDArray[np.bool_] = np.any(self._called("stored", {"ids": ids, "where": where}), axis=0)
        return stored

    def count(self, where: dict[str, Any] | None) -> int:
        """Return the number of records that match a filter, with a key or without."""
        return sum(self._called("count", {"where": where}))

    def scan(self, size: int, where: dict[str, Any] | None, page: slice = ALL) -> Iterator[Records]:
        """Yield records that match a filter, shard by shard. Raises StaleRead if a shard moves to another version."""
        caller = self.caller.now()  # one version for all messages
        skip, remaining = page.start, sys.maxsize if page.stop is None else page.stop - page.start
        counts = self._called("count", {"where": where}, caller) if skip else [1] * caller.shards
        for shard, count in enumerate(counts):
            if skip >= count:
                skip -= count
                continue
            after, first = -1, None
            while after is not None and remaining:
                message = functools.partial(
                    _scan, first=first, after=after, size=min(size, remaining), where=where, skip=skip
                )
                batch, after = caller.ask(message, [shard], complete=True).replies[shard]
                first = first or caller.known[shard]
                skip, remaining = 0, remaining - len(batch)
                if len(batch):
                    yield batch

    def located(self, ids: list[Id], where: dict[str, Any] | None = None, required: bool = False) -> Rows:
        """Return rows (n,) of ids; -1 if an id is not stored, has no key or fails the filter (or UnknownId)."""
        answers = self.caller.ask(lambda _, version: messages.Locate(version, ids, where), complete=True)
        rows: Rows = np.max([np.full(len(ids), -1), *answers.replies.values()], axis=0)
        if required and (rows < 0).any():
            raise UnknownId(f"id {check.shown(ids[int((rows < 0).argmax())])} is not stored, or has no key")
        return rows

    def values_at(self, rows: Rows) -> Tensor:  # (q, k), -1 = none
        """Return values (q, k, v), or labels (q, k), of rows (q, k); 0 for row -1. Raises StaleRead if one is dead."""
        return Sharded(self.caller, None).gathered(rows, keys=False)[1]

    def sample_keys(self, count: int) -> Tensor:
        """Return about `count` keys (n, d): the first ⌈count / shards⌉ of each shard."""
        caller = self.caller.now()
        per_shard = -(-count // caller.shards)
        answers = caller.ask(lambda _, version: messages.ScanRows(version, -1, per_shard), complete=True)
        return torch.cat([batch.keys for _, (batch, _) in sorted(answers.replies.items())])

    def put(self, change: WriteKind, given: Given, progress: Progress | bool | None) -> list[Id]:
        """Raise ReadOnly, since this cluster does not write."""
        raise ReadOnly("a cluster of databases only reads; write to the shards' own databases, then refresh()")

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Raise ReadOnly, since this cluster does not write."""
        raise ReadOnly("a cluster of databases only reads; write to the shards' own databases, then refresh()")

    # -- questions -------------------------------------------------------------------------------------------------

    def request(self, *positional: Any, need_weights: bool = False, **named: Any) -> tuple[Request, Sharded]:
        """Return a request and its source, as `Core.request` does. Raises BadInput if `need_weights` is True."""
        if need_weights:
            raise BadInput("need_weights needs the weights of all records, which a cluster does not gather; pass k=")
        return super().request(*positional, **named)

    def estimate_plainly(self, queries: Any, parameters: tuple[Any, ...]) -> None:
        """Return None: `attend` takes its general path, as shards draw."""
        return None

    def taking_part(
        self, queries: Any, by: Any, where: dict[str, Any] | None, mask: Any
    ) -> tuple[Tensor, None, None, Sharded]:
        """Return checked queries, None, None and the source; `where` filters. Raises BadInput for a mask."""
        if mask is not None:
            raise BadInput("mask needs an order of rows, which a cluster does not have; pass a filter as where=")
        return self.as_queries(queries, by), None, None, Sharded(self.caller, where)

    def search(self, search: SearchArguments) -> Hits:
        """Search every shard, and return the best hits of all. Raises BadInput for arguments of a single database."""
        if refused := [name for name in _ALONE if getattr(search, name) is not None]:
            raise BadInput(
                f"{' and '.join(refused)}: a cluster does not search by text, by group or with diversity; omit this "
                "argument and pass queries=, or search one database"
            )
        if search.queries is None:
            raise BadInput("search got no queries; a cluster searches by vector only: pass queries=")
        metric = self.schema.metric
        extent = check.extent(metric, search.k, search.radius, search.offset)
        query = Query(self.as_queries(search.queries), metric=metric, exact=search.exact, **extent)
        excluded = check.excluded(search.exclude_ids, len(query.queries)) or None
        return Sharded(self.caller, search.where).hits(query, excluded)


def _scan(_: int, version: int, first: messages.Description | None, after: int, **words: Any) -> messages.ScanRows:
    """Return the next message of a scan, which must reach the same directory: `after` is a row of that directory."""
    if first is not None and messages.directory_of(version) != messages.directory_of(first.version):
        version = first.version
    return messages.ScanRows(version, after, **words)
