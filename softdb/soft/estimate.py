"""The soft query estimated to a tolerance: draws that grow until the error bar fits, or a pass over every record."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Estimate, Hits, Pooled, Resolve
from softdb.check import Tolerance, shown
from softdb.compiled.threads import available
from softdb.errors import BadInput
from softdb.index.contract import Floats, prepared
from softdb.index.rerank import scores_at
from softdb.index.tail import FEWEST, Tail, kept, seeds_of
from softdb.pool import State, merge
from softdb.scores import fold
from softdb.soft.explain import explained
from softdb.soft.query import Finder, Live, Positions, SoftQuery, metric_in_place, pool_rows, score_rows
from softdb.soft.spread import Spread, pooled_at, spread_at
from softdb.soft.whole import attend_all, log_all
from softdb.store import Snapshot
from softdb.stream import stream
from softdb.weights import Softmax, divisor, softmax

__all__ = ["attend_estimated", "log_partition"]

FIRST, GROWTH = 400, 4  # records pooled for a query in the first round, and how much more in each further one
SCORED = 3  # times as many are drawn and scored
NEAR = 4  # times as many codes are looked at one by one
MARGIN = 1.3  # more than the error bar says will be needed
READ, PASSED = 1e-10, 6e-12  # seconds to read a number of a record in a stream, and to use it for one query
CALLED, SPENT, GATHERED = 1e-3, 1e-6, 2e-9  # seconds an estimate takes, for each record pooled, each number of it
LEAST = 50  # records that must be drawn, or nothing is known of those that are not
SMALL = 0.1  # of that size: below it, tolerance is relative to it


def attend_estimated(
    query: SoftQuery,
    snapshot: Snapshot,
    tail: Tail | None,  # None: nothing can draw
    border: int,  # the first position that it does not cover
    tolerance: Tolerance,
    seed: int,
    find: Finder,  # an exact finder
    resolve: Resolve,
) -> Pooled:
    """The softmax over all records, to a tolerance.

    Each round draws records for the queries whose error bar does not fit yet, scores them exactly, keeps some by their
    weights and pools these with the inverse of their probabilities. Records younger than the index are pooled whole.
    Queries for which a pass over every record costs less are answered so, and all of them where nothing can be drawn:
    no index, one of another metric, a mask. Raises BadInput for weightings and scores that have no estimator.
    """
    _require_estimator(query)
    plan = None if tail is None else _plan(query, snapshot, tail, border, seed)
    if plan is None:
        return attend_all(query, snapshot, find, resolve)
    parts, rest = plan.rounds(tolerance)
    if len(rest) == len(query.queries):
        return attend_all(query, snapshot, find, resolve)
    return _joined(plan, parts, rest, tolerance, find, resolve)


def log_partition(
    query: SoftQuery,
    snapshot: Snapshot,
    tail: Tail | None,
    border: int,
    tolerance: Tolerance,  # of Z, relative to it
    seed: int,
) -> Estimate:
    """log Z alone, Z = Σ exp(s / T) over all records, as `attend_estimated` estimates it; nothing is pooled."""
    plan = None if tail is None else _plan(query, snapshot, tail, border, seed)
    parts, rest = ([], np.arange(len(query.queries))) if plan is None else plan._replace(pools=False).rounds(tolerance)
    found = [(which, part.lse, part.bar, part.met) for which, part in parts]
    if len(rest):
        lse = log_all(query.of(rest), snapshot)
        found.append((rest, lse, torch.zeros_like(lse.detach()), torch.ones_like(lse, dtype=torch.bool)))
    order = np.concatenate([which for which, *_ in found])
    back = torch.from_numpy(np.argsort(order)).to(query.queries.device)
    lse, bar, met = (torch.cat(column)[back] for column in list(zip(*found, strict=True))[1:])
    exact = torch.zeros_like(met)
    exact[torch.from_numpy(rest).to(exact.device)] = True
    return Estimate(lse, bar, met, exact)


class _Estimate(NamedTuple):
    """An estimated answer to some of the queries."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,)
    stderr: Tensor  # (q,)
    lse_stderr: Tensor  # (q,)
    bar: Tensor  # (q,)
    met: Tensor  # (q,) bool
    positions: Tensor  # (q, k) int64, -1 = none
    scores: Tensor  # (q, k)
    weights: Tensor  # (q, k)

    def of(self, which: Tensor) -> _Estimate:
        """The same for some of them."""
        return _Estimate(*(column[which] for column in self))

    def padded(self, width: int) -> _Estimate:
        """The same with so many candidates."""
        more = (0, width - self.positions.shape[1])
        pad = torch.nn.functional.pad
        return self._replace(
            positions=pad(self.positions, more, value=-1),
            scores=pad(self.scores, more, value=-torch.inf),
            weights=pad(self.weights, more),
        )


class _Drawn(NamedTuple):
    """Records to pool."""

    positions: Positions  # (q, k), -1 = none
    log_weights: Floats  # (q, k) log of the inverse of each one's probability
    scores: Tensor  # (q, k) by the index's metric, -inf for none
    known: Live  # (q,) whether so many were drawn that what they say of the others counts


class _Plan(NamedTuple):
    """What is drawn from, for what."""

    query: SoftQuery
    snapshot: Snapshot
    tail: Tail
    factor: float  # logits are this times the metric's score
    asked: Floats  # (q, d) the queries as the index sees them
    counts: Live  # (size,) over positions: the records that take part and can be drawn
    young: Live | None  # (size,): those that cannot, as the index does not hold them
    taking_part: int  # how many they are together
    seed: int
    pools: bool = True  # else log Z alone is wanted

    def rounds(self, tolerance: Tolerance) -> tuple[list[tuple[Positions, _Estimate]], Positions]:
        """Estimates, each with the queries (q,) that it answers; and the queries that are left for an exact pass."""
        rest, budget = np.arange(len(self.asked)), FIRST
        parts: list[tuple[Positions, _Estimate]] = []
        while len(rest):
            if tolerance.most is None and self._seconds(len(rest), budget) > self._exact_seconds(len(rest)):
                break
            budget = min(budget, tolerance.most or budget)
            found, allowed = self._estimate(rest, budget, tolerance)
            stop = torch.ones_like(found.met) if budget == tolerance.most else found.met
            if bool(stop.all()):
                return [*parts, (rest, found)], rest[:0]
            parts.append((rest[stop.cpu().numpy()], found.of(stop)))
            rest = rest[~stop.cpu().numpy()]
            needed = MARGIN * budget * float((found.bar / allowed)[~stop].square().median())
            budget = max(GROWTH * budget, int(min(needed, self.snapshot.size)))
        return parts, rest

    def _seconds(self, queries: int, budget: int) -> float:
        numbers = int(self.asked.shape[1]) + self.query.pooled_dim
        return CALLED + queries * budget * (SPENT + GATHERED * numbers)

    def _exact_seconds(self, queries: int) -> float:
        """What a pass over every record costs."""
        numbers = float(self.taking_part * (self.asked.shape[1] + self.query.pooled_dim))
        return numbers * (READ + PASSED * queries)

    def _estimate(self, which: Positions, budget: int, tolerance: Tolerance) -> tuple[_Estimate, Tensor]:
        """The answer of one round, and the bar (q,) that is allowed."""
        query, drawn = self.query.of(which), self._drawn(which, budget)
        scores, positions = drawn.scores, drawn.positions
        if metric_in_place(query.score, query.queries, self.snapshot) is None:
            scores = score_rows(query.score, query.queries, self.snapshot, positions)
        # a copy for the error, which has no gradient
        logits = (scores.detach().cpu() / divisor(query.temperature, scores.dtype)).numpy() + drawn.log_weights
        state = self._pooled(query, scores, drawn, logits)
        if self.young is not None:
            state = State(*merge([state, self._whole(query)])[:2])
        output, lse = (one.detach().cpu().numpy() for one in (state.output, state.lse))
        spread = spread_at(logits, drawn.log_weights, self.snapshot, positions, output, lse, tolerance.confidence)
        bar, allowed = self._error(state, spread, tolerance)
        bar = bar.masked_fill(~torch.from_numpy(drawn.known), torch.inf)
        stderr, lse_stderr, weights, met = spread.stderr, spread.lse_stderr, spread.weights, bar <= allowed
        columns = (stderr, lse_stderr, bar, met, torch.from_numpy(positions), scores.detach(), weights)
        return _Estimate._make((state.output, state.lse, *(one.to(scores.device) for one in columns))), allowed

    def _pooled(self, query: SoftQuery, scores: Tensor, drawn: _Drawn, logits: NDArray[np.floating]) -> State:
        """The softmax over what was drawn."""
        width = query.pooled_dim if self.pools else 0
        if not scores.requires_grad and scores.device.type == "cpu":
            return State(*pooled_at(logits, self.snapshot, drawn.positions, width))
        live = torch.from_numpy(drawn.positions >= 0).to(scores.device)
        temperature = divisor(query.temperature, scores.dtype)
        log_weights = torch.from_numpy(drawn.log_weights).to(scores)
        weights, lse = softmax(scores + log_weights * temperature, temperature, live)
        if not width:
            return State(lse.new_zeros(len(lse), 0), lse)
        return State(pool_rows(weights, self.snapshot, drawn.positions, query.num_classes), lse)

    def _drawn(self, which: Positions, budget: int) -> _Drawn:
        """Which records to pool."""
        asked, near = self.asked[which], min(NEAR * budget, self.snapshot.size)
        drawn = self.tail.draw(asked, self.factor, near, SCORED * budget, 2 * self.seed)
        positions = self.snapshot.positions(drawn.rows)
        positions[~self.counts[positions] | (positions < 0)] = -1
        chosen = (positions >= 0).sum(1)
        known = (chosen >= LEAST) | (chosen == self.taking_part)
        scores = scores_at(self.snapshot, asked, positions, self.tail.index.metric)
        logits = np.float32(self.factor) * scores + drawn.log_weights
        places, logs = kept(drawn.rows, logits, drawn.log_weights, budget, seeds_of(asked, 2 * self.seed + 1))
        if not places.shape[1]:
            none = np.full((len(which), 1), -1, np.int64)
            return _Drawn(none, np.zeros(none.shape, np.float32), torch.full(none.shape, -torch.inf), known)
        nothing, places = places < 0, np.maximum(places, 0)
        positions, scores = np.take_along_axis(positions, places, 1), np.take_along_axis(scores, places, 1)
        positions[nothing], scores[nothing] = -1, -np.inf
        return _Drawn(positions, logs, torch.from_numpy(scores), known)

    def _whole(self, query: SoftQuery) -> tuple[Tensor, Tensor]:
        """The soft query over the records that the index does not hold."""
        output, lse = stream(
            query.queries, self.snapshot, query.score, query.temperature,
            allowed=self.young, num_classes=query.num_classes, value_dim=query.pooled_dim,
        )  # fmt: skip
        return output if self.pools else output[:, :0], lse

    def _error(self, state: State, spread: Spread, tolerance: Tolerance) -> tuple[Tensor, Tensor]:  # (q,), (q,)
        """The error bar, of the output or of Z relative to it, and the largest one that meets the tolerance."""
        if not self.pools:
            return spread.lse_bar, torch.full_like(spread.lse_bar, tolerance.rtol)
        length: Tensor = torch.linalg.vector_norm(state.output.detach(), dim=1).cpu()
        rounding = torch.finfo(length.dtype).eps * (1 + state.lse.detach().cpu().abs().nan_to_num(0, 0, 0)) * length
        bar = spread.bar + rounding
        if bool((bar > tolerance.atol + tolerance.rtol * length).any()):
            length = length.clamp(min=SMALL * (1.0 if self.query.num_classes else self.snapshot.value_size))
        return bar, tolerance.atol + tolerance.rtol * length


def _require_estimator(query: SoftQuery) -> None:
    """Raises BadInput where no index could draw for the query."""
    if not isinstance(query.weighting, Softmax):
        raise BadInput(
            f"the weights are {type(query.weighting).__name__.lower()}, for which there is no estimate; a tolerance "
            "goes with softmax and with a gaussian kernel: leave it out for the exact answer, or give k"
        )
    with torch.no_grad():
        folded = fold(query.score, query.queries[:1])
    if folded is None or folded.scale is None:
        raise BadInput(
            f"the score is {shown(query.score)}, whose values no index knows, so nothing can be drawn for it; a "
            "tolerance goes with Dot, ScaledDot, Cosine, General, NegativeL2 and Gaussian: leave it out for the exact "
            "answer, or give k"
        )


def _plan(query: SoftQuery, snapshot: Snapshot, tail: Tail, border: int, seed: int) -> _Plan | None:
    """What is drawn from; None where nothing can be drawn."""
    if not isinstance(query.weighting, Softmax) or query.mask is not None or not available() or not len(query.queries):
        return None
    with torch.no_grad():
        folded = fold(query.score, query.queries)
    if folded is None or folded.scale is None or folded.metric is not tail.index.metric:
        return None
    factor = float(folded.scale) / query.temperature
    keep, count = snapshot.live, snapshot.count
    if query.allowed is not None:
        keep = snapshot.live & query.allowed
        count = int(np.count_nonzero(keep))
    if not 1e-30 < factor < 1e30 or count < FEWEST:
        return None
    counts, young = keep, None
    if border < snapshot.size:
        counts, young = keep.copy(), keep.copy()
        counts[border:], young[:border] = False, False
    asked = prepared(folded.queries.detach().cpu().numpy(), tail.index.metric)
    return _Plan(query, snapshot, tail, factor, asked, counts, young, count, seed)


def _joined(
    plan: _Plan,
    parts: list[tuple[Positions, _Estimate]],
    rest: Positions,  # (r,) queries left
    tolerance: Tolerance,
    find: Finder,
    resolve: Resolve,
) -> Pooled:
    """Estimates and exact answers in the order of the queries."""
    query, snapshot = plan.query, plan.snapshot
    estimates, order = [part for _, part in parts], [which for which, _ in parts]
    if len(rest):
        estimates.append(_exactly(query.of(rest), snapshot, find, resolve))
        order.append(rest)
    whole, device = estimates[0], query.queries.device
    if len(estimates) > 1:
        width = max(part.positions.shape[1] for part in estimates)
        columns = zip(*(part.padded(width) for part in estimates), strict=True)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
        whole = _Estimate(*(torch.cat(column)[back] for column in columns))
    exact = torch.zeros(len(query.queries), dtype=torch.bool, device=device)
    exact[torch.from_numpy(rest).to(device)] = True
    weights, best = whole.weights.sort(dim=1, descending=True, stable=True)
    rows = torch.from_numpy(snapshot.rows(whole.positions.cpu().numpy())).to(device)
    pooled = Pooled(
        whole.output,
        whole.lse,
        exact=exact,
        missed_mass=torch.zeros_like(whole.lse.detach()),
        candidates=torch.where(exact, query.taking_part(snapshot).to(exact.device), (whole.positions >= 0).sum(1)),
        hits=Hits(rows.gather(1, best), query.shown_scores(whole.scores).gather(1, best), resolve),
        weights=weights,
        finder=plan.tail.index.kind,
        explanation=lambda count: explained(query, snapshot, pooled, count, find, resolve),
        bar=whole.bar,
        stderr=whole.stderr,
        lse_stderr=whole.lse_stderr,
        met=whole.met,
    )
    return pooled


def _exactly(query: SoftQuery, snapshot: Snapshot, find: Finder, resolve: Resolve) -> _Estimate:
    """The exact answer, as an estimate without error."""
    pooled = attend_all(query, snapshot, find, resolve)
    none = torch.full((len(query.queries), 1), -1, device=pooled.lse.device)
    nothing = torch.zeros_like(pooled.lse.detach())
    return _Estimate(
        pooled.output, pooled.lse, nothing, nothing, nothing, torch.ones_like(pooled.exact), none,
        torch.full_like(none, -torch.inf, dtype=pooled.lse.dtype), torch.zeros_like(none, dtype=pooled.lse.dtype),
    )  # fmt: skip
