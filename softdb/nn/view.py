"""A database seen through an encoder of its keys that is being trained."""

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
from softdb.answers import Hits, Pooled
from softdb.attend import Request
from softdb.check import Metric, shown
from softdb.database import SoftDB
from softdb.database.reembedding import TextOf, require_field, texts_at
from softdb.errors import BadInput, StaleRead
from softdb.index.choose import Progress
from softdb.nn.eager import untraced
from softdb.nn.encoded import Encode, Encoded, Encoding, copyable, device_of, frozen_copy, probed, unindexed
from softdb.nn.handle import SharedHandle
from softdb.nn.reindexed import InBackground, Policy, Reindexed, Work
from softdb.nn.stale_index import NOTHING, StaleIndex, Version
from softdb.reports import ReindexReport, ViewReport
from softdb.scoring import Score, ScoreFunction, query_width, score_of
from softdb.typing import Numbers, Vectors

ASKED = 256  # of the last queries, kept to measure recall with


class View(Reindexed):
    """A database whose keys are f(k), f an encoder that is trained: finding by f as it was, scores by f as it is.

        s_i = s(q, f(k_i)),  w = softmax(s / T),  output = Σ w_i v_i,  lse = log Σ exp(s_i / T)

    Candidates come from a stale index: all f(k_i) as of some training step, in memory. `overfetch` times as many as
    asked for are taken, encoded anew, and scored; the best k by these scores are pooled, with gradient to the queries
    and to the encoder. So an old index costs recall, never a wrong score or a lost gradient. `reindex` says when it is
    made anew (as ATLAS, Izacard et al. 2022, section 2.4); call `step()` after each optimizer.step(). Records inserted
    since are encoded and compared each time until the next reindexing; deleted ones never come back.

    A linear encoder of a dot product needs no view, see `softdb.nn.Attention`; under the cosine or L2 it is the
    simplest one: nn.View(db, torch.nn.Linear(d, d), metric="cosine").

    The values pooled are the stored ones or the labels; where the key serves as the value, f(k). Candidates are chosen
    with the encoder in eval mode; scores that carry the gradient are of its current mode. Threads run the encoder of a
    view one at a time; who calls it directly meanwhile may meet it in eval mode. Autocast reaches the encoder alone:
    scores and pooling are in the queries' precision. The encoder is a submodule; the handle and the stale index are not
    in the state_dict; copies share the handle; loading a state_dict, a pickle, or a move to another device makes the
    index anew when it is next needed. Encodings made on a GPU stay there, n d' numbers, and all of them are compared.
    Answers lie where the queries do. Nothing is written: the database may be open for reading only.

    Cost: reindexing is n records through the encoder and an index of them, n d' numbers in memory; `attend(k=)` is a
    search, up to q overfetch k records through the encoder, and q k of them again with gradient.

    Args:
        db: the database.
        encoder: an nn.Module, or a callable, (m, d) stored keys -> (m, d'), or m texts -> (m, d'). Row by row: a
            record's vector must not depend on the others beside it.
        texts: whether the encoder is given the records' texts in the place of their keys.
        field: where these are, as `SoftDB.reembed` takes it.
        metric: "dot", "cosine" or "l2" between queries and f(k); None: the database's.
        dim: d', checked against what the encoder gives to zeros; None: that.
        reindex: a policy, `EverySteps(n)` (or n), `OnRecall(target)`, `InBackground(n)`, or None = `Never()`.
        overfetch: how many times k candidates are re-scored.
        recall: the share of the true nearest that the index of the stale index shall find in it.
        batch_size: records encoded at once.
        max_age: training steps after which `attend(k=)` and `search` refuse an older one with StaleRead.
        index: of what kind, see `SoftDB.build_index`; "ivf" is built faster than "auto".

    Raises BadInput for what does not fit.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, num_classes=2)
    >>> db.insert([1, 2], [[1, 0, 0], [0, 1, 0]], [0, 1])
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

    # -- asking --------------------------------------------------------------------------------------------------------

    @untraced
    def attend(
        self,
        queries: Numbers,  # (q, d')
        *,
        temperature: float = 1.0,
        k: int | None = None,
        score: Score | ScoreFunction | None = None,
        where: dict[str, Any] | None = None,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Pooled:
        """The soft query, over the k best of the candidates, or over every record: exactly, or by some that are drawn.

        With `max_draws` the codes of the stale index draw about so many records a query, which are encoded anew and
        count by the inverse of their probabilities: Σ e^s, Σ e^s v and their gradients are unbiased however stale it
        is, but scatter the more. `stderr` is what the draws show, `bar` is NaN: a record that has come near since and
        was not drawn shows nowhere. Exact where that encodes no more records, and without codes (below 10,000
        records, kind "flat", on a GPU).

        Else every record is encoded, `batch_size` at a time, and again in backward: cost q n d' and n encodings,
        memory for the activations of one block and, with a gradient, q v numbers a block. With k `missed_mass` is NaN,
        unknown. A kernel's weights are its plain normalisation, as with `SoftDB.attend`.

        Args:
            queries: numbers as wide as f(k), or a tensor with its graph.
            temperature: divides the scores.
            k: how many; the `finder` of the answer is "stale index".
            score: a `softdb.scores` object or a callable; an nn.Module's parameters get gradients too. None: that of
                the metric; one that ranks otherwise is compared with every record, "scan".
            where: a filter on the payload.
            max_draws: how many records to draw for a query.
            generator: draws anew with each call, as training wants; None: the same draw every time.

        Raises:
            BadInput: arguments, or what the encoder returned, cannot be used; the message names the record.
            StaleRead: the stale index is older than `max_age`; or, by `explain()` of an answer over every record, the
                parameters were changed since.
            Closed: the database was closed.
        """
        count = None if k is None else check.integer(k, "k")
        tolerance = check.draws(max_draws, k)
        request, source = self.request(
            queries, temperature, score, k=count, where=where, tolerance=tolerance, generator=generator
        )
        with check.precise():
            if tolerance is not None:
                return source.estimate(request)
            return source.exact(request) if k is None else source.nearest(request)

    @untraced
    def search(
        self,
        queries: Numbers,  # (q, d')
        k: int = 10,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
    ) -> Hits:
        """The k best of the candidates by f(k) as it is, best first; `exact` compares every record.

        Scores carry the gradient to queries and encoder. Raises as `attend`.
        """
        k = check.integer(k, "k")
        request, source = self.request(queries, k=k, where=where, exact=exact)
        with check.precise():
            found = source.scored(request, source.find(request).positions)
        rows = torch.from_numpy(source.rows(found.positions)).to(found.scores.device)
        return Hits(rows, found.scores, source.resolve)

    def indexed_nearest(self, queries: Numbers, k: int = 10) -> Tensor:  # (q, d') -> (q, k) rows
        """The k nearest by the vectors as they were indexed, all of them compared; -1 = none. Encodes nothing.

        After `reindex()` that is exact search by f(k) as it is. Cost: q n d'. Raises as `attend`.
        """
        version, snapshot = self._current(self._encoding(), stale=True), self.db.core.view()[0]
        asked = check.queries(queries, self.dim, None, "the encoded keys of this view are compared with queries")
        with check.precise():
            rows = replace(version, index=None).find(asked.detach(), check.integer(k, "k"), version.alive(snapshot))
        return torch.from_numpy(rows)

    def request(
        self,
        queries: Vectors,  # (q, d')
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        *,
        k: int | None = None,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Request, Encoded]:
        """Return a checked request and the encoded records; `exact`: k are found by comparing every record."""
        self.db.core.require_open()
        if score is not None and not callable(score):
            raise BadInput(f"score is {shown(score)}; expected an object of softdb.scores or a callable")
        score = score_of(self.metric) if score is None else score
        encoding = self._encoding()  # under the caller's autocast; all else is as precise as the queries
        with check.precise():
            taker = "the encoded keys of this view are compared with queries"
            asked = check.queries(queries, query_width(score, self.dim), None, taker)
            request = Request.of(asked, score, None, check.temperature(temperature))
            folded = request.detached.folded
            served = (
                (k is not None or tolerance is not None)
                and not exact
                and folded is not None
                and folded.metric is self.metric
            )
            version = self._current(encoding) if served else None
            snapshot, allowed = self.db.core.view(where)  # after the version: no row of that is younger
        if version is not None and request.score is score_of(self.metric):
            self._asked = asked.detach()[:ASKED].clone()
        source = Encoded(
            snapshot,
            self.db.core.schema,
            encoding,
            self.metric,
            version,
            self.overfetch,
            self.db.core.store.read,
            encoding.stamp,
        )
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        return replace(request, allowed=allowed, k=k or 0, exact=exact, tolerance=tolerance, seed=seed), source

    # -- staleness -----------------------------------------------------------------------------------------------------

    def _lags(self) -> bool:
        return self._stale.now is not NOTHING

    def _work(self, background: bool) -> Work:
        encoding = self._encoding()
        if background:  # its lock is its own: training need not wait for a copy
            encoding = replace(encoding, encoder=frozen_copy(self.encoder), lock=threading.RLock())
        return functools.partial(self._make, self._stale, encoding, self.steps)

    def measure(self, k: int = 2, sample: int = 4096) -> float:
        """The share of the k nearest by f as it is that are among the overfetch · k nearest of the stale index.

        Both among `sample` records of the stale index drawn at random, for the last queries asked (at first for encoded
        records). Where these are fewer than all it is an estimate: k of them stand for k n / sample of all, of whom a
        larger share is found, so take a small k. What the index itself misses is not in it. Cost: `sample` encodings.
        """
        encoding, snapshot = self._encoding(), self.db.core.view()[0]
        version = self._current(encoding, stale=True)
        k, sample = check.integer(k, "k"), check.integer(sample, "sample")
        places = np.flatnonzero(version.alive(snapshot))
        if sample < len(places) and sample < 2 * self.overfetch * k:
            raise BadInput(
                f"sample is {sample} but overfetch · k is {self.overfetch * k}, most of that; sample at least "
                f"{2 * self.overfetch * k} records, or ask for a smaller k"
            )
        random = np.random.default_rng([version.number, self.steps])
        places = np.sort(random.choice(places, min(sample, len(places)), replace=False))
        if len(places) == 0:
            return 1.0
        rows, score = version.rows[places], score_of(self.metric)
        fresh = encoding.found(snapshot.keys_at(snapshot.positions(rows)), rows)
        asked = fresh[:ASKED] if self._asked is None else self._asked.to(fresh.device)
        with torch.no_grad(), check.precise():
            now = score(asked, fresh).topk(min(k, len(places))).indices
            then = score(asked, version.vectors_at(places).to(fresh)).topk(min(self.overfetch * k, len(places))).indices
        found = (now.unsqueeze(2) == then.unsqueeze(1)).any(2)
        self._recall = float(found.double().mean())
        return self._recall

    def report(self) -> ViewReport:
        """Return the age of the stale index and its cost."""
        self.db.core.require_open()
        now, snapshot = self._stale.now, self.db.core.view()[0]
        return ViewReport(
            now.number, len(now.rows), int(np.count_nonzero(unindexed(snapshot, now))), self.age, self._recall,
            self.reindexing, self._reindexes, now.seconds, self._seconds,
        )  # fmt: skip

    # -- the stale index -----------------------------------------------------------------------------------------------

    def _make(self, stale: StaleIndex, encoding: Encoding, step: int, say: Progress) -> ReindexReport:
        """The next version of the stale index, of an encoder as it was at some step."""
        snapshot = self.db.core.view()[0]
        positions = np.flatnonzero(snapshot.live)
        rows = snapshot.rows(positions)

        def block(low: int) -> Tensor:
            say("encoding", low, len(rows))
            mine = slice(low, low + self.batch_size)
            return encoding.found(snapshot.keys_at(positions[mine]), rows[mine])

        return self._counted(stale.replace(rows, map(block, range(0, len(rows), self.batch_size)), step))

    def _current(self, encoding: Encoding, stale: bool = False) -> Version:
        """The version in use, made if there is none; StaleRead where it is too old, unless stale ones will do."""
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
        """As `attend`."""
        return self.attend(queries, **words)

    def extra_repr(self) -> str:
        """The database, the metric and the policy."""
        return f"{self.db!r}, dim={self.dim}, metric={self.metric.value!r}, reindex={self.policy!r}"

    def _apply(self, *args: Any, **kwargs: Any) -> View:
        before = device_of(self.encoder)
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if before != device_of(self.encoder):
            _outdated(self, None)
        return self

    def _start(self) -> None:
        """Make the locks and the state that no copy takes along."""
        self._first, self._running = threading.Lock(), threading.RLock()
        self._build, self._asked = None, None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_first", "_running", "_build", "_asked")
        return {name: one for name, one in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()


def _outdated(view: View, keys: Any) -> None:
    """Other parameters were loaded, or they were moved: the stale index is of none of them, or elsewhere."""
    view._stop("other parameters were loaded")
    view._stale = view._stale.anew()
