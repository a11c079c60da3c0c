"""`View`: a database whose stored keys pass through an encoder that is being trained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Pooled, shaped
from softdb.attend import Request
from softdb.check import Metric, shown
from softdb.database import SoftDB
from softdb.database.reembedding import TextOf, require_field, texts_at
from softdb.errors import BadInput, StaleRead
from softdb.index.choose import Progress
from softdb.nn.drawn import DrawnRecords
from softdb.nn.eager import untraced
from softdb.nn.encoded import Encode, Encoding, copyable, device_of, frozen_copy, probed, unindexed
from softdb.nn.handle import SharedHandle
from softdb.nn.reindexed import InBackground, Policy, Reindexed, Work
from softdb.nn.stale_index import NOTHING, StaleIndex, Version
from softdb.reports import ReindexReport, ViewReport
from softdb.scoring import Score, ScoreFunction, query_width, score_of
from softdb.typing import Numbers, Vectors

RECENT_QUERIES = 256  # number of latest queries kept to measure recall on


class View(Reindexed):
    """A database whose keys are f(k), with f an encoder in training. An earlier f finds candidates, the current scores.

        s_i = s(q, f(k_i)),  w = softmax(s / T),  output = Σ w_i v_i,  lse = log Σ exp(s_i / T)

    Candidates come from a stale index, which holds all f(k_i) of some training step in memory. `overfetch` k candidates
    are encoded again and scored; the best k by these scores are pooled, with gradient to the queries and the encoder.
    So a stale index costs recall, but no score or gradient is wrong. `reindex` says when to renew the index (as ATLAS,
    Izacard et al. 2022, section 2.4); call `step()` after each optimizer.step(). Records inserted since the last
    reindexing are encoded and compared with each query; deleted records are not found.

    A linear encoder with the dot product needs no view, see `softdb.nn.Attention`. For the cosine or L2 use
    nn.View(db, torch.nn.Linear(d, d), metric="cosine").

    The view pools the stored values or labels; without these, f(k). The encoder finds candidates in eval mode and
    computes scores with gradient in its current mode. Threads take turns with a view's encoder; a direct call of the
    encoder at the same time may run in eval mode. Autocast affects only the encoder: scores and pooling have the
    precision of the queries. The encoder is a submodule. The handle and the stale index are not in the state_dict;
    copies share the handle. After loading a state_dict or a pickle, or a move to another device, the index is rebuilt
    when it is needed. The n d' numbers of encodings made on a GPU stay there, and every encoding is compared. Answers
    are on the device of the queries. A view writes nothing, so the database may be read-only.

    Cost: reindexing encodes and indexes n records, n d' numbers in memory; `attend(k=)` is a search, then encodes up to
    q overfetch k records, and q k of them again with gradient.

    Args:
        db: the database.
        encoder: an nn.Module, or a callable, (m, d) stored keys -> (m, d'), or m texts -> (m, d'). A record's vector
            must not depend on the other records of the batch.
        texts: True: encode the records' texts; False: encode the records' keys.
        field: field of the payload that holds the texts, see `SoftDB.reembed`.
        metric: "dot", "cosine" or "l2" between queries and f(k); None: the database's.
        dim: the expected width d' of the encoder's output; None: any width.
        reindex: a policy, `EverySteps(n)` (or n), `OnRecall(target)`, `InBackground(n)`, or None = `Never()`.
        overfetch: number of candidates to score, as a multiple of k.
        recall: share of the true nearest indexed vectors that the index is tuned to find.
        batch_size: number of records encoded at once.
        max_age: age in training steps above which `attend(k=)` and `search` refuse a stale index with StaleRead.
        index: kind of index, see `SoftDB.build_index`; "ivf" is built faster than "auto".

    Raises BadInput for arguments that do not fit the database or each other.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, num_classes=2)
    >>> ids = db.insert([1, 2], [[1, 0, 0], [0, 1, 0]], [0, 1])
    >>> view = View(db, torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), metric="l2")
    >>> view.attend(torch.ones(5, 4), k=1).output.shape
    torch.Size([5, 2])
    """

    encoder: Any  # an nn.Module or a callable

    def __init__(
        self,
        db: SoftDB,
        encoder: Encode,
        *,
        texts: bool = False,
        field: TextOf = None,
        metric: Literal["dot", "cosine", "l2"] | None = None,
        dim: int | None = None,
        reindex: Policy | int | None = None,
        overfetch: int = 4,
        recall: float = 0.95,
        batch_size: int = 4096,
        max_age: int | None = None,
        index: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(db, SoftDB):
            raise BadInput(f"db is {shown(db)}; expected an open softdb database")
        db.core.require_width()
        self.overfetch = check.integer(overfetch, "overfetch")
        self.max_age = None if max_age is None else check.integer(max_age, "max_age", 0)
        self.batch_size = check.integer(batch_size, "batch_size")
        self.metric = Metric.parse(db.metric if metric is None else metric)
        self._begin(reindex, StaleIndex(self.metric, recall, index))
        require_field(field)
        self._texts, self._field = texts, field
        self.dim = probed(encoder, None if texts else db.dim)
        if isinstance(self.policy, InBackground):
            copyable(encoder)
        if dim is not None and check.integer(dim, "dim") != self.dim:
            raise BadInput(
                f"dim is {shown(dim)} but the encoder gives vectors {self.dim} wide; omit dim, or change one of them"
            )
        self._handle, self.encoder, self._reembedded = SharedHandle(db), encoder, db.core.reembedded
        self._start()
        self.register_load_state_dict_post_hook(_outdated)  # type: ignore[no-untyped-call]

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._handle.db

    # -- queries -------------------------------------------------------------------------------------------------------

    @untraced
    @shaped
    def attend(
        self,
        queries: Numbers,  # (q, d'), or (…, d')
        *,
        temperature: float | Tensor = 1.0,
        k: int | None = None,
        score: Score | ScoreFunction | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Pooled:
        """Answer the soft query from the k best candidates, from drawn records, or from all records.

        With `rtol`, `atol` or `max_draws` the codes of the stale index draw records for each query. They are encoded
        and weighted by their inverse probabilities, so Σ e^s, Σ e^s v and their gradients are unbiased however stale
        the index is. `stderr` and `met` are estimates from the draws; `bar` is NaN, as a record that is near only since
        training moved it may never be drawn. The answer is exact if that encodes no more records, or without codes
        (below 10,000 records, kind "flat", on a GPU).

        Without these and k every record is encoded, `batch_size` at a time, and again in backward: cost q n d' and n
        encodings, memory for the activations of a block and, with a gradient, q v numbers for each block. With k
        `missed_mass` is NaN. With a kernel as score, the kernel replaces exp(s / T).

        Args:
            queries: numbers (q, d') or (…, d'), as wide as f(k), or a tensor with its graph.
            temperature: divides the scores; a number, or a floating tensor () or (q,), which gets a gradient.
            k: pool the k best candidates; the `finder` of the answer is then "stale index".
            score: a `softdb.scores` object or a callable; an nn.Module's parameters get gradients too. None: the
                metric's. A score that ranks differently from the metric is computed for every record (finder "scan").
            rtol, atol: tolerance for 95 % of the errors ‖ô - o‖: atol + rtol max(‖o‖, 0.1 r), where r² = Σ w ‖v‖².
            max_draws: number of records to draw for each query, once.
            generator: random numbers for the draws; pass one in training. None: every call draws the same numbers.
            where: a filter on the payload.

        Raises:
            BadInput: arguments, or the encoder's output, cannot be used; the message names the record.
            StaleRead: the stale index is older than `max_age`; also from `explain()` of an answer over every record, if
                the encoder has changed since.
            Closed: the database was closed.
        """
        count = None if k is None else check.integer(k, "k")
        tolerance = check.draws(rtol, atol, max_draws, k)
        request, source = self.request(
            queries, temperature, score, k=count, where=where, tolerance=tolerance, generator=generator
        )
        with check.precise():
            if tolerance is not None:
                return source.estimate(request)
            return source.exact(request) if k is None else source.nearest(request)

    @untraced
    @shaped
    def search(
        self,
        queries: Numbers,  # (q, d'), or (…, d')
        k: int = 10,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
    ) -> Hits:
        """Return the k best candidates by the current f(k), best first; with `exact` every record is a candidate.

        Scores carry the gradient to queries and encoder. Raises the errors of `attend`.
        """
        k = check.integer(k, "k")
        request, source = self.request(queries, k=k, where=where, exact=exact)
        with check.precise():
            scored = source.scored(request, source.find(request).positions)
        rows = torch.from_numpy(source.rows(scored.positions)).to(scored.scores.device)
        return Hits(rows, scored.scores, source.resolve)

    @shaped
    def indexed_nearest(self, queries: Numbers, k: int = 10) -> Tensor:  # (q, d') -> (q, k) rows
        """Return the rows of the k records whose indexed vectors are nearest; -1 = none. Encodes no record.

        Compares every indexed vector, so after `reindex()` this is exact search by the current f(k). Cost: q n d'.
        """
        version, snapshot = self._current(self._encoding(), stale=True), self.db.core.view()[0]
        vectors = check.queries(queries, self.dim, None, "the encoded keys of this view are compared with queries")
        with check.precise():
            rows = replace(version, index=None).find(vectors.detach(), check.integer(k, "k"), version.alive(snapshot))
        return torch.from_numpy(rows)

    def request(
        self,
        queries: Vectors,  # (q, d')
        temperature: float | Tensor = 1.0,
        score: Score | ScoreFunction | None = None,
        *,
        k: int | None = None,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Request, DrawnRecords]:
        """Return a checked request and its source, the encoded records; with `exact` every record is compared."""
        core = self.db.core
        core.require_open()
        if score is not None and not callable(score):
            raise BadInput(f"score is {shown(score)}; expected an object of softdb.scores or a callable")
        score = score_of(self.metric) if score is None else score
        encoding = self._encoding()  # before `precise`, which turns off the caller's autocast
        with check.precise():
            taker = "the encoded keys of this view are compared with queries"
            vectors = check.queries(queries, query_width(score, self.dim), None, taker)
            heat = check.temperature(temperature, check.leading(queries, len(vectors)))
            request = Request.of(vectors, score, None, heat)
            folded = request.detached.folded
            ranked = folded is not None and folded.metric is self.metric
            wanted = (k is not None or tolerance is not None) and not exact
            version = self._current(encoding) if wanted and ranked else None
            snapshot, allowed = core.view(where)  # after the version: it needs all the version's rows
        if version is not None and request.plain_score is score_of(self.metric):
            self._last_queries = vectors.detach()[:RECENT_QUERIES].clone()
        source = DrawnRecords(
            snapshot, core.schema, encoding, self.metric, version, self.overfetch, core.store.read, encoding.stamp
        )
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        return replace(request, allowed=allowed, k=k or 0, exact=exact, tolerance=tolerance, seed=seed), source

    # -- staleness -----------------------------------------------------------------------------------------------------

    def _lags(self) -> bool:
        return self._stale.now is not NOTHING

    def _work(self, background: bool) -> Work:
        encoding = self._encoding()
        if background:  # the copy has its own lock, so training need not wait for it
            encoding = replace(encoding, encoder=frozen_copy(self.encoder), lock=threading.RLock())
        return functools.partial(self._make, self._stale, encoding, self.steps)

    def measure(self, k: int = 2, sample: int = 4096) -> float:
        """Measure the share of the k nearest, by the current f, among the overfetch · k nearest by the stale index.

        Uses the latest queries (before the first query, encoded records) and `sample` random records of the stale
        index. A sample smaller than the database overestimates the recall: the k nearest of the sample correspond to
        the k n / sample nearest of all n, which are easier to find. So choose a small k. Records that the index misses
        because its search is approximate do not count. Cost: `sample` encodings.
        """
        encoding, snapshot = self._encoding(), self.db.core.view()[0]
        version = self._current(encoding, stale=True)
        k, sample = check.integer(k, "k"), check.integer(sample, "sample")
        places = np.flatnonzero(version.alive(snapshot))
        if sample < len(places) and sample < 2 * self.overfetch * k:
            raise BadInput(
                f"sample is {sample} but overfetch · k is {self.overfetch * k}, most of the sample; sample at least "
                f"{2 * self.overfetch * k} records, or pass a smaller k"
            )
        random = np.random.default_rng([version.number, self.steps])
        places = np.sort(random.choice(places, min(sample, len(places)), replace=False))
        if len(places) == 0:
            return 1.0
        rows, score = version.rows[places], score_of(self.metric)
        keys = encoding.evaluated(snapshot.keys_at(snapshot.positions(rows)), rows)
        queries = keys[:RECENT_QUERIES] if self._last_queries is None else self._last_queries.to(keys.device)
        with torch.no_grad(), check.precise():
            true = score(queries, keys).topk(min(k, len(places))).indices
            stale = score(queries, version.vectors_at(places).to(keys))
            candidates = stale.topk(min(self.overfetch * k, len(places))).indices
        self._recall = float((true.unsqueeze(2) == candidates.unsqueeze(1)).any(2).double().mean())
        return self._recall

    def report(self) -> ViewReport:
        """Return the age and size of the stale index, and the time spent on reindexing."""
        self.db.core.require_open()
        version, snapshot = self._stale.now, self.db.core.view()[0]
        return ViewReport(
            version.number, len(version.rows), int(np.count_nonzero(unindexed(snapshot, version))), self.age,
            self._recall, self.reindexing, self._reindexes, version.seconds, self._seconds,
        )  # fmt: skip

    # -- the stale index -----------------------------------------------------------------------------------------------

    def _make(self, stale: StaleIndex, encoding: Encoding, step: int, progress: Progress) -> ReindexReport:
        """Encode all records as the next version of the stale index; `step` is the encoder's training step."""
        snapshot = self.db.core.view()[0]
        positions = np.flatnonzero(snapshot.live)
        rows = snapshot.rows(positions)

        def block(low: int) -> Tensor:
            progress("encoding", low, len(rows))
            batch = slice(low, low + self.batch_size)
            return encoding.evaluated(snapshot.keys_at(positions[batch]), rows[batch])

        return self._counted(stale.replace(rows, map(block, range(0, len(rows), self.batch_size)), step))

    def _current(self, encoding: Encoding, stale: bool = False) -> Version:
        """Return the version in use, or make the first. Raises StaleRead if older than max_age, unless `stale`."""
        if self._stale.now is NOTHING:
            with self._first:
                if self._stale.now is NOTHING:
                    self._make(self._stale, encoding, self.steps, lambda *_: None)
        version = self._stale.now
        age = self.steps - version.step
        if not stale and self.max_age is not None and age > self.max_age:
            raise StaleRead(
                f"the stale index is {age} training steps old and max_age is {self.max_age}; call reindex(), choose a "
                "policy that keeps up, or allow a greater age"
            )
        return version

    def _encoding(self) -> Encoding:
        if self.db.core.reembedded != self._reembedded:
            raise StaleRead("all keys of the database were made anew since this view was made; make another view")
        texts = functools.partial(texts_at, self.db.core, field=self._field) if self._texts else None
        return Encoding(self.encoder, self.dim, self.batch_size, self.db.core.store.read, self._running, texts=texts)

    # -- the module ----------------------------------------------------------------------------------------------------

    __call__: Callable[..., Pooled]

    def forward(self, queries: Numbers, **words: Any) -> Pooled:
        """Answer the soft query; see `attend`."""
        return self.attend(queries, **words)

    def extra_repr(self) -> str:
        """Return the database, the metric and the policy."""
        return f"{self.db!r}, dim={self.dim}, metric={self.metric.value!r}, reindex={self.policy!r}"

    def _apply(self, *args: Any, **kwargs: Any) -> View:
        before = device_of(self.encoder)
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if before != device_of(self.encoder):
            _outdated(self, None)
        return self

    def _start(self) -> None:
        """Make new locks, and reset the state that copies of a view do not share."""
        self._first, self._running = threading.Lock(), threading.RLock()
        self._build, self._last_queries = None, None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_first", "_running", "_build", "_last_queries")
        return {name: attribute for name, attribute in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()


def _outdated(view: View, keys: Any) -> None:
    """Drop the stale index: after the parameters were loaded or moved to another device its vectors are useless."""
    view._stop("other parameters were loaded")
    view._stale = view._stale.emptied()
