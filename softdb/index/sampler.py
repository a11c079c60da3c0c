"""Records drawn by one scan of an index's codes, each with a probability that its own code and its error decide.

The draws are those of `softdb/kernels/native/draw.cc`, which has the equations: sums over those drawn, divided by their
probabilities, are unbiased whatever the codes are worth. docs/error-bars.md derives what bounds those not drawn.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Numbers, Rows
from softdb.index.quantizer import APART, BLOCK, GAIN, Allowed, Places
from softdb.index.reach import reach_of
from softdb.index.rerank import CODES
from softdb.index.sketches import Sketches
from softdb.kernels import native
from softdb.kernels.threads import by_lines, with_help, workers
from softdb.store import Snapshot

FIRST = 500  # records drawn for a query in the first round
NEWEST, FORGOTTEN = 0.3, 0.98  # weight of the last cost; what stays of one that is too high
PLAIN = 0.05  # share of the draws that goes to all records alike, as in draw.cc
FEWEST = 10_000  # records below which a pass over all of them costs less than any draw


class Drawing(NamedTuple):
    """Parameters of a draw."""

    queries: Floats  # (q, d) prepared
    factor: float  # logits are this times the score
    budget: int  # records to draw for a query; those set apart come on top
    seed: int
    doubt: float  # the probability that the bounds on records that were not drawn are wrong
    least: float = math.nan  # records count if they score so much; NaN: by their weight
    points: float = 0.0  # candidates for samples of so many; 0: no

    @property
    def visible(self) -> float:
        """Deviations that one of `budget` records is expected to exceed: Φ(-x) = 1 / budget."""
        return statistics.NormalDist().inv_cdf(max(0.5, 1 - 1 / max(1, min(self.budget, 1 << 40))))


class Answering(NamedTuple):
    """Values to pool over the records drawn, and parameters of the error bar."""

    values: Any  # the stored column
    width: int  # v, or the number of classes; 0: the normaliser alone is wanted
    z: float  # quantile of the normal at the confidence
    salt: int = 0  # of random signs: parts that are merged need their own
    fewest: int = 0  # draws below which nothing is known of the records that were not drawn,
    slight: float = 0.0  # unless the largest term of these is at most so large


class Figures(NamedTuple):
    """Figures of drawn answers, (q,) each. Weights and terms are relative to Ẑ; in counts a record weighs 1."""

    base: Numbers  # log of the unit of the correction and of `moved`
    drawn: Numbers  # number of records, whole
    correction: Numbers  # what estimates of all records add to Σ w / p
    unseen: Numbers  # the largest term w / p that a record not drawn may be
    hidden: Numbers  # Σ w² / p over errors that too few draws may show
    missed: Numbers  # their sum Σ w, as it is expected
    alone: Numbers  # and Σ w²
    thinned: Numbers  # the largest term of a record set apart that was left to chance; 0: none was
    expected: Numbers  # variance as codes tell it
    lse: Numbers  # log Ẑ
    noise: Numbers  # Σ r²
    noises: Numbers  # Σ r⁴
    variance: Numbers  # Σ ‖y‖²
    variances: Numbers  # Σ ‖y‖⁴
    usual: Numbers  # root of the mean square of ‖v - o‖ by the shares of records in `hidden`
    drift: Numbers  # length of the mean of v - o by these shares
    reach: Numbers  # no value is farther than that from the answer
    bar: Numbers  # quantile of ‖ô - o‖
    lse_bar: Numbers  # quantile of |Ẑ / Z - 1|
    blind: Numbers  # how much of that is for what was not drawn


class DrawnAnswer(NamedTuple):
    """The softmax over the records drawn, and sums over the terms of its error; `softdb.attend.error` has these."""

    output: Numbers  # (q, v)
    moved: Numbers  # (q, v) what corrections add to Σ w v / p
    first: Numbers  # (q, v) Σ r y
    signed: Floats  # (q, SIGNS, v) Σ ±y
    roots: Numbers  # (q, SIGNS) Σ ±r
    weights: Numbers  # (q, w) shares of the answer


class DrawnSample(NamedTuple):
    """Records drawn for each query, scored exactly, the heaviest first; and the answers that follow."""

    positions: Rows  # (q, w), -1 = none
    scores: Numbers  # (q, w) by the index's metric, -inf for none
    chances: Numbers  # (q, w) the probability of each, 1 for none
    controls: Numbers  # (q, w) of counts: the chance that the code alone gives each to lie inside
    figures: Figures
    answer: DrawnAnswer | None  # None of counts


class Drawable(NamedTuple):
    """Slots of an index that may be drawn."""

    slots: Allowed
    places: Places  # positions of the slots
    inside: int  # number of them


class Sampler:
    """Draws records that lists of codes hold. Safe to use from several threads."""

    def __init__(self, index: Sketches, snapshot: Snapshot, num_classes: int | None) -> None:
        self.index = index
        self.reach = reach_of(index, snapshot, num_classes)
        sketch, layout = index.sketch, index.layout
        turns, centroids = sketch.rotation.rows, sketch.centroids.rows
        errors, filled, scales = layout.errors.reshape(-1).copy(), layout.slots, np.ones(index.covered, np.float32)
        scales[self.reach.apart] = self.reach.scales
        far = np.zeros(index.covered, np.bool_)
        far[self.reach.apart] = True
        errors[filled[far[layout.rows[filled]]]] = APART
        self._apart = filled[errors[filled] == APART]
        self._scales = scales[layout.rows[self._apart]]
        self._largest = float(errors[errors < APART].max(initial=0)) * sketch.error_step
        l2, gained, most_errors = index.metric is Metric.L2, *np.zeros((2, index.lists), np.float32)
        own = np.repeat(np.arange(index.lists), layout.sizes)
        np.maximum.at(gained, own, layout.gains.reshape(-1)[filled] / GAIN)
        np.maximum.at(most_errors, own, np.where(errors[filled] == APART, 0, errors[filled]))
        self._held = (
            layout.starts, layout.sketches.reshape(len(layout.sketches), -1), layout.gains,
            errors.reshape(layout.errors.shape), layout.corrections.view(np.uint16), sketch.unit, sketch.error_step,
            sketch.words.reshape(-1, BLOCK), len(sketch.words), np.ascontiguousarray(index.spreads), gained,
            layout.radii, most_errors, turns, centroids,
            np.einsum("ld,ld->l", centroids, centroids), sketch.origin, l2,
        )  # fmt: skip
        self._native = native().Sketch(*self._held)  # of arrays that it keeps alive
        self._costs: dict[object, float] = {}  # of kinds of queries, as shares of those of a pass

    def knows(self, kind: object) -> bool:
        """Return True if queries of a kind were drawn for before."""
        return kind in self._costs

    def hopeless(self, kind: object) -> bool:
        """Return True if to draw for a kind of queries cost more than a pass; now and then they are tried again."""
        cost = self._costs.get(kind, 0.0)
        if cost > 1:
            self._costs[kind] = FORGOTTEN * cost
        return cost > 1

    def learn(self, kind: object, cost: float) -> None:
        """Take in the cost of some queries of a kind, as a share of that of a pass for them."""
        self._costs[kind] = self._costs.get(kind, cost) + NEWEST * (cost - self._costs.get(kind, cost))

    @property
    def parts(self) -> int:
        """Parts of a code."""
        return len(self.index.sketch.words)

    @property
    def slots(self) -> int:
        """Number of codes that a draw looks at."""
        return int(self.index.layout.rows.size)

    def draw(
        self,
        eligible: Drawable,
        snapshot: Snapshot,
        ask: Drawing,
        controls: bool,  # sums over all records correct the draws
        answering: Answering | None = None,  # None: records are counted
    ) -> DrawnSample:
        """About `budget` records for each query, and the answers that follow. Cost: see draw.cc."""
        index, queries = self.index, np.ascontiguousarray(ask.queries)
        q, seeds = len(queries), _factors(ask.seed, queries.shape[1])
        budget = min(ask.budget, max(1, eligible.inside))
        width, v, signs = budget + len(self._apart) + _room(budget), answering.width if answering else 0, native().SIGNS
        positions, (scores, chances) = np.empty((q, width), np.int64), np.empty((2, q, width))
        held, figures = np.empty((q, 0 if answering else width)), np.zeros((native().FIGURES, q))
        sums = np.empty((q, signs * v), np.float32), np.empty((q, signs)), np.empty((q, width if answering else 0))
        output, moved, first = np.empty((3, q, v))
        products = q * (self.slots * self.parts // 2 + 4 * width * (queries.shape[1] + 2 * v))
        threads = workers(products) if q == 1 else 1

        def drawing(part: slice) -> Any:
            drawn = queries[part], *eligible.slots, eligible.places
            apart = self._apart, self._scales, snapshot.key_column, CODES[index.metric]
            asked = ask.factor, ask.least, budget, ask.visible, controls, seeds
            written = positions[part], scores[part], chances[part], held[part], figures[:, part]
            which = ask.points, part.start or 0, threads
            draw = native().Draw(self._native, self._largest, *drawn, *apart, *asked, *written, *which)
            if answering:
                of_values = answering.values, self.reach.means, self.reach.centre, self.reach.value_radius
                judged = answering.salt, answering.z, -math.log(ask.doubt), answering.fewest, answering.slight
                answers = (output, moved, first, *sums)
                draw.answers(*of_values, *judged, *(array[part] for array in answers))
            return draw

        if threads > 1:
            draw = drawing(slice(1))
            with_help(draw.run, draw.help, threads)
        else:
            by_lines(lambda draw: draw.run(), lambda part: (drawing(part),), q, products)
        answer = None
        if answering:
            answer = DrawnAnswer(output, moved, first, sums[0].reshape(q, signs, v), *sums[1:])
        return DrawnSample(positions, scores, chances, held, Figures(*figures), answer)


def _room(budget: int) -> int:
    """Places for the draws that go to all records alike."""
    plain = max(1, PLAIN * budget)
    return int(plain + 8 * plain**0.5 + 16)


@functools.lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> NDArray[np.uint64]:  # (count,)
    """Odd random numbers, the same for a seed, by which a query's bits make its own: errors are independent."""
    factors: NDArray[np.uint64] = np.random.default_rng(seed).integers(1, 1 << 63, count, np.uint64) | np.uint64(1)
    return factors
