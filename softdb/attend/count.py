"""Number of records within a radius, estimated from some that are drawn through the index."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.answers import Estimate
from softdb.attend.blocks import scored_tiles
from softdb.attend.error import SKEWED, f_quantile
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Live, Positions, Request
from softdb.attend.scoring import score_rows
from softdb.check import Tolerance
from softdb.index.contract import prepared
from softdb.index.query import Query
from softdb.index.tail import FEWEST, Drawing, Tail
from softdb.kernels import available

FIRST, GROWTH = 1200, 4  # records drawn for a query in the first round, and how many more in each further one
NEAR = 1.3  # times as many codes are looked at one by one
LEAST = 50  # records that must be drawn, or nothing is known of those that are not
LOOKS, WIDER = 2, 8  # how often it is looked wider for what lies inside, and how much wider
BLIND = 0.3  # of the bar, at most, may be for what was not drawn
BOUNDARY = 50  # records drawn just outside, which stand for those missed just inside

EXACTLY = 16  # queries that are counted exactly at once
GATHERED = 1 << 24  # numbers of keys gathered at once for that, where they cannot be read in place

Numbers = NDArray[np.float64]


@torch.no_grad()
def count_by_scores(source: SourceRecords, request: Request, least: float) -> Estimate:
    """Number of records that score at least so much, by scoring all. Cost q n d."""
    value = torch.zeros(len(request.queries), dtype=torch.float64)
    for tile, scores in scored_tiles(request.detached, source):
        value[tile.chunk] += (scores >= least).sum(1).to(value)
    sure = torch.ones_like(value, dtype=torch.bool)
    return Estimate(value, torch.zeros_like(value), sure, sure)


def count_drawn(
    source: IndexedRecords,
    request: Request,
    least: float,  # the score that counts
) -> Estimate:
    """Number of records scoring at least so much, ĉ = Σ 1[s ≥ least] / p over those drawn (Horvitz and Thompson 1952).

    Its variance is Σ 1[s ≥ least] (1 - p) / p². One more record counts as drawn, as uncertain as those just outside, so
    that few draws, or none, do not pass for certainty; and the bar allows for records that draws may not show, in lists
    that may hold some (docs/error-bars.md). Draws grow until the bar fits; a pass over every record answers
    where that costs less. The records younger than the index are compared one by one.
    """
    tolerance = request.tolerance
    assert tolerance is not None
    ball = _Ball(request, source, tolerance, least, request.keep(source.live), *source.sampler())
    rest, drawn = np.arange(len(request.queries)), FIRST
    value, bar = np.zeros(len(rest)), np.full(len(rest), np.inf)
    taking_part = int(np.count_nonzero(ball.keep))
    while ball.tail is not None and available() and taking_part >= FEWEST and len(rest):
        most = tolerance.most or ball.tail.planner.most_counted(taking_part)
        if drawn > most and tolerance.most is None:
            break
        drawn = min(drawn, most)
        left = rest
        for look in range(LOOKS + 1):  # wider, where much of the bar is for what was not drawn
            value[left], bar[left], blind = ball.estimated(ball.tail, left, drawn, look)
            left = left[blind & (bar[left] > ball.allowed(value[left]))]
            if not len(left):
                break
        fits = bar[rest] <= ball.allowed(value[rest])
        rest = rest[:0] if drawn == tolerance.most else rest[~fits]
        drawn *= GROWTH
    exact = np.zeros(len(value), np.bool_)
    if len(rest):
        value[rest], bar[rest], exact[rest] = ball.exactly(rest, ball.keep), 0.0, True
    met = bar <= ball.allowed(value)
    told = torch.from_numpy
    return Estimate(told(value), told(bar), told(met), told(exact))


def count_exactly(source: IndexedRecords, request: Request, least: float) -> NDArray[np.int64]:  # (q,)
    """Number of records that score at least so much. Cost q n d."""
    ball = _Ball(request, source, Tolerance(0.0, 0.0, 0.0, None), least, request.keep(source.live), None, 0)
    return ball.exactly(np.arange(len(request.queries)), ball.keep).astype(np.int64)


class _Ball(NamedTuple):
    """The records that count."""

    request: Request
    source: IndexedRecords
    tolerance: Tolerance
    least: float
    keep: Live  # (size,) the records that take part
    tail: Tail | None  # None: nothing can draw
    indexed_until: int  # the first position that it does not cover

    def allowed(self, counts: Numbers) -> Numbers:  # (q,) -> (q,)
        """The largest error that meets the tolerance."""
        return self.tolerance.atol + self.tolerance.rtol * np.maximum(counts, 1)

    def exactly(self, which: Positions, keep: Live) -> Numbers:  # (w,)
        """Exact counts of some of the queries, among some of the records."""
        score, columns = self.request.score, self.source.columns
        counts = []
        for few in np.array_split(which, -(-len(which) // EXACTLY)):
            queries = self.request.queries[torch.from_numpy(few)]
            positions = self.source.in_radius(Query(queries, 0, self.source.schema.metric, keep, least=self.least))
            count, step = np.zeros(len(few)), max(1, GATHERED // (EXACTLY * queries.shape[1]))
            for part in np.split(positions, range(step, positions.shape[1], step), axis=1):
                scores = score_rows(score, queries, columns, part).detach().cpu().numpy()
                count += ((scores >= self.least) & (part >= 0)).sum(1)
            counts.append(count)
        return np.concatenate(counts)

    def estimated(
        self, tail: Tail, which: Positions, drawn: int, look: int
    ) -> tuple[Numbers, Numbers, Live]:  # (q,), (q,), (q,)
        """Counts, their error bars, and whether too much of each is for records that were not drawn.

        The last is told from what was expected, not from what was drawn: to look again where a draw found little,
        and not where it found much, would make counts too large.
        """
        confidence, queries = self.tolerance.confidence, self.request.queries.detach().cpu().numpy()
        asked = prepared(queries[which], tail.index.metric)
        near, doubt = min(int(NEAR * drawn * WIDER**look), tail.size), math.log(1 / (1 - confidence))
        columns, seed = self.source.columns, self.request.seed
        found = tail.draw(Drawing(columns, asked, 1.0, near, drawn, seed, 1 - confidence, self.least))
        positions = found.positions
        positions[(positions < 0) | ~self.keep[positions]] = -1
        inside = (positions >= 0) & (found.scores >= self.least)
        weights = np.exp(found.log_weights.astype(np.float64))
        counts: Numbers = (weights * inside).sum(1)
        noise = (weights * weights - weights) * inside
        outside = np.where((positions >= 0) & ~inside & (found.log_weights > 0), -found.scores, np.inf)
        nearest = np.argsort(outside, axis=1, kind="stable")[:, :BOUNDARY]
        there = np.isfinite(np.take_along_axis(outside, nearest, 1))
        just = np.take_along_axis(weights * weights - weights, nearest, 1) * there
        one_more = just.sum(1) / np.maximum(there.sum(1), 1)
        variance, squares = noise.sum(1), np.square(noise).sum(1)
        some = found.unseen > -np.inf  # else no record that was not drawn can lie inside
        variance, squares = variance + one_more * some, squares + np.square(one_more) * some
        draws = np.maximum(SKEWED * variance**2 / np.where(squares > 0, squares, 1), 2.0)
        bar = np.sqrt(variance * [f_quantile(confidence, 1.0, draw) for draw in draws])
        blind = np.minimum(np.sqrt(2 * doubt * np.exp(found.hidden)), doubt * np.exp(found.unseen))
        by_chance = found.log_weights > 0
        wrong = inside & by_chance & (found.log_weights > found.unseen[:, None] + 1e-6)  # where none was said to be
        few = (drawn < LEAST) & (found.unseen > -np.inf)  # so few tell nothing of the others
        bar += np.where(few | wrong.any(1), np.inf, blind)
        if self.indexed_until < self.source.columns.size:
            unindexed = self.keep.copy()
            unindexed[: self.indexed_until] = False
            counts += self.exactly(which, unindexed)
        usual = np.sqrt(f_quantile(confidence, 1.0, 50.0) * np.exp(found.expected))
        return counts, bar, blind > BLIND * (blind + usual)
