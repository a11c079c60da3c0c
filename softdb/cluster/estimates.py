"""Estimated soft queries over a cluster: the caller runs the rounds and judges the error; shards draw records.

Each shard mixes its number into its random seeds. `softdb.attend.error.joined` merges the shards' errors around the
merged output, so the error bar is that of one database. The first round divides the draws among shards in proportion to
their numbers of records. In later rounds 90 % of the draws are divided in proportion to σ_s, where σ_s² / b_s is the
squared error of shard s after b_s draws (Neyman 1934), and 10 % as in the first round. Any division is unbiased.
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
from softdb.attend.rounds import GROWTH, LEAST, MARGIN, SLIGHT, error_of, magnitude
from softdb.cluster import shard as messages
from softdb.cluster.posed import Posed
from softdb.cluster.shard_source import QueriedShards
from softdb.index.contract import Numbers
from softdb.index.sampler import FIRST
from softdb.pool import State, merge

BY_RECORDS = 0.1  # in later rounds, share of the draws that is divided in proportion to numbers of records
BETTER = 0.8  # redraw with a new division if it lowers the squared error at least to this fraction
STEP = 4  # later budgets are powers of 2^(1/STEP), so that many queries have equal budgets, in one batch
FEW = 8  # least number of draws from each shard


@dataclass
class _Book:
    """Results of all rounds so far, for each shard and query."""

    parts: dict[int, list[NDArray[Any]]] = field(default_factory=dict)  # shard -> columns of its ErrorEstimate
    pooled: dict[int, Positions] = field(default_factory=dict)  # shard -> (q,) number of records pooled
    exact: dict[int, NDArray[np.bool_]] = field(default_factory=dict)  # shard -> (q,) True if all records were pooled
    last: dict[int, Positions] = field(default_factory=dict)  # shard -> (q,) number of the last round
    asks: list[dict[int, messages.Draw]] = field(default_factory=list)  # [round][shard]: messages sent
    places: list[dict[int, Positions]] = field(default_factory=list)  # [round][shard]: indices of queries sent

    def write(self, shard: int, where: Positions, drawn: messages.Drawn, queries: int) -> None:
        """Replace one shard's results for the queries at indices `where`; `queries` is the number of all queries."""
        if shard not in self.parts:
            self.parts[shard] = [np.zeros((queries, *column.shape[1:]), column.dtype) for column in drawn.estimate]
            self.pooled[shard], self.last[shard] = (np.zeros(queries, np.int64) for _ in range(2))
            self.exact[shard] = np.zeros(queries, np.bool_)
        for column, new in zip(self.parts[shard], drawn.estimate, strict=True):
            column[where] = new
        self.pooled[shard][where], self.exact[shard][where] = drawn.pooled, drawn.exactly
        self.last[shard][where] = len(self.asks) - 1

    def of(self, which: Positions) -> list[ErrorEstimate]:
        """Return each shard's error estimate for the queries at indices `which`."""
        return [ErrorEstimate(*(column[which] for column in self.parts[shard])) for shard in self.shards]

    @property
    def shards(self) -> list[int]:
        """Shards that answered."""
        return sorted(self.parts)


def estimated(source: QueriedShards, request: Request) -> Pooled:
    """Estimate a soft query: draw in rounds, until the error bar of every query is within the tolerance."""
    rounds = _Rounds(source, request, source.posed(request))
    more = True
    while more:  # a rank without remaining queries goes on while another rank has some
        rounds.draw()
        rounds.judge()
        more = source.caller.transport.anyone(bool(len(rounds.remaining)))
    return rounds.answer()


class _Rounds:
    """Runs the rounds of one estimate, and keeps budgets and results between two rounds."""

    def __init__(self, source: QueriedShards, request: Request, posed: Posed) -> None:
        tolerance, q = request.tolerance, len(request.queries)
        assert tolerance is not None
        self.source, self.request, self.posed, self.tolerance = source, request, posed, tolerance
        known = source.caller.known
        counts = np.array([known[shard].keyed if shard in known else 0 for shard in range(source.caller.shards)])
        self.records: Numbers = counts / max(1, counts.sum())  # (p,) fraction of all records that each shard has
        self.shares = np.repeat(self.records[:, None], q, axis=1)  # (p, q) fraction of a query's draws for each shard
        self.budgets = np.full(q, min(FIRST, tolerance.most or FIRST))  # (q,) number of draws over all shards
        self.reshared = np.zeros(q, np.bool_)  # (q,) True: the extra round after a new division is used up
        self.remaining, self.book = np.arange(q), _Book()
        self.error, self.met = [np.zeros(q) for _ in range(3)], np.zeros(q, np.bool_)  # bar, stderr, lse_stderr

    def draw(self) -> None:
        """Run one round: each shard draws for the remaining queries that it has not answered exactly yet."""
        book, question, tolerance = self.book, self.posed.question, self.tolerance
        asks, places, own_budgets = dict[int, messages.Draw](), dict[int, Positions](), self._own_budgets()
        for shard, known in self.source.caller.known.items():
            where = self.remaining
            if shard in book.exact:
                where = where[~book.exact[shard][where]]
            if len(book.asks) and shard not in book.parts:  # the shard is missing
                continue
            own = replace(question, queries=question.queries[where])
            asks[shard] = messages.Draw(
                known.version, own, self.request.pools, own_budgets[shard, where], self.request.seed,
                tolerance.confidence, tolerance.most is not None,
            )  # fmt: skip
            places[shard] = where
        source, is_first = self.source, not book.asks
        all_shards = is_first or source.caller.transport.collective
        answers = source.ask(lambda shard, _: asks[shard], [s for s in asks if all_shards or len(places[s])])
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
        """Return numbers of draws; after the first round rounded to powers of 2^(1/STEP), so that many are equal."""
        wanted = np.maximum(self.budgets * self.shares, FEW)
        if len(self.book.asks):
            lower: Numbers = 2 ** (np.floor(STEP * np.log2(wanted)) / STEP)
            unspent = self.budgets - lower.sum(0)
            for shards in np.argsort(-wanted / lower, axis=0, kind="stable"):
                step = (2 ** (1 / STEP) - 1) * np.take_along_axis(lower, shards[None], 0)[0]
                fits = np.flatnonzero(step <= unspent)
                lower[shards[fits], fits] += step[fits]
                unspent[fits] -= step[fits]
            wanted = lower
        budgets: Positions = np.maximum(np.rint(wanted), 1).astype(np.int64)
        return budgets

    def judge(self) -> None:
        """Compute error bars, remove queries that meet the tolerance, and set budgets for the remaining queries."""
        book, which, tolerance, request = self.book, self.remaining, self.tolerance, self.request
        if not len(which):
            return
        parts = book.of(which)
        merged = joined(parts)
        pooled = np.sum([book.pooled[shard][which] for shard in book.shards], axis=0)
        few = (pooled < LEAST) & (merged.unseen > SLIGHT)
        bounds = ("unseen", "hidden", "missed", "alone")  # set to infinity where too few records were drawn
        merged = merged._replace(**{name: np.where(few, np.inf, getattr(merged, name)) for name in bounds})
        error = bars(merged, tolerance.confidence)
        size = 1.0 if self.source.num_classes else None
        bar, allowed = error_of(
            tolerance, request.pools, magnitude(merged.lse), np.linalg.norm(merged.output, axis=1), error,
            lambda: size or self.source.caller.value_size,
        )  # fmt: skip
        exact = np.all([book.exact[shard][which] for shard in book.shards], axis=0)
        met = exact | (bar <= allowed)
        for column, values in zip(self.error, (bar, error.stderr, error.lse_stderr), strict=True):
            column[which] = np.where(exact, 0.0, values)
        self.met[which] = met
        reshared = self._share_out(which, parts, merged)
        most = tolerance.most or np.inf
        full = self.budgets[which] >= most
        more, grows = ~met & (reshared | ~full), ~met & ~full
        with np.errstate(invalid="ignore", over="ignore"):
            needed = np.nan_to_num(MARGIN * self.budgets[which] * (bar / allowed) ** 2, nan=np.inf)
        wanted = np.maximum(GROWTH * self.budgets[which], np.minimum(needed, self.source.caller.count))
        self.budgets[which[grows]] = np.minimum(wanted, most)[grows]
        self.remaining = which[more]

    def _share_out(self, which: Positions, parts: list[ErrorEstimate], merged: ErrorEstimate) -> NDArray[np.bool_]:
        """Divide the next round's draws among shards; return (q,) True to redraw a query once with an equal budget."""
        book = self.book
        errors = parts_of_error(parts, merged, self.request.pools)  # (p, q)
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
        new = better & ~self.reshared[which] & ~np.all([book.exact[s][which] for s in book.shards], axis=0)
        self.reshared[which[new]] = True
        worth: NDArray[np.bool_] = new & (self.tolerance.most is not None)
        return worth

    def answer(self) -> Pooled:
        """Merge the shards' outputs and lses; return the answer with error bars and with gradients."""
        book, request, source = self.book, self.request, self.source
        device, dtype, every = request.queries.device, request.queries.dtype, np.arange(len(request.queries))

        def as_tensor(column: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(column)).to(device, dtype)

        shards = book.shards
        states = State(*(as_tensor(np.stack([book.parts[shard][i] for shard in shards])) for i in (0, 1)))
        used = [
            {shard: book.last[shard][where] == number for shard, where in places.items() if shard in shards}
            for number, places in enumerate(book.places)
        ]
        asks = [{shard: asks[shard] for shard in own} for asks, own in zip(book.asks, used, strict=True)]
        states = source.states(self.posed, states, asks, book.places, used, [(shard,) for shard in shards])
        state = merge([State(*own) for own in zip(*states, strict=True)])
        exact = torch.from_numpy(np.all([book.exact[shard] for shard in shards], axis=0)).to(device)
        drawn = torch.from_numpy(np.sum([book.pooled[shard] for shard in shards], axis=0)).to(device)
        drawn = torch.where(exact, source.taking_part(request), drawn)
        bar, stderr, lse_stderr = self.error
        none, nothing = torch.full((len(every), 0), -1, device=device), np.zeros((len(every), 0))
        error = Estimated(
            state.output, state.lse, as_tensor(stderr), as_tensor(lse_stderr), as_tensor(bar),
            torch.from_numpy(self.met).to(device), none, as_tensor(nothing), as_tensor(nothing), drawn,
        )  # fmt: skip
        answer = state.output, state.lse + self.posed.shift
        return answered(request, source, answer, self._finder(exact), doubt=Doubt(exact, error=error))

    def _finder(self, exact: torch.Tensor) -> str:
        kinds = sorted({shard.finder for shard in self.source.caller.known.values() if shard.finder is not None})
        return "all" if bool(exact.all()) or not kinds else kinds[0]
