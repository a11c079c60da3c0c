"""Draw records in one scan of an index's codes, with probabilities from each record's code and the code's error.

`softdb/kernels/native/draw.cc` has the equations: sums over the drawn records, each divided by its probability, are
unbiased for codes of any precision. docs/error-bars.md derives bounds for records that were not drawn.
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

LISTED = 80  # number of slots that cost as much to scan as the preparation of a list for a query
FIRST = 500  # number of records drawn for a query in the first round
NEWEST, FORGOTTEN = 0.3, 0.98  # weight of the newest cost in the mean; decay of a mean above 1 at each use
PLAIN = 0.05  # share of the draws that are uniform (kPlain of draw.cc)
FEWEST = 10_000  # with fewer records a pass over all costs less than any draw


class Drawing(NamedTuple):
    """Parameters of one round of draws."""

    queries: Floats  # (q, d) prepared
    factor: Numbers | float  # (q,) logit / score
    budget: int  # number of records to draw for a query, in addition to those set apart
    seed: int
    doubt: float  # probability that the bounds on undrawn records are wrong
    least: float = math.nan  # for counts: least score of a record that counts; NaN: draw by weight
    points: float = 0.0  # for samples: expected number of points; 0: no samples

    @property
    def visible(self) -> float:
        """x standard deviations, which one of `budget` records is expected to exceed: Φ(-x) = 1 / budget."""
        return statistics.NormalDist().inv_cdf(max(0.5, 1 - 1 / max(1, min(self.budget, 1 << 40))))


class Answering(NamedTuple):
    """Values to pool over the drawn records, and parameters of the error bar."""

    values: Any  # the stored column
    width: int  # v, or the number of classes; 0: only the normaliser is computed
    z: float  # quantile of the normal distribution at the confidence
    salt: int = 0  # seed of random signs; parts whose answers are merged need different salts
    fewest: int = 0  # with fewer draws than this the error has no bound,
    slight: float = 0.0  # unless the largest undrawn term is at most this share of Ẑ
    shown: int = 0  # number of records to sort by weight


class Figures(NamedTuple):
    """Statistics of answers from draws, (q,) each. Weights and terms are relative to Ẑ; in counts a record weighs 1."""

    base: Numbers  # log of the unit in which `correction` and `moved` are given
    drawn: Numbers  # number of drawn records, an integer
    correction: Numbers  # term that the control variates add to Σ w / p
    unseen: Numbers  # bound on the term w / p of any undrawn record
    hidden: Numbers  # Σ w² / p over records with code errors so rare that no draw may show them
    missed: Numbers  # expected Σ w of the records in `hidden`
    alone: Numbers  # expected Σ w² of the records in `hidden`
    thinned: Numbers  # the largest term of a record that thinning may drop; 0 if there is none
    expected: Numbers  # variance that the codes predict
    lse: Numbers  # log Ẑ
    noise: Numbers  # Σ r², for the error of Ẑ
    noises: Numbers  # Σ r⁴
    variance: Numbers  # Σ ‖y‖², for the error of the output
    variances: Numbers  # Σ ‖y‖⁴
    usual: Numbers  # root mean square distance ‖v - o‖ of a value from the answer, weighted as in `hidden`
    drift: Numbers  # length of the mean of v - o, weighted as in `hidden`
    reach: Numbers  # largest distance of a value from the answer
    length: Numbers  # ‖o‖
    entropy: Numbers  # of the weights of all records, estimated as the mean of -log weight over the draws
    scanned: Numbers  # share of the codes that were read
    stderr: Numbers  # √Σ ‖y‖², standard error of the output
    lse_stderr: Numbers  # √Σ r², standard error of Ẑ / Z
    bar: Numbers  # quantile of the output's error ‖ô - o‖
    lse_bar: Numbers  # quantile of the normaliser's error |Ẑ / Z - 1|


class DrawnAnswer(NamedTuple):
    """The softmax answer from the drawn records, and sums over its error terms y and r (`softdb.attend.error`)."""

    output: Numbers  # (q, v)
    moved: Numbers  # (q, v) term that control variates add to Σ w v / p
    first: Numbers  # (q, v) Σ r y
    signed: Floats  # (q, SIGNS, v) Σ ±y with random signs
    roots: Numbers  # (q, SIGNS) Σ ±r with random signs
    weights: Numbers  # (q, w) each record's share of the answer


class DrawnSample(NamedTuple):
    """Records drawn for each query and scored exactly, the `shown` heaviest first, and answers computed from them."""

    positions: Rows  # (q, w), -1 = none
    scores: Numbers  # (q, w) by the index's metric, -inf for none
    chances: Numbers  # (q, w) probability with which each record was drawn, 1 for none
    controls: Numbers  # (q, w) for counts: the probability, by code, that the record lies in the radius
    figures: Figures
    answer: DrawnAnswer | None  # None for counts


class FirstRound(NamedTuple):
    """The number of records that a first round draws for each query, planned from what earlier queries needed."""

    budget: int = FIRST
    needed: tuple[float, ...] = ()  # numbers of draws that the latest queries needed
    unused: int = 0  # how many of these are newer than `budget`


class Drawable(NamedTuple):
    """The slots of an index that may be drawn."""

    slots: Allowed
    places: Places  # position of the record in each slot
    inside: int  # number of these slots
    until: int  # the first unindexed position


class Sampler:
    """Draws records from lists of codes. Safe to use from several threads."""

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
        self._native = native().Sketch(*self._held)  # refers to the arrays, which `_held` keeps alive
        self._costs: dict[object, float] = {}  # kind of queries -> mean cost of draws, over comparing all records
        self.plans: dict[object, FirstRound] = {}  # kind of queries -> its first round
        self.remembered: dict[object, Any] = {}  # parameters of plain estimates -> what estimates with them share
        self._scanned: dict[object, float] = {}  # kind of queries -> mean share of the codes that they read

    def knows(self, kind: object) -> bool:
        """Return True if the cost of draws for this kind of queries has been measured."""
        return kind in self._costs

    def hopeless(self, kind: object) -> bool:
        """Return True if draws for this kind of queries cost more than comparing all records. The cost decays."""
        cost = self._costs.get(kind, 0.0)
        if cost > 1:
            self._costs[kind] = FORGOTTEN * cost
        return cost > 1

    def learn(self, kind: object, cost: float) -> None:
        """Record the cost of draws for this kind of queries, over the cost of comparing all records."""
        self._costs[kind] = self._costs.get(kind, cost) + NEWEST * (cost - self._costs.get(kind, cost))

    def slots_for(self, kind: object) -> float:
        """Return the number of slots that a query reads, by the latest queries of its kind; for a new kind all."""
        return self.slots * self._scanned.get(kind, 1.0) + LISTED * self.index.lists

    def read(self, kind: object, share: float) -> None:
        """Record the share of the codes that queries of a kind have read."""
        self._scanned[kind] = self._scanned.get(kind, share) + NEWEST * (share - self._scanned.get(kind, share))

    @property
    def parts(self) -> int:
        """Number of parts of a code."""
        return len(self.index.sketch.words)

    @property
    def slots(self) -> int:
        """Number of slots of the codes."""
        return int(self.index.layout.rows.size)

    def draw(
        self,
        eligible: Drawable,
        snapshot: Snapshot,
        drawing: Drawing,
        controls: bool,  # True: correct the answer by control variates
        answering: Answering | None = None,  # None: count records instead of pooling values
    ) -> DrawnSample:
        """Draw about `drawing.budget` records for each query, and compute an answer from them. Cost: see draw.cc."""
        index, queries = self.index, np.ascontiguousarray(drawing.queries)
        q, seeds = len(queries), _factors(drawing.seed, queries.shape[1])
        factors = np.full(q, drawing.factor, np.float64)
        budget = min(drawing.budget, max(1, eligible.inside))
        width, v, signs = budget + len(self._apart) + _room(budget), answering.width if answering else 0, native().SIGNS
        positions, (scores, chances) = np.empty((q, width), np.int64), np.empty((2, q, width))
        controls_of, figures = np.empty((q, 0 if answering else width)), np.zeros((native().FIGURES, q))
        sums = np.empty((q, signs * v), np.float32), np.empty((q, signs)), np.empty((q, width if answering else 0))
        output, moved, first = np.empty((3, q, v))
        products = q * (self.slots * self.parts // 2 + 4 * width * (queries.shape[1] + 2 * v))
        threads = workers(products) if q == 1 else 1

        def kernel_for(run: slice) -> Any:
            drawn = queries[run], *eligible.slots, eligible.places
            apart = self._apart, self._scales, snapshot.key_column, CODES[index.metric]
            parameters = factors[run], drawing.least, budget, drawing.visible, controls, seeds
            written = positions[run], scores[run], chances[run], controls_of[run], figures[:, run]
            which = drawing.points, run.start or 0, threads
            draw = native().Draw(self._native, self._largest, *drawn, *apart, *parameters, *written, *which)
            if answering:
                of_values = answering.values, self.reach.means, self.reach.centre, self.reach.value_radius
                limits = answering.fewest, answering.slight, answering.shown
                judged = answering.salt, answering.z, -math.log(drawing.doubt), *limits
                answers = (output, moved, first, *sums)
                draw.answers(*of_values, *judged, *(array[run] for array in answers))
            return draw

        if threads > 1:
            draw = kernel_for(slice(1))
            with_help(draw.run, draw.help, threads)
        else:
            by_lines(lambda draw: draw.run(), lambda run: (kernel_for(run),), q, products)
        answer = None
        if answering:
            answer = DrawnAnswer(output, moved, first, sums[0].reshape(q, signs, v), *sums[1:])
        return DrawnSample(positions, scores, chances, controls_of, Figures(*figures), answer)


def _room(budget: int) -> int:
    """Return the number of array columns to reserve for uniform draws."""
    plain = max(1, PLAIN * budget)
    return int(plain + 8 * plain**0.5 + 16)


@functools.lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> NDArray[np.uint64]:  # (count,)
    """Return odd random factors for the hash of a query's bits. The hash seeds its draws, so errors are independent."""
    factors: NDArray[np.uint64] = np.random.default_rng(seed).integers(1, 1 << 63, count, np.uint64) | np.uint64(1)
    return factors
