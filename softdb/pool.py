"""Pool values by their weights, and merge answers over disjoint sets of records into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.scoring import softmax

__all__ = ["State", "merge", "missed_mass", "pool"]


class State(NamedTuple):
    """Answer to a soft query over some records; `merge` combines the answers over disjoint records."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,), -inf if no record takes part


def pool(
    weights: Tensor,  # (q, k)
    values: Tensor,  # (q, k, v), or int64 labels (q, k)
    num_classes: int | None = None,  # needed for labels
) -> Tensor:  # (q, v), or (q, num_classes)
    """Return the weighted sum of the candidates' values, o = Σ w v; for labels, the total weight of each class.

    Differentiable in the weights and in vector values. Cost q k v; for labels q (k + num_classes). Raises BadInput for
    labels without `num_classes`.
    """
    values = values.to(weights.device)
    if values.is_floating_point():
        if values.device.type != "cpu":  # a matrix product would be no faster, and TF32 would round it
            return (weights.unsqueeze(2) * values.to(weights.dtype)).sum(1)
        return (weights.unsqueeze(1) @ values.to(weights.dtype)).squeeze(1)
    if num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    return weights.new_zeros(len(weights), num_classes).scatter_add(1, values.long(), weights)


def merge(
    states: Sequence[State | tuple[Tensor, Tensor]],  # one or more, over disjoint records
) -> State:
    """Merge the answers over disjoint records into the answer over all: lse = log Σ e^lse_i, o = Σ e^(lse_i - lse) o_i.

    Associative and commutative up to rounding, and differentiable. A state in which no record takes part for a
    query has lse = -inf and adds nothing; if all are so, the result is (0, -inf), with zero gradients. Cost q v per
    state. Raises BadInput for no states.
    """
    if not states:
        raise BadInput("merge got no states; give it at least one (output, lse)")
    outputs, lses = (torch.stack(column, dim=1) for column in zip(*states, strict=True))  # (q, parts, v), (q, parts)
    shares, lse = softmax(lses, 1.0, lses > -torch.inf)
    return State(pool(shares, outputs), lse)


@torch.no_grad()
def missed_mass(
    sample_scores: Tensor,  # (q, m): records drawn uniformly, scored against each query
    taken: Tensor,  # (q, m) bool: True for a sampled record that is a hit of the query or takes no part
    others: Tensor | int,  # (q,): number of records that take part and are not hits
    head_lse: Tensor,  # (q,): log-normaliser of the hits
    temperature: float,
) -> Tensor:  # (q,)
    """Return the estimated share of the softmax weight that is not on a query's hits: Z_rest / (Z_head + Z_rest).

    Z_rest = others / m' · Σ exp(s / T) over the m' sampled records that are not taken. They are a uniform sample of the
    others, so Z_rest is unbiased; logs keep it from overflowing. Returns 0 if all records are hits, 1 if there are no
    hits, and NaN (unknown) if the sample has none of the others, which cannot happen if it is larger than the number of
    hits. No gradient. Cost q m.
    """
    drawn = (~taken).sum(dim=1)  # (q,)
    _, lse = softmax(sample_scores, temperature, ~taken)
    count = torch.as_tensor(others, device=lse.device).to(lse.dtype).expand_as(lse)
    rest_lse = lse + (count / drawn).log()  # -inf + inf = NaN if none was drawn
    return (rest_lse - head_lse).sigmoid().masked_fill((count <= 0) | (rest_lse == -torch.inf), 0)
