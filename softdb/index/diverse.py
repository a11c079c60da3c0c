"""Maximal marginal relevance: choose candidates that are near the query and unlike those chosen before."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.check import Metric


def diverse(
    queries: Tensor,  # (q, d)
    keys: Tensor,  # (q, c, d) floating point
    scores: Tensor,  # (q, c) best first, -inf = none
    k: int,  # at most c
    metric: Metric,
    diversity: float,
) -> Tensor:  # (q, k) int64
    """Return the indices of k candidates of each query in the order of choice, missing candidates last.

        next = argmax_i [λ s(q, k_i) - (1 - λ) max_{j taken} s(k_i, k_j)],  λ = 1 - diversity

    Carbonell and Goldstein 1998, "The use of MMR", equation 1. The similarity of two keys is their cosine; for L2 it is
    minus the squared distance. For the dot product, s(q, k_i) is divided by |q| and by the length of the longest
    candidate, so that the score lies in -1 … 1 as a cosine does and the order does not change. Cost q k c d.
    """
    q = len(scores)
    live = torch.isfinite(scores)
    relevance = scores.masked_fill(~live, 0)
    if metric is not Metric.L2:
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=2, keepdim=True)
        if metric is Metric.DOT:
            longest = lengths.amax((1, 2)) * torch.linalg.vector_norm(queries, dim=1)
            relevance = relevance / longest.masked_fill(longest == 0, 1).unsqueeze(1)
        keys = keys / lengths.masked_fill(lengths == 0, 1)
    lowest = torch.finfo(scores.dtype).min
    nearest = torch.full_like(relevance, -torch.inf)  # similarity to the most similar key chosen so far
    taken = torch.zeros_like(live)
    picks = torch.zeros(q, k, dtype=torch.int64, device=scores.device)
    every = torch.arange(q, device=scores.device)
    for step in range(1, k):
        last = keys[every, picks[:, step - 1]].unsqueeze(1)  # (q, 1, d)
        alike = -(keys - last).square().sum(2) if metric is Metric.L2 else (keys * last).sum(2)
        nearest = torch.maximum(nearest, alike)
        taken[every, picks[:, step - 1]] = True
        marginal = (
            ((1 - diversity) * relevance - diversity * nearest)
            .masked_fill(~live, lowest)
            .masked_fill(taken, -torch.inf)
        )
        picks[:, step] = marginal.argmax(1)  # of equal candidates the first, which has the best score
    return picks
