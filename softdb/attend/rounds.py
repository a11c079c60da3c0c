"""Rounds of an estimate: draw records, compute the answer and its error bar, and plan the next round by cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
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
FEW_QUERIES = 64  # largest number of queries of a request whose parameters are remembered,
ESTIMATORS = 64  # and largest number of such requests
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
        sampler, eligible = drawable
        if folded.metric is not sampler.index.metric:
            return None
        factor, count, unindexed = factors_of(request.detached), eligible.inside, None
        if eligible.until < columns.size:
            unindexed = request.keep(source.live).copy()
            unindexed[: eligible.until] = False
            count += int(np.count_nonzero(unindexed))
        if factor is None or count < FEWEST or not eligible.inside:
            return None
        queries = prepared(folded.queries.detach().cpu().numpy(), sampler.index.metric)
        many = min(len(queries).bit_length(), PROBED)  # the cost of a pass per query hardly changes for many
        kind = many, source.width if request.pools else 0, round(math.log2(factor.max())), *tolerance
        return cls(request, source, tolerance, sampler, eligible, factor, queries, unindexed, count, kind)

    @classmethod
    def plainly(cls, source: IndexedRecords, queries: Floats, parameters: tuple[float, ...]) -> Estimator | None:
        """Return an estimator for queries (q, d) and parameters like those of a remembered one; None: there is none."""
        drawable = source.sampler(None)
        if drawable is None:
            return None
        sampler, eligible = drawable
        remembered = sampler.remembered.get((len(queries), *parameters))
        if remembered is None or eligible.until < source.columns.size or eligible.inside < FEWEST:
            return None
        earlier, factor, kind = remembered
        request, vectors = replace(earlier, queries=torch.from_numpy(queries)), prepared(queries, sampler.index.metric)
        count = eligible.inside
        return cls(request, source, earlier.tolerance, sampler, eligible, factor, vectors, None, count, kind)

    def remember(self) -> None:
        """Remember a plain request, so that `plainly` can answer others with its parameters."""
        request, known, few = self.request, self.sampler.remembered, len(self.queries) <= FEW_QUERIES
        plain = self.tolerance.most is None and request.allowed is None and not (request.seed or request.need_weights)
        if few and plain and self.is_plain:
            if len(known) >= ESTIMATORS:
                known.clear()
            key = len(request.queries), request.temperature, *self.tolerance[:3]
            known[key] = replace(request, queries=request.queries[:0].clone()), self.factor, self.kind

    @property
    def in_place(self) -> bool:
        """True if kernels score the drawn records for the answer, without gradients."""
        return metric_in_place(self.request.plain_score, self.request.queries, self.source.columns) is not None

    @property
    def is_plain(self) -> bool:
        """True if the kernel's answer is the answer, for queries of one temperature."""
        request = self.request
        return request.pools and self.unindexed is None and self.in_place and not isinstance(request.score, Tempered)

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
        ratios = (
            error / most if most else math.inf for error, most in zip(bar.tolist(), allowed.tolist(), strict=True)
        )
        latest = [task.budget * min(WRONG, MARGIN * ratio * ratio) for ratio in ratios]
        needed, unused = (*needed, *latest)[-REMEMBERED:], unused + len(latest)
        if unused >= REPLANNED:
            draws, q = np.array(needed), len(self.queries)
            starts, others = np.minimum(STARTS, self.taking_part), np.maximum(draws, GROWTH * STARTS[:, None])
            passed, first, unused = self.pass_cost(q), self._cost(q, starts), 0
            second = np.minimum(self._cost(q, np.minimum(others, self.taking_part)), passed)
            cost = first + np.where(draws > STARTS[:, None], second, 0).mean(1)
            cost[RISK * first > passed] = np.inf
            if cost.min() < CLEARLY * cost[budget == STARTS]:
                budget = int(STARTS[np.argmin(cost)])
        self.sampler.plans[self.kind] = FirstRound(budget, needed, unused)

    def after(
        self, task: Round, bar: Numbers, allowed: Numbers, stderr: Numbers
    ) -> tuple[Live, list[Round], Positions]:
        """Return the mask (q,) of the queries that a round answered, further rounds, and queries for a pass."""
        met: Live = bar <= allowed
        if self.tolerance.most is not None or np.count_nonzero(met) == len(met):
            return np.ones(len(bar), np.bool_), [], NO_QUERIES
        with np.errstate(over="ignore", invalid="ignore"):
            by_bar, by_draws = MARGIN * np.square(bar / allowed), MARGIN * np.square(stderr / allowed)
            blind = np.fmin(np.fmax(by_draws, np.fmin(by_bar, BLIND)), WRONG)
            growth = np.where(bar <= BY_DRAWS * stderr, by_bar, blind)
            needed = np.fmin(growth * task.budget, self.taking_part)
        unmet, needed = task.which[~met], np.fmax(needed[~met], GROWTH * task.budget)
        steps = np.ceil(np.log2(needed) / STEP)
        further, tasks, passed = list[Round](), list[Round](), [NO_QUERIES]
        for step in sorted(set(steps.tolist())):
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
        return float(self._cost(round(share * len(task.which)), min(task.budget, self.taking_part)))

    def _cost(self, q: int, draws: Any) -> Any:  # a number, or an array for an array of numbers of draws
        sampler = self.sampler
        return draw_cost(q, sampler.slots_for(self.kind), sampler.parts, draws, self.queries.shape[1], self._width)

    def pass_cost(self, queries: int) -> float:
        """Return the cost of a pass over every record for `queries` queries, in bytes read."""
        d, v = self.queries.shape[1], self._width
        return pass_cost(queries, self.taking_part, d, v, record_bytes(self.source.snapshot, v > 0)) if queries else 0.0

    def sample(self, task: Round, salt: int = 0) -> DrawnSample:
        """Draw records and pool them. `salt` seeds random signs; parts that are merged need different salts."""
        confidence, budget = self.tolerance.confidence, task.budget
        drawing = Drawing(self.queries[task.which], self.factor[task.which], budget, self.request.seed, 1 - confidence)
        snapshot, controls = self.source.snapshot, not self._width or bool(self.sampler.reach.means.shape[1])
        column, z = snapshot.value_column, normal_quantile(confidence)
        answering = Answering(column, self._width, z, salt, self.least, SLIGHT, SHOWN)
        sample = self.sampler.draw(self.eligible, snapshot, drawing, controls, answering)
        self.sampler.read(self.kind, float(sample.figures.scanned.sum()) / len(task.which))
        return sample

    def pooled(self, task: Round, sample: DrawnSample) -> tuple[Tensor, State]:  # (q, k), …
        """Return scores of the drawn records, and the answer with the gradients of the request's score."""
        request, columns, positions = self.request.at(task.which), self.source.columns, sample.positions
        scores, figures, answer = torch.from_numpy(sample.scores), sample.figures, sample.answer
        assert answer is not None
        if self.in_place:
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

    def judged(self, task: Round, sample: DrawnSample) -> tuple[Callable[[], Estimated], Numbers, Numbers, Numbers]:
        """Return a function that assembles a round's answer, its error bar, the tolerance, and the standard error."""
        request, figures, answer = self.request, sample.figures, sample.answer
        assert answer is not None
        error, weights, entropy = Bars.of(figures), answer.weights[:, :SHOWN], figures.entropy
        lse, length, precise, pooled = figures.lse, figures.length, self.in_place, None
        if not self.in_place or self.unindexed is not None:
            scores, state = self.pooled(task, sample)
            precise = not scores.requires_grad and scores.device.type == "cpu"
            if self.unindexed is not None:
                state, spread = self.spread(task, sample, state)
                grown, lse, length, precise = spread.lse - lse, spread.lse, np.linalg.norm(spread.output, axis=1), False
                error, entropy = bars(spread, self.tolerance.confidence), entropy + grown
                weights = weights * np.exp(-grown)[:, None]
            pooled = scores, state
        size = 0.0 if request.pools and precise else magnitude(lse)
        bar, allowed = error_of(self.tolerance, request.pools, size, length, error, self._value_size)

        def assembled() -> Estimated:
            scores, state = pooled or self.pooled(task, sample)
            columns = *state, error.stderr, error.lse_stderr, bar, scores.detach()[:, :SHOWN], weights, entropy
            output, lse, stderr, lse_stderr, bars, shown, weights_of, entropy_of = (
                _alike(column, request.queries, scores.device) for column in columns
            )
            met, positions, drawn = (
                torch.from_numpy(column).to(scores.device)
                for column in (bar <= allowed, sample.positions[:, :SHOWN], figures.drawn.astype(np.int64))
            )
            return Estimated(
                output, lse, stderr, lse_stderr, bars, met, positions, shown, weights_of, drawn, entropy_of
            )

        return assembled, bar, allowed, error.stderr if request.pools else error.lse_stderr

    def _value_size(self) -> float:
        return 1.0 if self.source.num_classes else self.source.columns.value_size

    def spread(self, task: Round, sample: DrawnSample, state: State) -> tuple[State, ErrorEstimate]:
        """Merge unindexed records into the answer. Return the answer and its error estimate."""
        assert sample.answer is not None
        spread = ErrorEstimate.of(sample.figures, sample.answer)
        if self.unindexed is not None:
            streamed = self.source.stream(replace(self.request.at(task.which), allowed=self.unindexed))
            state = merge([state, (streamed[0].to(state.output), streamed[1].to(state.lse))])
            spread = joined([spread, sure(*(column.detach().cpu().double().numpy() for column in streamed))])
        return state, spread


def _alike(column: Tensor | Numbers, queries: Tensor, device: torch.device) -> Tensor:
    """Return a column in the dtype of the queries, by numpy if no gradient is lost: that takes less time than torch."""
    if isinstance(column, Tensor) and (column.requires_grad or device.type != "cpu"):
        return column.to(device, queries.dtype)
    numbers = np.asarray(column).astype(np.float64 if queries.dtype is torch.float64 else np.float32, copy=False)
    return torch.from_numpy(numbers).to(device)


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
    return int(segment.keys.strides[0] + (segment.values.strides[0] if pools and segment.values is not None else 0))


def magnitude(lse: Numbers) -> Numbers:
    """Return |lse|, and 0 where it is -inf."""
    return np.abs(np.where(np.isneginf(lse), 0.0, lse))


def error_of(
    tolerance: Tolerance,
    pools: bool,  # False: only the log-normaliser is computed
    size: Numbers | float,  # (q,) |log Ẑ|, for rounding; 0 if logits are float64 and values are pooled
    length: Numbers,  # (q,) ‖o‖
    error: Bars,
    value_size: Callable[[], float],  # rms‖v‖
) -> tuple[Numbers, Numbers]:  # (q,), (q,)
    """Return the error bar of the output (or of Z relative to Z), and the largest bar that meets the tolerance."""
    rounding = EPS * (1 + size)
    if not pools:  # add the rounding of log Z to float32
        wide = error.lse_bar + np.expm1(np.minimum(rounding, 700))
        return wide, np.full_like(wide, tolerance.rtol)
    bar = error.bar + rounding * length
    allowed = tolerance.atol + tolerance.rtol * length
    if np.count_nonzero(bar > allowed):
        allowed = tolerance.atol + tolerance.rtol * np.maximum(length, SMALL * value_size())
    return bar, allowed
