"""The tail beyond the nearest, sampled: records drawn from the whole database with known probabilities.

The records whose codes are nearest are considered one by one, the others by the lists of an IVF index, each in
proportion to how much it is thought to matter: the root of the mean square of its weight exp(logit),

    near:  exp(ŝ + ε²)                  ŝ the logit that the code gives, ε the standard error of the codes
    far:   exp(μ + σ²) P^½              μ, σ mean and deviation of the logits in a list, taken as normal; where the
                                        list was searched, P = Φ((τ - μ - 2 σ²) / σ) / Φ((τ - μ) / σ), as what lies
                                        above the last of the near, τ, is among them; at most
                                        μ + σ √(2 log m), about the largest of the m in the list

A share of the draws goes to all records alike. What is thought decides how large the error is, never whether the answer
is right: sums over those drawn, divided by their probabilities, are unbiased (Horvitz and Thompson 1952).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.compiled.threads import by_lines
from softdb.index.contract import Floats, Index, Rows, faiss_module, prepared
from softdb.index.rerank import scores_at
from softdb.store import Snapshot

__all__ = ["FEWEST", "Drawn", "Frame", "Tail", "kept", "seeds_of"]

FEWEST = 10_000  # records that are all pooled sooner than drawn from
SAMPLED = 1 << 14  # stored keys that the spread of the lists is taken from
CALIBRATED = 64  # stored keys that the error of the codes is taken from, as queries
PRIOR = 8  # records' worth of belief that a list spreads as all do
PLAIN = 0.1  # share of the draws that goes to all records alike
SCANNED = 1 << 16  # codes that are looked at one by one, for a deviation of 1 of the logits in a list
ROOM = 8.0  # standard deviations of the number drawn that there is room for
PERMANENT = 1 << 40  # seed of the order inside the lists; draws shift it


class Frame(NamedTuple):
    """The rows of each list in the order of their permanent random numbers: 12 bytes a record."""

    rows: Rows  # (n,)
    chances: NDArray[np.uint32]  # (n,) ascending within a list
    starts: Rows  # (lists + 1,)


class Drawn(NamedTuple):
    """Rows drawn for each query, and the log of the inverse of each one's probability."""

    rows: Rows  # (q, w), -1 = none
    log_weights: Floats  # (q, w)


class Thought(NamedTuple):
    """What is known before anything is drawn: logits of the nearest by their codes, and of each list."""

    near: Rows  # (q, c), -1 = none
    near_logits: Floats  # (q, c) log of how much each matters
    codes: Floats  # (q, c)
    means: Floats  # (q, lists)
    deviations: Floats  # (q, lists)
    probed: int  # how many lists were searched
    least: float  # the logit that matters; NaN: weights matter


class Tail:
    """A sampler over the rows that an IVF index holds. Safe to use from several threads."""

    def __init__(self, index: Index, snapshot: Snapshot) -> None:
        inner = index.inner
        self.index = index
        self.frame = _frame(inner.invlists)
        self.sizes = np.diff(self.frame.starts).astype(np.float32)  # (lists,)
        self.centroids: Floats = inner.quantizer.reconstruct_n(0, inner.nlist)  # (lists, d)
        live = np.flatnonzero(snapshot.live)
        some = np.sort(np.random.default_rng(3).choice(live, min(len(live), SAMPLED), replace=False, shuffle=False))
        keys = prepared(snapshot.keys_at(some).numpy(), index.metric)
        home = inner.quantizer.search(keys, 1)[1][:, 0]
        left = keys - self.centroids[home]
        self._spread(left, home, inner.nlist)
        self._calibrate(snapshot, keys)

    def _spread(
        self,
        left: Floats,  # (m, d) keys seen from their centroids
        home: Rows,  # (m,)
        lists: int,
    ) -> None:
        """How keys lie around their centroids: one covariance, scaled for each list."""
        squares = np.einsum("md,md->m", left, left, dtype=np.float64)
        whole = max(float(squares.mean()), 1e-12)
        found = np.bincount(home, squares, lists) + PRIOR * whole
        self.scale = (found / (np.bincount(home, minlength=lists) + PRIOR) / whole).astype(np.float32)  # (lists,)
        values, vectors = np.linalg.eigh((left.T @ left / len(left)).astype(np.float64))
        roots = vectors * np.sqrt(np.maximum(values, 0))  # times its transpose it is the covariance
        self.root = roots.astype(np.float32)  # (d, d)
        self.reach = np.float32(whole)  # mean squared distance from the centroid
        self.reach_spread = np.float32(squares.var())

    def _calibrate(self, snapshot: Snapshot, keys: Floats) -> None:
        """How far scores by codes lie from the true ones, for a query of length 1."""
        asked = np.ascontiguousarray(keys[:: max(1, len(keys) // CALIBRATED)][:CALIBRATED])
        rows, codes = self.index.find_scored(asked, 128, None, None)
        true = scores_at(snapshot, asked, snapshot.positions(rows), self.index.metric)
        there = (rows >= 0) & np.isfinite(true)
        error = true[there] - codes[there]
        lengths = float(np.linalg.norm(asked, axis=1).mean()) if self.index.metric is Metric.DOT else 1.0
        self.bias, self.error = (float(error.mean()), float(error.std())) if len(error) else (0.0, 0.0)
        self.bias, self.error = self.bias / max(lengths, 1e-12), self.error / max(lengths, 1e-12)

    def draw(
        self,
        queries: Floats,  # (q, d) prepared
        factor: float,  # logits are this times the score
        near: int,
        budget: int,
        seed: int,
    ) -> Drawn:
        """About `budget` rows for each query, by their weights; dead ones among them.

        Cost of a search, and q (near + lists).
        """
        means, deviations = self._logits(queries, factor)
        effort = self._effort(float(deviations.mean()))
        rows, codes, error = self._near(queries, near, effort)
        near_logits = (factor * codes + (factor * error) ** 2).astype(np.float32)
        coded = (factor * codes).astype(np.float32)
        return self._loose(Thought(rows, near_logits, coded, means, deviations, effort, np.nan), queries, budget, seed)

    def draw_within(
        self,
        queries: Floats,  # (q, d) prepared
        least: float,
        near: int,
        budget: int,
        seed: int,
    ) -> Drawn:
        """As `draw`, by their chances to score at least so much."""
        means, deviations = self._logits(queries, 1.0)
        effort = self._effort(1.0)
        rows, codes, error = self._near(queries, near, effort)
        beyond = torch.from_numpy((codes - least) / np.maximum(error, 1e-12)).double()
        chances = (0.5 * torch.special.log_ndtr(beyond)).clamp(min=-14).float().numpy()
        return self._loose(Thought(rows, chances, codes, means, deviations, effort, least), queries, budget, seed)

    def _near(
        self, queries: Floats, near: int, effort: int
    ) -> tuple[Rows, Floats, Floats]:  # (q, near), (q, near), (q, 1)
        """Rows whose codes are nearest, what they score by them, and the standard error of that."""
        rows, codes = self.index.find_scored(queries, near, None, effort)
        dot = self.index.metric is Metric.DOT
        scale = np.linalg.norm(queries, axis=1, keepdims=True) if dot else np.ones((len(queries), 1))
        return rows, (codes + self.bias * scale).astype(np.float32), (self.error * scale).astype(np.float32)

    def _loose(self, thought: Thought, queries: Floats, budget: int, seed: int) -> Drawn:
        draw = functools.partial(_drawn, thought, self.sizes, self.frame, float(budget), seeds_of(queries, seed))
        found, logs, most = draw(int(budget + ROOM * budget**0.5 + 16))
        if most > found.shape[1]:
            found, logs, most = draw(most)
        return Drawn(found[:, :most], logs[:, :most])

    def _effort(self, deviation: float) -> int:
        """How many lists to search: where weights in a list are about alike, draws from it do as well."""
        codes = SCANNED * min(max(deviation, 0.25), 16.0)
        lists = len(self.sizes)
        return min(lists, max(1, round(codes * lists / max(1.0, float(self.sizes.sum())))))

    def _logits(self, queries: Floats, factor: float) -> tuple[Floats, Floats]:  # (q, lists), (q, lists)
        """Mean and deviation of the logits in each list."""
        if self.index.metric is not Metric.L2:
            turned = queries @ self.root
            variance = np.einsum("qd,qd->q", turned, turned)[:, None] * self.scale
            return factor * (queries @ self.centroids.T), factor * np.sqrt(variance) + np.float32(1e-6)
        products = queries @ self.centroids.T
        apart = (queries**2).sum(1)[:, None] - 2 * products + (self.centroids**2).sum(1)
        turned, moved = queries @ self.root, self.centroids @ self.root
        along = (turned**2).sum(1)[:, None] - 2 * turned @ moved.T + (moved**2).sum(1)
        variance = 4 * np.maximum(along, 0) * self.scale + self.reach_spread * self.scale**2
        return -factor * (np.maximum(apart, 0) + self.reach * self.scale), factor * np.sqrt(variance) + np.float32(1e-6)


def _drawn(
    thought: Thought,
    sizes: Floats,
    frame: Frame,
    budget: float,
    seeds: NDArray[np.uint64],
    width: int,
) -> tuple[Rows, Floats, int]:
    """Rows and log-weights, each (q, width), and the most that a query drew, which may be more."""
    from softdb.compiled import draw as loops

    near, near_logits, codes, means, deviations, probed, least = thought
    q, each = len(near), (near.shape[1] + len(sizes)) * loops.STEPS
    found, logs = np.full((q, width), -1, np.int64), np.zeros((q, width), np.float32)
    far_logits, far_sizes = np.empty_like(means), np.empty_like(means)
    counts = np.zeros(q, np.int64)

    def work(part: slice) -> None:
        far = far_logits[part], far_sizes[part]
        loops.far(near[part], codes[part], means[part], deviations[part], sizes, probed, least, *far)
        asked = near[part], near_logits[part], *far
        loops.draw(*asked, frame, budget, PLAIN, seeds[part], found[part], logs[part], counts[part])

    by_lines(work, q, q * each * 4)
    return found, logs, int(counts.max(initial=0))


def _frame(lists: Any) -> Frame:
    """Every list's rows, ordered by their random numbers."""
    from softdb.compiled import draw as loops

    faiss = faiss_module()
    sizes = [lists.list_size(i) for i in range(lists.nlist)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows, chances = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.uint32)
    for i, size in enumerate(sizes):
        if size:
            part = slice(starts[i], starts[i + 1])
            rows[part] = faiss.rev_swig_ptr(lists.get_ids(i), size)
            loops.hashes(rows[part], PERMANENT, chances[part])
            order = np.argsort(chances[part])
            rows[part], chances[part] = rows[part][order], chances[part][order]
    return Frame(rows, chances, starts)


def seeds_of(
    queries: Floats,  # (q, d)
    seed: int,
) -> NDArray[np.uint64]:  # (q,)
    """A seed for each query, which its numbers decide: the errors of queries asked together are independent."""
    bits = np.ascontiguousarray(queries, np.float32).view(np.uint32)
    seeds: NDArray[np.uint64] = (bits * _factors(seed, queries.shape[1])).sum(1, dtype=np.uint64)
    return seeds


@functools.lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> NDArray[np.uint64]:  # (count,)
    """Odd random numbers, the same for a seed."""
    factors: NDArray[np.uint64] = np.random.default_rng(seed).integers(1, 1 << 63, count, np.uint64) | np.uint64(1)
    return factors


def kept(
    rows: Rows,  # (q, w), -1 = none
    logits: Floats,  # (q, w) with the log-weights; -inf = takes no part
    log_weights: Floats,  # (q, w)
    budget: int,
    seeds: NDArray[np.uint64],  # (q,)
) -> tuple[Rows, Floats]:  # (q, k), (q, k)
    """Some of the draws, each kept in proportion to its weight: their places, -1 = none, and new log-weights."""
    from softdb.compiled import draw as loops

    k = min(rows.shape[1], int(budget + ROOM * budget**0.5 + 16))
    places, logs = np.full((len(rows), k), -1, np.int64), np.zeros((len(rows), k), np.float32)
    counts = np.empty(len(rows), np.int64)

    def work(part: slice) -> None:
        drawn = rows[part], logits[part], log_weights[part]
        loops.thin(*drawn, float(budget), seeds[part], places[part], logs[part], counts[part])

    by_lines(work, len(rows), rows.size * loops.STEPS * 4)
    most = min(k, int(counts.max(initial=0)))
    if counts.max(initial=0) > k:
        raise AssertionError("more draws were kept than there is room for")
    return places[:, :most], logs[:, :most]
