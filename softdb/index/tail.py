"""Parts of an estimate: records scored surely, and records drawn from the others with known probabilities.

Surely, with probability 1: the records whose codes are nearest, and those set apart (`softdb.index.reach`). The others
are drawn by the lists of an IVF index, in proportion to how much a record of the list is thought to matter, the root of
the mean square of its weight exp(logit),

    exp(μ + σ²) P^½                     μ, σ mean and deviation of the logits in a list, taken as normal; where the
                                        list was searched, P = Φ((τ - μ - 2 σ²) / σ) / Φ((τ - μ) / σ), as what lies
                                        above the last of the near, τ, is among them; at most
                                        μ + σ √(2 log m), about the largest of the m in the list

and, a share `CAPPED` of the draws, in proportion to the most that it may weigh, exp(cap). A share goes to all records
alike. What is thought decides how large the error is, never whether the answer is right: sums over those drawn, divided
by their probabilities, are unbiased (Horvitz and Thompson 1952). The caps decide what the error bar must allow for in
records that were not drawn: a term, weight over probability, of at most `unseen`. docs/error-bars.md derives both.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Numbers, Rows
from softdb.index.ivf import IVF
from softdb.index.lists import Lists
from softdb.index.placement import RecordColumns
from softdb.index.planner import Planner
from softdb.index.reach import reach_of
from softdb.index.rerank import scores_at
from softdb.kernels import native
from softdb.kernels.threads import by_lines
from softdb.store import Snapshot

FEWEST = 10_000  # records that are all pooled sooner than drawn from
PLAIN, CAPPED = 0.1, 0.5  # share of the draws that goes to all records alike, and by what they may weigh at most
CERTAIN = 5.0  # deviations from what is thought of a record that none is expected to exceed: 3e-7 of normal ones
SCANNED = 1 << 16  # codes that are looked at one by one, for a deviation of 1 of the logits in a list
ROOM = 8.0  # standard deviations of the number drawn that there is room for
PERMANENT = 1 << 40  # seed of the order inside the lists; draws shift it
STEPS = 64  # products that a draw takes in the time of one list, or of one record, that is weighed
ROUNDING = 1e-6  # of ‖q‖ + ‖c‖, squared: what a list's mean score may be off by in float32


class Frame(NamedTuple):
    """The rows of each list, less those set apart, by their permanent random numbers: 12 bytes a record."""

    rows: Rows  # (n,)
    chances: NDArray[np.uint32]  # (n,) ascending within a list
    starts: Rows  # (lists + 1,)


class TailSample(NamedTuple):
    """Records for each query, scored exactly."""

    positions: Rows  # (q, w), -1 = none
    scores: Numbers  # (q, w) by the index's metric, -inf for none
    log_weights: Floats  # (q, w) log of the inverse of each one's probability
    unseen: Numbers  # (q,) log of the largest term, weight over probability, that a record not drawn may be
    hidden: Numbers  # (q,) log of Σ y² / p, y their weights, over what too few draws may show
    expected: Numbers  # (q,) the same over all that may be drawn, as it is thought to be
    scales: Numbers  # (w,) how far their values may reach, in units of `Reach.value_radius`


class Drawing(NamedTuple):
    """Parameters of a draw."""

    snapshot: RecordColumns
    queries: Floats  # (q, d) prepared
    factor: float  # logits are this times the score
    near: int
    budget: int
    seed: int
    doubt: float  # the probability that what is said of records not drawn is wrong
    least: float = np.nan  # records matter only if they score so much; NaN: by their weight

    @property
    def visible(self) -> float:
        """Deviations that some of `budget` records exceed, but for that doubt: Φ(-x) = log(1 / doubt) / budget."""
        return statistics.NormalDist().inv_cdf(max(0.5, 1 - math.log(1 / self.doubt) / self.budget))


class _ListScores(NamedTuple):
    """The lists as queries see them."""

    nearness: Numbers  # (q, lists) score of the centroid
    means: Numbers  # (q, lists) mean of the scores in a list
    deviations: Numbers  # (q, lists)
    excess: Numbers  # (q, lists) how many times as far from it as the others the farthest may lie
    caps: Numbers  # (q, lists) the largest score that one of its records may have


class _Near(NamedTuple):
    """The records whose codes are nearest, scored exactly, and what the other ones of the lists searched may score."""

    rows: Rows  # (q, c), -1 = none
    positions: Rows  # (q, c + apart) theirs, then those of the records set apart
    scores: Numbers  # (q, c + apart)
    searched: NDArray[np.bool_]  # (q, lists)
    others: Numbers  # (5, q) the score of the last by its code, the cap, and so on: see `Caps` in the kernels


class Tail:
    """A sampler over the rows that an IVF index holds. Safe to use from several threads."""

    def __init__(self, index: Lists | IVF, snapshot: Snapshot, planner: Planner) -> None:
        self.index = index
        self.planner = planner
        self.centroids = index.centroids  # (lists, d)
        self.reach = reach_of(index, snapshot)
        self.lengths, self.mean_lengths = (
            np.einsum("ld,ld->l", one, one, dtype=np.float64) for one in (self.centroids, self.reach.means)
        )  # ‖c‖², ‖m‖²
        self.frame = _frame(*index.members(), self.reach.is_apart)
        self.sizes = np.diff(self.frame.starts)  # (lists,)
        self.size = len(self.frame.rows) + len(self.reach.apart)
        self.origin = self.reach.means.mean(0)
        radii, largest = self.reach.mean_radii, self.reach.radii
        self.excess = np.divide(largest, radii, out=np.ones_like(radii), where=radii > 0)  # (lists,)

    def draw(self, ask: Drawing) -> TailSample:
        """The `near` nearest by their codes, the records set apart, and about `budget` drawn from the others.

        Dead records are among them. Where half of all would be near, all are taken. Cost of a search of the lists that
        may matter, q lists, and (near + apart + budget) d for the scores of each query.
        """
        snapshot, queries = ask.snapshot, ask.queries
        if 2 * ask.near >= self.size:
            return self._everything(snapshot, queries)
        lists = self._seen_by(queries, counts=not np.isnan(ask.least))
        found = self._near(ask, lists)
        rows, logs, (unseen, hidden, expected) = self._sampled(ask, lists, found)
        positions = snapshot.positions(rows)
        scores = scores_at(snapshot, queries, positions, self.index.metric, precise=True)
        return TailSample(
            np.concatenate([found.positions, positions], axis=1),
            np.concatenate([found.scores, scores], axis=1),
            np.concatenate([np.zeros(found.scores.shape, np.float32), logs], axis=1),
            unseen, hidden, expected,
            np.concatenate([np.ones(ask.near), self.reach.scales, np.ones(rows.shape[1])]),
        )  # fmt: skip

    def _everything(self, snapshot: RecordColumns, queries: Floats) -> TailSample:
        """Every record that the index holds, scored exactly."""
        rows = np.concatenate([self.frame.rows, self.reach.apart])
        positions = snapshot.positions(rows)
        scales = np.concatenate([np.ones(len(self.frame.rows)), self.reach.scales])
        there = (positions >= 0) & snapshot.live[positions]
        everyone = np.broadcast_to(positions[there], (len(queries), int(np.count_nonzero(there)))).copy()
        scores = scores_at(snapshot, queries, everyone, self.index.metric, precise=True)
        certain, none = np.zeros(everyone.shape, np.float32), np.full(len(queries), -np.inf)
        return TailSample(everyone, scores, certain, none, none, none, scales[there])

    def _near(self, ask: Drawing, lists: _ListScores) -> _Near:
        """Search the lists that may hold something heavy, and score what is found."""
        snapshot, queries = ask.snapshot, ask.queries
        order, searches = self._to_search(ask, lists)
        chosen = np.where(np.arange(order.shape[1]) < searches[:, None], order, -1)
        nearness = np.take_along_axis(lists.nearness, order, 1).astype(np.float32)
        rows, codes, rounding = self.index.near_in_lists(queries, chosen, nearness, ask.near)
        searched = np.zeros(lists.means.shape, np.bool_)
        np.put_along_axis(searched, order, np.arange(order.shape[1]) < searches[:, None], 1)
        rows[(rows >= 0) & self.reach.is_apart[rows]] = -1
        apart = np.broadcast_to(snapshot.positions(self.reach.apart), (len(rows), len(self.reach.apart)))
        positions = np.concatenate([snapshot.positions(rows), apart], axis=1)
        scores = scores_at(snapshot, queries, positions, self.index.metric, precise=True)
        reach, usual = self.reach, max(self.reach.mean_error, 1e-300)
        others, l2 = np.empty((5, len(rows))), self.index.metric is Metric.L2
        origin = self.origin if l2 else np.zeros_like(self.origin)
        seen = queries, self.index.turned(queries - origin), codes, scores, rounding
        known = reach.errors, reach.log_shares, usual, reach.part_errors
        native().caps(*seen, l2, *known, ask.factor, CERTAIN, ask.visible, others)
        return _Near(rows, positions, scores, searched, others)

    def _to_search(self, ask: Drawing, lists: _ListScores) -> tuple[Rows, Rows]:  # (q, most), (q,)
        """Lists to search for each query, the highest caps first, and their number.

        As many as hold about SCANNED codes for a deviation of 1 of the logits in a list: where the weights in a list
        are about equal, draws from it do as well. And so many that no term of those not searched, by their caps, is
        larger than a hundredth of what all lists are thought to hold. For a count all that may hold one.
        """
        (q, n), factor = lists.means.shape, ask.factor
        deviation = np.clip(factor * lists.deviations.mean(), 0.25, 16.0)
        enough = min(n, max(1, round(SCANNED * float(deviation) * n / max(1, int(self.sizes.sum())))))
        order, counts = np.argsort(-lists.caps, axis=1, kind="stable"), np.empty(q, np.int64)
        small = 0.01 * CAPPED * ask.budget
        native().to_search(lists.means, lists.deviations, lists.caps, order, self.sizes, factor, small, enough, counts)
        if not np.isnan(ask.least):  # every list that may hold one
            counts = np.maximum(counts, (lists.caps >= ask.least).sum(1))
        return order[:, : int(counts.max(initial=1))], counts

    def _sampled(
        self, ask: Drawing, lists: _ListScores, found: _Near
    ) -> tuple[Rows, Floats, Numbers]:  # (q, w), (q, w), (3, q)
        """Rows drawn from the lists, their log-weights, and what those not drawn may be, as `TailSample` has it."""
        q, factor, least = len(ask.queries), ask.factor, ask.factor * ask.least
        caps, logits, hiding, left = factor * lists.caps, *np.empty((3, *lists.caps.shape))
        seeds, bounds = seeds_of(ask.queries, ask.seed), np.empty((3, q))
        others = found.others * np.array([factor, factor, factor, 1, factor])[:, None]
        seen = (found.rows >= 0).sum(1), others, factor * lists.means, factor * lists.deviations, lists.excess
        native().propose(*seen, self.sizes, found.searched, ask.visible, least, caps, logits, hiding, left)

        def given(part: slice, *out: Any) -> tuple[Any, ...]:
            asked = found.rows[part], logits[part], caps[part], hiding[part], left[part]
            return *asked, *self.frame, float(ask.budget), PLAIN, CAPPED, least, seeds[part], *out, bounds[:, part]

        each = (found.rows.shape[1] + len(self.sizes)) * STEPS
        return *_with_room(native().draw, given, q, _room(ask.budget), q * each), bounds

    def _seen_by(self, queries: Floats, counts: bool = False) -> _ListScores:
        """Means, deviations and caps of the scores in each list. Cost q d (lists + d).

        For a count only what is certain is a cap: one record more is an error, however little it weighs.
        """
        reach, l2 = self.reach, self.index.metric is Metric.L2
        products = (queries @ reach.means.T).astype(np.float64)
        nearness = (queries @ self.centroids.T).astype(np.float64)
        squares = np.einsum("qd,qd->q", queries, queries, dtype=np.float64)[:, None]
        rounding = ROUNDING * (np.sqrt(squares) + np.sqrt(self.mean_lengths)) ** 2
        turned = (queries @ reach.root).astype(np.float64)
        if not l2:
            means = products
            deviations = np.sqrt(np.einsum("qd,qd->q", turned, turned))[:, None] * reach.mean_radii
            certain = products + np.sqrt(squares) * reach.radii
        else:
            nearness = 2 * nearness - self.lengths - squares
            apart = np.maximum(squares - 2 * products + self.mean_lengths, 0)
            moved = (reach.means @ reach.root).astype(np.float64)
            along = (turned**2).sum(1)[:, None] - 2 * turned @ moved.T + (moved**2).sum(1)
            means = -(apart + reach.mean_radii**2)
            deviations = np.sqrt(4 * np.maximum(along, 0) + reach.spread * reach.mean_radii**2) * reach.mean_radii
            certain = -np.square(np.maximum(np.sqrt(apart) - reach.radii, 0))
        deviations = deviations + 1e-12 * (1 + np.abs(means))
        peaks = np.empty(means.shape)
        native().peaks(queries, reach.means, reach.extents, l2, peaks)  # of features that few records have
        excess = np.maximum(self.excess, (peaks / deviations + native().MORE) / CERTAIN)
        likely = np.full_like(certain, np.inf) if counts else means + CERTAIN * deviations * excess
        if l2:
            likely = np.minimum(likely + reach.mean_radii**2, 0)
        return _ListScores(nearness, means, deviations, excess, np.minimum(certain, likely) + rounding)


def _frame(rows: Rows, starts: Rows, is_apart: NDArray[np.bool_]) -> Frame:
    """Every list's rows, less those set apart, ordered by their random numbers."""
    stays = ~is_apart[rows]
    ends = np.concatenate([[0], np.cumsum(stays)])
    rows, starts = rows[stays], ends[starts].astype(np.int64)
    chances = np.empty(len(rows), np.uint32)
    native().hashes(rows, PERMANENT, chances)
    for low, high in itertools.pairwise(starts):
        order = np.argsort(chances[low:high])
        rows[low:high], chances[low:high] = rows[low:high][order], chances[low:high][order]
    return Frame(rows, chances, starts)


def _room(budget: int) -> int:
    """So many places do for about so many draws."""
    return int(budget + ROOM * budget**0.5 + 16)


def _with_room(
    loop: Callable[..., None], given: Callable[..., tuple[Any, ...]], q: int, width: int, products: int
) -> tuple[Rows, Floats]:  # (q, w), (q, w)
    """The numbers, -1 for none, and the logs that a loop writes for q queries; once more where there was no room."""
    rows, logs, counts = np.full((q, width), -1, np.int64), np.zeros((q, width), np.float32), np.zeros(q, np.int64)
    by_lines(loop, lambda part: given(part, rows[part], logs[part], counts[part]), q, products)
    most = int(counts.max(initial=0))
    return (rows[:, :most], logs[:, :most]) if most <= width else _with_room(loop, given, q, most, products)


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


def subsample(
    drawn: TailSample,
    logits: Numbers,  # (q, w) with the log-weights; -inf = takes no part
    budget: int,
    seeds: NDArray[np.uint64],  # (q,)
) -> tuple[Rows, Floats, Numbers]:  # (q, k), (q, k), (q,)
    """Some of the records, each kept in proportion to its weight: their places, -1 = none, and new log-weights.

    And the log of the term, weight over probability, of each that was not sure to be kept; -inf where all were.
    """
    largest = np.empty(len(logits))

    def given(part: slice, *out: Any) -> tuple[Any, ...]:
        asked = drawn.positions[part], logits[part], drawn.scales, drawn.log_weights[part], float(budget)
        return *asked, seeds[part], *out, largest[part]

    room = min(logits.shape[1], _room(budget))
    return *_with_room(native().subsample, given, len(logits), room, logits.size * STEPS), largest
