"""A database seen through an encoder of its keys that is being trained."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Pooled
from softdb.attend.request import SoftQuery, soft_query
from softdb.check import Metric, shown
from softdb.database import SoftDB
from softdb.errors import BadInput, Cancelled, StaleRead
from softdb.index.background import Build
from softdb.nn.encoded import attend_all, attend_nearest, candidates, scored, served, young
from softdb.nn.encoding import Encode, Encoding, probed
from softdb.nn.held import Held
from softdb.nn.refresh import InBackground, Policy, policy_of
from softdb.nn.shadow import NOTHING, Shadow, Version
from softdb.reports import ReindexReport
from softdb.scores import Kernel, Score, ScoreFunction, query_width, score_of
from softdb.store import Snapshot
from softdb.weights import weighting

__all__ = ["View"]

ASKED = 256  # of the last queries, kept to measure recall with

Rows = NDArray[np.int64]


class View(torch.nn.Module):
    """A database whose keys are f(k), f an encoder that is trained: finding by f as it was, scores by f as it is.

        s_i = s(q, f(k_i)),  w = softmax(s / T),  output = Σ w_i v_i,  lse = log Σ exp(s_i / T)

    Candidates come from a shadow: all f(k_i) as of some training step, indexed, in memory. `overfetch` times as many as
    asked for are taken, encoded anew, and scored; the best k by these scores are pooled, with gradient to the queries
    and to the encoder. So an old shadow costs recall, never a wrong score or a lost gradient. `refresh` says when the
    shadow is made anew (as ATLAS, Izacard et al. 2022, section 2.4, re-ranks and refreshes); call `step()` after each
    optimizer.step(). Records inserted since are encoded and compared each time until the next refresh; deleted ones
    never come back.

    A linear encoder of a dot product needs no view, see `softdb.nn.Attention`; under the cosine or L2 it is the
    simplest one: nn.View(db, torch.nn.Linear(d, d), metric="cosine").

    The values pooled are the stored ones or the labels; where the key serves as the value, f(k). Candidates are chosen
    with the encoder in eval mode; scores that carry the gradient are of its current mode. From several threads a view
    runs its encoder in one at a time; who calls it directly meanwhile may meet it in eval mode. Autocast reaches the
    encoder alone: scores and pooling are in the queries' precision. The encoder is a submodule.
    The handle and the shadow are not in the state_dict; copies share the handle; loading a state_dict makes the shadow
    anew when it is next needed, as does a pickle. Nothing is written: the database may be open for reading only.

    Cost: a refresh is n records through the encoder and an index of them, n d' numbers in memory; `attend(k=)` is a
    search, up to q overfetch k records through the encoder, and q k of them again with gradient.

    Args:
        db: the database.
        encoder: an nn.Module, or a callable, (m, d) stored keys -> (m, d'). Row by row: a record's vector must not
            depend on the others beside it.
        metric: "dot", "cosine" or "l2" between queries and f(k); None: the database's.
        dim: d', checked against what the encoder gives to zeros; None: that.
        refresh: a policy, `EverySteps(n)` (or n), `OnRecall(target)`, `InBackground(n)`, or None = `Never()`.
        overfetch: how many times k candidates are re-scored.
        recall: the share of the true nearest that the index of the shadow shall find in it.
        batch_size: records encoded at once.
        max_age: training steps after which `attend(k=)` and `search` refuse an older shadow with StaleRead.
        index: of what kind, see `SoftDB.build_index`; "ivf-sq8" is built faster than "auto".

    Raises BadInput for what does not fit.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, num_classes=2)
    >>> db.insert([1, 2], [[1, 0, 0], [0, 1, 0]], [0, 1])
    >>> view = View(db, torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), metric="l2")
    >>> view.attend(torch.ones(5, 4), k=1).output.shape
    torch.Size([5, 2])
    """

    encoder: Any  # an nn.Module or a callable
    _build: Build[ReindexReport] | None  # a refresh in the background
    _asked: Tensor | None  # the last queries (q, d')

    def __init__(
        self,
        db: SoftDB,
        encoder: Encode,
        *,
        metric: Literal["dot", "cosine", "l2"] | None = None,
        dim: int | None = None,
        refresh: Policy | int | None = None,
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
        self.batch_size, self.policy = check.integer(batch_size, "batch_size"), policy_of(refresh)
        self.metric = Metric.parse(db.metric if metric is None else metric)
        self._shadow = Shadow(self.metric, recall, index)
        self.dim = probed(encoder, db.dim)
        if isinstance(self.policy, InBackground):
            _copyable(encoder)
        if dim is not None and check.integer(dim, "dim") != self.dim:
            raise BadInput(
                f"dim is {dim} but the encoder gives vectors {self.dim} wide; omit dim, or change one of them"
            )
        self._held, self.encoder, self.steps = Held(db), encoder, 0
        self._start()
        self._totals: dict[str, Any] = {"refreshes": 0, "total_seconds": 0.0, "recall": None}
        self.register_load_state_dict_post_hook(_outdated)  # type: ignore[no-untyped-call]

    @property
    def db(self) -> SoftDB:
        """The database."""
        assert self._held.db is not None  # checked
        return self._held.db

    @property
    def age(self) -> int:
        """Training steps since the encoder was what the shadow is of; 0 while there is none."""
        now = self._shadow.now
        return 0 if now is NOTHING else self.steps - now.step

    @property
    def refreshing(self) -> bool:
        """Whether a refresh is under way in the background."""
        return self._build is not None and not self._build.done

    # -- asking --------------------------------------------------------------------------------------------------------

    def attend(
        self,
        queries: Any,  # (q, d')
        *,
        temperature: float = 1.0,
        k: int | None = None,
        score: Score | ScoreFunction | None = None,
        where: dict[str, Any] | None = None,
    ) -> Pooled:
        """The soft query, over the k best of the candidates, or, without k, exactly over every record.

        Without k every record is encoded, `batch_size` at a time, and again in backward: cost q n d' and n encodings,
        memory for the activations of one block and, where a gradient is wanted, q v numbers a block. `missed_mass` is
        NaN, unknown, with k. A kernel's weights are its plain normalisation, as with `SoftDB.attend`.

        Args:
            queries: numbers as wide as f(k), or a tensor with its graph; at least as many as one.
            temperature: divides the scores.
            k: how many; the `finder` of the answer is "shadow".
            score: a `softdb.scores` object or a callable, of which an nn.Module's parameters get gradients too; None:
                that of the metric. One that ranks otherwise than the metric is compared with every record, "scan".
            where: a filter on the payload.

        Raises:
            BadInput: arguments, or what the encoder returned, cannot be used; the message names the record.
            StaleRead: the shadow is older than `max_age`; or, by `explain()` of an answer over every record, the
                parameters were changed since it was given.
            Closed: the database was closed.
        """
        self.db._store.require_open()
        if score is not None and not callable(score):
            raise BadInput(f"score is {shown(score)}; expected an object of softdb.scores or a callable")
        score = score_of(self.metric) if score is None else score
        encoding = self._encoding()
        with check.precise():
            return self._attend(queries, temperature, k, score, where, encoding)

    def search(
        self,
        queries: Any,  # (q, d')
        k: int = 10,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
    ) -> Hits:
        """The k best of the candidates by f(k) as it is, best first; `exact` compares every record.

        Scores carry the gradient to queries and encoder. Raises as `attend`.
        """
        self.db._store.require_open()
        asked, count, encoding = self._queries(queries, self.dim), check.integer(k, "k"), self._encoding()
        with check.precise():
            version = None if exact else self._current(encoding)
            snapshot, allowed = self.db.view(where)
            score = score_of(self.metric)
            query = soft_query(asked, score, weighting("softmax"), 1.0, allowed, None, None, self.dim)
            found, _ = self._find(query, snapshot, count, version, encoding)
            positions, scores, _ = scored(query, snapshot, encoding, found)
        return Hits(torch.from_numpy(snapshot.rows(positions)).to(scores.device), scores, self.db._store.read)

    def _attend(
        self,
        queries: Any,  # (q, d')
        temperature: float,
        k: int | None,
        score: Score | ScoreFunction,
        where: dict[str, Any] | None,
        encoding: Encoding,
    ) -> Pooled:
        """The soft query, `attend`, in the queries' own precision."""
        asked = self._queries(queries, query_width(score, self.dim))
        temperature, count = check.positive(temperature, "temperature"), None if k is None else check.integer(k, "k")
        schema = self.db._store.schema
        query = soft_query(
            asked,
            score,
            weighting("normalised" if isinstance(score, Kernel) else "softmax"),
            temperature,
            None,
            None,
            schema.num_classes,
            schema.pooled_dim if schema.has_values else self.dim,
        )
        shadowed = count is not None and served(query, self.metric) is not None
        version = self._current(encoding) if shadowed else None
        snapshot, allowed = self.db.view(where)  # after the version: no row of that is younger
        query, rest = replace(query, allowed=allowed), (schema.has_values, self.db._store.read)
        if count is None:
            return attend_all(query, snapshot, encoding, *rest)
        return attend_nearest(query, snapshot, encoding, self._find(query, snapshot, count, version, encoding), *rest)

    # -- staleness -----------------------------------------------------------------------------------------------------

    def step(self) -> str:
        """Count a training step, after optimizer.step(), and do what the policy finds due.

        Returns what that was: "kept", "measured", "refreshed" or "started". Raises what a refresh in the background,
        or this one, failed with; the old shadow serves on.
        """
        self.steps += 1  # the optimiser's was made, whatever failed in the background
        self._finished()
        return self.policy.after_step(self)

    def refresh(self, *, background: bool = False) -> Build[ReindexReport] | None:
        """Encode every record and take that into use, at once or in a thread, as `SoftDB.build_index` builds.

        In the background a copy of the encoder works, in eval mode; wait for the returned build with `.result()`. Until
        the swap the old shadow answers. Raises BadInput where the encoder cannot be copied, or another refresh is under
        way.
        """
        self.db._store.require_open()
        if not background:
            self._stop("refresh() was called")  # it would put an older encoder's vectors in the place of these
            self._make(self._shadow, self._encoding(), self.steps)
            return None
        if self.refreshing:
            raise BadInput("a refresh is under way in the background; wait for it, or refresh at once")
        frozen = _frozen(self.encoder)
        self._finished()
        # its lock is its own: training need not wait for a copy
        encoding = replace(self._encoding(), encoder=frozen, lock=threading.RLock())
        self._build = Build(functools.partial(self._make, self._shadow, encoding, self.steps))
        self._build.start()
        return self._build

    def measure(self, k: int = 2, sample: int = 4096) -> float:
        """The share of the k nearest by f as it is that are among the overfetch · k nearest of the shadow.

        Both among `sample` records of the shadow drawn at random, for the last queries asked (at first for encoded
        records). Where these are fewer than all it is an estimate: k of them stand for k n / sample of all, of whom a
        larger share is found, so take a small k. Cost: `sample` encodings. What the index misses, see `recall`, is not
        in it.
        """
        encoding, store = self._encoding(), self.db._store
        version = self._current(encoding, stale=True)
        k, sample, snapshot = check.integer(k, "k"), check.integer(sample, "sample"), store.snapshot
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
        fresh = encoding.found(snapshot.keys_at(snapshot.positions(rows)), lambda i: int(rows[i]))
        asked = fresh[:ASKED] if self._asked is None else self._asked
        with torch.no_grad(), check.precise():
            now = score(asked, fresh).topk(min(k, len(places))).indices
            then = score(asked, version.vectors_at(places)).topk(min(self.overfetch * k, len(places))).indices
        found = (now.unsqueeze(2) == then.unsqueeze(1)).any(2)
        self._totals["recall"] = float(found.double().mean())
        return float(self._totals["recall"])

    def report(self) -> dict[str, Any]:
        """How old the shadow is, and what it cost.

        version, records and age of the shadow; young: records that it lacks; seconds of the last refresh; refreshes and
        total_seconds of all; refreshing: whether one is under way; recall: as last measured, None before.
        """
        self.db._store.require_open()
        now, snapshot = self._shadow.now, self.db._store.snapshot
        return {
            "version": now.number,
            "records": len(now.rows),
            "age": self.age,
            "young": int(np.count_nonzero(young(snapshot, now))),
            "seconds": now.seconds,
            "refreshing": self.refreshing,
            **self._totals,
        }

    # -- the shadow ----------------------------------------------------------------------------------------------------

    def _make(
        self, shadow: Shadow, encoding: Encoding, step: int, say: Callable[[str, int, int], None] | None = None
    ) -> ReindexReport:
        """The next version of the shadow, of an encoder as it was at some step."""
        snapshot = self.db._store.snapshot
        positions = np.flatnonzero(snapshot.live)
        rows = snapshot.rows(positions)

        def blocks() -> Iterator[Tensor]:
            for low in range(0, len(rows), self.batch_size):
                if say is not None:
                    say("encoding", low, len(rows))
                mine = slice(low, low + self.batch_size)
                yield encoding.found(snapshot.keys_at(positions[mine]), lambda i, low=low: int(rows[low + i]))  # type: ignore[misc]

        shadow.replace(rows, blocks(), step)
        with self._lock:
            self._totals["refreshes"] += 1
            self._totals["total_seconds"] += shadow.seconds
        return shadow.report()

    def _current(self, encoding: Encoding, stale: bool = False) -> Version:
        """The version in use, made if there is none; StaleRead where it is too old, unless stale ones will do."""
        if self._shadow.now is NOTHING:
            with self._first:
                if self._shadow.now is NOTHING:
                    self._make(self._shadow, encoding, self.steps)
        version = self._shadow.now
        age = self.steps - version.step
        if not stale and self.max_age is not None and age > self.max_age:
            raise StaleRead(
                f"the shadow is {age} training steps old and max_age is {self.max_age}; call refresh(), choose a "
                "refresh policy that keeps up, or allow a greater age"
            )
        return version

    def _find(
        self, query: SoftQuery, snapshot: Snapshot, k: int, version: Version | None, encoding: Encoding
    ) -> tuple[Rows, str]:
        """Positions of the k best (q, k), and what found them."""
        count = min(self.overfetch * k, max(k, snapshot.count))
        if version is not None and query.score is score_of(self.metric):
            self._asked = query.queries.detach()[:ASKED].clone()
        return candidates(query, snapshot, encoding, self.metric, k, count, version)

    def _encoding(self) -> Encoding:
        return Encoding(self.encoder, self.dim, self.batch_size, self.db._store.read, self._running)

    def _queries(self, queries: Any, width: int) -> Tensor:
        return check.queries(queries, width, None, "the encoded keys of this view are compared with queries")

    def _finished(self) -> None:
        """Let go of a background refresh that has ended; raises what it failed with."""
        build = self._build
        if build is None or not build.done:
            return
        self._build = None
        with contextlib.suppress(Cancelled):  # somebody wanted that
            build.result()

    def _stop(self, reason: str) -> None:
        if self._build is not None:
            self._build.stop(reason)
            self._build = None

    # -- the module ----------------------------------------------------------------------------------------------------

    __call__: Callable[..., Pooled]

    def forward(self, queries: Any, **words: Any) -> Pooled:
        """As `attend`."""
        return self.attend(queries, **words)

    def extra_repr(self) -> str:
        """The database, the metric and the policy."""
        return f"{self.db!r}, dim={self.dim}, metric={self.metric.value!r}, refresh={self.policy!r}"

    def _start(self) -> None:
        """What no copy takes along."""
        self._lock, self._first, self._running = threading.Lock(), threading.Lock(), threading.RLock()
        self._build, self._asked = None, None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_lock", "_first", "_running", "_build", "_asked")
        return {name: one for name, one in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()


def _copyable(encoder: Encode) -> torch.nn.Module:
    """The encoder, if it is one to copy. Raises BadInput."""
    if not isinstance(encoder, torch.nn.Module):
        raise BadInput(
            f"encoder is {shown(encoder)}, of which no copy can be frozen while training goes on; make it an nn.Module "
            "to refresh in the background, or refresh at once"
        )
    return encoder


def _frozen(encoder: Encode) -> Encode:
    """A copy that training does not reach, in eval mode."""
    module = _copyable(encoder)
    try:
        return copy.deepcopy(module).eval()
    except (RuntimeError, TypeError) as error:
        raise BadInput(
            f"the encoder cannot be copied, which a refresh in the background needs: {error}; refresh at once, or let "
            "it hold parameters alone (torch.nn.utils.parametrizations.weight_norm in the place of weight_norm)"
        ) from error


def _outdated(view: View, keys: Any) -> None:
    """Other parameters were loaded: the shadow is of none of them."""
    view._stop("other parameters were loaded")
    view._shadow = view._shadow.anew()
