"""`Cluster`: the shards as one database. It asks and merges; what it answers is what one database of all would."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Record, Records
from softdb.attend import Request
from softdb.check import Id, Schema
from softdb.cluster import shard as say
from softdb.cluster.answers import Sharded
from softdb.cluster.asking import array
from softdb.cluster.caller import Caller
from softdb.cluster.copying import copied, of_records
from softdb.cluster.merge import joined_records
from softdb.database import SoftVerbs, TableVerbs
from softdb.database.handle import verb
from softdb.encoders import of_name
from softdb.errors import BadInput, Closed, UnknownId
from softdb.reports import IndexReport, SnapshotReport, Stats
from softdb.scoring import Score, ScoreFunction, Weighting, query_width, score_of
from softdb.typing import Ids, IdsPerQuery, Vectors

__all__ = ["Cluster", "Versioned"]

BUILDING = 3600.0  # seconds that an index may take
_ALONE = ("texts", "mode", "fusion", "diversity", "fetch_k", "group_by", "group_size")  # of SoftDB.search alone

Rows = NDArray[np.int64]


class Versioned(Protocol):
    """Where the records are kept, as far as a reader needs it."""

    def newest(self) -> int:
        """The newest version."""


class Cluster(SoftVerbs, TableVerbs):
    """Shards as one database: SoftDB's verbs that read, and its answers.

        db = Cluster(Local([DatabaseShard(one, i, len(all)) for i, one in enumerate(all)]))

    Every read names the version that this handle saw last; a shard that is at another one raises StaleRead, and
    `refresh()` goes on to the newest. Differentiable as a database is; see docs/cluster.md for what travels.

    Args:
        transport: what carries questions to the shards; `close` closes it.
        timeout: seconds that any question may take; beyond it ShardUnavailable, whatever a shard does.
        partial: whether answers without the shards that are missing will do. Then `missing` names these, `met` is False
            and `bar` infinite. Losses want all shards all the same.
        truth: what the shards are copies of; None: each shard's own database.
    """

    def __init__(
        self, transport: say.Transport, timeout: float = 30.0, partial: bool = False, truth: Versioned | None = None
    ) -> None:
        self.truth, self.mode, self._closed = truth, "r", False
        self.caller = Caller(transport, check.positive(timeout, "timeout"), bool(partial))

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require_open(self) -> None:
        """Raises Closed."""
        if self._closed:
            raise Closed("the cluster was closed; open it again")

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric, alike in every shard."""
        return self.caller.first.schema

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return self.schema.dim

    @property
    def value_dim(self) -> int | None:
        """v, the width of a value; None where values are labels, or the keys themselves."""
        return self.schema.value_dim

    @property
    def num_classes(self) -> int | None:
        """Values are integer labels below this; None where they are not labels."""
        return self.schema.num_classes

    @property
    def dtype(self) -> str:
        """How vectors are stored, "float32" or "float16"."""
        return str(self.schema.dtype.name)

    @property
    def metric(self) -> str:
        """How queries and keys are compared: "dot", "cosine" or "l2"."""
        return self.schema.metric.value

    @property
    def encoder_name(self) -> str | None:
        """The name of the encoder that made the keys; None where none is remembered."""
        return self.caller.first.encoder

    @property
    def fields(self) -> tuple[str, ...]:
        """None: a cluster declares no fields of the payload."""
        return ()

    @property
    def id_types(self) -> set[str]:
        """Which of "integer" and "text" ids there are."""
        return set().union(*self._called("id_types", {}))

    @property
    def path(self) -> None:
        """None: the records are in several places."""

    @property
    def shards(self) -> int:
        """How many there are."""
        return self.caller.shards

    @property
    def version(self) -> int:
        """What this handle sees; the newest of its shards', which are all at one where there is a truth."""
        return max(one.version for one in self.caller.known.values())

    @property
    def keyed(self) -> int:
        """How many records have a key: all that vectors meet."""
        return self.caller.count

    @verb
    def refresh(self) -> int:
        """See what was committed since, in every shard, and return the version. Cost: whatever the shards must copy."""
        newest = say.NEWEST if self.truth is None else self.truth.newest()
        self.caller.look(lambda _: say.Refresh(newest))
        return self.version

    def close(self) -> None:
        """Let go of the shards. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.caller.transport.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{self.keyed} keys, dim {self.dim}, {self.metric}"
        return f"<Cluster of {self.shards} shards, {what}>"

    @verb
    def stats(self) -> Stats:
        """Of all shards together: sums, and the index of the first."""
        found = self._called("stats", {})
        sums = {name: sum(getattr(one, name) for one in found) for name in ("records", "keyless", "dead", "bytes")}
        whole: Stats = dataclasses.replace(
            found[0], path=None, mode=self.mode, generation=self.version, **sums,
            segments=sum(one.segments for one in found), unflushed=0,
        )  # fmt: skip
        return whole

    @verb
    def build_index(self, /, kind: str = "auto", **words: Any) -> list[IndexReport]:
        """Build every shard's index, side by side, as `SoftDB.build_index`; the reports, shard by shard.

        Raises BadInput for arguments that do not travel: `background` and `progress`.
        """
        if refused := {"background", "progress"} & words.keys():
            raise BadInput(f"{' and '.join(sorted(refused))} mean nothing for a cluster, which waits for all shards")
        patient = self.caller.complete()
        patient.timeout = max(BUILDING, patient.timeout)
        answers = patient.ask(lambda _, version: say.CallVerb(version, "build_index", {"kind": kind, **words}))
        self.caller.look(lambda _: say.Describe(say.NEWEST))
        return [report for _, report in sorted(answers.replies.items())]

    # -- records ---------------------------------------------------------------------------------------------------

    def _called(self, name: str, words: dict[str, Any], caller: Caller | None = None) -> list[Any]:
        answers = (caller or self.caller).ask(lambda _, version: say.CallVerb(version, name, words), whole=True)
        return [reply for _, reply in sorted(answers.replies.items())]

    @verb
    def get(self, ids: Ids) -> Records:
        """The records of those ids, in that order. Raises UnknownId (a KeyError) naming one that is not stored."""
        names = check.identifiers(ids, unique=False)
        caller = self.caller  # grown meanwhile, the shards are others
        home = np.full(len(names), -1)
        for shard, stored in enumerate(self._called("stored", {"ids": names}, caller)):
            home[stored] = shard
        if (home < 0).any():
            raise UnknownId(f"id {check.shown(names[int((home < 0).argmax())])} is not stored; check it with `in`")
        places = {shard: np.flatnonzero(home == shard) for shard in np.unique(home).tolist()}

        def mine(shard: int, version: int) -> say.CallVerb:
            return say.CallVerb(version, "get", {"ids": [names[i] for i in places.get(shard, ())]})

        found = caller.ask(mine, places, whole=True).replies
        parts = [(places[shard], part) for shard, part in found.items() if shard in places]
        if not parts:
            return self._called("get", {"ids": []})[0]  # type: ignore[no-any-return]
        return joined_records([part for _, part in parts], np.argsort(np.concatenate([where for where, _ in parts])))

    @verb
    def __getitem__(self, name: Id) -> Record:
        return self.get([name])[0]

    @verb
    def __contains__(self, name: object) -> bool:
        return bool(self.stored(check.identifiers([name]))[0])

    def stored(self, ids: list[Id]) -> NDArray[np.bool_]:
        """Which of ids (n,) are stored, with a key or without."""
        found: NDArray[np.bool_] = np.any(self._called("stored", {"ids": ids}), axis=0)
        return found

    @verb
    def __len__(self) -> int:
        return self.count()

    @verb
    def count(self, where: dict[str, Any] | None = None) -> int:
        """How many records there are, or how many a filter matches, with a key or without."""
        return sum(self._called("count", {"where": where}))

    @verb
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, shard by shard, in batches of at most `batch_size`.

        Raises StaleRead where a shard has gone on to another version meanwhile.
        """
        return self._scanned(check.integer(batch_size, "batch_size"), where)

    def _scanned(self, size: int, where: dict[str, Any] | None) -> Iterator[Records]:
        caller = self.caller  # grown meanwhile, the shards are others
        for shard in range(caller.shards):
            after = -1
            while after is not None:
                message = functools.partial(_scan, after=after, size=size, where=where)
                batch, after = caller.ask(message, [shard], whole=True).replies[shard]
                if len(batch):
                    yield batch

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records to one ordinary database in a new directory, there whole, or not at all.

        Cost: a scan, batch by batch. Indexes are not copied.

        Raises BadInput for a path where something is, StaleRead where a shard has gone on meanwhile, and WriteFailed
        where the disk refuses.
        """
        batches = self._scanned(1000, None)
        return copied(
            check.folder(path, "path", "the path of a new directory"),
            lambda folder: of_records(batches, self.schema, self.encoder_name, folder),
        )

    def located(self, ids: list[Id], where: dict[str, Any] | None = None) -> Rows:
        """Rows (n,) of ids; -1 for those not stored, without a key, or that the filter does not match."""
        answers = self.caller.ask(lambda _, version: say.Locate(version, ids, where), whole=True)
        rows: Rows = np.max([np.full(len(ids), -1), *answers.replies.values()], axis=0)
        return rows

    def values_at(self, rows: Rows) -> Tensor:  # (q, k), -1 = none
        """Values (q, k, v), or labels (q, k), of rows; zeros where there is none. Raises StaleRead for one gone."""
        return Sharded(self.caller, None).gathered(rows, keys=False)[1]

    def sample_keys(self, count: int) -> Tensor:
        """Up to so many of the keys, by which one database is told from another: the first of each shard."""
        caller = self.caller
        each = -(-count // caller.shards)
        answers = caller.ask(lambda _, version: say.ScanRows(version, -1, each), whole=True)
        return torch.cat([batch.keys for _, (batch, _) in sorted(answers.replies.items())])

    # -- questions -------------------------------------------------------------------------------------------------

    def as_queries(self, queries: Vectors, width: int | None = None) -> Tensor:
        """Queries (q, width) as every verb takes them: checked, encoded where they are text. Raises BadInput."""

        def encoder() -> check.Encoder | None:
            name = self.encoder_name
            return check.query_encoder(None if name is None else of_name(name, self.dim))

        vectors = check.encoded(queries, "queries", encoder)
        if width in (None, self.dim):
            return check.queries(vectors, self.dim, None)
        return check.queries(vectors, width, None, "this score takes queries")

    def request(
        self,
        queries: Any,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        *,
        k: int | None = None,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
        need_weights: bool = False,
    ) -> tuple[Request, Sharded]:
        """What a soft verb asks, checked, and the records it asks; arguments as `attend`. Raises BadInput.

        A cluster takes no mask, as its records have no order, and holds no weights of all records.
        """
        if score is not None and not callable(score):
            raise BadInput(f"score is {check.shown(score)}; expected an object of softdb.scores or a callable")
        if mask is not None:
            raise BadInput(
                "mask says by row order who takes part, which a cluster does not have; give a filter, where="
            )
        if need_weights:
            raise BadInput("need_weights holds the weights of all records, which no cluster gathers; give k")
        by = score_of(self.schema.metric) if score is None else score
        temperature = check.positive(temperature, "temperature")
        tensor = self.as_queries(queries, query_width(by, self.dim))
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        request = Request.of(tensor, by, weights, temperature, k=k, tolerance=tolerance, seed=seed)
        return request, Sharded(self.caller, where)

    @verb
    def search(
        self,
        /,
        queries: Vectors | None = None,
        k: int | None = None,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        radius: float | None = None,
        exclude_ids: IdsPerQuery | None = None,
        offset: int = 0,
        **others: Any,
    ) -> Hits:
        """The k nearest records of each query, best first, those that score alike by id; arguments as `SoftDB.search`.

        Each shard finds its k nearest, by its own index or exactly; k scores and ids of each travel, and the keys of
        the k best where the queries want a gradient. Payloads travel when they are asked for.

        Raises BadInput for what only one database does: `texts`, `mode`, `fusion`, `diversity`, `fetch_k`, `group_by`
        and `group_size`.
        """
        _require_taken(others)
        if queries is None:
            raise BadInput("queries are missing; a cluster searches by vector")
        ask = check.asked(k, radius, None, None, self.schema.metric, offset, None, None)
        tensor, source = self.as_queries(queries), Sharded(self.caller, where)
        left_out = check.excluded(exclude_ids, len(tensor)) or None
        question = say.ShardQuery(array(tensor), self.schema.metric, where=where)
        count = None if ask.least is not None else min(ask.offset + ask.k, self.keyed)
        found = source.nearest(question, count, exact, ask.least, left_out)
        rows = torch.from_numpy(found.rows[:, ask.offset :]).to(tensor.device)
        scores = torch.tensor(found.scores[:, ask.offset :]).to(tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            request = Request.of(tensor, score_of(self.schema.metric))
            scores = source.scored(request, found.rows[:, ask.offset :]).scores
        return Hits(rows, scores, source.resolve, source.missing)


def _require_taken(words: dict[str, Any]) -> None:
    """BadInput for a word of `SoftDB.search` that a cluster does not take, TypeError for one that nobody does."""
    unknown = next((one for one in words if one not in _ALONE), None)
    if unknown is not None:
        raise TypeError(f"search() got an unexpected keyword argument {unknown!r}")
    given = [one for one in words if words[one] is not None]
    if given:
        raise BadInput(
            f"{' and '.join(given)}: a cluster does not search by text, by group or with diversity; pass queries as "
            "vectors without it, or ask one database"
        )


def _scan(_: int, version: int, after: int, size: int, where: dict[str, Any] | None) -> say.ScanRows:
    return say.ScanRows(version, after, size, where)
