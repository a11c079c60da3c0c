"""`DatabaseShard`: answers the messages of a cluster from an ordinary database, at one generation of it."""

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
from softdb.check import Id, Tolerance
from softdb.cluster import shard as messages
from softdb.cluster.drawing import ShardDrawing, passed, taking_part
from softdb.cluster.merge import first, in_order
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.index.contract import Rows
from softdb.pool import State
from softdb.scoring import Softmax, Uniform, score_of
from softdb.store.entry import RecordEntry

CALLS = ("build_index", "count", "get", "id_types", "stats", "stored")  # names allowed in CallVerb
TIED = 4  # factor by which k grows if more records may tie with the last hit


def salted(seed: int, shard: int) -> int:
    """Mix the shard's number into a seed: the error bar assumes that shards draw independently of each other."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1, np.uint64)[0] >> 24)


def _parted(state: State, merged_lse: Tensor, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Convert gradients for the merged output and lse to gradients for this shard's own. `Backward` has equations."""
    share = (state.lse - merged_lse).exp().masked_fill(state.lse == -torch.inf, 0)
    along = (output_grad.double() * state.output.double()).sum(1) + lse_grad.double()
    return share.unsqueeze(1) * output_grad, (share * along).to(lse_grad)


class DatabaseShard:
    """One database as a shard of a cluster. Several threads may call `answer` at once."""

    def __init__(
        self,
        db: SoftDB,
        shard: int,
        shards: int,
        version: Callable[[], int] | None = None,  # returns the version; None: the database's generation
    ) -> None:
        self.db, self.shard, self.shards = db, shard, shards
        self.version = version or (lambda: db.generation)
        db.core.store.matches.is_whole = False

    def answer(self, ask: messages.Message) -> Any:
        """Return the reply to a message; see `ClusterShard.answer`."""
        if isinstance(ask, messages.Refresh):
            self.db.refresh()
        if isinstance(ask, messages.Describe | messages.Refresh):
            return self._description()
        self._require(ask)
        reply = self._replies[type(ask)](self, ask)
        self._require(ask)  # the database may have been refreshed meanwhile
        return reply

    def _require(self, ask: messages.Message) -> None:
        own = self.version()
        if not ask.fits(own):
            raise StaleRead(
                f"shard {self.shard} is at version {own} but was asked for {ask.version}; refresh() and ask again"
            )

    def _description(self) -> messages.Description:
        db, version = self.db, self.version()
        snapshot, index = db.core.view()[0], db.core.finder.index
        size = snapshot.value_size if snapshot.size and db.num_classes is None else 1.0
        kind = None if index is None else index.kind
        return messages.Description(
            self.shard, self.shards, version, db.core.schema, snapshot.count, size, kind, db.encoder_name, len(db)
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def _rows(self, rows: Rows) -> Rows:
        """Convert row numbers of this database to row numbers of the cluster; -1 stays -1."""
        directory = messages.directory_of(self.version()) << messages.ROW_BITS
        return np.where(rows < 0, -1, directory | (rows * self.shards + self.shard))

    def _local(self, rows: Rows, ids: list[Id] | None) -> Rows:
        """Convert row numbers of the cluster to this database's; rows of another directory by id, -1 if deleted."""
        numbers = rows & ((1 << messages.ROW_BITS) - 1)
        if ((numbers % self.shards != self.shard) | (rows < 0)).any():
            raise BadInput(
                f"shard {self.shard} was asked for rows of another shard; expected row % {self.shards} = {self.shard}"
            )
        if (rows >> messages.ROW_BITS == messages.directory_of(self.version())).all():
            return numbers // self.shards
        if ids is None:
            raise StaleRead(f"shard {self.shard} was rebuilt, and its rows have new numbers; repeat the query")
        return self.db.core.located(ids)

    def _called(self, ask: messages.CallVerb) -> Any:
        if ask.verb not in CALLS:
            raise BadInput(f"a shard was asked to {ask.verb}; expected one of {', '.join(CALLS)}")
        member = getattr(self.db.core if ask.verb in ("id_types", "stored") else self.db, ask.verb)
        return member(**ask.arguments) if callable(member) else member

    def _located(self, ask: messages.Locate) -> Rows:
        return self._rows(self.db.core.located(ask.ids, ask.where))

    def _resolved(self, ask: messages.ResolveRows) -> list[RecordEntry]:
        own = self._local(ask.rows, ask.ids)
        entries = self.db.core.store.read(own[own >= 0], ask.payloads, ask.texts)
        pairs = zip(ask.rows.tolist(), own.tolist(), strict=True)
        return [entries[local]._replace(row=row) for row, local in pairs if local in entries]

    def _scanned(self, ask: messages.ScanRows) -> tuple[Records, int | None]:
        rows = self.db.core.matching(ask.where)
        rows = rows[np.searchsorted(rows, ask.after, "right") + ask.skip :]
        batch = rows[: ask.size]
        entries = self.db.core.store.read(batch, payloads=False)
        ids = [entries[row].id for row in batch.tolist()]
        return self.db.get(ids), int(batch[-1]) if len(rows) > ask.size else None

    def _gathered(self, ask: messages.Gather) -> messages.GatheredRows:
        snapshot = self.db.core.view()[0]
        positions = snapshot.positions(self._local(ask.rows, ask.ids))
        if ((positions < 0) | ~snapshot.live[positions]).any():
            raise StaleRead("a record was deleted or replaced while the query was answered; repeat the query")
        return messages.GatheredRows(
            snapshot.keys_at(positions).numpy() if ask.keys else None,
            snapshot.values_at(positions).numpy() if ask.values else None,
        )

    # -- questions -------------------------------------------------------------------------------------------------

    def request(
        self, ask: messages.ShardQuery, tolerance: Tolerance | None = None, grad: bool = False
    ) -> tuple[Request, Stored]:
        """Convert a query from a message to a request to this database; return the request and its source."""
        queries, score = torch.tensor(ask.queries).requires_grad_(grad), self._score(ask)
        temperature: float | Tensor = ask.temperature
        if ask.scaled:
            queries, temperature = queries[:, :-1], queries[:, -1].reciprocal()
        weights = Uniform() if ask.uniform else Softmax()
        return self.db.core.request(queries, temperature, score, weights, ask.where, tolerance=tolerance)

    @staticmethod
    def _score(ask: messages.ShardQuery) -> Any:
        if ask.metric is None:
            assert ask.score is not None
            try:
                return pickle.loads(ask.score)
            except Exception as error:
                raise BadInput(
                    f"a shard cannot load the score ({type(error).__name__}: {error}); define it in a module that the "
                    "shards can import, in a notebook or script on Ray, or use one of softdb.scores"
                ) from error
        return score_of(ask.metric)

    def _passed(self, ask: messages.PassOver) -> messages.Passed:
        request, source = self.request(ask.question)
        with torch.no_grad():
            output, lse = passed(request, source, ask.pools)
        return messages.Passed(output.numpy(), lse.numpy(), taking_part(request, source))

    def _drawing(self, ask: messages.Draw, grad: bool = False) -> ShardDrawing:
        tolerance = Tolerance(1e-9, 0.0, ask.confidence, int(ask.budgets.max(initial=1)) if ask.bounded else None)
        request, source = self.request(ask.question, tolerance, grad)
        request = replace(request, seed=salted(ask.seed, self.shard), pools=ask.pools)
        return ShardDrawing(request, source, ask, self.shard)

    def _drawn(self, ask: messages.Draw) -> messages.Drawn:
        with torch.no_grad():
            return self._drawing(ask).drawn()

    def _backward(self, ask: messages.Backward) -> messages.Gradient:
        with torch.enable_grad():
            if isinstance(ask.of, messages.Draw):
                drawing = self._drawing(ask.of, grad=True)
                request, (output, lse) = drawing.request, drawing.state()
            else:
                request, source = self.request(ask.of.question, grad=True)
                output, lse = passed(request, source, ask.of.pools)
            score = request.score
            parameters = (
                [p for p in score.parameters() if p.requires_grad] if isinstance(score, torch.nn.Module) else []
            )
            inputs = [request.queries, *(parameters if ask.of.question.trains else [])]
            incoming = torch.tensor(ask.output_grad), torch.tensor(ask.lse_grad)
            if ask.merged_lse is not None:
                incoming = _parted(State(output.detach(), lse.detach()), torch.tensor(ask.merged_lse), *incoming)
            grads = torch.autograd.grad((output, lse), inputs, incoming, allow_unused=True)
        pairs = zip(inputs, grads, strict=True)
        filled = [(torch.zeros_like(tensor) if grad is None else grad).numpy() for tensor, grad in pairs]
        return messages.Gradient(filled[0], tuple(filled[1:]))

    def _counted(self, ask: messages.CountWithin) -> Rows:
        request, source = self.request(ask.question)
        return count_exactly(source, request, ask.least)

    def _sampled(self, ask: messages.Sample) -> messages.ShardHits:
        request, source = self.request(ask.question)
        most = int(ask.counts.max(initial=0))
        generator = torch.Generator().manual_seed(salted(ask.seed, self.shard))
        hits = source.sample(request, most, generator).hits
        rows = np.where(np.arange(most) < ask.counts[:, None], hits.rows.numpy(), -1)
        return self._reply(rows, hits.scores.numpy(), "all", True, taking_part(request, source))

    # -- the nearest -----------------------------------------------------------------------------------------------

    def _nearest(self, ask: messages.Nearest) -> messages.ShardHits:
        """Return the k best records, equal scores sorted by id. Searches with larger k while the last hit has ties."""
        if ask.k is None:
            return in_order(self._candidates(ask, 0))
        k = count = min(ask.k, self.db.core.keyed)
        while True:
            hits = self._candidates(ask, min(count + 1, self.db.core.keyed))
            scores, width = hits.scores, hits.scores.shape[1]
            tied = (scores[:, k - 1] == scores[:, -1]) & (scores[:, -1] > -np.inf) if k and width > k else np.zeros(0)
            if not tied.any() or width >= self.db.core.keyed or width <= count:
                break
            count = TIED * count
        return first(in_order(hits), k)

    def _candidates(self, ask: messages.Nearest, k: int) -> messages.ShardHits:
        """Return the k nearest records in the database's order, which does not sort equal scores by id."""
        question = ask.question
        if self.db.core.keyed and (ask.least is not None or ask.excluded is not None):  # a search needs k > 0
            extent = check.Extent(k=k, least=ask.least, offset=0, diversity=0.0, fetch_k=0, group_size=1)
            excluded = ask.excluded[0] if ask.excluded is not None and len(ask.excluded) == 1 else ask.excluded
            queries = torch.tensor(question.queries)
            query, source = self.db.core.query(queries, extent, question.where, excluded, exact=ask.exact)
            hits = source.hits(query)
            finder = "flat" if ask.exact else "search"
            return self._reply(hits.rows.numpy(), hits.scores.numpy(), finder, ask.exact, 0)
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
        return self._reply(rows, scores.numpy(), finder, candidates.certain, taking_part(request, source))

    def _reply(self, rows: Rows, scores: NDArray[Any], finder: str, certain: bool, count: int) -> messages.ShardHits:
        known = self.db.core.store.read(np.unique(rows[rows >= 0]), payloads=False)
        try:
            ids = [[known[row].id for row in line if row >= 0] for line in rows.tolist()]
        except KeyError:
            raise StaleRead("a record was deleted or replaced while the query was answered; repeat the query") from None
        return messages.ShardHits(self._rows(rows), np.where(rows < 0, -np.inf, scores), ids, finder, certain, count)

    @torch.no_grad()
    def _explained(self, ask: messages.Explain) -> messages.Explained:
        """Find the records of largest weight by a search, and sum the entropy in a pass over all records."""
        request, source = self.request(ask.question)
        hits = self._nearest(messages.Nearest(ask.version, ask.question, ask.k, exact=True))
        lse, entropy = torch.tensor(ask.lse), torch.zeros(len(ask.lse), dtype=torch.float64)
        for tile, scores in scored_tiles(request, source):
            logs = scores / request.temperature - lse[tile.chunk].unsqueeze(1)
            entropy[tile.chunk] -= (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
        return messages.Explained(hits, entropy.numpy())

    _replies: ClassVar[dict[type[messages.Message], Callable[..., Any]]] = {
        messages.CallVerb: _called,
        messages.Locate: _located,
        messages.ResolveRows: _resolved,
        messages.ScanRows: _scanned,
        messages.Gather: _gathered,
        messages.Nearest: _nearest,
        messages.PassOver: _passed,
        messages.Draw: _drawn,
        messages.Backward: _backward,
        messages.CountWithin: _counted,
        messages.Sample: _sampled,
        messages.Explain: _explained,
    }
