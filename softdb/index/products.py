"""Approximate scores of blocks by matrix products, the best scores of all blocks, and a bound on rounding errors.

This is the first step of exact search. In the second step the candidates are scored again, pair by pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric

_GROUP = 32  # number of scores in a group; the maxima of groups are computed first


class Best(NamedTuple):
    """The best approximate scores so far and the positions of their records, in any order."""

    scores: Tensor  # (q, c)
    positions: Tensor  # (q, c)


class BlockKeys:
    """A block of keys and the terms of their scores that do not depend on the query."""

    def __init__(self, metric: Metric, keys: Tensor, before: BlockKeys | None) -> None:
        self.keys = keys  # (m, d)
        # all blocks share this memory: page faults of new memory cost more than the product
        self._moved: Tensor = keys.new_empty(0) if before is None else before._moved
        self._scores: Tensor = keys.new_empty(0) if before is None else before._scores
        self.inverse = _inverse_lengths(keys) if metric is Metric.COSINE else keys.new_empty(0)  # (m,)

    def around(self, centre: Tensor) -> Tensor:  # (m, d), overwritten by the next call
        """Return the keys minus the vector `centre` (d,)."""
        if self._moved.numel() < self.keys.numel():
            self._moved = self.keys.new_empty(self.keys.numel())
        return torch.sub(self.keys, centre, out=self._moved[: self.keys.numel()].view_as(self.keys))

    def scores(self, queries: int) -> Tensor:  # (q, m)
        """Return memory for the scores of `queries` queries. All calls share this memory."""
        numbers = queries * len(self.keys)
        if self._scores.numel() < numbers:
            self._scores = self.keys.new_empty(numbers)
        return self._scores[:numbers].view(queries, -1)


class Probe:
    """Queries prepared for comparison with blocks, and a bound on the rounding errors of their scores."""

    def __init__(self, metric: Metric, queries: Tensor) -> None:
        self.metric, self.given, self.queries = metric, queries, queries  # (q, d)
        if metric is Metric.L2:
            # relative to the mean query, the scores of near keys lose no digits by cancellation
            self.centre = queries.mean(0)
            self.moved = queries - self.centre
            self.single = len(queries) == 1
        elif metric is Metric.COSINE:
            self.queries = queries * _inverse_lengths(queries).unsqueeze(1)

    def approximate(self, block: BlockKeys) -> Tensor:  # (q, m), overwritten by the next call
        """Return scores from one matrix product. For L2 they lack a constant for each query, which `full` adds."""
        out = block.scores(len(self.queries))
        if self.metric is not Metric.L2:
            _multiply(self.queries, block.keys, out)
            return out if self.metric is Metric.DOT else out.mul_(block.inverse)
        moved = block.around(self.centre)
        squares = torch.linalg.vector_norm(moved, dim=1).square_()
        if self.single:
            return torch.neg(squares, out=out[0]).unsqueeze(0)
        return _multiply(self.moved, moved, out).mul_(2).sub_(squares)

    def full(self, scores: Tensor) -> Tensor:  # (q,) float64
        """Return one score for each query from `approximate` ones, with the constant of L2 added."""
        scores = scores.double()
        return scores - self.moved.double().square().sum(1) if self.metric is Metric.L2 else scores

    def slack(
        self,
        worst: Tensor,  # (q,) float64, score of the k-th candidate
        longest: Tensor,  # (q,) float64, length of the longest key that matters
    ) -> Tensor:  # (q,) float64
        """Return a bound on the error of the approximate score of a record about as near as the k-th candidate.

        |error| ≤ d u Σ|a_i b_i| for a product of d terms at unit rounding u (Higham 2002, section 3.1).
        """
        unit = torch.finfo(self.queries.dtype).eps / 2
        if self.queries.dtype is torch.float32 and reduced():
            unit = 2.0**-8  # torch may compute products in bfloat16
        terms = unit * (2 * self.queries.shape[1] + 16)
        if self.metric is Metric.L2:
            apart: Tensor = torch.linalg.vector_norm(self.moved.double(), dim=1)
            return terms * (2 * apart + (-worst).sqrt()).square()
        lengths: Tensor = torch.linalg.vector_norm(self.queries.double(), dim=1)
        return terms * lengths * (longest if self.metric is Metric.DOT else 1)


def reduced() -> bool:
    """Return True if float32 products may run in lower precision, or if torch's settings cannot be read."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return True


def pair_scores(
    queries: Tensor,  # (…, d)
    keys: Tensor,  # (…, d)
    metric: Metric,
) -> Tensor:  # (…)
    """Return scores pair by pair without matrix products, so equal keys have equal scores and TF32 is never used."""
    if metric is Metric.L2:
        return (keys - queries).square_().sum(-1).neg_()
    products = (keys * queries).sum(-1)
    if metric is Metric.DOT:
        return products
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1) * torch.linalg.vector_norm(queries, dim=-1)
    return products / lengths.masked_fill_(lengths == 0, torch.inf)


def _multiply(queries: Tensor, keys: Tensor, out: Tensor) -> Tensor:
    """Write the inner products of queries (q, d) and keys (m, d) to `out` (q, m), and return `out`."""
    if len(queries) >= 8:
        return torch.mm(queries, keys.T, out=out)
    # for 2 to 7 queries MKL computes keys · queriesᵀ two to three times faster; one query is doubled
    doubled = queries if len(queries) > 1 else queries.repeat(2, 1)
    return out.copy_(torch.mm(keys, doubled.T).T[: len(queries)])


def _inverse_lengths(vectors: Tensor) -> Tensor:
    """Return 1/‖x‖ (m,) of vectors (m, d), and 0 for a zero vector."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    low, high = lengths.aminmax()
    if not (low > 1e-15 and high < 1e15):  # a square overflows or underflows, or a vector is zero
        lengths = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return lengths.reciprocal().masked_fill(lengths == 0, 0).to(vectors.dtype)


def merge(
    best: Best | None,
    scores: Tensor,  # (q, m)
    positions: Tensor,  # (m,)
    width: int,
) -> Best:
    """Merge the best scores so far with those of a block. Keep the `width` best."""
    groups = scores.shape[1] // _GROUP
    if groups < 2 * width:
        return top(best, scores, positions.expand(scores.shape), width)
    # the `width` best scores are in the `width` groups with the largest maxima; strided groups vectorise
    maxima = scores[:, : groups * _GROUP].view(-1, _GROUP, groups).amax(1)  # (q, groups)
    remainder = torch.arange(groups * _GROUP, scores.shape[1])
    if best is None or best.scores.shape[1] < width:
        hot = torch.arange(len(scores))
        best = best or Best(scores.new_empty(len(scores), 0), positions.new_empty(len(scores), 0))
    else:
        floor = best.scores.amin(1)
        hot = (~(torch.maximum(maxima.amax(1), _amax(scores[:, remainder])) <= floor)).nonzero()[:, 0]
        if not len(hot):
            return best
    chosen = maxima[hot].topk(width, sorted=False).indices.unsqueeze(1)  # (hot, 1, kept)
    places = (chosen + groups * torch.arange(_GROUP).view(1, -1, 1)).flatten(1)
    places = torch.cat([places, remainder.expand(len(hot), -1)], 1)
    own = top(Best(best.scores[hot], best.positions[hot]), scores[hot.unsqueeze(1), places], positions[places], width)
    if len(hot) == len(scores):
        return own
    return Best(best.scores.index_copy(0, hot, own.scores), best.positions.index_copy(0, hot, own.positions))


def _amax(scores: Tensor) -> Tensor:
    return scores.amax(1) if scores.shape[1] else scores.new_full((len(scores),), -torch.inf)


def top(
    best: Best | None,
    scores: Tensor,  # (q, m)
    positions: Tensor,  # (q, m)
    width: int,
) -> Best:
    """Merge other scores into the best so far, and return the `width` best."""
    if best is not None:
        scores, positions = torch.cat([best.scores, scores], 1), torch.cat([best.positions, positions], 1)
    if scores.shape[1] <= width:
        return Best(scores.clone(), positions.clone())  # copied, as the memory of the scores is reused
    values, places = scores.topk(width, sorted=False)
    return Best(values, positions.gather(1, places))
