"""Pooling: candidates and their weights become one answer; answers of parts merge into the answer of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.scoring import softmax

__all__ = ["State", "merge", "missed_mass", "pool", "tail_lse"]


class State(NamedTuple):
    """A soft query over some of the records, of which parts that share none merge into the whole."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,), -inf where nothing takes part


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
        if values.device.type != "cpu":  # no faster as a product of matrices, which TF32 would round
            return (weights.unsqueeze(2) * values.to(weights.dtype)).sum(1)
        return (weights.unsqueeze(1) @ values.to(weights.dtype)).squeeze(1)
    if num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    return weights.new_zeros(len(weights), num_classes).scatter_add(1, values.long(), weights)


def merge(
    states: Sequence[State | tuple[Tensor, Tensor]],  # one or more, of records that no two share
) -> State:
    """The state of the whole from the states of its parts: lse = log Σ e^lse_i, o = Σ e^(lse_i - lse) o_i.

    Associative and commutative up to rounding, and differentiable. A part that holds nothing for a query (lse = -inf)
    adds nothing to it; where no part holds anything the state is (0, -inf), with zero gradients. Cost q v a part.
    Raises BadInput for no states.
    """
    if not states:
        raise BadInput("merge got no states; give it at least one (output, lse)")
    outputs, lses = (torch.stack(column, dim=1) for column in zip(*states, strict=True))  # (q, parts, v), (q, parts)
    shares, lse = softmax(lses, 1.0, lses > -torch.inf)
    return State(pool(shares, outputs), lse)


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
