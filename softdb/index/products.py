"""Approximate scores of blocks by matrix products, the best of them, and a bound on their rounding.

Step one of exact search; the candidates are scored again, pair by pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric

_GROUP = 32  # scores of a group, whose maximum is taken first


class Best(NamedTuple):
    """The best approximate scores so far and their positions, in any order."""

    scores: Tensor  # (q, c)
    positions: Tensor  # (q, c)


class KeyBlock(NamedTuple):
    """A block of records on the device where they are compared."""

    positions: Tensor  # (m,)
    keys: Tensor  # (m, d)


class BlockKeys:
    """A block of keys with terms of its metric that all queries share."""

    def __init__(self, metric: Metric, keys: Tensor, before: BlockKeys | None) -> None:
        self.keys = keys  # (m, d)
        # memory shared by all blocks: page faults of new memory cost more than the product
        self._moved: Tensor = keys.new_empty(0) if before is None else before._moved
        self._scores: Tensor = keys.new_empty(0) if before is None else before._scores
        self.inverse = _inverse_lengths(keys) if metric is Metric.COSINE else keys.new_empty(0)  # (m,)

    def around(self, centre: Tensor) -> Tensor:  # (m, d), overwritten by the next call
        """Return the keys minus a centre (d,)."""
        if self._moved.numel() < self.keys.numel():
            self._moved = self.keys.new_empty(self.keys.numel())
        return torch.sub(self.keys, centre, out=self._moved[: self.keys.numel()].view_as(self.keys))

    def scores(self, queries: int) -> Tensor:  # (q, m)
        """Memory for the scores of `queries` queries, shared by all calls."""
        numbers = queries * len(self.keys)
        if self._scores.numel() < numbers:
            self._scores = self.keys.new_empty(numbers)
        return self._scores[:numbers].view(queries, -1)


class Probe:
    """Queries prepared for comparison with blocks, and the bound on the rounding of their scores."""

    def __init__(self, metric: Metric, queries: Tensor) -> None:
        self.metric, self.given, self.queries = metric, queries, queries  # (q, d)
        if metric is Metric.L2:
            # seen from the mean query, cancellation loses no digits of near keys
            self.centre = queries.mean(0)
            self.moved = queries - self.centre
            self.single = len(queries) == 1
        elif metric is Metric.COSINE:
            self.queries = queries * _inverse_lengths(queries).unsqueeze(1)

    def approximate(self, block: BlockKeys) -> Tensor:  # (q, m), overwritten by the next call
        """Scores by one matrix product; for L2 without the constant of each query."""
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
        """Scores, one for each query, from approximate ones: the constant of L2 is added."""
        scores = scores.double()
        return scores - self.moved.double().square().sum(1) if self.metric is Metric.L2 else scores

    def slack(
        self,
        worst: Tensor,  # (q,) float64, score of the last candidate
        longest: Tensor,  # (q,) float64, length of the longest key concerned
    ) -> Tensor:  # (q,) float64
        """Largest error of an approximate score of a record about as near as the last candidate.

        |error| ≤ d u Σ|a_i b_i| for a product of d terms at unit rounding u (Higham 2002, section 3.1).
        """
        unit = torch.finfo(self.queries.dtype).eps / 2
        if self.queries.dtype is torch.float32 and reduced():
            unit = 2.0**-8  # products may run in bfloat16
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
    """Scores pair by pair, without matrix products: equal keys score alike at any position, and never in TF32."""
    if metric is Metric.L2:
        return (keys - queries).square_().sum(-1).neg_()
    products = (keys * queries).sum(-1)
    if metric is Metric.DOT:
        return products
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1) * torch.linalg.vector_norm(queries, dim=-1)
    return products / lengths.masked_fill_(lengths == 0, torch.inf)


def _multiply(queries: Tensor, keys: Tensor, out: Tensor) -> Tensor:
    """q·k for every pair of (q, d) and (m, d), written to out (q, m)."""
    if len(queries) >= 8:
        return torch.mm(queries, keys.T, out=out)
    # for few queries MKL is two to three times faster this way round, except for a single one
    doubled = queries if len(queries) > 1 else queries.repeat(2, 1)
    return out.copy_(torch.mm(keys, doubled.T).T[: len(queries)])


def _inverse_lengths(vectors: Tensor) -> Tensor:
    """1/‖x‖ (m,) of vectors (m, d), 0 for a zero vector."""
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
    """Merge the best so far with a block's best."""
    groups = scores.shape[1] // _GROUP
    if groups < 2 * width:
        return top(best, scores, positions.expand(scores.shape), width)
    # the best scores lie in the groups with the best maxima; a strided group vectorises
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
    """Merge the best so far with other scores."""
    if best is not None:
        scores, positions = torch.cat([best.scores, scores], 1), torch.cat([best.positions, positions], 1)
    if scores.shape[1] <= width:
        return Best(scores.clone(), positions.clone())  # the memory of the scores is reused
    values, places = scores.topk(width, sorted=False)
    return Best(values, positions.gather(1, places))
