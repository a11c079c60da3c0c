"""One round of an estimate: what to draw, the answer and its error bar, what it costs, and which round comes next."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.error import Bars, ErrorEstimate, bars, joined, pooled_at, spread_at, sure
from softdb.attend.protocol import IndexedRecords
from softdb.attend.request import Live, Positions, Request
from softdb.attend.result import Estimated
from softdb.attend.scoring import metric_in_place, pool_rows, score_rows
from softdb.check import Tolerance
from softdb.index.contract import Floats, prepared
from softdb.index.planner import EstimateCosts, estimate_costs
from softdb.index.tail import FEWEST, Drawing, Tail, TailSample, seeds_of, subsample
from softdb.kernels import available, native
from softdb.pool import State, merge
from softdb.scoring import Softmax, divisor, softmax

Numbers = NDArray[np.float64]

FIRST, GROWTH = 400, 4  # records pooled for a query in the first round, and how much more in each further one
SCORED = 4  # times as many are drawn and scored
NEAR = 3  # times as many are scored because their codes are nearest
LOOKS, WIDER = 3, 8  # how often it is looked wider for what is heavy, and how much wider
BLIND, BLINDER = 0.3, 0.8  # of the bar, at most, may be for what was not drawn: else it is looked wider
MARGIN = 1.3  # more than the error bar says will be needed
LEAST = 25  # records that must be pooled, or their spread tells nothing of the others'
AT_ONCE = 1 << 22  # records scored at once, of all queries
SMALL = 0.1  # of that size: below it, tolerance is relative to it


class Subsample(NamedTuple):
    """Records to pool, and what is known of the others."""

    positions: Positions  # (q, k), -1 = none
    log_weights: Floats  # (q, k) log of the inverse of each one's probability
    scores: Numbers  # (q, k) by the index's metric, -inf for none
    unseen: Numbers  # (q,) as in `ErrorEstimate`, relative to what was drawn
    hidden: Numbers  # (q,)
    thinned: Numbers  # (q,)


class Round(NamedTuple):
    """Some of the queries, how many records to pool for each, and how wide to look for what is heavy."""

    which: Positions  # (q,)
    budget: int
    look: int = 0


class Estimator(NamedTuple):
    """Source and request of an estimate."""

    request: Request
    source: IndexedRecords
    tolerance: Tolerance
    tail: Tail
    factor: float  # logits are this times the metric's score
    asked: Floats  # (q, d) the queries as the index sees them
    counts: Live  # (size,) over positions: the records that take part and can be drawn
    unindexed: Live | None  # (size,): those that cannot, as the index does not hold them
    taking_part: int  # how many they are together
    drawable: int  # and how many of them can be drawn
    least: int = LEAST  # of several parts the caller counts all together

    @classmethod
    def of(cls, request: Request, source: IndexedRecords) -> Estimator | None:
        """None where nothing can be drawn."""
        (tail, indexed_until), columns, tolerance = source.sampler(), source.columns, request.tolerance
        if tail is None or tolerance is None or request.mask is not None or not len(request.queries):
            return None
        folded = request.detached.folded if available() and isinstance(request.weighting, Softmax) else None
        if folded is None or folded.scale is None or folded.metric is not tail.index.metric:
            return None
        scale = folded.scale.detach() if isinstance(folded.scale, Tensor) else folded.scale  # it decides what is drawn
        factor, keep = float(scale) / request.temperature, request.keep(source.live)
        count = columns.count if request.allowed is None else int(np.count_nonzero(keep))
        if not 1e-30 < factor < 1e30 or count < FEWEST:
            return None
        counts, unindexed, drawable = keep, None, count
        if indexed_until < columns.size:
            counts, unindexed = keep.copy(), keep.copy()
            counts[indexed_until:], unindexed[:indexed_until] = False, False
            drawable = int(np.count_nonzero(counts))
        if not drawable:
            return None
        asked = prepared(folded.queries.detach().cpu().numpy(), tail.index.metric)
        return cls(request, source, tolerance, tail, factor, asked, counts, unindexed, count, drawable)

    def after(self, task: Round, found: Estimated, allowed: Tensor, blind: Tensor) -> tuple[Tensor, list[Round]]:
        """Mask (q,) of the queries that a round has answered, and the rounds for the others."""
        most, further = self.tolerance.most, []
        wider = blind & ~found.met & (task.look < looks(self.request))
        done = found.met | (~wider & (task.budget == most))
        more = ~done & ~wider
        if bool(wider.any()):
            further.append(task._replace(which=task.which[wider.cpu().numpy()], look=task.look + 1))
        if bool(more.any()):
            needed = MARGIN * task.budget * float((found.bar / allowed)[more].square().median())
            budget = max(GROWTH * task.budget, int(min(needed, self.source.columns.size)))
            further.append(Round(task.which[more.cpu().numpy()], min(budget, most or budget), task.look))
        return done, further

    def near(self, task: Round) -> int:
        """Number of records that are scored because they are near: more where few of those found take part."""
        return int(min(NEAR * task.budget * WIDER**task.look / self._share, self.tail.size))

    def draws(self, task: Round) -> int:
        """And how many of the others are drawn."""
        return int(SCORED * task.budget * 2**task.look / self._share)

    @property
    def _share(self) -> float:
        """Of the records that the index holds, about how many take part."""
        return min(1.0, max(self.drawable / max(1, self.tail.size), 0.05))

    @property
    def _width(self) -> int:
        return self.source.width if self.request.pools else 0

    def parts(self, task: Round) -> list[Round]:
        """The task in parts that fit into memory."""
        parts = -(-len(task.which) * self.near(task) // AT_ONCE)
        return [task._replace(which=one) for one in np.array_split(task.which, min(parts, len(task.which)) or 1)]

    def too_dear(self, task: Round) -> bool:
        """Return True if a pass over every record costs less, where the number of draws is not given.

        A round costs its first look, and whatever more a wider one scores.
        """
        if self.tolerance.most is not None:
            return False
        q, first = len(task.which), Round(task.which, FIRST)
        records, usual = (self.near(one) + self.draws(one) + len(self.tail.reach.apart) for one in (task, first))
        return self._costs.round(q * records / usual) > self._exact_seconds(q)

    def _exact_seconds(self, queries: int) -> float:
        """Cost of a pass over every record, in seconds."""
        return self._costs.exact.seconds(self.taking_part * (self.asked.shape[1] + self._width), queries)

    @property
    def _kind(self) -> object:
        """Features by which estimates take about the same time."""
        rtol, atol = self.tolerance.rtol, self.tolerance.atol
        scales = self.factor, rtol, atol, float(len(self.asked)), self.taking_part / self.source.count
        return self._width, *(math.frexp(scale)[1] for scale in scales)

    def hopeless(self) -> bool:
        """Return True if estimates of this kind have taken longer than a pass over every record."""
        return self.tolerance.most is None and self.tail.planner.hopeless(self._kind)

    def learn(self, seconds: float) -> None:
        """Take in how long an estimate took, a pass for what it left included."""
        if self.tolerance.most is None:
            self.tail.planner.learn(self._kind, seconds / max(self._exact_seconds(len(self.asked)), 1e-9))

    @property
    def _costs(self) -> EstimateCosts:
        return self.tail.planner.estimate_costs(self._width, self._measured)

    def _measured(self) -> EstimateCosts:
        plain = replace(self.request.detached, allowed=None, tolerance=None)
        some = self.source.first(self.asked.shape[1] + self._width)
        size, asked = some.count, self.request.detached.queries

        def repeated(count: int) -> Tensor:
            return asked[torch.arange(count) % len(asked)]

        def pass_over(count: int) -> object:
            return some.stream(replace(plain, queries=repeated(count)))

        def one_round(count: int) -> object:
            estimator = Estimator.of(replace(self.request.detached, queries=repeated(count)), self.source)
            return estimator and estimator.found(Round(np.arange(count), FIRST))

        with torch.no_grad():
            return estimate_costs(pass_over, size * (self.asked.shape[1] + self._width), one_round)

    def found(self, task: Round) -> tuple[Estimated, Tensor, Tensor]:
        """A round: as `judged`."""
        chosen = self.chosen(task)
        return self.judged(task, chosen, *self.pooled(task, chosen))

    def chosen(self, task: Round) -> Subsample:
        """Draw records, and choose those to pool."""
        drawn = self.tail.draw(
            Drawing(
                self.source.columns, self.asked[task.which], self.factor, self.near(task), self.draws(task),
                2 * self.request.seed, 1 - self.tolerance.confidence,
            )
        )  # fmt: skip
        out = (drawn.positions < 0) | ~self.counts[drawn.positions]
        drawn.positions[out], drawn.scores[out] = -1, -np.inf
        logits = self.factor * drawn.scores + drawn.log_weights
        seeds = seeds_of(self.asked[task.which], 2 * self.request.seed + 1)
        places, logs, largest = subsample(drawn, logits, task.budget, seeds)
        total, unseen, hidden = _beyond(drawn, logits)
        thinned = np.exp(np.where(np.isneginf(largest), -np.inf, largest - np.where(np.isneginf(total), 0, total)))
        few = ((places >= 0).sum(1) < self.least) & (thinned > 0)
        unseen[few], hidden[few] = np.inf, np.inf
        if not places.shape[1]:
            places, logs = np.full((len(logits), 1), -1, np.int64), np.zeros((len(logits), 1), np.float32)
        none, places = places < 0, np.maximum(places, 0)
        positions = np.take_along_axis(drawn.positions, places, 1)
        scores = np.take_along_axis(drawn.scores, places, 1)
        positions[none], scores[none] = -1, -np.inf
        return Subsample(positions, logs, scores, unseen, hidden, thinned)

    def pooled(self, task: Round, chosen: Subsample) -> tuple[Tensor, Numbers, State]:  # (q, k), (q, k), …
        """Scores of what was chosen, logits with the log-weights, and the answer: the softmax over them."""
        request, columns, positions = self.request.at(task.which), self.source.columns, chosen.positions
        scores, temperature = torch.from_numpy(chosen.scores), request.temperature
        if metric_in_place(request.score, request.queries, columns) is None:
            scores = score_rows(request.score, request.queries, columns, positions)
        # a copy for the error, which has no gradient
        exact_logits = scores.detach().cpu().double() / divisor(temperature, torch.float64)
        logits: Numbers = exact_logits.numpy() + chosen.log_weights.astype(np.float64)
        if not scores.requires_grad and scores.device.type == "cpu":
            return scores, logits, State(*pooled_at(logits, columns, positions, self._width))
        live, temperature = torch.from_numpy(positions >= 0).to(scores.device), divisor(temperature, scores.dtype)
        log_weights = torch.from_numpy(chosen.log_weights).to(scores)
        weights, lse = softmax(scores + log_weights * temperature, temperature, live)
        if not self._width:
            return scores, logits, State(lse.new_zeros(len(lse), 0), lse)
        return scores, logits, State(pool_rows(weights, columns, positions, self.source.num_classes), lse)

    def judged(
        self, task: Round, chosen: Subsample, scores: Tensor, logits: Numbers, state: State
    ) -> tuple[Estimated, Tensor, Tensor]:
        """The answer with its error, the bar (q,) that is allowed, and (q,) whether too much is for the unseen."""
        request, precise = self.request, not scores.requires_grad and scores.device.type == "cpu"
        state, spread, weights = self.spread(task, chosen, logits, state)
        precise &= self.unindexed is None
        found = bars(spread, self.tolerance.confidence)
        bar, allowed = self._error(state, spread, found, precise)
        blind = torch.from_numpy(blinded(request, spread, found, bar.numpy()))
        device = scores.device
        dtype = request.queries.dtype if request.queries.is_floating_point() else torch.float32

        def told(column: Tensor) -> Tensor:
            return column.to(device, dtype)

        answer = Estimated(
            told(state.output), told(state.lse), told(torch.from_numpy(found.stderr)),
            told(torch.from_numpy(found.lse_stderr)), told(bar), (bar <= allowed).to(device),
            torch.from_numpy(chosen.positions).to(device), told(scores.detach()), told(weights),
        )  # fmt: skip
        return answer, told(allowed), blind.to(device)

    def spread(
        self,
        task: Round,
        chosen: Subsample,
        logits: Numbers,  # (q, k) with the log-weights
        state: State,
        salt: int = 0,  # of the signs: parts that are merged need their own
    ) -> tuple[State, ErrorEstimate, Tensor]:  # and the candidates' weights, (q, k)
        """The answer with the unindexed records, and what its error is made of."""
        output, lse = (one.detach().cpu().double().numpy() for one in (state.output, state.lse))
        columns, positions = self.source.columns, chosen.positions
        spread, weights = spread_at(logits, chosen.log_weights, columns, positions, (output, lse), salt)
        spread = self._known(spread, chosen)
        if self.unindexed is not None:
            rest = self.source.stream(replace(self.request.at(task.which), allowed=self.unindexed))
            state = merge([state, (rest[0].to(state.output), rest[1].to(state.lse))])
            exact = sure(*(one.detach().cpu().double().numpy() for one in rest))
            before, spread = spread.lse, joined([spread, exact])
            weights = weights * torch.from_numpy(np.exp(before - spread.lse))[:, None]
        return state, spread, weights

    def _known(self, spread: ErrorEstimate, chosen: Subsample) -> ErrorEstimate:
        """The spread of what was drawn, with what is known of the values and weights that were not."""
        reach, output = self.tail.reach, spread.output
        if not self.request.pools:
            far = np.ones(len(output))
        elif self.source.num_classes:
            far = np.sqrt(np.square(output).sum(1) + 1 - 2 * output.min(1, initial=0.0))  # from the farthest corner
        else:
            far = reach.value_radius + np.linalg.norm(output - reach.centre, axis=1)
        return spread._replace(unseen=chosen.unseen, hidden=chosen.hidden, thinned=chosen.thinned, reach=far)

    def _error(
        self, state: State, spread: ErrorEstimate, found: Bars, precise: bool
    ) -> tuple[Tensor, Tensor]:  # (q,), (q,)
        """As `error_of`."""
        one = 1.0 if self.source.num_classes else None
        output = state.output if self.request.pools else None
        return error_of(self.tolerance, output, spread, found, precise, lambda: one or self.source.columns.value_size)


def looks(request: Request) -> int:
    """Maximum number of wider looks: none where the cost is bounded and a gradient is wanted.

    A step of training asks for a direction at a bounded cost, not for a narrow bar.
    """
    most = None if request.tolerance is None else request.tolerance.most
    return LOOKS if most is None or (most >= LEAST and not request.wants_gradient) else 0


def blinded(request: Request, spread: ErrorEstimate, found: Bars, bar: Numbers) -> Live:  # (q,) -> (q,)
    """Queries of whose bar too much is for what was not drawn; where more may be pooled, that makes it less, too."""
    bounded = request.tolerance is not None and request.tolerance.most is not None
    reach = spread.reach if request.pools else 1.0
    blind: Live = (found.blind * reach > (BLIND if bounded else BLINDER) * bar) | np.isinf(found.blind)
    return blind


def error_of(
    tolerance: Tolerance,
    output: Tensor | None,  # (q, v); None: the log-normaliser alone is wanted
    spread: ErrorEstimate,
    found: Bars,
    precise: bool,  # whether logits are float64
    value_size: Callable[[], float],  # rms‖v‖
) -> tuple[Tensor, Tensor]:  # (q,), (q,)
    """The error bar, of the output or of Z relative to it, and the largest one that meets the tolerance."""
    eps = float(np.finfo(np.float32).eps)
    size = np.abs(np.nan_to_num(spread.lse, neginf=0.0))
    if output is None:  # log Z is rounded to float32
        wide = torch.from_numpy(found.lse_bar + np.expm1(np.minimum(eps * (1 + size), 700)))
        return wide, torch.full_like(wide, tolerance.rtol)
    rounding = eps * (1 + (0 if precise else size))
    length: Tensor = torch.linalg.vector_norm(output.detach().cpu().double(), dim=1)
    bar = torch.from_numpy(found.bar) + torch.from_numpy(rounding * np.ones(len(length))) * length
    if bool((bar > tolerance.atol + tolerance.rtol * length).any()):
        length = length.clamp(min=SMALL * value_size())
    return bar, tolerance.atol + tolerance.rtol * length


def _beyond(drawn: TailSample, logits: Numbers) -> tuple[Numbers, Numbers, Numbers]:  # (q,), (q,), (q,)
    """log Ẑ, and `unseen` and `hidden` relative to it, once the draws were held against what was thought of them.

    Infinite where a record that was drawn is heavier than any was said to be. Where the squared terms drawn add up to
    more than was expected, so may those that were not.
    """
    found = np.empty((3, len(logits)))
    native().log_sums(logits, drawn.log_weights, found)
    total, squares, largest = found
    with np.errstate(invalid="ignore", over="ignore"):
        base = np.where(np.isneginf(total), 0, total)
        ratio = np.exp(np.fmax(squares - drawn.expected, 0))
        hidden = np.nan_to_num(np.exp(drawn.hidden - 2 * base) * ratio, nan=np.inf, posinf=np.inf)
        unseen = np.exp(drawn.unseen - base)
    wrong = largest > drawn.unseen + 1e-6
    return total, np.where(wrong, np.inf, unseen), np.where(wrong, np.inf, hidden)
