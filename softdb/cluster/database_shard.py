"""A shard over an ordinary database: each message becomes what the database is asked anyway, on one generation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Records
from softdb.attend import Request, Stored
from softdb.attend.blocks import scored_tiles
from softdb.attend.count import count_exactly
from softdb.attend.request import Candidates
from softdb.attend.scoring import scan
from softdb.check import Id, Metric, Tolerance
from softdb.cluster import shard as say
from softdb.cluster.drawing import ShardDrawing, passed, taking_part
from softdb.cluster.merge import first, in_order
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.pool import State
from softdb.scoring import Fold, Softmax, Uniform, score_of
from softdb.store.entry import RecordEntry

CALLS = ("build_index", "count", "drop_index", "get", "id_types", "stats", "stored")  # verbs that a message may name
TIED = 4  # times as many are found, where the last of them tie with the next

Rows = NDArray[np.int64]


def salted(seed: int, shard: int) -> int:
    """A shard's own seed: equal records on two shards must not be drawn alike, or no bar could tell their error."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1, np.uint64)[0] >> 24)


class Scaled(torch.nn.Module):
    """A metric's score times a factor that wants a gradient."""

    def __init__(self, metric: Metric, factor: float) -> None:
        super().__init__()
        self.metric, self.own = metric, score_of(metric)
        self.factor = torch.nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (q, d), (n, d) or (q, k, d) -> (q, n) or (q, k)
        """factor · metric(q, k)."""
        return self.own(queries, keys) * self.factor.to(queries.dtype)

    def fold(self, queries: Tensor) -> Fold:  # (q, d)
        """The metric itself, and the factor."""
        return Fold(self.metric, queries, self.factor)


def _parted(own: State, whole: Tensor, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor, Tensor]:
    """A part's gradients of output and lse, from those of the whole: see `Backward`."""
    share = (own.lse - whole).exp().masked_fill(own.lse == -torch.inf, 0)
    along = (output_grad.double() * own.output.double()).sum(1) + lse_grad.double()
    return share.unsqueeze(1) * output_grad, (share * along).to(lse_grad)


class DatabaseShard:
    """The records of one database as a shard of several. Safe to ask from several threads, if the database is."""

    def __init__(
        self,
        db: SoftDB,
        shard: int,
        shards: int,
        version: Callable[[], int] | None = None,  # that the records are at; None: the generation
        refresh: Callable[[int], object] | None = None,  # brings them to a version, or to the newest
    ) -> None:
        self.db, self.shard, self.shards = db, shard, shards
        self.version = version or (lambda: db.generation)
        self.refresh = refresh or (lambda _: db.refresh())
        db.core.store.matches.is_whole = False

    def answer(self, ask: say.Message) -> Any:
        """As `ClusterShard.answer`."""
        reply = self._answers(ask)
        if not isinstance(ask, say.Describe | say.Refresh):
            self._require(ask)  # it may have gone on meanwhile
        return reply

    def _require(self, ask: say.Message) -> None:
        own = self.version()
        if not ask.fits(own):
            raise StaleRead(
                f"shard {self.shard} is at version {own} but was asked for {ask.version}; refresh() and ask again"
            )

    def _answers(self, ask: say.Message) -> Any:
        if isinstance(ask, say.Describe):
            return self._description()
        if isinstance(ask, say.Refresh):
            self.refresh(ask.version)
            return self._description()
        self._require(ask)
        return self._replies[type(ask)](self, ask)

    def _description(self) -> say.Description:
        db, version = self.db, self.version()
        snapshot, index = db.core.view()[0], db.core.finder.index
        size = snapshot.value_size if snapshot.size and db.num_classes is None else 1.0
        kind = None if index is None else index.kind
        return say.Description(
            self.shard, self.shards, version, db.core.schema, snapshot.count, size, kind, db.encoder_name, len(db)
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def _rows(self, rows: Rows) -> Rows:
        """The cluster's rows of local ones; -1 stays."""
        here = say.directory_of(self.version()) << say.ROW_BITS
        return np.where(rows < 0, -1, here | (rows * self.shards + self.shard))

    def _local(self, rows: Rows, ids: list[Id] | None) -> Rows:
        """Local rows of the cluster's; by the ids where these are of another directory, -1 for those that are gone."""
        places = rows & ((1 << say.ROW_BITS) - 1)
        if ((places % self.shards != self.shard) | (rows < 0)).any():
            raise BadInput(
                f"shard {self.shard} was asked for rows of another; it holds row % {self.shards} of its number"
            )
        if (rows >> say.ROW_BITS == say.directory_of(self.version())).all():
            return places // self.shards
        if ids is None:
            raise StaleRead(f"shard {self.shard} was made anew, and its rows are numbered otherwise; ask again")
        return self.db.core.located(ids)

    def _called(self, ask: say.CallVerb) -> Any:
        if ask.verb not in CALLS:
            raise BadInput(f"a shard was asked to {ask.verb}; it knows {', '.join(CALLS)}")
        found = getattr(self.db.core if ask.verb in ("id_types", "stored") else self.db, ask.verb)
        return found(**ask.words) if callable(found) else found

    def _located(self, ask: say.Locate) -> Rows:
        return self._rows(self.db.core.located(ask.ids, ask.where))

    def _resolved(self, ask: say.ResolveRows) -> list[RecordEntry]:
        own = self._local(ask.rows, ask.ids)
        found = self.db.core.store.read(own[own >= 0], ask.payloads, ask.texts)
        pairs = zip(ask.rows.tolist(), own.tolist(), strict=True)
        return [found[mine]._replace(row=row) for row, mine in pairs if mine in found]

    def _scanned(self, ask: say.ScanRows) -> tuple[Records, int | None]:
        rows = self.db.core.matching(ask.where)
        rows = rows[np.searchsorted(rows, ask.after, "right") :]
        some = rows[: ask.size]
        found = self.db.core.store.read(some, payloads=False)
        return self.db.get([found[row].id for row in some.tolist()]), int(some[-1]) if len(rows) > ask.size else None

    def _gathered(self, ask: say.Gather) -> say.GatheredRows:
        snapshot = self.db.core.view()[0]
        positions = snapshot.positions(self._local(ask.rows, ask.ids))
        if ((positions < 0) | ~snapshot.live[positions]).any():
            raise StaleRead("a record was deleted or replaced while the query was answered; ask again")
        return say.GatheredRows(
            snapshot.keys_at(positions).numpy() if ask.keys else None,
            snapshot.values_at(positions).numpy() if ask.values else None,
        )

    # -- questions -------------------------------------------------------------------------------------------------

    def request(
        self, ask: say.ShardQuery, tolerance: Tolerance | None = None, grad: bool = False
    ) -> tuple[Request, Stored]:
        """Return a message as a request to the database."""
        queries = torch.tensor(ask.queries).requires_grad_(grad)
        score, temperature = self._score(ask)
        weights = Uniform() if ask.uniform else Softmax()
        return self.db.core.request(queries, temperature, score, weights, ask.where, tolerance=tolerance)

    @staticmethod
    def _score(ask: say.ShardQuery) -> tuple[Any, float]:
        if ask.metric is None:
            assert ask.score is not None
            try:
                return pickle.loads(ask.score), ask.temperature
            except Exception as error:
                raise BadInput(
                    f"a shard cannot load the score ({type(error).__name__}: {error}); define it in a module that the "
                    "shards can import, not in a notebook or a script, or use one of softdb.scores"
                ) from error
        if ask.trains:
            return Scaled(ask.metric, 1 / ask.temperature), 1.0
        return score_of(ask.metric), ask.temperature

    def _passed(self, ask: say.PassOver) -> say.Passed:
        request, source = self.request(ask.question)
        with torch.no_grad():
            output, lse = passed(request, source, ask.pools)
        return say.Passed(output.numpy(), lse.numpy(), taking_part(request, source))

    def _drawing(self, ask: say.Draw, grad: bool = False) -> ShardDrawing:
        tolerance = Tolerance(1e-9, 0.0, ask.confidence, int(ask.budgets.max(initial=1)) if ask.bounded else None)
        request, source = self.request(ask.question, tolerance, grad)
        request = replace(request, seed=salted(ask.seed, self.shard), pools=ask.pools)
        return ShardDrawing(request, source, ask, self.shard)

    def _drawn(self, ask: say.Draw) -> say.Drawn:
        with torch.no_grad():
            return self._drawing(ask).drawn()

    def _backward(self, ask: say.Backward) -> say.Gradient:
        with torch.enable_grad():
            if isinstance(ask.of, say.Draw):
                drawing = self._drawing(ask.of, grad=True)
                request, (output, lse) = drawing.request, drawing.state()
            else:
                request, source = self.request(ask.of.question, grad=True)
                output, lse = passed(request, source, ask.of.pools)
            score = request.score
            parameters = (
                [p for p in score.parameters() if p.requires_grad] if isinstance(score, torch.nn.Module) else []
            )
            wanted = [request.queries, *(parameters if ask.of.question.trains else [])]
            grads = torch.tensor(ask.output_grad), torch.tensor(ask.lse_grad)
            if ask.whole is not None:
                grads = _parted(State(output.detach(), lse.detach()), torch.tensor(ask.whole), *grads)
            found = torch.autograd.grad((output, lse), wanted, grads, allow_unused=True)
        mine = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]
        return say.Gradient(mine[0].numpy(), tuple(grad.numpy() for grad in mine[1:]))

    def _counted(self, ask: say.CountWithin) -> say.Counted:
        request, source = self.request(ask.question)
        return say.Counted(count_exactly(source, request, ask.least))

    def _sampled(self, ask: say.Sample) -> say.ShardHits:
        request, source = self.request(ask.question)
        most = int(ask.counts.max(initial=0))
        generator = torch.Generator().manual_seed(salted(ask.seed, self.shard))
        found = source.sample(request, most, generator).hits
        rows = np.where(np.arange(most) < ask.counts[:, None], found.rows.numpy(), -1)
        return self._found(rows, found.scores.numpy(), "all", True, taking_part(request, source))

    # -- the nearest -----------------------------------------------------------------------------------------------

    def _nearest(self, ask: say.Nearest) -> say.ShardHits:
        """The k best, with all that tie with the last of them, by id."""
        if ask.k is None:
            return in_order(self._candidates(ask, 0))
        k = count = min(ask.k, self.db.core.keyed)
        while True:
            found = self._candidates(ask, min(count + 1, self.db.core.keyed))
            scores, width = found.scores, found.scores.shape[1]
            tied = (scores[:, k - 1] == scores[:, -1]) & (scores[:, -1] > -np.inf) if k and width > k else np.zeros(0)
            if not tied.any() or width >= self.db.core.keyed or width <= count:
                break
            count = TIED * count
        return first(in_order(found), k)

    def _candidates(self, ask: say.Nearest, k: int) -> say.ShardHits:
        """The k nearest, as the database finds them."""
        question = ask.question
        if self.db.core.keyed and (ask.least is not None or ask.excluded is not None):  # no search takes k = 0
            extent: check.Extent = {
                "k": k,
                "least": ask.least,
                "offset": 0,
                "diversity": 0.0,
                "fetch_k": 0,
                "group_size": 1,
            }
            out = ask.excluded[0] if ask.excluded is not None and len(ask.excluded) == 1 else ask.excluded
            queries = torch.tensor(question.queries)
            query, source = self.db.core.query(queries, extent, question.where, out, exact=ask.exact)
            found = source.hits(query)
            finder = "flat" if ask.exact else "search"
            return self._found(found.rows.numpy(), found.scores.numpy(), finder, ask.exact, 0)
        request, source = self.request(question)
        with torch.no_grad():
            if question.metric is None:
                candidates = Candidates(scan(request.top(k), source), "scan")
            else:
                candidates = source.find(request.top(k, ask.exact))
            positions, finder = candidates
            scored = source.scored(request, positions)
        scores, order = scored.scores.sort(dim=1, descending=True, stable=True)
        rows = source.rows(np.take_along_axis(positions, order.numpy(), 1))
        return self._found(rows, scores.numpy(), finder, candidates.certain, taking_part(request, source))

    def _found(self, rows: Rows, scores: NDArray[Any], finder: str, certain: bool, count: int) -> say.ShardHits:
        known = self.db.core.store.read(np.unique(rows[rows >= 0]), payloads=False)
        try:
            ids = [[known[row].id for row in mine if row >= 0] for mine in rows.tolist()]
        except KeyError:
            raise StaleRead("a record was deleted or replaced while the query was answered; ask again") from None
        return say.ShardHits(self._rows(rows), np.where(rows < 0, -np.inf, scores), ids, finder, certain, count)

    @torch.no_grad()
    def _explained(self, ask: say.Explain) -> say.Explained:
        """Cost of a search, and a pass for the entropy."""
        request, source = self.request(ask.question)
        found = self._nearest(say.Nearest(ask.version, ask.question, ask.k, exact=True))
        lse, entropy = torch.tensor(ask.lse), torch.zeros(len(ask.lse), dtype=torch.float64)
        for tile, scores in scored_tiles(request, source):
            logs = scores / request.temperature - lse[tile.chunk].unsqueeze(1)
            entropy[tile.chunk] -= (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
        return say.Explained(found, entropy.numpy())

    _replies: ClassVar[dict[type[say.Message], Callable[..., Any]]] = {
        say.CallVerb: _called,
        say.Locate: _located,
        say.ResolveRows: _resolved,
        say.ScanRows: _scanned,
        say.Gather: _gathered,
        say.Nearest: _nearest,
        say.PassOver: _passed,
        say.Draw: _drawn,
        say.Backward: _backward,
        say.CountWithin: _counted,
        say.Sample: _sampled,
        say.Explain: _explained,
    }
