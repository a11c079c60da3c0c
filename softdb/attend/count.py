"""Count the records within a radius, exactly or by an estimate from records that are drawn through the index."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.answers import Estimate
from softdb.attend.blocks import scored_tiles
from softdb.attend.candidates import score_all
from softdb.attend.error import f_quantile
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Live, Positions, Request
from softdb.attend.rounds import record_bytes
from softdb.check import Tolerance
from softdb.index.contract import Numbers, prepared
from softdb.index.planner import draw_cost, pass_cost
from softdb.index.query import Query
from softdb.index.sampler import FEWEST, Drawable, Drawing, Sampler
from softdb.kernels import native

FIRST, GROWTH = 400, 4  # number of records drawn for a query in the first round; factor for each further round
BOUNDARY = 1.0  # number of records by which a count may be wrong although no draw shows it; added to the bar
EXACTLY = 16  # number of queries that are counted exactly at the same time


@torch.no_grad()
def count_by_scores(source: SourceRecords, request: Request, least: float) -> Estimate:
    """Count the records that score at least `least`, by scoring all records. Cost q n d."""
    value = torch.zeros(len(request.queries), dtype=torch.float64)
    for tile, scores in scored_tiles(request.detached, source):
        value[tile.chunk] += (scores >= least).sum(1).to(value)
    sure = torch.ones_like(value, dtype=torch.bool)
    return Estimate(value, torch.zeros_like(value), sure, sure)


def count_drawn(
    source: IndexedRecords,
    request: Request,
    least: float,  # least score of a record that counts
) -> Estimate:
    """Estimate the number of records that score at least `least`, from draws of records that codes leave undecided.

    ĉ = Σ h + Σ (1[s ≥ least] - h) / p. The first sum is over all records, the second over the drawn records. h is about
    the probability, given its code, that a record scores at least `least` (Särndal, Swensson and Wretman 1992, chapter
    6). The variance is at least the one that codes predict, so that few draws are not taken for certainty. The bar
    covers records that draws may not show (docs/error-bars.md). The number of draws grows until the bar meets the
    tolerance. All records are scored instead if that costs less. Unindexed records are scored exactly.
    """
    tolerance = request.tolerance
    assert tolerance is not None
    ball = _Ball(request, source, tolerance, least, request.keep(source.live))
    open_queries, drawn = np.arange(len(request.queries)), tolerance.most or FIRST
    value, bar = np.zeros(len(open_queries)), np.full(len(open_queries), np.inf)
    taking_part, drawable = int(np.count_nonzero(ball.keep)), source.sampler(request.allowed)
    while drawable is not None and taking_part >= FEWEST and len(open_queries):
        if tolerance.most is None and ball.too_dear(drawable[0], len(open_queries), drawn, taking_part):
            break
        value[open_queries], bar[open_queries] = ball.estimated(*drawable, open_queries, drawn)
        fits = bar[open_queries] <= ball.allowed(value[open_queries])
        open_queries = open_queries[:0] if tolerance.most is not None else open_queries[~fits]
        drawn *= GROWTH
    exact = np.zeros(len(value), np.bool_)
    if len(open_queries):
        value[open_queries], bar[open_queries], exact[open_queries] = ball.exactly(open_queries, ball.keep), 0.0, True
    met = bar <= ball.allowed(value)
    tensor = torch.from_numpy
    return Estimate(tensor(value), tensor(bar), tensor(met), tensor(exact))


def count_exactly(source: IndexedRecords, request: Request, least: float) -> NDArray[np.int64]:  # (q,)
    """Count the records that score at least `least` exactly. Cost q n d."""
    ball = _Ball(request, source, Tolerance(0.0, 0.0, 0.0, None), least, request.keep(source.live))
    return ball.exactly(np.arange(len(request.queries)), ball.keep)


class _Ball(NamedTuple):
    """A count in progress: the request, the least score, the tolerance, and the records that take part."""

    request: Request
    source: IndexedRecords
    tolerance: Tolerance
    least: float
    keep: Live  # (size,) the records that take part

    def allowed(self, counts: Numbers) -> Numbers:  # (q,) -> (q,)
        """Return the largest error that meets the tolerance, for each count."""
        return self.tolerance.atol + self.tolerance.rtol * np.maximum(counts, 1)

    def exactly(self, which: Positions, keep: Live) -> NDArray[np.int64]:  # (w,)
        """Count exactly for the queries `which`, among the records in the mask `keep`."""
        score, columns = self.request.score, self.source.columns
        counts = []
        for few in np.array_split(which, max(1, -(-len(which) // EXACTLY))):
            queries = self.request.queries[torch.from_numpy(few)]
            positions = self.source.in_radius(Query(queries, 0, self.source.schema.metric, keep, least=self.least))
            scores = score_all(score, queries, columns, positions).detach().cpu().numpy()
            counts.append(((scores >= self.least) & (positions >= 0)).sum(1))
        return np.concatenate(counts)

    def too_dear(self, sampler: Sampler, queries: int, drawn: int, records: int) -> bool:
        """Return True if scoring every record costs less than a round of draws."""
        d = self.request.queries.shape[1]
        draws = draw_cost(queries, sampler.slots, sampler.parts, min(drawn, records), d, 0)
        return bool(draws > pass_cost(queries, records, d, 0, record_bytes(self.source.snapshot, pools=False)))

    def estimated(
        self, sampler: Sampler, eligible: Drawable, which: Positions, drawn: int
    ) -> tuple[Numbers, Numbers]:  # (q,), (q,)
        """Draw records for the queries `which`; return estimated counts and their error bars."""
        confidence, queries = self.tolerance.confidence, self.request.queries.detach().cpu().numpy()
        doubt = math.log(1 / (1 - confidence))
        prepared_queries = prepared(queries[which], sampler.index.metric)
        drawing = Drawing(prepared_queries, 1.0, drawn, self.request.seed, 1 - confidence, self.least)
        sample = sampler.draw(eligible, self.source.snapshot, drawing, True)
        inside = (sample.positions >= 0) & (sample.scores >= self.least)
        weights = 1 / sample.chances
        counts: Numbers = (weights * inside).sum(1) + sample.figures.correction
        noise = (weights * weights - weights) * np.square(inside - sample.controls)
        variance, squares = noise.sum(1), np.square(noise).sum(1)
        draws = np.maximum(native().SKEWED * variance**2 / np.where(squares > 0, squares, 1), 2.0)
        variance = np.maximum(variance, sample.figures.expected)
        bar = BOUNDARY + np.sqrt(variance * [f_quantile(confidence, 1.0, draw) for draw in draws])
        bar += np.minimum(np.sqrt(2 * doubt * sample.figures.hidden), doubt * sample.figures.unseen)
        if eligible.until < self.source.columns.size:
            unindexed = self.keep.copy()
            unindexed[: eligible.until] = False
            counts += self.exactly(which, unindexed)
        return counts, bar
