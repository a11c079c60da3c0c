"""Pooling: candidates and their weights become one answer; answers of parts merge into the answer of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.weights import divisor, softmax

__all__ = ["Moments", "State", "merge", "missed_mass", "pool", "sampled", "tail_lse"]


class Moments(NamedTuple):
    """What the error of a sampled answer is made of: sums of c = (1 - p) w² over its candidates.

    w is a candidate's weight in the answer and p its inclusion probability, 1 for those that entered surely.
    """

    squares: Tensor  # (q,) Σ c ‖v‖²
    values: Tensor  # (q, v) Σ c v
    weights: Tensor  # (q,) Σ c


class State(NamedTuple):
    """A soft query over some of the records, of which parts that share none merge into the whole."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,), -inf where nothing takes part
    moments: Moments | None = None  # None: exact

    @property
    def stderr(self) -> Tensor:  # (q,)
        """Standard error of the output, in the norm: √(Σ c ‖v - o‖²), from the moments; 0 where exact."""
        if self.moments is None:
            return torch.zeros_like(self.lse)
        a, b, c = self.moments
        spread = a - 2 * (self.output * b).sum(1) + self.output.square().sum(1) * c
        return _root(spread)

    @property
    def lse_stderr(self) -> Tensor:  # (q,)
        """Standard error of the normaliser, relative to it, which is that of lse: √(Σ c); 0 where exact."""
        return torch.zeros_like(self.lse) if self.moments is None else _root(self.moments.weights)


def pool(
    weights: Tensor,  # (q, k)
    values: Tensor,  # (q, k, v), or int64 labels (q, k)
    num_classes: int | None = None,  # needed for labels
) -> Tensor:  # (q, v), or (q, num_classes)
    """The weighted sum of the candidates' values, o = Σ w v; of labels, how much weight each class holds.

    Differentiable in the weights and in vector values. Cost q k v; of labels q (k + num_classes). Raises BadInput for
    labels without `num_classes`.
    """
    values = values.to(weights.device)
    if values.is_floating_point():
        return (weights.unsqueeze(1) @ values.to(weights.dtype)).squeeze(1)
    if num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    return weights.new_zeros(len(weights), num_classes).scatter_add(1, values.long(), weights)


def sampled(
    scores: Tensor,  # (q, k)
    temperature: float,
    live: Tensor,  # (q, k) bool
    log_weights: Tensor,  # (q, k) at least 0: log of the inverse of each candidate's inclusion probability p
    values: Tensor,  # (q, k, v), or int64 labels (q, k)
    num_classes: int | None = None,  # needed for labels
) -> State:
    """The state of candidates of which some were drawn: the softmax of s / T + log(1/p), a ratio estimator.

    The moments tell its error (Särndal, Swensson and Wretman 1992, section 5.6, for independent draws). Log-weights are
    constants to autograd: the gradients of Σ e^a and Σ e^a v are unbiased, a = s / T + log(1/p). Cost q k v.
    """
    temperature = divisor(temperature, scores.dtype)
    weights, lse = softmax(scores + log_weights.detach() * temperature, temperature, live)
    chance = -torch.expm1(-log_weights.detach())  # 1 - p, right to the last digit where p is near 1
    noise = chance * weights.square()
    squares = torch.ones_like(noise)
    if values.is_floating_point():
        squares = torch.linalg.vector_norm(values.to(noise), dim=-1).square()  # holds no second copy of the values
    moments = Moments((noise * squares).sum(1), pool(noise, values, num_classes), noise.sum(1))
    return State(pool(weights, values, num_classes), lse, moments)


def merge(
    states: Sequence[State | tuple[Tensor, Tensor]],  # one or more, of records that no two share
) -> State:
    """The state of the whole from the states of its parts: lse = log Σ e^lse_i, o = Σ e^(lse_i - lse) o_i.

    Moments add up, rescaled by e^(2 (lse_i - lse)); the whole is exact where every part is. Associative and commutative
    up to rounding, and differentiable. A part that holds nothing for a query (lse = -inf) adds nothing to it; where no
    part holds anything the state is (0, -inf), with zero gradients. Cost q v a part. Raises BadInput for no states.
    """
    if not states:
        raise BadInput("merge got no states; give it at least one (output, lse)")
    parts = [State(*state) for state in states]
    lses = torch.stack([part.lse for part in parts], dim=1)  # (q, parts)
    shares, lse = softmax(lses, 1.0, lses > -torch.inf)
    output = pool(shares, torch.stack([part.output for part in parts], dim=1))
    if all(part.moments is None for part in parts):
        return State(output, lse)
    columns = zip(*(_moments(part) for part in parts), strict=True)
    squares, values, weights = (torch.stack(column, dim=1) for column in columns)
    noise = shares.square()
    return State(output, lse, Moments((noise * squares).sum(1), pool(noise, values), (noise * weights).sum(1)))


def _moments(state: State) -> Moments:
    nothing = torch.zeros_like(state.lse)
    return state.moments or Moments(nothing, torch.zeros_like(state.output), nothing)


def _root(square: Tensor) -> Tensor:
    """√x, 0 with a gradient of 0 where rounding left nothing above it."""
    none = square <= 0
    return square.masked_fill(none, 1).sqrt().masked_fill(none, 0)


@torch.no_grad()
def tail_lse(
    sample_scores: Tensor,  # (q, m): records drawn uniformly, scored against each query
    taken: Tensor,  # (q, m) bool: drawn, but among the query's own hits (or taking no part)
    others: Tensor | int,  # (q,): how many records are not
    temperature: float,
) -> Tensor:  # (q,)
    """Log of an estimate of what the records beyond a query's hits add to its normaliser.

    With m' of the sample not taken: Z = others / m' · Σ exp(s / T) over those. Given m' ≥ 1 they are a uniform sample
    of the others, so Z (not its log) is unbiased. -inf without others; NaN, which is "unknown", where there are others
    but none was drawn: a sample larger than the number of hits always has one. No gradient. Cost q m.
    """
    drawn = (~taken).sum(dim=1)  # (q,)
    _, lse = softmax(sample_scores, temperature, ~taken)
    count = torch.as_tensor(others, device=lse.device).to(lse.dtype).expand_as(lse)
    estimate = lse + (count / drawn).log()  # -inf + inf where none was drawn
    return estimate.masked_fill(count <= 0, -torch.inf)


@torch.no_grad()
def missed_mass(
    sample_scores: Tensor,  # (q, m): records drawn uniformly, scored against each query
    taken: Tensor,  # (q, m) bool: drawn, but among the query's own hits (or taking no part)
    others: Tensor | int,  # (q,): how many records are not
    head_lse: Tensor,  # (q,): log-normaliser of the hits
    temperature: float,
) -> Tensor:  # (q,)
    """Estimated share of the softmax mass that lies beyond a query's hits: Z_tail / (Z_head + Z_tail).

    Z_tail as in `tail_lse`; the ratio is taken of logs, so nothing overflows. 0 where nothing is beyond the hits, 1
    where there are no hits, NaN where `tail_lse` is. No gradient. Cost q m.
    """
    tail = tail_lse(sample_scores, taken, others, temperature)
    return (tail - head_lse).sigmoid().masked_fill(tail == -torch.inf, 0)
