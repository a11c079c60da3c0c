"""The records of a cluster as a source: what a soft query asks of them, asked of every shard and merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Estimate, Hits, Pooled, Samples
from softdb.attend import Request
from softdb.attend.blocks import scores_of
from softdb.attend.estimate import require_estimator
from softdb.attend.request import Candidates, Positions, Scored
from softdb.attend.result import hits_of
from softdb.attend.sample import require_softmax
from softdb.attend.scoring import plateaus
from softdb.check import Id
from softdb.cluster import shard as say
from softdb.cluster.caller import Caller
from softdb.cluster.estimates import estimated
from softdb.cluster.merge import passed_over, ranked
from softdb.cluster.posed import Posed, array, pickled
from softdb.cluster.shard_source import AskedShards
from softdb.errors import BadInput, StaleRead
from softdb.index.query import Query
from softdb.pool import State, merge, pool
from softdb.scoring import Argmax, Softmax, Uniform, score_of
from softdb.store.entry import RecordEntry

Rows = NDArray[np.int64]


class Sharded(AskedShards):
    """The records that take part in one request."""

    def __init__(self, caller: Caller, where: dict[str, Any] | None) -> None:
        super().__init__(caller, where)
        self._asked = caller.known
        self.known: dict[int, RecordEntry] = {}  # by row: what came with the hits

    # -- a pass ----------------------------------------------------------------------------------------------------

    def stream(self, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """Each shard passes over its records; the states merge. Travels: q d numbers up and q (v + 1) back a shard."""
        if not isinstance(request.weighting, Softmax | Uniform):
            raise BadInput(
                f"more than 2,048 records share the weight of {type(request.weighting).__name__.lower()} for a query, "
                "which no cluster solves over all of its shards; pass k=, or lower the temperature"
            )
        asked = self.posed(request)
        if not self.wants_gradient(asked):
            answers = self.ask(lambda _, version: say.PassOver(version, asked.question, request.pools))
            whole = passed_over([part for _, part in sorted(answers.replies.items())])
            self._count = whole.taking_part
            output, lse = (torch.from_numpy(one).to(request.queries) for one in (whole.output, whole.lse))
            return output, lse + asked.shift
        states = self._states(request, asked)
        parts = [State(*part) for part in zip(*states, strict=True)]
        state = parts[0] if len(parts) == 1 else merge(parts)
        return state.output, state.lse + asked.shift

    def _states(self, request: Request, asked: Posed, apart: bool = False) -> State:  # (p, q, v), (p, q)
        """Those of the shards, merged where they lie together, with gradients; without the shift."""
        asks = dict[int, say.PassOver]()

        def message(shard: int, version: int) -> say.PassOver:
            asks[shard] = say.PassOver(version, asked.question, request.pools, apart)
            return asks[shard]

        answers = self.ask(message)
        parts = sorted(answers.replies.items())
        output, lse = (torch.from_numpy(np.stack([part[i] for _, part in parts])).to(request.queries) for i in (0, 1))
        self._count = sum(part.taking_part for _, part in parts)
        every, owners = np.arange(len(request.queries)), [answers.of(shard) for shard, _ in parts]
        asks = {shard: asks[shard] for mine in owners for shard in mine}
        places, kept = dict.fromkeys(asks, every), dict.fromkeys(asks, every >= 0)
        return self.states(asked, State(output, lse), [asks], [places], [kept], owners)

    # -- candidates ------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Candidates:
        """The k nearest of all shards, by the order of the score."""
        detached = request.detached
        folded = None if isinstance(request.weighting, Argmax) and plateaus(request.score) else detached.folded
        if folded is None:
            question = say.ShardQuery(array(detached.queries), None, score=pickled(request.score)[0], where=self.where)
        else:
            question = say.ShardQuery(array(folded.queries), folded.metric, where=self.where)
        found = self.ranked(say.Nearest(say.NEWEST, question, min(request.k, self.caller.count), request.exact))
        self._count = found.taking_part
        return Candidates(found.rows, found.finder)

    def hits(self, query: Query, excluded: list[list[Id]] | None = None) -> Hits:
        """The hits of all shards, best first, those that score alike by id."""
        queries, offset = query.queries, query.offset
        question = say.ShardQuery(array(queries), query.metric, where=self.where)
        k = None if query.least is not None else min(offset + query.k, self.caller.count)
        found = self.ranked(say.Nearest(say.NEWEST, question, k, query.exact, query.least, excluded))
        rows = found.rows[:, offset:]
        if queries.requires_grad and torch.is_grad_enabled():
            scores = self.scored(Request.of(queries, score_of(query.metric)), rows).scores
        else:
            scores = torch.tensor(found.scores[:, offset:]).to(queries)
        return Hits(torch.from_numpy(rows).to(queries.device), scores, self.resolve, self.missing)

    def ranked(self, message: say.Nearest) -> say.ShardHits:
        """The best of all shards, asked that at their versions."""
        answers = self.ask(lambda _, version: replace(message, version=version))
        return self.known_ids(ranked([part for _, part in sorted(answers.replies.items())], message.k))

    def known_ids(self, found: say.ShardHits) -> say.ShardHits:
        """Return the same, with the ids that came along remembered."""
        for rows, names in zip(found.rows.tolist(), found.ids, strict=True):
            self.known.update((row, RecordEntry(row, name)) for row, name in zip(rows, names, strict=False))
        self._fetched(found.rows)
        return found

    def scored(self, request: Request, positions: Positions) -> Scored:
        """By the score, on copies of the candidates' keys: q k d numbers travel."""
        keys = self.gathered(positions, values=False)[0]
        scores = scores_of(request.score, request.queries, keys.to(request.queries))
        return Scored(positions, scores.masked_fill(torch.from_numpy(positions < 0).to(scores.device), -torch.inf))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """On copies of the candidates' values."""
        return pool(weights, self.gathered(found.positions, keys=False)[1].to(weights.device), self.num_classes)

    def gathered(self, positions: Positions, keys: bool = True, values: bool = True) -> tuple[Tensor, Tensor]:
        """Keys and values (…, d), (…, v) or labels (…), of rows (…); zeros at -1, and where not asked for."""
        rows, back = np.unique(positions, return_inverse=True)
        here = np.where(rows < 0, -1, rows % self.caller.shards)

        def message(shard: int, version: int) -> say.Gather:
            mine = rows[here == shard]
            return say.Gather(version, mine, keys, values, self._names(shard, version, mine))

        answers = self.caller.ask(message, np.unique(here[rows >= 0]).tolist(), whole=True)
        columns = []
        for i, width in enumerate(
            (self.schema.dim, None if self.num_classes else self.schema.value_dim or self.schema.dim)
        ):
            whole: Any = np.zeros(
                (len(rows), *([] if width is None else [width])), self.schema.dtype if width else np.int64
            )
            for shard, part in answers.replies.items():
                if part[i] is not None:
                    whole[here == shard] = part[i]
            columns.append(torch.from_numpy(whole[back.reshape(positions.shape)]))
        return columns[0], columns[1]

    @property
    def resolve(self) -> Any:
        """Ids, payloads and texts of rows, at the version of the answer; ids came with the hits."""
        return self._resolved

    def _resolved(self, rows: Rows, payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        known = self.known
        if not payloads and not texts and all(row in known for row in rows.tolist()):
            return {row: known[row] for row in rows.tolist()}
        if self.caller.transport.collective:  # which one rank alone cannot ask: they came with the hits
            return {row: known[row] for row in rows.tolist() if row in known}
        return self._looked_up(rows, payloads, texts)

    def _looked_up(self, rows: Rows, payloads: bool, texts: bool) -> dict[int, RecordEntry]:
        here = rows % self.caller.shards

        def message(shard: int, version: int) -> say.ResolveRows:
            mine = rows[here == shard]
            return say.ResolveRows(version, mine, payloads, texts, self._names(shard, version, mine))

        answers = self.caller.ask(message, np.unique(here).tolist(), whole=True)
        return {one.row: one for found in answers.replies.values() for one in found}

    def _names(self, shard: int, version: int, rows: Rows) -> list[Id] | None:
        """The ids of rows, where they came with the hits, and mean the same records at that version."""
        asked = self._asked.get(shard)
        known = [self.known.get(row) for row in rows.tolist()]
        if asked is None or say.of_records(asked.version) != say.of_records(version):
            return None
        return None if None in known else [one.id for one in known if one is not None]

    def _fetched(self, rows: Positions) -> None:
        """Resolve all of the hits now, where no rank can ask alone later."""
        if self.caller.transport.collective:
            self.known |= self._looked_up(np.unique(rows[rows >= 0]), payloads=True, texts=True)

    # -- other answers ---------------------------------------------------------------------------------------------

    def estimate(self, request: Request) -> Pooled:
        """Rounds of draws in every shard, until the error bar of the whole fits."""
        if request.pools:
            require_estimator(request)
        try:
            return estimated(self, request)
        except StaleRead:  # the directory that drew is gone
            if not self.caller.taken_over():
                raise
            return estimated(self, request)

    def count_within(self, request: Request, least: float) -> Estimate:
        """The sum of exact counts. Cost of a pass in every shard."""
        question = say.ShardQuery(array(request.queries), self.schema.metric, where=self.where)
        answers = self.ask(lambda shard, version: say.CountWithin(version, question, least))
        value = torch.from_numpy(np.sum([reply.counts for reply in answers.replies.values()], axis=0)).double()
        whole = torch.full(value.shape, not self.missing)
        return Estimate(value, torch.zeros_like(value).masked_fill(~whole, torch.inf), whole, whole, self.missing)

    def sample(self, request: Request, count: int, generator: torch.Generator) -> Samples:
        """A shard for each draw, by how much weight it holds, and there a record by its own. Two passes."""
        require_softmax(request)
        asked = self.posed(request)
        lses = self._states(replace(request, pools=False), asked, apart=True).lse.mT  # (q, p)
        lse = merge([State(one.new_zeros(len(one), 0), one) for one in lses.unbind(1)]).lse + asked.shift
        shares = lses.detach().double().cpu().softmax(1).nan_to_num(0).cumsum(1)
        chances = torch.rand(len(shares), count, generator=generator, dtype=torch.float64)
        shard = torch.searchsorted(shares, chances * shares[:, -1:], right=True).clamp(max=shares.shape[1] - 1).numpy()
        seed = int(torch.randint(1 << 40, (), generator=generator))
        there = sorted(set(range(self.caller.shards)) - set(self.missing))
        answers = self.ask(
            lambda one, version: say.Sample(version, asked.question, (shard == there.index(one)).sum(1), seed)
        )
        rows = np.full(shard.shape, -1, np.int64)
        for one, part in answers.replies.items():
            mine = shard == there.index(one)
            rows[mine] = part.rows[np.arange(part.rows.shape[1]) < mine.sum(1, keepdims=True)]
            for line, names in zip(part.rows.tolist(), part.ids, strict=True):
                self.known.update((row, RecordEntry(row, name)) for row, name in zip(line, names, strict=False))
        self._fetched(rows)
        found = self.scored(request, rows)
        hits = hits_of(request, self, found, found.scores.device)
        log_prob = (found.scores / request.temperature - lse.unsqueeze(1)).masked_fill(~hits.live, -torch.inf)
        return Samples(hits, torch.ones(len(rows), dtype=torch.bool, device=lse.device), lambda: log_prob)

    def heaviest(self, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:  # and (q,)
        """The heaviest of all shards, and the entropy of all weights. Cost of a search and a pass in every shard."""
        asked = self.posed(request)
        own_lse = array(lse - asked.shift)
        answers = self.ask(lambda shard, version: say.Explain(version, asked.question, own_lse, count))
        found = self.known_ids(ranked([part.found for _, part in sorted(answers.replies.items())], count))
        entropy = np.sum([part.entropy for part in answers.replies.values()], axis=0)
        return self.scored(request, found.rows), torch.from_numpy(entropy)
