"""SoftDB: the one stateful class. It orchestrates store, index and soft queries, and contains no mathematics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Estimate, Hits, Pooled, Record, Records, Samples
from softdb.attend import Request, Stored, counted, estimated, exact, hits, log_partition, nearest, sampled
from softdb.check import Array, Id, Schema
from softdb.errors import BadInput, ReadOnly, SoftDBError, StaleRead, WriteFailed
from softdb.index import Finder
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.reports import CompactReport, IndexReport, SnapshotReport, Stats
from softdb.scores import Kernel, Score, ScoreFunction, query_width, score_of
from softdb.store import Batch, Snapshot, Store
from softdb.store.compact import compact
from softdb.store.duplicate import duplicate
from softdb.store.filters import field_names
from softdb.store.stats import stats
from softdb.store.verify import verify
from softdb.typing import Device, Ids, IdsPerQuery, Numbers, Vectors
from softdb.weights import Weighting

__all__ = ["SoftDB"]

_log = logging.getLogger("softdb")

MOST_SAMPLED = 2**31  # records that one call of `sample` may draw

P = ParamSpec("P")
R = TypeVar("R")


def _verb(method: Callable[Concatenate[SoftDB, P], R]) -> Callable[Concatenate[SoftDB, P], R]:
    """A public method: a closed handle is refused first, and every error names the method, once."""

    @functools.wraps(method)
    def call(self: SoftDB, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # a graph cannot hold files: torch.compile runs the verb as it is
            return torch.compiler.disable(call)(self, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        try:
            self._store.require_open()
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with check.precise():
                    return method(self, *args, **kwargs)
            return method(self, *args, **kwargs)
        except SoftDBError as error:
            if not hasattr(error, "verb"):
                error.verb = method.__name__.strip("_")  # type: ignore[attr-defined]
                error.args = (f"{error.verb}: {error.args[0]}", *error.args[1:])  # type: ignore[attr-defined]
            raise

    return call


class SoftDB:
    """A durable database of embedded keys and values that answers exact, approximate and soft queries.

    Made by `softdb.open`. Safe to use from several threads; a context manager; every verb takes batches.
    """

    def __init__(self, store: Store, encoder: check.Encoder | None, device: torch.device | None) -> None:
        self._store = store
        self._finder = Finder(store, device)
        self._encoder = encoder
        self._device = device

    # -- writing ---------------------------------------------------------------------------------------------------

    @_verb
    def insert(self, ids: Ids, keys: Vectors, values: Numbers | None = None, payloads: Any = None) -> None:
        """Add records; on disk when this returns, all of them or none.

        Args:
            ids: n of `str` or `int`.
            keys: (n, d) numbers, or n texts where the database has an encoder.
            values: (n, v) numbers, (n,) integer labels, or None: as the database was made.
            payloads: n JSON values, or None.

        Raises:
            DuplicateId: an id is stored already or comes twice.
            BadInput: something does not fit; nothing was written.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
        """
        self._store.insert(self._batch(ids, keys, values, payloads))

    @_verb
    def upsert(self, ids: Ids, keys: Vectors, values: Numbers | None = None, payloads: Any = None) -> None:
        """As `insert`, but a record whose id is stored already is replaced whole, its payload too."""
        self._store.upsert(self._batch(ids, keys, values, payloads))

    @_verb
    def update(
        self, ids: Ids, keys: Vectors | None = None, values: Numbers | None = None, payloads: Any = None
    ) -> None:
        """Replace the given parts of stored records, all or none. Raises UnknownId for an id that is not stored."""
        if keys is None and values is None and payloads is None:
            raise BadInput("nothing to change was given; pass keys, values or payloads")
        names, schema = self._identifiers(ids), self._store.schema
        self._store.update(
            names,
            None if keys is None else check.filled(self._keys(keys), "keys", len(names)),
            None if values is None else check.values(values, schema, len(names)),
            None if payloads is None else check.payloads(payloads, len(names)),
        )

    @_verb
    def delete(self, ids: Ids | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete records by id (missing ones are fine) or by filter, and return how many there were."""
        if (ids is None) == (where is None):
            raise BadInput("give ids or where, one of them; where={} deletes every record")
        return self._store.delete(None if ids is None else check.identifiers(ids, unique=False), where)

    # -- reading ---------------------------------------------------------------------------------------------------

    @_verb
    def get(self, ids: Ids) -> Records:
        """The records of those ids, in that order. Raises UnknownId (a KeyError) naming one that is not stored."""
        names = check.identifiers(ids, unique=False)
        snapshot, rows, texts = self._store.require(names)
        return self._records(snapshot, snapshot.positions(rows), names, texts)

    @_verb
    def __getitem__(self, name: Id) -> Record:
        return self.get([name])[0]

    @_verb
    def __contains__(self, name: object) -> bool:
        return bool(self._store.locate(check.identifiers([name]))[1][0] >= 0)

    @_verb
    def __len__(self) -> int:
        return self._store.snapshot.count

    @_verb
    def count(self, where: dict[str, Any] | None = None) -> int:
        """How many records there are, or how many a filter matches."""
        if where is None:
            return len(self)
        return int(np.count_nonzero(self._store.matching(where)[1]))

    @_verb
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, in the order of their last insertion, in batches.

        The scan is of the generation it began with, less the records that were deleted before it reached them.
        """
        return self._scan(check.clamped(batch_size, "batch_size", 2**31), *self.view(where))

    def _scan(self, size: int, snapshot: Snapshot, allowed: NDArray[np.bool_] | None) -> Iterator[Records]:
        positions = np.flatnonzero(snapshot.live if allowed is None else allowed & snapshot.live)
        for start in range(0, len(positions), size):
            mine = positions[start : start + size]
            rows = snapshot.rows(mine)
            found = self._store.read(rows)
            kept = np.fromiter((row in found for row in rows.tolist()), np.bool_, len(rows))
            names, texts = zip(*(found[row] for row in rows[kept].tolist()), strict=True) if kept.any() else ((), ())
            if names:
                yield self._records(snapshot, mine[kept], list(names), list(texts))

    @_verb
    def search(
        self,
        queries: Vectors,
        k: int | None = None,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        radius: float | None = None,
        exclude_ids: IdsPerQuery | None = None,
        diversity: float | None = None,
        fetch_k: int | None = None,
    ) -> Hits:
        """The k nearest records of each query, best first; with m records to choose from, min(k, m) of them.

        The answer is min(k, len(db)) wide; where a filter leaves fewer records, a line ends in row -1, score -inf.

        Args:
            queries: (q, d) numbers, or q texts where the database has an encoder. A tensor keeps its graph:
                `hits.scores` carry the gradient. Answers are in the queries' precision; a list is float32.
            k: how many; 10 where nothing else is asked for.
            where: a filter on the payload; see `softdb.store.filters`.
            exact: pass the index by.
            radius: in place of k, every record that is near enough, always exact: for "l2" a largest distance,
                ‖q - k‖ ≤ radius, though scores are -‖q - k‖²; for "dot" and "cosine" a least score, s ≥ radius. The
                answer is as wide as the query with the most hits; the others end in row -1, score -inf.
            exclude_ids: ids that shall not be found, one list for all queries or one for each of them (a query that is
                itself stored leaves itself out); k others are. Unknown ids are fine.
            diversity: from 0 (the nearest) to 1 (the most unlike each other): the k are chosen one by one among the
                nearest `fetch_k` by maximal marginal relevance, and come in the order of choosing. See
                `softdb.index.diverse`. Scores stay those of the query.
            fetch_k: for diversity; 4 k where not given.

        Cost: q n d without an index (or few matches); with one, its probes and the exact scores of some 100 candidates.

            db.search(queries, radius=0.8)                              # every record with cosine ≥ 0.8
            db.search(db.get(ids).keys, exclude_ids=[[i] for i in ids])  # neighbours of stored records
            db.search(queries, k=5, diversity=0.3)
        """
        metric = self._store.schema.metric
        tensor = self.as_queries(queries)
        ask = check.asked(k, radius, diversity, fetch_k, metric)
        left_out = [] if exclude_ids is None else check.excluded(exclude_ids, len(tensor))
        snapshot, allowed, excluded = self._view_without(where, left_out) if left_out else (*self.view(where), None)
        find = functools.partial(self._finder.find, snapshot, exact=exact)
        return Hits(*hits(ask, tensor, snapshot, metric, find, allowed, excluded), self._store.read)

    @_verb
    def attend(
        self,
        queries: Any,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        k: int | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        need_weights: bool = False,
    ) -> Pooled:
        """The soft query: the mean of the values, weighted by softmax(score / temperature) or another weighting.

            w_i = exp(s(q, k_i) / T) / Σ_j exp(s(q, k_j) / T),  output = Σ_i w_i v_i,  lse = log Σ_j exp(s(q, k_j) / T)

        Over every record that takes part (exact; cost q n (d + v), memory O(block)); or with `k=` over the k nearest:
        `exact` tells where that is proven to be the same, `missed_mass` estimates the weight of the others. Output and
        lse are differentiable in the queries and in the score's parameters.

        Args:
            queries: (q, d) numbers or a tensor with its graph, or q texts where the database has an encoder. As wide as
                the keys, unless the score compares other widths.
            temperature: towards 0 the nearest record's value, towards infinity the mean of all values.
            score: a `softdb.scores` object or a callable (q, d), (m, d) -> (q, m). None: the database's metric, by
                which its index finds. `softdb.attention` has ScaledDot instead, as torch has: score=scores.ScaledDot()
                gives that here.
            weights: "softmax", "sparsemax", "entmax15", "normalised" (a kernel's plain normalisation), "uniform"
                (average pooling), "argmax" (a lookup); None: normalised for a kernel, else softmax.
            k: truncate to the k nearest. A score that no index can find for is compared with every record.
            rtol, atol: estimate to a tolerance, from records that are drawn through the index: the error ‖ô - o‖ shall
                be at most atol + rtol max(‖o‖, 0.1 rms‖v‖). `bar` tells how large it is, `met` where that fits. Exact
                where that costs less, and where nothing can be drawn: no IVF index, one of another metric than the
                score's, a mask. BadInput for weights other than softmax, and scores without an index form.
            confidence: the share of answers whose error shall be within their `bar`.
            max_draws: pool so many records for a query at most, whether the tolerance is met or not; `bar` is inf
                where nothing can be said of what was not drawn. More may be scored to narrow the bar, unless the
                queries want a gradient.
            generator: draws anew with each call, as training wants; None: the same draw every time.
            where: a filter on the payload.
            mask: (q, len(db)) bool in row order, True = takes part; (len(db),) serves every query.
            need_weights: hold the weights of an exact answer: `weights` (q, n) of `hits`, every record that takes part,
                in row order. Memory q n; without it they are never held. With `k` and tolerances they always are.

        An empty set of records gives zeros and lse = -inf, with gradient zero.
        """
        tolerance = check.tolerance(rtol, atol, confidence, max_draws, k)
        count = None if k is None else check.integer(k, "k")
        request, source = self.request(
            queries, temperature, score, weights, where, mask, k=count, tolerance=tolerance, generator=generator,
            need_weights=need_weights,
        )  # fmt: skip
        if tolerance is not None:
            return estimated(request, source)
        return exact(request, source) if k is None else nearest(request, source)

    @_verb
    def log_partition(
        self,
        queries: Any,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """log Z = log Σ exp(score / temperature) over every record, estimated so that |Ẑ / Z - 1| ≤ rtol.

        What normalises a softmax; `log_density` is the same for a kernel. Z itself is estimated without bias, and so is
        its gradient. `bar` is of Ẑ / Z. Arguments as `attend`.
        """
        tolerance = check.tolerance(rtol, 0.0, confidence, max_draws, None)
        if tolerance is None:
            raise BadInput("rtol is None; expected a number above 0, such as 0.05")
        return log_partition(
            *self.request(queries, temperature, score, where=where, tolerance=tolerance, generator=generator)
        )

    @_verb
    def log_density(
        self,
        queries: Any,
        kernel: Kernel,
        *,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """Kernel density estimate log p(q) = log Σ_i K(q, k_i) - log n - log ∫K (Rosenblatt 1956; Parzen 1962).

        Differentiable in the queries and the bandwidth. -inf where no record takes part, or none within a compact
        kernel. Drawn through the index of an "l2" database for `Gaussian`, else exact; arguments as `log_partition`.

            db.log_density(queries, scores.Gaussian(0.3)).value
        """
        if not isinstance(kernel, Kernel):
            raise BadInput(f"kernel is {check.shown(kernel)}; expected one of softdb.scores, such as Gaussian(0.3)")
        tolerance = check.tolerance(rtol, 0.0, confidence, max_draws, None)
        if tolerance is None:
            raise BadInput("rtol is None; expected a number above 0, such as 0.05")
        request, source = self.request(queries, score=kernel, where=where, tolerance=tolerance, generator=generator)
        found = log_partition(request, source)
        shift = request.taking_part(source).clamp(min=1).to(found.value).log() + kernel.log_volume(
            request.queries.shape[1]
        )
        return dataclasses.replace(found, value=found.value - shift.to(found.value))

    @_verb
    def count_within(
        self,
        queries: Any,
        radius: float,
        *,
        rtol: float = 0.05,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """How many records are near enough, estimated: `value` (q,) float64, its `bar`, `met`, `exact`.

        A count has no gradient. Exact where that costs less, such as for few records or few that are near.

        Args:
            queries: as in `search`.
            radius: as in `search`: the largest distance for "l2" (not its score, which is -distance²), else the least
                score.
            rtol, atol: the error shall be at most atol + rtol max(count, 1).
            confidence, max_draws, generator: as in `attend`; at most so many records are drawn.
            where: a filter on the payload.
        """
        metric = self._store.schema.metric
        ask, tensor = check.asked(None, radius, None, None, metric), self.as_queries(queries).detach()
        tolerance = check.tolerance(rtol, atol, confidence, max_draws, None)
        if tolerance is None or ask.least is None:
            raise BadInput("radius or rtol is None; expected numbers, such as radius=0.8 and rtol=0.05")
        request, source = self.request(tensor, where=where, tolerance=tolerance, generator=generator)
        return counted(request, source, ask.least)

    @_verb
    def sample(
        self,
        queries: Any,
        n: int = 1,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        generator: torch.Generator | None = None,
    ) -> Samples:
        """n records for each query, drawn with replacement from softmax(score / temperature) over all: exactly.

        `log_prob` carries the gradient, as REINFORCE wants it: -(reward * samples.log_prob).mean(). Cost q n d: one
        pass over the records, two where the queries want a gradient. Other arguments as `attend`; without a generator
        torch's own random numbers.
        """
        request, source = self.request(queries, temperature, score, where=where, mask=mask)
        count = check.integer(n, "n", 1, MOST_SAMPLED // max(1, len(request.queries)))
        generator = check.generator(generator) or torch.default_generator
        return sampled(request, source, count, generator)

    # -- fields of the payload -------------------------------------------------------------------------------------

    @_verb
    def index_field(self, *names: str) -> None:
        """Declare fields of the payload: SQLite indexes them, and filters on them no longer read the payloads.

            db.index_field("year", "lang")
            db.search(queries, where={"year": {"$gte": 2020}, "lang": "de"})

        Kept with the database; an index that is there already stays. Any answer is the same without. Equality, order,
        `$in`, `$exists` and their negations use it, `$contains` does not. Cost: one pass over the payloads now, and on
        every insert 1 to 3 µs and 20 to 30 bytes a record and field.
        """
        self._store.index_fields(field_names(names))

    @_verb
    def drop_field(self, name: str) -> None:
        """Drop the index of a declared field. Raises BadInput where it has none."""
        self._store.drop_field(*field_names([name]))

    # -- the index, a cache ----------------------------------------------------------------------------------------

    @overload
    def build_index(
        self,
        /,
        kind: str = "auto",
        *,
        recall: float = 0.95,
        k: int = 10,
        queries: Vectors | None = None,
        memory: int | str | None = None,
        progress: Progress | None = None,
        background: Literal[False] = False,
        device: Device | None = None,
    ) -> IndexReport: ...

    @overload
    def build_index(
        self,
        /,
        kind: str = "auto",
        *,
        recall: float = 0.95,
        k: int = 10,
        queries: Vectors | None = None,
        memory: int | str | None = None,
        progress: Progress | None = None,
        background: Literal[True],
        device: Device | None = None,
    ) -> Build[IndexReport]: ...

    @_verb
    def build_index(
        self,
        kind: str = "auto",
        *,
        recall: float = 0.95,
        k: int = 10,
        queries: Vectors | None = None,
        memory: int | str | None = None,
        progress: Progress | None = None,
        background: bool = False,
        device: Device | None = None,
    ) -> IndexReport | Build[IndexReport]:
        """Build the approximate index anew, measure its recall, keep it as a cache, and return the report.

        A build that is interrupted, or that fails, leaves the old index in use. Reading and writing may go on meanwhile
        in other threads, and nothing that they change is lost; one build runs at a time.

        Args:
            kind: "auto" (the fastest on a sample), "ivf" (lists with 4-bit codes), "ivf-rabitq" (lists with a bit a
                number), "ivf-sq8" (lists with a byte a number), "hnsw" (a graph over bytes) or "flat" (none).
            recall: the share of the true k nearest that a search shall find; the effort is raised until it is measured.
            k: for which k.
            queries: (q, d) of the kind that will come; without them, stored keys held aside. Half of them are tuned
                on, and the recall that the other half meets is reported.
            memory: what codes and ids may occupy, in bytes or as text such as "200MB".
            progress: called with what is being done, how much of it is done, and the whole.
            background: return at once a `softdb.index.background.Build`: `.done`, `.progress`, `.cancel()`, and
                `.result(timeout)`, the report. Closing the database cancels it. `progress` is called in its thread.
            device: where this handle computes from then on, "cpu", "cuda" or "cuda:1", as `db.device` says; None: as
                before. On a GPU "ivf" has 8-bit codes, "hnsw" and "ivf-rabitq" do not exist, and memory is the GPU's;
                the cache is an index that a CPU reads, too.

        Raises:
            BadInput: no index meets the memory, or none that does reaches the recall; the message says what would do.
                Or another build is going on; or the device is not there, or has no such index.
            MissingDependency: FAISS, or its GPU build, is not installed.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; build the index from the one that writes")
        asked = None if queries is None else self.as_queries(queries).detach()
        if not isinstance(background, bool):
            raise BadInput(f"background is {check.shown(background)}; expected True or False")
        if asked is not None and background:
            asked = asked.clone()  # the caller may go on to change what was given
        where = check.device(device)
        work = self._finder.builder(kind, recall, check.integer(k, "k"), asked, memory, where)
        build = self._finder.begin(functools.partial(self._build_index, work, where), progress)
        if not background:
            return build.run()
        build.start()
        return build

    @_verb
    def _build_index(
        self, work: Callable[[Progress], IndexReport], device: torch.device | None, say: Progress
    ) -> IndexReport:
        with _index_kept():
            report = work(say)
        self._device = self._device if device is None else device
        return report

    @_verb
    def tune(self, recall: float | None = None, *, k: int | None = None, queries: Vectors | None = None) -> IndexReport:
        """Measure the index's recall anew and change how hard it looks, not its codes; returns the report.

        After many changes, or for queries of another kind than it was tuned for. Costs the exact search of 512 queries.

        Args:
            recall: the share of the true k nearest to find; None: as before.
            k: for which k; None: as before.
            queries: (q, d) of the kind that will come; without them, stored keys held aside.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; tune the index from the one that writes")
        asked = None if queries is None else self.as_queries(queries).detach()
        with _index_kept():
            return self._finder.tune(recall, None if k is None else check.integer(k, "k"), asked)

    @_verb
    def watch(self, share: float = 0.01, window: int = 500) -> None:
        """How closely this handle watches the recall of its searches by the index; it does so from the beginning.

        Now and then one query of a batch is also searched exactly, after the batch was answered. `stats().index`
        shows the share of the true nearest that such queries were given (`live_recall`) and how many were checked; a
        `RecallWarning` says, once until the index is built or tuned anew, that it is surely below the target.

        Args:
            share: of the time that searches take, how much the checks may take besides; 0: none.
            window: how many checks count, the latest ones.
        """
        self._finder.watch.change(check.share(share, "share"), check.integer(window, "window", 1, 10**6))

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Its directory; None in memory."""
        return self._store.path

    @property
    def mode(self) -> str:
        """ "rw", or "r" for a handle that only reads."""
        return self._store.mode

    @property
    def device(self) -> torch.device:
        """Where this handle computes: queries that are no tensors are answered there, and the index is searched there.

        Given to `softdb.open`, changed by `build_index(device=)`. A tensor is answered where it lies.
        """
        return torch.device("cpu") if self._device is None else self._device

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return self._store.schema.dim

    @property
    def value_dim(self) -> int | None:
        """v, the width of a value; None where values are labels, or the keys themselves."""
        return self._store.schema.value_dim

    @property
    def num_classes(self) -> int | None:
        """Values are integer labels below this; None where they are not labels."""
        return self._store.schema.num_classes

    @property
    def dtype(self) -> str:
        """How vectors are stored, "float32" or "float16"."""
        return self._store.schema.dtype.name

    @property
    def metric(self) -> str:
        """How queries and keys are compared: "dot", "cosine" or "l2"."""
        return self._store.schema.metric.value

    @property
    def generation(self) -> int:
        """Grows with every change; a reader's is the one that it sees until `refresh()`."""
        self._store.require_open()
        return self._store.snapshot.generation

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""
        self._store.require_open()
        return tuple(self._store.fields())

    @_verb
    def refresh(self) -> int:
        """See what other processes have committed since, and return the generation. A writer sees all at once."""
        self._finder.refresh()
        return self._store.refresh()

    @_verb
    def compact(self) -> CompactReport:
        """Remove from disk, and from the index, what was deleted or replaced; answers and rows stay what they are.

        Reading and writing go on meanwhile, here and in other processes; readers see the new files after `refresh()`.
        A crash at any moment loses nothing. Cost: see `softdb.store.compact.compact`.

        Raises:
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
            CorruptionError: something to be copied does not give its checksum.
        """
        report = compact(self._store)
        try:
            self._finder.compact()
        except OSError as error:  # a cache: it serves this handle, and is written again at the end
            _log.warning("the index of what is left could not be kept: %s", error)
        return dataclasses.replace(report, bytes=self._store.occupied())

    @_verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy the newest generation to another directory, consistent while writing goes on; it opens by itself.

        Args:
            path: a directory that does not exist or is empty. A database in memory is saved there.

        Raises BadInput for another path, and WriteFailed where the disk refuses: then nothing of the copy is left, and
        this handle goes on.
        """
        if not isinstance(path, str | os.PathLike):
            raise BadInput(f"path is {check.shown(path)}; expected the path of a new directory")
        return duplicate(self._store, Path(path))

    @_verb
    def verify(self) -> int:
        """Read everything back against its checksums and return the number of records. Raises CorruptionError."""
        return verify(self._store)

    @_verb
    def stats(self) -> Stats:
        """What the database is, holds and occupies. Cost: a walk over its directory; see `dim`, `metric`, `count()`."""
        return stats(self._store, self._finder.report())

    @_verb
    def flush(self) -> None:
        """Bring all changes to disk; with `durability="full"` they are there already.

        Cost: one fsync for each column file that has changed, and one for the catalogue.

        Raises:
            WriteFailed: the disk refused; the changes since the last flush are undone.
            ReadOnly, Closed: this handle does not write.
        """
        self._store.flush()

    def close(self) -> None:
        """Let go of files and lock; the handle then refuses everything. Safe to call twice.

        Raises WriteFailed where changes of a relaxed database could not be brought to disk.
        """
        try:
            if not self._store.closed:
                self._finder.close()
        except (OSError, SoftDBError) as error:  # a cache: the records do not need it
            _log.warning("the index could not be kept, build_index() makes it anew: %s", error)
        finally:
            self._store.close()

    def __enter__(self) -> SoftDB:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "in memory" if self._store.path is None else repr(str(self._store.path))
        if self._store.closed:
            return f"<SoftDB {where}, closed>"
        schema = self._store.schema
        return f"<SoftDB {where}: {self._store.snapshot.count} records, dim {schema.dim}, {schema.metric.value}>"

    def __reduce__(self) -> tuple[Callable[..., SoftDB], tuple[Any, ...]]:
        """A handle travels to another process as its path, and opens there for reading."""
        if self._store.path is None:
            raise BadInput("a database in memory cannot be pickled; give it a path")
        return _reopen, (self._store.path, self._encoder, self._device)

    # -- the inner face: what modules built on a database use (softdb.nn, train, bench, the command line) ----------

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric, as the database was made."""
        return self._store.schema

    @property
    def finder(self) -> Finder:
        """What finds candidates: the index, or exact search."""
        return self._finder

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._store.closed

    def require_open(self) -> None:
        """Raises Closed."""
        self._store.require_open()

    def require_writable(self) -> None:
        """Raises Closed, ReadOnly, and WriteFailed after a write that failed."""
        self._store.require_writable()

    def view(self, where: dict[str, Any] | None = None) -> tuple[Snapshot, NDArray[np.bool_] | None]:
        """The newest generation that this handle sees, and the positions (size,) that a filter allows; None: all."""
        return (self._store.snapshot, None) if where is None else self._store.matching(where)

    def source(self, snapshot: Snapshot) -> Stored:
        """The records of a generation, as every answer reads them."""
        return Stored(snapshot, self._store.schema, self._finder, self._store.read)

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
    ) -> tuple[Request, Stored]:
        """What a soft verb asks, checked, and the records it asks; arguments as `attend`. Raises BadInput."""
        if score is not None and not callable(score):
            raise BadInput(f"score is {check.shown(score)}; expected an object of softdb.scores or a callable")
        schema = self._store.schema
        score = score_of(schema.metric) if score is None else score
        tensor = self.as_queries(queries, query_width(score, schema.dim))
        temperature = check.positive(temperature, "temperature")
        snapshot, allowed = self.view(where)
        if mask is not None:
            mask = check.mask(mask, (len(tensor), snapshot.count)).to(tensor.device)
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        request = Request.of(
            tensor, score, weights, temperature, allowed, mask, k, tolerance, seed, need_weights=need_weights
        )
        return request, self.source(snapshot)

    def locate(self, ids: list[Id], required: bool = False) -> tuple[Snapshot, NDArray[np.int64]]:
        """The newest generation and the rows (n,) of ids in it; -1, or UnknownId if required, for those not stored."""
        return (self._store.require if required else self._store.locate)(ids)[:2]

    def resolve(self, rows: NDArray[np.int64]) -> dict[int, tuple[Id, str | None]]:
        """Id and payload text of rows; those that were deleted or replaced are absent."""
        return self._store.read(rows)

    def rewrite(
        self, rows: NDArray[np.int64], keys: Tensor | None, values: Tensor | None
    ) -> tuple[Snapshot, NDArray[np.int64]]:
        """Update the records at rows (m,) in one transaction; the generation after, and their new rows (m,).

        Raises StaleRead, and writes nothing, where one of them was deleted or replaced.
        """
        with self._store.lock:  # what another thread writes comes before all of this or after it
            known = self._store.read(rows)
            if len(known) < len(rows):
                raise StaleRead(
                    f"{len(rows) - len(known)} of {len(rows)} records were deleted or replaced meanwhile; reload()"
                )
            names = [known[row][0] for row in rows.tolist()]
            self.update(names, keys=keys, values=values)
            return self.locate(names)

    def as_queries(self, queries: Vectors, width: int | None = None) -> Tensor:
        """Queries (q, width) as every verb takes them: checked, encoded where they are text. Raises BadInput."""
        vectors, dim = check.encoded(queries, "queries", self._encoder), self._store.schema.dim
        if width in (None, dim):
            return check.queries(vectors, dim, self._device)
        return check.queries(vectors, width, self._device, "this score takes queries")

    # -- the door --------------------------------------------------------------------------------------------------

    def _batch(self, ids: Ids, keys: Vectors, values: Numbers | None, payloads: Any) -> Batch:
        names = self._identifiers(ids)
        return Batch(
            names,
            check.filled(self._keys(keys), "keys", len(names)),
            check.values(values, self._store.schema, len(names)),
            check.payloads(payloads, len(names)),
        )

    def _identifiers(self, ids: Ids) -> list[Id]:
        names = check.identifiers(ids)
        if not names:
            raise BadInput("ids are an empty batch; give at least one")
        return names

    def _keys(self, keys: Vectors) -> Array:
        schema = self._store.schema
        return check.matrix(check.encoded(keys, "keys", self._encoder), "keys", schema.dim, schema.dtype)

    def _view_without(
        self, where: dict[str, Any] | None, left_out: list[list[Id]]
    ) -> tuple[Snapshot, NDArray[np.bool_] | None, NDArray[np.int64] | None]:
        """As `_view`, and the positions (q, e) of records to leave out, -1 = none, all of one generation."""
        with self._store.lock, self._store.read_transaction():
            snapshot, allowed = self.view(where)
            rows = self._store.locate([one for names in left_out for one in names])[1]
        return snapshot, allowed, snapshot.positions(check.padded(rows, [len(names) for names in left_out]))

    def _records(
        self, snapshot: Snapshot, positions: NDArray[np.int64], names: list[Id], texts: list[str | None]
    ) -> Records:
        if not names:
            empty = torch.zeros(0, self._store.schema.dim)
            return Records([], empty, None, [])
        values = snapshot.values_at(positions) if self._store.schema.has_values else None
        return Records(names, snapshot.keys_at(positions), values, texts)


@contextlib.contextmanager
def _index_kept() -> Iterator[None]:
    """An index that is in use but could not be written is told as what it is."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            f"the index serves this handle, but the disk refused its file ({error}); the records are safe: make room, "
            "then build it again"
        ) from error


def _reopen(path: Path, encoder: check.Encoder | None, device: torch.device | None) -> SoftDB:
    return SoftDB(Store(path, "r", None), encoder, device)
