"""`Sharded`: the source of a cluster's records. Each kind of answer asks every shard and merges the replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
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
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.estimates import estimated
from softdb.cluster.merge import passed_over, ranked
from softdb.cluster.posed import Posed, array, pickled
from softdb.cluster.shard_source import QueriedShards
from softdb.errors import BadInput, StaleRead
from softdb.index.contract import Rows
from softdb.index.query import Query
from softdb.pool import State, merge, pool
from softdb.scoring import Argmax, Softmax, Uniform, score_of
from softdb.store.entry import RecordEntry


class Sharded(QueriedShards):
    """Source of the records on all shards that match the filter of one request."""

    def __init__(self, caller: Caller, where: dict[str, Any] | None) -> None:
        super().__init__(caller, where)
        self.known: dict[int, RecordEntry] = {}  # row -> id of a hit; in a collective call also payload and text

    # -- a pass ----------------------------------------------------------------------------------------------------

    def stream(self, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """Pool all records: return the output (q, v) and the log-normaliser (q,).

        Sends q d numbers to each shard, which returns q (v + 1). Raises BadInput unless weights are softmax or uniform.
        """
        if not isinstance(request.weighting, Softmax | Uniform):
            raise BadInput(
                f"more than 2,048 records share the weight of {type(request.weighting).__name__.lower()} for a query, "
                "which a cluster cannot solve over several shards; pass k=, or lower the temperature"
            )
        posed = self.posed(request)
        if not self.wants_gradient(posed):
            answers = self.ask(lambda _, version: messages.PassOver(version, posed.question, request.pools))
            merged = passed_over(_in_order(answers))
            self._count = merged.taking_part
            output, lse = (torch.from_numpy(column).to(request.queries) for column in (merged.output, merged.lse))
            return output, lse + posed.shift
        states = [State(*state) for state in zip(*self._states(request, posed), strict=True)]
        state = states[0] if len(states) == 1 else merge(states)
        return state.output, state.lse + posed.shift

    def _states(self, request: Request, posed: Posed, apart: bool = False) -> State:  # (p, q, v), (p, q)
        """Return each shard's output and lse with gradients, before the shift; apart=False merges those of a host."""
        asks = dict[int, messages.PassOver]()

        def message(shard: int, version: int) -> messages.PassOver:
            asks[shard] = messages.PassOver(version, posed.question, request.pools, apart)
            return asks[shard]

        answers = self.ask(message)
        replies = _in_order(answers)
        output, lse = (torch.from_numpy(np.stack([r[i] for r in replies])).to(request.queries) for i in (0, 1))
        self._count = sum(reply.taking_part for reply in replies)
        every, owners = np.arange(len(request.queries)), [answers.of(shard) for shard in sorted(answers.replies)]
        asks = {shard: asks[shard] for shards in owners for shard in shards}
        places, used = dict.fromkeys(asks, every), dict.fromkeys(asks, every >= 0)
        return self.states(posed, State(output, lse), [asks], [places], [used], owners)

    # -- candidates ------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Candidates:
        """Return, for each query, the k records of all shards that score highest."""
        detached = request.detached
        folded = None if isinstance(request.weighting, Argmax) and plateaus(request.plain_score) else detached.folded
        if folded is None:
            score = pickled(request.plain_score)[0]
            question = messages.ShardQuery(array(detached.vectors), None, score=score, where=self.where)
        else:
            question = messages.ShardQuery(array(folded.queries), folded.metric, where=self.where)
        k = min(request.k, self.caller.count)
        hits = self.ranked(messages.Nearest(messages.NEWEST, question, k, request.exact))
        self._count = hits.taking_part
        return Candidates(hits.rows, hits.finder)

    def hits(self, query: Query, excluded: list[list[Id]] | None = None) -> Hits:
        """Search all shards; return the best hits, with equal scores sorted by id."""
        queries, offset = query.queries, query.offset
        question = messages.ShardQuery(array(queries), query.metric, where=self.where)
        k = None if query.least is not None else min(offset + query.k, self.caller.count)
        hits = self.ranked(messages.Nearest(messages.NEWEST, question, k, query.exact, query.least, excluded))
        rows = hits.rows[:, offset:]
        if queries.requires_grad and torch.is_grad_enabled():
            scores = self.scored(Request.of(queries, score_of(query.metric)), rows).scores
        else:
            scores = torch.tensor(hits.scores[:, offset:]).to(queries)
        return Hits(torch.from_numpy(rows).to(queries.device), scores, self.resolve, self.missing)

    def ranked(self, message: messages.Nearest) -> messages.ShardHits:
        """Send `message` to every shard, for the shard's version; return the best hits of all shards."""
        answers = self.ask(lambda _, version: replace(message, version=version))
        return self.known_ids(ranked(_in_order(answers), message.k))

    def known_ids(self, hits: messages.ShardHits) -> messages.ShardHits:
        """Store the ids of hits in `known`, and return the hits unchanged."""
        for rows, names in zip(hits.rows.tolist(), hits.ids, strict=True):
            self.known.update((row, RecordEntry(row, name)) for row, name in zip(rows, names, strict=False))
        self._fetched(hits.rows)
        return hits

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Fetch the candidates' keys (q k d numbers) from the shards, and score the keys here, with gradients."""
        keys = self.gathered(positions, values=False)[0]
        scores = scores_of(request.score, request.queries, keys.to(request.queries))
        return Scored(positions, scores.masked_fill(torch.from_numpy(positions < 0).to(scores.device), -torch.inf))

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Fetch the candidates' values from the shards, and pool the values here."""
        return pool(weights, self.gathered(scored.positions, keys=False)[1].to(weights.device), self.num_classes)

    def gathered(self, positions: Positions, keys: bool = True, values: bool = True) -> tuple[Tensor, Tensor]:
        """Fetch keys (…, d) and values (…, v), or labels (…), of rows (…). Zeros for row -1 and unwanted columns."""
        rows, back = np.unique(positions, return_inverse=True)
        shard_of = np.where(rows < 0, -1, rows % self.caller.shards)

        def message(shard: int, version: int) -> messages.Gather:
            own_rows = rows[shard_of == shard]
            return messages.Gather(version, own_rows, keys, values, self._names(own_rows))

        answers = self.caller.ask(message, np.unique(shard_of[rows >= 0]).tolist(), complete=True)
        columns, schema = [], self.schema
        for i, width in enumerate((schema.dim, None if self.num_classes else schema.value_dim or schema.dim)):
            shape = (len(rows),) if width is None else (len(rows), width)
            column: Any = np.zeros(shape, schema.dtype if width else np.int64)
            for shard, reply in answers.replies.items():
                if reply[i] is not None:
                    column[shard_of == shard] = reply[i]
            columns.append(torch.from_numpy(column[back.reshape(positions.shape)]))
        return columns[0], columns[1]

    @property
    def resolve(self) -> Any:
        """Function (rows, payloads, texts) -> {row: RecordEntry}, which reads the version that the answer saw."""
        return self._resolved

    def _resolved(self, rows: Rows, payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        known = self.known
        if not payloads and not texts and all(row in known for row in rows.tolist()):
            return {row: known[row] for row in rows.tolist()}
        if self.caller.transport.collective:  # one rank cannot ask alone: `_fetched` has resolved all hits
            return {row: known[row] for row in rows.tolist() if row in known}
        return self._looked_up(rows, payloads, texts)

    def _looked_up(self, rows: Rows, payloads: bool, texts: bool) -> dict[int, RecordEntry]:
        shard_of = rows % self.caller.shards

        def message(shard: int, version: int) -> messages.ResolveRows:
            own_rows = rows[shard_of == shard]
            return messages.ResolveRows(version, own_rows, payloads, texts, self._names(own_rows))

        answers = self.caller.ask(message, np.unique(shard_of).tolist(), complete=True)
        return {entry.row: entry for entries in answers.replies.values() for entry in entries}

    def _names(self, rows: Rows) -> list[Id] | None:
        """Return the ids of rows from `known`; None if an id is missing."""
        known = [self.known.get(row) for row in rows.tolist()]
        return None if None in known else [entry.id for entry in known if entry is not None]

    def _fetched(self, rows: Positions) -> None:
        """In a collective transport, read all hits' ids, payloads and texts now: no rank can ask alone later."""
        if self.caller.transport.collective:
            self.known |= self._looked_up(np.unique(rows[rows >= 0]), payloads=True, texts=True)

    # -- other answers ---------------------------------------------------------------------------------------------

    def estimate(self, request: Request) -> Pooled:
        """Estimate a soft query by draws in every shard, until the merged error bar is within the tolerance."""
        if request.pools:
            require_estimator(request)
        try:
            return estimated(self, request)
        except StaleRead:  # a directory was rebuilt, so that its draws cannot be repeated
            if not self.caller.taken_over():
                raise
            return estimated(self, request)

    def count_within(self, request: Request, least: float) -> Estimate:
        """Sum the shards' exact counts of records that score at least `least`. Cost: one pass in every shard."""
        question = messages.ShardQuery(array(request.queries), self.schema.metric, where=self.where)
        answers = self.ask(lambda shard, version: messages.CountWithin(version, question, least))
        value = torch.from_numpy(np.sum([*answers.replies.values()], axis=0)).double()
        complete = torch.full(value.shape, not self.missing)
        bar = torch.zeros_like(value).masked_fill(~complete, torch.inf)
        return Estimate(value, bar, complete, complete, self.missing)

    def sample(self, request: Request, count: int, generator: torch.Generator) -> Samples:
        """Draw `count` records a query: first a shard by its sum of weights, then a record in it. Cost: two passes."""
        require_softmax(request)
        posed = self.posed(request)
        lses = self._states(replace(request, pools=False), posed, apart=True).lse.mT  # (q, p)
        lse = merge([State(own.new_zeros(len(own), 0), own) for own in lses.unbind(1)]).lse + posed.shift
        shares = lses.detach().double().cpu().softmax(1).nan_to_num(0).cumsum(1)
        chances = torch.rand(len(shares), count, generator=generator, dtype=torch.float64)
        shard = torch.searchsorted(shares, chances * shares[:, -1:], right=True).clamp(max=shares.shape[1] - 1).numpy()
        seed = int(torch.randint(1 << 40, (), generator=generator))
        present = sorted(set(range(self.caller.shards)) - set(self.missing))
        answers = self.ask(
            lambda s, version: messages.Sample(version, posed.question, (shard == present.index(s)).sum(1), seed)
        )
        rows = np.full(shard.shape, -1, np.int64)
        for s, reply in answers.replies.items():
            drawn = shard == present.index(s)
            rows[drawn] = reply.rows[np.arange(reply.rows.shape[1]) < drawn.sum(1, keepdims=True)]
            for line, names in zip(reply.rows.tolist(), reply.ids, strict=True):
                self.known.update((row, RecordEntry(row, name)) for row, name in zip(line, names, strict=False))
        self._fetched(rows)
        scored = self.scored(request, rows)
        hits = hits_of(request, self, scored, scored.scores.device)
        log_prob = (scored.scores / request.temperature - lse.unsqueeze(1)).masked_fill(~hits.live, -torch.inf)
        return Samples(hits, torch.ones(len(rows), dtype=torch.bool, device=lse.device), lambda: log_prob)

    def heaviest(self, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:  # …, (q,)
        """Return the records of largest weight, and the weights' entropy (q,). Costs a search and a pass a shard."""
        posed = self.posed(request)
        lse_of_shards = array(lse - posed.shift)
        answers = self.ask(lambda shard, version: messages.Explain(version, posed.question, lse_of_shards, count))
        hits = self.known_ids(ranked([reply.hits for reply in _in_order(answers)], count))
        entropy = np.sum([reply.entropy for reply in answers.replies.values()], axis=0)
        return self.scored(request, hits.rows), torch.from_numpy(entropy)


def _in_order(answers: messages.ShardReplies) -> list[Any]:
    return [reply for _, reply in sorted(answers.replies.items())]
