"""Scores of whole blocks by matrix products, the best of them, and how far rounding may have misled.

Step one of exact search. What it keeps is scored again, pair by pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric

_GROUP = 32  # scores that share a maximum


class Best(NamedTuple):
    """The best approximate scores so far, and where they lie: not in order."""

    scores: Tensor  # (q, c)
    positions: Tensor  # (q, c)


class KeyBlock(NamedTuple):
    """Some of the records, where they are compared."""

    positions: Tensor  # (m,)
    keys: Tensor  # (m, d)


class BlockKeys:
    """A block of keys and what its metric needs of it, computed once for all queries."""

    def __init__(self, metric: Metric, keys: Tensor, before: BlockKeys | None) -> None:
        self.keys = keys  # (m, d)
        # the same memory for all blocks: megabytes asked for anew cost more in page faults than the product
        self._moved: Tensor = keys.new_empty(0) if before is None else before._moved
        self._scores: Tensor = keys.new_empty(0) if before is None else before._scores
        self.inverse = _inverse_lengths(keys) if metric is Metric.COSINE else keys.new_empty(0)  # (m,)

    def around(self, centre: Tensor) -> Tensor:  # (m, d), overwritten by the next call
        """The keys as seen from a centre (d,)."""
        if self._moved.numel() < self.keys.numel():
            self._moved = self.keys.new_empty(self.keys.numel())
        return torch.sub(self.keys, centre, out=self._moved[: self.keys.numel()].view_as(self.keys))

    def scores(self, queries: int) -> Tensor:  # (q, m)
        """Memory for the scores of so many queries, the same for every call."""
        numbers = queries * len(self.keys)
        if self._scores.numel() < numbers:
            self._scores = self.keys.new_empty(numbers)
        return self._scores[:numbers].view(queries, -1)


class Probe:
    """Some queries made ready to be compared with blocks, and how far rounding may mislead them."""

    def __init__(self, metric: Metric, queries: Tensor) -> None:
        self.metric, self.asked, self.queries = metric, queries, queries  # (q, d)
        if metric is Metric.L2:
            # around the queries nothing that is near to them is lost to cancellation
            self.centre = queries.mean(0)
            self.moved = queries - self.centre
            self.single = len(queries) == 1
        elif metric is Metric.COSINE:
            self.queries = queries * _inverse_lengths(queries).unsqueeze(1)

    def approximate(self, block: BlockKeys) -> Tensor:  # (q, m), overwritten by the next call
        """Scores by one matrix product; L2 without its constant per query."""
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
        """Approximate scores, one for each query, with the constant put back."""
        scores = scores.double()
        return scores - self.moved.double().square().sum(1) if self.metric is Metric.L2 else scores

    def slack(
        self,
        worst: Tensor,  # (q,) float64, score of the last found
        longest: Tensor,  # (q,) float64, length of the longest key concerned
    ) -> Tensor:  # (q,) float64
        """Largest error of an approximate score, for a record about as near as the last found.

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
    """Return True if products of float32 may run in less; torch refuses to say once its newer settings were used."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return True


def pair_scores(
    queries: Tensor,  # (…, d)
    keys: Tensor,  # (…, d)
    metric: Metric,
) -> Tensor:  # (…)
    """Scores pair by pair, without matrix products: the same for equal keys wherever they stand, and never in TF32."""
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
    asked = queries if len(queries) > 1 else queries.repeat(2, 1)
    return out.copy_(torch.mm(keys, asked.T).T[: len(queries)])


def _inverse_lengths(vectors: Tensor) -> Tensor:
    """1/‖x‖ (m,) of vectors (m, d), 0 for a zero vector."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    low, high = lengths.aminmax()
    if not (low > 1e-15 and high < 1e15):  # squares of float32 that overflow, vanish, or belong to a zero vector
        lengths = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return lengths.reciprocal().masked_fill(lengths == 0, 0).to(vectors.dtype)


def merge(
    best: Best | None,
    scores: Tensor,  # (q, m)
    positions: Tensor,  # (m,)
    kept: int,
) -> Best:
    """The best so far and a block's best, together."""
    groups = scores.shape[1] // _GROUP
    if groups < 2 * kept:
        return top(best, scores, positions.expand(scores.shape), kept)
    # the best scores lie in the groups with the best maxima; a strided group vectorises
    maxima = scores[:, : groups * _GROUP].view(-1, _GROUP, groups).amax(1)  # (q, groups)
    tail = torch.arange(groups * _GROUP, scores.shape[1])
    if best is None or best.scores.shape[1] < kept:
        hot = torch.arange(len(scores))
        best = best or Best(scores.new_empty(len(scores), 0), positions.new_empty(len(scores), 0))
    else:
        floor = best.scores.amin(1)
        hot = (~(torch.maximum(maxima.amax(1), _amax(scores[:, tail])) <= floor)).nonzero()[:, 0]
        if not len(hot):
            return best
    chosen = maxima[hot].topk(kept, sorted=False).indices.unsqueeze(1)  # (hot, 1, kept)
    places = (chosen + groups * torch.arange(_GROUP).view(1, -1, 1)).flatten(1)
    places = torch.cat([places, tail.expand(len(hot), -1)], 1)
    here = top(Best(best.scores[hot], best.positions[hot]), scores[hot.unsqueeze(1), places], positions[places], kept)
    if len(hot) == len(scores):
        return here
    return Best(best.scores.index_copy(0, hot, here.scores), best.positions.index_copy(0, hot, here.positions))


def _amax(scores: Tensor) -> Tensor:
    return scores.amax(1) if scores.shape[1] else scores.new_full((len(scores),), -torch.inf)


def top(
    best: Best | None,
    scores: Tensor,  # (q, m)
    positions: Tensor,  # (q, m)
    kept: int,
) -> Best:
    """The best so far and others, together."""
    if best is not None:
        scores, positions = torch.cat([best.scores, scores], 1), torch.cat([best.positions, positions], 1)
    if scores.shape[1] <= kept:
        return Best(scores.clone(), positions.clone())  # the scores' memory is used again
    values, places = scores.topk(kept, sorted=False)
    return Best(values, positions.gather(1, places))
