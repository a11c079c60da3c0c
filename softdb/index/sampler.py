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
import torch
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Numbers, Rows
from softdb.index.quantizer import APART, BLOCK, GAIN, Allowed, Places
from softdb.index.reach import reach_of
from softdb.index.rerank import CODES
from softdb.index.sketches import Sketches
from softdb.kernels import native
from softdb.kernels.threads import by_lines, share_out, workers
from softdb.store import Snapshot

HOPELESS, NEWEST, FORGOTTEN = 0.5, 0.3, 0.98  # share from which on nothing is drawn; weight of the last; what stays
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

    @property
    def visible(self) -> float:
        """Deviations that one of `budget` records is expected to exceed: Φ(-x) = 1 / budget."""
        return statistics.NormalDist().inv_cdf(max(0.5, 1 - 1 / max(1, min(self.budget, 1 << 40))))


class DrawnSample(NamedTuple):
    """Records drawn for each query, scored exactly. Weights, chances and bounds are relative to exp(base)."""

    positions: Rows  # (q, w), -1 = none
    scores: Numbers  # (q, w) by the index's metric, -inf for none
    log_weights: Floats  # (q, w) log of the inverse of each one's probability
    controls: Numbers  # (q, w) weight that the code alone gives each, times β; zeros where nothing is corrected
    doubts: Numbers  # (q, w) share of each in `hidden`
    lists: NDArray[np.int32]  # (q, w) list of each
    masses: Numbers  # (q, lists) corrections: β times the sum of controls over a list, less its estimate from the draws
    base: Numbers  # (q,)
    unseen: Numbers  # (q,) log of the largest term, weight over probability, of a record that was not drawn
    hidden: Numbers  # (q,) Σ w² / p over errors that too few draws may show
    missed: Numbers  # (q,) their sum Σ w, as it is expected
    alone: Numbers  # (q,) and Σ w²
    raised: Numbers  # (q,) factor, at least 1, by which the variance that draws show falls short of the expected one
    correction: Numbers  # (q,) sum of `masses`
    thinned: Numbers  # (q,) log of the largest term of a record set apart that was left to chance; -inf: none was
    expected: Numbers  # (q,) variance as codes tell it


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
        self._turns, self._centroids = (torch.from_numpy(matrix.rows.T.copy()) for matrix in sketch[:2])
        self._lengths = torch.from_numpy(np.einsum("ld,ld->l", *[sketch.centroids.rows] * 2))
        errors, filled, scales = layout.errors.reshape(-1).copy(), layout.slots, np.ones(index.covered, np.float32)
        scales[self.reach.apart] = self.reach.scales
        far = np.zeros(index.covered, np.bool_)
        far[self.reach.apart] = True
        errors[filled[far[layout.rows[filled]]]] = APART
        self._apart = filled[errors[filled] == APART]
        self._scales = scales[layout.rows[self._apart]]
        self._largest = float(errors[errors < APART].max(initial=0)) * sketch.error_step
        l2, gained = index.metric is Metric.L2, np.zeros(index.lists, np.float32)
        np.maximum.at(gained, np.repeat(np.arange(index.lists), layout.sizes), layout.gains.reshape(-1)[filled] / GAIN)
        self._held = (
            layout.starts, layout.sketches.reshape(len(layout.sketches), -1), layout.gains,
            errors.reshape(layout.errors.shape), layout.corrections.view(np.uint16), sketch.unit, sketch.error_step,
            sketch.words.reshape(-1, BLOCK), len(sketch.words), np.ascontiguousarray(index.spreads), gained, l2,
        )  # fmt: skip
        self._native = native().Sketch(*self._held)  # of arrays that it keeps alive
        self._passed: dict[object, float] = {}  # share of the queries of a kind that drawing did not answer

    def hopeless(self, kind: object) -> bool:
        """Return True if most queries of a kind needed a pass over all records; now and then they are tried again."""
        share = self._passed.get(kind, 0.0)
        if share > HOPELESS:
            self._passed[kind] = FORGOTTEN * share
        return share > HOPELESS

    def learn(self, kind: object, share: float) -> None:
        """Take in the share of some queries of a kind that drawing did not answer."""
        self._passed[kind] = self._passed.get(kind, 0.0) + NEWEST * (share - self._passed.get(kind, 0.0))

    @property
    def parts(self) -> int:
        """Parts of a code."""
        return len(self.index.sketch.words)

    @property
    def slots(self) -> int:
        """Number of codes that a draw looks at."""
        return int(self.index.layout.rows.size)

    def draw(self, eligible: Drawable, snapshot: Snapshot, ask: Drawing, controls: bool) -> DrawnSample:
        """About `budget` records for each query, with the sums that correct them. Cost: see draw.cc."""
        index, queries = self.index, np.ascontiguousarray(ask.queries)
        l2, (q, _), lists = index.metric is Metric.L2, queries.shape, index.lists
        seen = torch.from_numpy(queries - index.sketch.origin if l2 else queries)
        turned, products = (seen @ self._turns).numpy(), seen @ self._centroids
        nearness = (2 * products - self._lengths if l2 else products).numpy()
        squares, seeds = torch.linalg.vector_norm(seen, dim=1).square().numpy(), seeds_of(queries, ask.seed)
        budget = min(ask.budget, max(1, eligible.inside))
        width = budget + len(self._apart) + _room(budget)
        positions, scores = np.empty((q, width), np.int64), np.empty((q, width))
        logs, own = np.empty((q, width), np.float32), np.empty((q, width), np.int32)
        held, doubts = np.empty((2, q, width))
        masses, bounds = np.zeros((q, lists if controls else 1)), np.empty((10, q))
        records = index.layout.errors.size

        def given(part: slice) -> tuple[Any, ...]:
            drawn = queries[part], turned[part], nearness[part], squares[part], *eligible.slots, eligible.places
            asked = ask.factor, ask.least, budget, ask.visible, controls, seeds[part]
            written = positions[part], scores[part], logs[part], held[part], doubts[part], own[part]
            apart = self._apart, self._scales, snapshot.key_column, CODES[index.metric]
            return self._native, self._largest, *drawn, *apart, *asked, *written, masses[part], bounds[:, part]

        products = q * records * self.parts // 2
        if q == 1 and workers(products) > 1:
            draw = native().Draw(*given(slice(1)), True)
            draw.step(1)
            share_out(draw.step, [2, 3])
            draw.step(4)
        else:
            by_lines(lambda *drawn: native().Draw(*drawn, False).step(0), given, q, products)
        base, unseen, hidden, raised, correction, thinned, expected, _, missed, alone = bounds
        most = int((positions >= 0).sum(1).max(initial=0))
        w = slice(max(most, 1))
        return DrawnSample(
            positions[:, w], scores[:, w], logs[:, w], held[:, w], doubts[:, w], own[:, w], masses, base, unseen,
            hidden, missed, alone, raised, correction, thinned, expected,
        )  # fmt: skip


def _room(budget: int) -> int:
    """Places for the draws that go to all records alike."""
    plain = max(1, PLAIN * budget)
    return int(plain + 8 * plain**0.5 + 16)


def seeds_of(queries: Floats, seed: int) -> NDArray[np.uint64]:  # (q, d) -> (q,)
    """A seed for each query, which its numbers decide: the errors of queries asked together are independent."""
    bits = np.ascontiguousarray(queries, np.float32).view(np.uint32)
    seeds: NDArray[np.uint64] = (bits * _factors(seed, queries.shape[1])).sum(1, dtype=np.uint64)
    return seeds


@functools.lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> NDArray[np.uint64]:  # (count,)
    """Odd random numbers, the same for a seed."""
    factors: NDArray[np.uint64] = np.random.default_rng(seed).integers(1, 1 << 63, count, np.uint64) | np.uint64(1)
    return factors
