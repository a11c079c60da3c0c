"""The soft query over a cluster, estimated: the caller runs the rounds and judges; shards draw what they are told to.

Each shard draws with seeds and signs salted by its number; what the error is made of is re-centred at the merged output
(`softdb.attend.error.joined`), so the bar of the whole is that of one database. The first round gives each shard draws
in proportion to its records. Later ones go by σ_s, where σ_s² / b_s is what shard s with b_s draws adds to the squared
error (Neyman 1934), and a tenth still by records. No sum needs a weight for that: each is unbiased by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.answers import Pooled
from softdb.attend import Request
from softdb.attend.error import ErrorEstimate, bars, joined, parts_of_error
from softdb.attend.request import Positions
from softdb.attend.result import Doubt, Estimated, answered
from softdb.attend.rounds import GROWTH, LEAST, MARGIN, SLIGHT, error_of
from softdb.cluster import shard as say
from softdb.cluster.posed import Posed
from softdb.cluster.shard_source import AskedShards
from softdb.index.sampler import FIRST
from softdb.pool import State, merge

BY_RECORDS = 0.1  # of the draws of later rounds, the share that goes by how many records a shard holds
BETTER = 0.8  # of the squared error: what sharing out anew must leave at most to be worth a round of the same size
STEP = 4  # budgets of later rounds are powers of 2^(1/STEP): queries with the same are drawn for together
FEW = 8  # records that a shard is told to draw at least

Numbers = NDArray[np.float64]


@dataclass
class _Book:
    """Results of the rounds, for each shard and query."""

    parts: dict[int, list[NDArray[Any]]] = field(default_factory=dict)  # by shard: the columns of its ErrorEstimate
    pooled: dict[int, Positions] = field(default_factory=dict)
    exactly: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    last: dict[int, Positions] = field(default_factory=dict)  # which round each answer is of
    asks: list[dict[int, say.Draw]] = field(default_factory=list)  # of each round
    places: list[dict[int, Positions]] = field(default_factory=list)

    def write(self, shard: int, where: Positions, drawn: say.Drawn, queries: int) -> None:
        """Answers of a shard to some of the queries, in place of those before."""
        if shard not in self.parts:
            self.parts[shard] = [np.zeros((queries, *one.shape[1:]), one.dtype) for one in drawn.estimate]
            self.pooled[shard], self.last[shard] = (np.zeros(queries, np.int64) for _ in range(2))
            self.exactly[shard] = np.zeros(queries, np.bool_)
        for column, part in zip(self.parts[shard], drawn.estimate, strict=True):
            column[where] = part
        self.pooled[shard][where], self.exactly[shard][where] = drawn.pooled, drawn.exactly
        self.last[shard][where] = len(self.asks) - 1

    def of(self, which: Positions) -> list[ErrorEstimate]:
        """By shard, for some of the queries."""
        return [ErrorEstimate(*(column[which] for column in self.parts[shard])) for shard in self.shards]

    @property
    def shards(self) -> list[int]:
        """Those that answered."""
        return sorted(self.parts)


def estimated(source: AskedShards, request: Request) -> Pooled:
    """As `softdb.attend.estimate.estimate_drawn`: no shard knows the tolerance, or how many draws are enough."""
    rounds = _Rounds(source, request, source.posed(request))
    more = True
    while more:  # on every rank, for as long as one of them has queries left
        rounds.draw()
        rounds.judge()
        more = source.caller.transport.anyone(bool(len(rounds.rest)))
    return rounds.answer()


class _Rounds:
    """The state of an estimate between two rounds."""

    def __init__(self, source: AskedShards, request: Request, asked: Posed) -> None:
        tolerance, q = request.tolerance, len(request.queries)
        assert tolerance is not None
        self.source, self.request, self.asked, self.tolerance = source, request, asked, tolerance
        counts = np.array([source.caller.known[s].keyed if s in source.caller.known else 0 for s in range(self.shards)])
        self.records: Numbers = counts / max(1, counts.sum())
        self.shares = np.repeat(self.records[:, None], q, axis=1)  # (p, q) of the draws
        self.budgets = np.full(q, min(FIRST, tolerance.most or FIRST))  # of all shards together
        self.shared_anew = np.zeros(q, np.bool_)
        self.rest, self.book = np.arange(q), _Book()
        self.error, self.met = [np.zeros(q) for _ in range(3)], np.zeros(q, np.bool_)  # bar, stderr, and of lse

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.source.caller.shards

    def draw(self) -> None:
        """One round: every shard draws for the queries that are not done, but where it has passed over every record."""
        book, question, tolerance = self.book, self.asked.question, self.tolerance
        asks, places, own_budgets = dict[int, say.Draw](), dict[int, Positions](), self._own_budgets()
        for shard, known in self.source.caller.known.items():
            where = self.rest
            if shard in book.exactly:
                where = where[~book.exactly[shard][where]]
            if len(book.asks) and shard not in book.parts:  # it is missing
                continue
            own = replace(question, queries=question.queries[where])
            asks[shard] = say.Draw(
                known.version, own, self.request.pools, own_budgets[shard, where], self.request.seed,
                tolerance.confidence, tolerance.most is not None,
            )  # fmt: skip
            places[shard] = where
        source = self.source
        collective = self.source.caller.transport.collective
        turn = len(book.asks)
        answers = source.ask(
            lambda shard, _: asks[shard], [s for s in asks if collective or not turn or len(places[s])]
        )
        book.asks.append(
            {shard: replace(asks[shard], exactly=drawn.exactly) for shard, drawn in answers.replies.items()}
        )
        book.places.append({shard: places[shard] for shard in answers.replies})
        for shard, drawn in answers.replies.items():
            book.write(shard, places[shard], drawn, len(self.budgets))
        source.took_part(sum(drawn.taking_part for drawn in answers.replies.values()))
        for shard in answers.missing:
            book.parts.pop(shard, None)

    def _own_budgets(self) -> Positions:  # (p, q)
        """Whole numbers; of later rounds on a grid, so that many queries share one, by largest remainders."""
        wanted = np.maximum(self.budgets * self.shares, FEW)
        if len(self.book.asks):
            lower: Numbers = 2 ** (np.floor(STEP * np.log2(wanted)) / STEP)
            left = self.budgets - lower.sum(0)
            for shards in np.argsort(-wanted / lower, axis=0, kind="stable"):
                step = (2 ** (1 / STEP) - 1) * np.take_along_axis(lower, shards[None], 0)[0]
                fits = np.flatnonzero(step <= left)
                lower[shards[fits], fits] += step[fits]
                left[fits] -= step[fits]
            wanted = lower
        budgets: Positions = np.maximum(np.rint(wanted), 1).astype(np.int64)
        return budgets

    def judge(self) -> None:
        """Judge the error of the whole, settle the queries that it fits, and prepare messages for the others."""
        book, which, tolerance, request = self.book, self.rest, self.tolerance, self.request
        if not len(which):
            return
        parts = book.of(which)
        whole = joined(parts)
        pooled = np.sum([book.pooled[shard][which] for shard in book.shards], axis=0)
        few = (pooled < LEAST) & (whole.unseen > SLIGHT)
        unknown = (np.where(few, np.inf, bound) for bound in (whole.unseen, whole.hidden, whole.missed, whole.alone))
        whole = whole._replace(**dict(zip(("unseen", "hidden", "missed", "alone"), unknown, strict=True)))
        found = bars(whole, tolerance.confidence)
        size = 1.0 if self.source.num_classes else None
        bar, allowed = error_of(
            tolerance, request.pools, whole, found, False, lambda: size or self.source.caller.value_size
        )
        exact = np.all([book.exactly[shard][which] for shard in book.shards], axis=0)
        met = exact | (bar <= allowed)
        for column, part in zip(self.error, (bar, found.stderr, found.lse_stderr), strict=True):
            column[which] = np.where(exact, 0.0, part)
        self.met[which] = met
        anew = self._share_out(which, parts, whole)
        most = tolerance.most or np.inf
        last = ~anew & (self.budgets[which] >= most)
        more = ~met & ~last
        grows = more & ~(anew & (self.budgets[which] >= most))
        with np.errstate(invalid="ignore", over="ignore"):
            needed = np.nan_to_num(MARGIN * self.budgets[which] * (bar / allowed) ** 2, nan=np.inf)
        wanted = np.maximum(GROWTH * self.budgets[which], np.minimum(needed, self.source.caller.count))
        self.budgets[which[grows]] = np.minimum(wanted, most)[grows]
        self.rest = which[more]

    def _share_out(self, which: Positions, parts: list[ErrorEstimate], whole: ErrorEstimate) -> NDArray[np.bool_]:
        """The shares of the next round; and where these are worth a round of the same size, once."""
        book = self.book
        errors = parts_of_error(parts, whole, self.request.pools)  # (p, q)
        drawn = np.stack([np.maximum(book.pooled[shard][which], 1) for shard in book.shards])
        deviations = np.sqrt(errors * drawn)
        total = deviations.sum(0)
        neyman = np.divide(deviations, total, out=np.zeros_like(deviations), where=total > 0)
        own = self.records[book.shards][:, None]
        shares = np.where(total > 0, (1 - BY_RECORDS) * neyman + BY_RECORDS * own, own)
        self.shares[np.ix_(np.array(book.shards), which)] = shares
        with np.errstate(divide="ignore", invalid="ignore"):
            after = (deviations**2 / (shares * drawn.sum(0))).sum(0)
            better = after < BETTER * errors.sum(0)
        anew = better & ~self.shared_anew[which] & ~np.all([book.exactly[s][which] for s in book.shards], axis=0)
        self.shared_anew[which[anew]] = True
        worth: NDArray[np.bool_] = anew & (self.tolerance.most is not None)
        return worth

    def answer(self) -> Pooled:
        """The merged states, with gradients through the draws that they are of, and their bars."""
        book, request, source = self.book, self.request, self.source
        device, dtype, every = request.queries.device, request.queries.dtype, np.arange(len(request.queries))

        def told(column: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(column)).to(device, dtype)

        shards = book.shards
        states = State(*(told(np.stack([book.parts[shard][i] for shard in shards])) for i in (0, 1)))
        kept = [
            {shard: book.last[shard][where] == turn for shard, where in places.items() if shard in shards}
            for turn, places in enumerate(book.places)
        ]
        asks = [{shard: asks[shard] for shard in mine} for asks, mine in zip(book.asks, kept, strict=True)]
        states = source.states(self.asked, states, asks, book.places, kept, [(shard,) for shard in shards])
        state = merge([State(*part) for part in zip(*states, strict=True)])
        exact = torch.from_numpy(np.all([book.exactly[shard] for shard in shards], axis=0)).to(device)
        bar, stderr, lse_stderr = self.error
        none, nothing = torch.full((len(every), 0), -1, device=device), np.zeros((len(every), 0))
        error = Estimated(
            state.output, state.lse, told(stderr), told(lse_stderr), told(bar),
            torch.from_numpy(self.met).to(device), none, told(nothing), told(nothing),
            torch.from_numpy(np.sum([book.pooled[shard] for shard in shards], axis=0)).to(device),
        )  # fmt: skip
        doubt = Doubt(exact, torch.zeros_like(state.lse.detach()), error)
        answer = state.output, state.lse + self.asked.shift
        pooled = answered(request, source, answer, self._finder(exact), doubt=doubt)
        drawn = torch.from_numpy(np.sum([book.pooled[shard] for shard in shards], axis=0)).to(device)
        return replace(pooled, n_pooled=torch.where(exact, pooled.n_pooled, drawn))

    def _finder(self, exact: torch.Tensor) -> str:
        kinds = sorted({one.finder for one in self.source.caller.known.values() if one.finder is not None})
        return "all" if bool(exact.all()) or not kinds else kinds[0]
