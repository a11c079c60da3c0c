"""Rounds of an estimate: draw records, compute the answer and its error bar, and plan the next round by cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.error import Bars, ErrorEstimate, bars, joined, normal_quantile, sure
from softdb.attend.protocol import IndexedRecords
from softdb.attend.request import Live, Positions, Request
from softdb.attend.result import Estimated
from softdb.attend.scoring import metric_in_place, pool_rows, score_rows
from softdb.check import Tolerance
from softdb.index.contract import Floats, Numbers, prepared
from softdb.index.planner import draw_cost, pass_cost
from softdb.index.sampler import FEWEST, FIRST, Answering, Drawable, Drawing, DrawnSample, FirstRound, Sampler
from softdb.pool import State, merge
from softdb.scoring import Softmax, Tempered, divided, divisor, softmax
from softdb.store import Snapshot

GROWTH = 2  # least growth of the number of draws from one round to the next
MARGIN = 1.3  # safety factor on the number of draws that the error bar predicts
RISK = 1.2  # safety factor on a round's cost, as another round may follow
BY_DRAWS = 2.1  # a larger bar, in standard errors, is partly due to undrawn records
BLIND = 4  # largest growth of the draws if undrawn records dominate the bar: it then falls faster than 1/√draws
WRONG = 16  # largest growth of the draws in any case, for example after a record heavier than its code allows
LEAST = 25  # with fewer draws, the spread of drawn records says nothing about undrawn records
SLIGHT = 0.01  # fewer draws than LEAST suffice if no undrawn record can have a larger share of Ẑ
STEP = 2  # later rounds draw a power of 2^STEP records, so that queries can share rounds
AT_ONCE = 1 << 22  # largest number of draws in a round, over all queries
PROBED = 4  # number of queries of a large batch that are answered first, to measure the cost
SMALL = 0.1  # `rtol` is relative to ‖output‖, but at least to SMALL · rms‖v‖
NO_QUERIES: Positions = np.arange(0)
EPS = 2.0**-23  # relative rounding of float32
REMEMBERED = 64  # number of queries whose needed draws are remembered
REPLANNED = 16  # number of queries after which the first round is planned again
STARTS = (FIRST * 2 ** (np.arange(25) / 4)).astype(np.int64)  # numbers of draws that a first round may have
CLEARLY = 0.9  # a first round changes if its cost falls below this share
SHOWN = 256  # largest number of drawn records that an answer names: the heaviest


class Round(NamedTuple):
    """One round of draws: numbers of queries, and the number of records to draw for each."""

    which: Positions  # (q,)
    budget: int


class Estimator(NamedTuple):
    """An estimate in progress: its request, source, sampler and prepared queries."""

    request: Request
    source: IndexedRecords
    tolerance: Tolerance
    sampler: Sampler
    eligible: Drawable
    factor: Numbers  # (q,) logit / score of the metric
    queries: Floats  # (q, d) as the index compares them
    unindexed: Live | None  # (size,) mask of the records that take part but are not in the index
    taking_part: int  # number of records that take part, indexed or not
    kind: object = None  # key under which costs are remembered: queries with the same key cost about the same
    least: int = LEAST  # least number of draws; 0 for a shard, as the caller counts the draws of all shards

    @classmethod
    def of(cls, request: Request, source: IndexedRecords) -> Estimator | None:
        """Return the estimator, or None if no record can be drawn for the request."""
        tolerance, columns = request.tolerance, source.columns
        if tolerance is None or request.mask is not None or not len(request.queries):
            return None
        drawable = source.sampler(request.allowed)
        folded = request.detached.folded if isinstance(request.weighting, Softmax) else None
        if drawable is None or folded is None or folded.scale is None:
            return None
        sampler, eligible, indexed_until = drawable
        if folded.metric is not sampler.index.metric:
            return None
        factor, count, unindexed = factors_of(request.detached), eligible.inside, None
        if indexed_until < columns.size:
            unindexed = request.keep(source.live).copy()
            unindexed[:indexed_until] = False
            count += int(np.count_nonzero(unindexed))
        if factor is None or count < FEWEST or not eligible.inside:
            return None
        queries = prepared(folded.queries.detach().cpu().numpy(), sampler.index.metric)
        many = min(len(queries).bit_length(), PROBED)  # the cost of a pass per query hardly changes for many
        kind = many, source.width if request.pools else 0, round(math.log2(factor.max())), *tolerance
        return cls(request, source, tolerance, sampler, eligible, factor, queries, unindexed, count, kind)

    @property
    def budget(self) -> int:
        """Number of records that a first round draws for each query."""
        return self.tolerance.most or self.sampler.plans.get(self.kind, FirstRound()).budget

    def first(self) -> list[Round]:
        """Return the first rounds, split to fit into memory. If costs are unknown, the last, run first, is small."""
        most, every = self.tolerance.most, np.arange(len(self.queries))
        if most is not None or len(every) < PROBED**2 or self.sampler.knows(self.kind):
            return self.parts(Round(every, self.budget))
        probes = every[:: -(-len(every) // PROBED)]
        return [*self.parts(Round(np.delete(every, probes), FIRST)), Round(probes, FIRST)]

    def plan(self, task: Round, bar: Numbers, allowed: Numbers) -> None:
        """Learn from a first round how many records the next first round should draw, so that answers cost the least.

        A query that needs more draws than the first round has needs a second round, or a pass. The number is one of
        STARTS and changes only for a clear gain, as the same query with another number of draws has another answer.
        """
        budget, needed, unused = self.sampler.plans.get(self.kind, FirstRound())
        with np.errstate(over="ignore", invalid="ignore"):
            latest = np.fmin(MARGIN * np.square(bar / allowed), WRONG) * task.budget
        needed, unused = (*needed, *latest.tolist())[-REMEMBERED:], unused + len(latest)
        if unused >= REPLANNED:
            draws, q = np.array(needed), len(self.queries)
            passed, first, unused = self.pass_cost(q), self._cost(q, STARTS), 0
            second = np.minimum(self._cost(q, np.maximum(draws, GROWTH * STARTS[:, None])), passed)
            cost = first + np.where(draws > STARTS[:, None], second, 0).mean(1)
            cost[RISK * first > passed] = np.inf
            if cost.min() < CLEARLY * cost[budget == STARTS]:
                budget = int(STARTS[np.argmin(cost)])
        self.sampler.plans[self.kind] = FirstRound(budget, needed, unused)

    def after(
        self, task: Round, bar: Numbers, allowed: Numbers, stderr: Numbers
    ) -> tuple[NDArray[np.bool_], list[Round], Positions]:
        """Return the mask (q,) of the queries that a round answered, further rounds, and queries for a pass."""
        if self.tolerance.most is not None:
            return np.ones(len(bar), np.bool_), [], NO_QUERIES
        met = bar <= allowed
        if met.all():
            return met, [], NO_QUERIES
        with np.errstate(over="ignore", invalid="ignore"):
            by_bar, by_draws = MARGIN * np.square(bar / allowed), MARGIN * np.square(stderr / allowed)
            blind = np.fmin(np.fmax(by_draws, np.fmin(by_bar, BLIND)), WRONG)
            growth = np.where(bar <= BY_DRAWS * stderr, by_bar, blind)
            needed = np.fmin(growth * task.budget, self.taking_part)
        unmet, needed = task.which[~met], np.fmax(needed[~met], GROWTH * task.budget)
        steps = np.ceil(np.log2(needed) / STEP)
        further, tasks, passed = list[Round](), list[Round](), [NO_QUERIES]
        for step in np.unique(steps).tolist():
            more = Round(unmet[steps == step], int(min(2 ** (step * STEP), needed[steps == step].max())))
            joined = more._replace(which=np.concatenate([further[-1].which, more.which])) if further else more
            if further and self.cost(joined) < self.cost(further[-1]) + self.cost(more):
                further[-1] = joined
            else:
                further.append(more)
        for more in further:
            if task.budget >= self.taking_part or self.too_dear(more, len(unmet)):
                passed.append(more.which)
            else:
                tasks += self.parts(more)
        return met, tasks, np.concatenate(passed)

    @property
    def _width(self) -> int:
        return self.source.width if self.request.pools else 0

    def parts(self, task: Round) -> list[Round]:
        """Split a round by queries into rounds that fit into memory."""
        parts = -(-len(task.which) * min(task.budget, self.eligible.inside) // AT_ONCE)
        if parts < 2:
            return [task]
        return [task._replace(which=part) for part in np.array_split(task.which, min(parts, len(task.which)))]

    def too_dear(self, task: Round, together: int = 0) -> bool:
        """Return True if a pass over every record costs less than the round; False if the user set the number of draws.

        `together`: number of queries that one pass would answer.
        """
        q = len(task.which)
        together = max(together, q)
        return self.tolerance.most is None and RISK * self.cost(task) > self.pass_cost(together) * q / together

    def others_too_dear(self, task: Round, further: list[Round], to_pass: Positions, waiting: list[Round]) -> bool:
        """Return True if a pass costs less for all queries than rounds for those of a first round and the waiting ones.

        The waiting queries are expected to need as many rounds per query as those of the first round.
        """
        if self.tolerance.most is not None:
            return False
        every = len(self.queries)
        share = (len(task.which) + sum(len(other.which) for other in waiting)) / len(task.which)
        rounds = sum(self.cost(more, share) for more in (task, *further))
        return rounds > self.pass_cost(every) * (len(task.which) - len(to_pass)) * share / every

    def cost(self, task: Round, share: float = 1.0) -> float:
        """Return the cost of a round with `share` times its queries, in bytes read (see `softdb.index.planner`)."""
        return float(self._cost(round(share * len(task.which)), task.budget))

    def _cost(self, q: int, budget: Any) -> Any:  # a number, or an array for an array of budgets
        sampler, draws = self.sampler, np.minimum(budget, self.taking_part)
        return draw_cost(q, sampler.slots_for(self.kind), sampler.parts, draws, self.queries.shape[1], self._width)

    def pass_cost(self, queries: int) -> float:
        """Return the cost of a pass over every record for `queries` queries, in bytes read."""
        d, v = self.queries.shape[1], self._width
        return pass_cost(queries, self.taking_part, d, v, record_bytes(self.source.snapshot, v > 0)) if queries else 0.0

    def drawn(self, task: Round) -> tuple[Estimated, Numbers, Numbers, Numbers]:
        """Run a round. Return the answer, its bar, the largest bar that meets the tolerance, and the standard error."""
        sample = self.sample(task)
        self.sampler.read(self.kind, float(sample.figures.scanned.mean()))
        return self.judged(task, sample, *self.pooled(task, sample))

    def sample(self, task: Round, salt: int = 0) -> DrawnSample:
        """Draw records and pool them. `salt` seeds random signs; parts that are merged need different salts."""
        confidence, budget = self.tolerance.confidence, task.budget
        drawing = Drawing(self.queries[task.which], self.factor[task.which], budget, self.request.seed, 1 - confidence)
        snapshot, controls = self.source.snapshot, not self._width or bool(self.sampler.reach.means.shape[1])
        column, z = snapshot.value_column, normal_quantile(confidence)
        answering = Answering(column, self._width, z, salt, self.least, SLIGHT, SHOWN)
        return self.sampler.draw(self.eligible, snapshot, drawing, controls, answering)

    def pooled(self, task: Round, sample: DrawnSample) -> tuple[Tensor, State]:  # (q, k), …
        """Return scores of the drawn records, with the gradients of the request's score, and the answer."""
        request, columns, positions = self.request.at(task.which), self.source.columns, sample.positions
        scores, figures, answer = torch.from_numpy(sample.scores), sample.figures, sample.answer
        assert answer is not None
        if metric_in_place(request.plain_score, request.queries, columns) is not None:
            if isinstance(request.score, Tempered):
                scores = divided(scores, request.queries)
            return scores, State(torch.from_numpy(answer.output), torch.from_numpy(figures.lse))
        scores = score_rows(request.score, request.queries, columns, positions)
        live = torch.from_numpy(positions >= 0).to(scores.device)
        temperature, log_weights = divisor(request.temperature, scores.dtype), -torch.from_numpy(sample.chances).log()
        weights, lse = softmax(scores + log_weights.to(scores) * temperature, temperature, live)
        # with a correction c of Z and m of the output, both without gradient: Z = Z₀ + c, o = (Z₀ o₀ + m) / Z
        unit = (torch.from_numpy(figures.base).to(lse) - lse).exp().nan_to_num(0, posinf=0)
        share, output = unit * torch.from_numpy(figures.correction).to(lse), lse.new_zeros(len(lse), 0)
        if self._width:
            output = pool_rows(weights, columns, positions, self.source.num_classes)
            moved = unit.unsqueeze(1) * torch.from_numpy(answer.moved).to(unit)
            output = (output + moved.to(output)) / (1 + share).unsqueeze(1).to(output)
        return scores, State(output, lse + share.log1p())

    def judged(
        self, task: Round, sample: DrawnSample, scores: Tensor, state: State
    ) -> tuple[Estimated, Numbers, Numbers, Numbers]:
        """Compute the result of `drawn` from a sample, its scores and its pooled answer."""
        request, figures, precise = self.request, sample.figures, not scores.requires_grad and self.unindexed is None
        state, spread, weights = self.spread(task, sample, state)
        if self.unindexed is None:
            roots = np.sqrt((figures.variance, figures.noise))
            error = Bars(figures.bar, roots[0], figures.lse_bar, roots[1], figures.blind)
        else:
            error = bars(spread, self.tolerance.confidence)
        most = 1.0 if self.source.num_classes else None
        bar, allowed = error_of(
            self.tolerance, request.pools, spread, error, precise and scores.device.type == "cpu",
            lambda: most or self.source.columns.value_size,
        )  # fmt: skip
        device = scores.device
        dtype = request.queries.dtype if request.queries.is_floating_point() else torch.float32
        entropy = figures.entropy + (spread.lse - figures.lse)  # with the weights of unindexed records
        columns = np.stack((error.stderr, error.lse_stderr, bar, entropy))  # converted at once, which takes less time
        stderr, lse_stderr, bars_of, entropy_of = torch.from_numpy(columns).to(device, dtype)
        answer = Estimated(
            state.output.to(device, dtype), state.lse.to(device, dtype), stderr, lse_stderr, bars_of,
            torch.from_numpy(bar <= allowed).to(device), torch.from_numpy(sample.positions[:, :SHOWN]).to(device),
            scores.detach()[:, :SHOWN].to(device, dtype), torch.from_numpy(weights[:, :SHOWN]).to(device, dtype),
            torch.from_numpy(figures.drawn.astype(np.int64)).to(device), entropy_of,
        )  # fmt: skip
        return answer, bar, allowed, error.stderr if request.pools else error.lse_stderr

    def spread(self, task: Round, sample: DrawnSample, state: State) -> tuple[State, ErrorEstimate, Numbers]:
        """Merge unindexed records into the answer. Return it, its error estimate, and candidates' weights (q, k)."""
        assert sample.answer is not None
        spread, weights = ErrorEstimate.of(sample.figures, sample.answer), sample.answer.weights
        if self.unindexed is not None:
            streamed = self.source.stream(replace(self.request.at(task.which), allowed=self.unindexed))
            state = merge([state, (streamed[0].to(state.output), streamed[1].to(state.lse))])
            exact = sure(*(column.detach().cpu().double().numpy() for column in streamed))
            before, spread = spread.lse, joined([spread, exact])
            weights = weights * np.exp(before - spread.lse)[:, None]
        return state, spread, weights


def factors_of(request: Request) -> Numbers | None:  # (q,)
    """Return logit / metric(q, k) of each query, without gradient; None if the score has none, or outside float32."""
    folded = request.folded
    if folded is None or folded.scale is None:
        return None
    scale = folded.scale.detach().cpu().double().numpy() if isinstance(folded.scale, Tensor) else folded.scale
    factors = np.full(len(request.queries), scale / request.temperature)
    return factors if factors.min(initial=1.0) > 1e-30 and factors.max(initial=1.0) < 1e30 else None


def record_bytes(snapshot: Snapshot, pools: bool) -> int:
    """Return the bytes of a record that a pass reads: its key, and its value if values are pooled and not the keys."""
    segment = snapshot.segments[0]
    values = 0 if segment.values is None or not pools else segment.values[:1].nbytes
    return int(segment.keys[:1].nbytes + values)


def error_of(
    tolerance: Tolerance,
    pools: bool,  # False: only the log-normaliser is computed
    spread: ErrorEstimate,
    error: Bars,
    precise: bool,  # True if logits are float64
    value_size: Callable[[], float],  # rms‖v‖
) -> tuple[Numbers, Numbers]:  # (q,), (q,)
    """Return the error bar of the output (or of Z relative to Z), and the largest bar that meets the tolerance."""
    size = 0.0 if pools and precise else np.abs(np.where(np.isneginf(spread.lse), 0.0, spread.lse))
    rounding = EPS * (1 + size)
    if not pools:  # add the rounding of log Z to float32
        wide = error.lse_bar + np.expm1(np.minimum(rounding, 700))
        return wide, np.full_like(wide, tolerance.rtol)
    length = np.sqrt(np.square(spread.output).sum(1))
    bar = error.bar + rounding * length
    allowed = tolerance.atol + tolerance.rtol * length
    if (bar > allowed).any():
        allowed = tolerance.atol + tolerance.rtol * np.maximum(length, SMALL * value_size())
    return bar, allowed
