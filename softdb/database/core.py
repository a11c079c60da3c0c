"""`Core`: the internal interface of a database or a cluster, for `nn`, `train`, `formats`, `cluster` and `tools`.

`core` of a database is a `DatabaseCore`, of a cluster a `ClusterCore`; `Verbs` works with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Pooled, Records
from softdb.attend import Request, Source
from softdb.check import Id, Schema
from softdb.database.incoming import Given, WriteKind
from softdb.encoders import DEFAULT
from softdb.errors import BadInput, DeviceFailed
from softdb.filters import FilteredStore
from softdb.index.choose import Progress
from softdb.reports import Stats
from softdb.scoring import Score, ScoreFunction, Weighting, query_width, score_of
from softdb.typing import IdsPerQuery, Vectors

Rows = NDArray[np.int64]
Allowed = NDArray[np.bool_]
ALL = slice(0, None)  # every record; `check.page` makes other slices
T = TypeVar("T")
S = TypeVar("S", bound=Source, covariant=True)


class SearchArguments(NamedTuple):
    """The arguments of `search`, unchecked."""

    queries: Vectors | None
    k: int | None
    texts: Any
    mode: str | None
    fusion: Any
    where: dict[str, Any] | None
    exact: bool
    radius: float | None
    exclude_ids: IdsPerQuery | None
    diversity: float | None
    fetch_k: int | None
    offset: int
    group_by: str | None
    group_size: int | None


class Core(Protocol[S]):
    """Internal interface to the records of one database, or of all shards of a cluster."""

    created: bool = False  # True until the first query, if the handle has made the database's directory
    device: torch.device | None = None  # where queries that are not tensors are answered; None: the CPU

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric."""

    @property
    def encoder_name(self) -> str | None:
        """Stored name of the encoder that made the keys; None if no name is stored."""

    @property
    def path(self) -> Path | None:
        """Directory of the database; None for a database in memory, or a cluster with several directories."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""

    @property
    def id_types(self) -> set[str]:
        """Types of the stored ids: "integer", "text" or both."""

    @property
    def keyed(self) -> int:
        """Number of records with a key."""

    @property
    def closed(self) -> bool:
        """True after `close`."""

    def close(self) -> None:
        """Close it; safe to call twice."""

    def require_open(self) -> None:
        """Raise Closed after `close`."""

    def require_width(self) -> None:
        """Raise BadInput if the width of the keys is undecided, and Closed after `close`."""
        self.require_open()
        if not self.schema.dim:
            raise BadInput(
                "this database has no keys yet, so their width is undecided; insert records with keys first, or open "
                "it with dim="
            )

    def encoder(self) -> check.Encoder | None:
        """Return the encoder of the keys; None if no encoder is known."""

    def stored(self, ids: list[Id], where: dict[str, Any] | None = None) -> Allowed:  # n -> (n,)
        """Return True for each id that is stored, with a key or without, and matched by `where`."""

    def located(self, ids: list[Id], where: dict[str, Any] | None = None, required: bool = False) -> Rows:  # n -> (n,)
        """Return rows of ids; -1 if not stored, without a key (if required: an error), or not matched by `where`."""

    def values_at(self, rows: Rows) -> Tensor:  # (q, k), -1 = none
        """Return values (q, k, v), or labels (q, k), by row; zeros for -1. Raises StaleRead for a deleted record."""

    def sample_keys(self, count: int) -> Tensor:
        """Return at most `count` stored keys, with which two databases can be told apart."""

    def get(self, ids: list[Id] | None, where: dict[str, Any] | None = None, page: slice = ALL) -> Records:
        """Return a part of the records with these ids, in their order, or of all, that `where` matches."""

    def count(self, where: dict[str, Any] | None) -> int:
        """Return the number of records that match a filter, with a key or without."""

    def scan(self, size: int, where: dict[str, Any] | None, page: slice = ALL) -> Iterator[Records]:
        """Yield a part of the records that match a filter, in batches of at most `size`."""

    def search(self, search: SearchArguments) -> Hits:
        """Search with the arguments of `Questions.search`. Raises BadInput."""

    def estimate_plainly(self, queries: Any, parameters: tuple[Any, ...]) -> Pooled | None:
        """Answer `attend` as before with the same temperature, rtol, atol and confidence, with less overhead.

        Return None if `attend` must take its general path, and raise errors.
        """

    def stats(self) -> Stats:
        """Return the size and state of the database."""

    def put(self, change: WriteKind, given: Given, progress: Progress | bool | None) -> list[Id]:
        """Check records, write all or none, and return their ids. Raises the errors of `insert`, `upsert`, `update`."""

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete records by id, or those that a filter matches, and return the number of deleted records."""

    def taking_part(
        self, queries: Any, by: Score | ScoreFunction, where: dict[str, Any] | None, mask: Any
    ) -> tuple[Tensor, Allowed | None, Tensor | None, S]:
        """Check queries for a score, and the mask; return both, the filter's mask of positions, and the source."""

    def device_failed(self, verb: str, error: Exception) -> DeviceFailed:
        """Convert the error of a device to DeviceFailed."""
        return DeviceFailed(f"{verb}: a device failed ({str(error).splitlines()[0]}); ask fewer queries at once")

    @property
    def header(self) -> dict[str, Any]:
        """Description of the database in an export: schema, declared fields, and the encoder's name."""
        return {**self.schema.described, "fields": self.fields, "encoder": self.encoder_name}

    def as_queries(self, queries: Vectors, by: Score | ScoreFunction | None = None) -> Tensor:
        """Check queries, or encode query texts; return vectors (q, d), or as wide as a score needs. Raises BadInput."""
        dim, default = self.schema.dim, None if self.schema.dim else DEFAULT  # as `encoder_for` of the first texts
        width = dim if by is None else query_width(by, dim)
        vectors = check.encoded(queries, "queries", lambda: check.query_encoder(self.encoder() or default))
        if width == dim:
            return check.queries(vectors, dim, self.device)
        return check.queries(vectors, width, self.device, "this score takes queries")

    def request(
        self,
        queries: Any,
        temperature: float | Tensor = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        *,
        k: int | None = None,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
        need_weights: bool = False,
    ) -> tuple[Request, S]:
        """Check the arguments of `attend`; return the request and its source. Raises BadInput."""
        if score is not None and not callable(score):
            raise BadInput(f"score is {check.shown(score)}; expected an object of softdb.scores or a callable")
        self.require_width()
        by = score_of(self.schema.metric) if score is None else score
        tensor, allowed, mask, source = self.taking_part(queries, by, where, mask)
        temperature = check.temperature(temperature, check.leading(queries, len(tensor)))
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        request = Request.of(
            tensor, by, weights, temperature, k=k or 0, allowed=allowed, mask=mask, tolerance=tolerance, seed=seed,
            need_weights=need_weights,
        )  # fmt: skip
        return request, source


def with_one_encoder(store: FilteredStore, prepare: Callable[[], T]) -> T:
    """Call `prepare`, and repeat it if the database was re-embedded meanwhile: queries and keys need one encoder."""
    loader = store.loader
    while True:
        keyed = loader.loaded.keyed
        try:
            prepared = prepare()
        except BadInput:  # for example, the encoder's vectors have another width than the keys had
            if loader.loaded.keyed is keyed:
                raise
            continue
        if loader.loaded.keyed is keyed:
            return prepared
