"""Weights: what scores become. Nonnegative, and summing to 1 over the live candidates."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["divisor", "softmax"]


def softmax(
    scores: Tensor,  # (q, k); what stands at dead entries is ignored
    temperature: float,  # above 0
    live: Tensor,  # (q, k) bool
) -> tuple[Tensor, Tensor]:  # (q, k), (q,)
    """Softmax over the live entries, and its log-normaliser.

    With s the scores and T the temperature, over live entries: lse = log Σ exp(s / T) and w = exp(s / T - lse).
    A dead entry weighs exactly 0. Without a live entry the weights are zeros and lse is -inf, and all gradients are
    zeros. Scores of any size neither overflow nor lose digits: they are compared before they are divided. Cost q k.
    """
    temperature = divisor(temperature, scores.dtype)
    empty = ~live.any(dim=1)  # (q,)
    scores = scores.masked_fill(~live, -torch.inf)
    top = _finite_top(scores.detach())  # (q,)
    parts = ((scores - top.unsqueeze(1)) / temperature).exp()
    total = parts.sum(dim=1).masked_fill(empty, 1)
    lse = (total.log() + top / temperature).masked_fill(empty, -torch.inf)
    return parts / total.unsqueeze(1), lse


def divisor(temperature: float, dtype: torch.dtype) -> float:
    """The temperature as something scores of that dtype can be divided by: never rounded to 0."""
    return max(temperature, torch.finfo(dtype).tiny)


def _finite_top(
    scores: Tensor,  # (q, k), -inf where dead
) -> Tensor:  # (q,)
    """The largest score of each query, 0 where there is none: -inf minus it is still -inf, not NaN."""
    if not scores.shape[1]:
        return scores.new_zeros(len(scores))
    top = scores.amax(dim=1)
    return top.masked_fill(top == -torch.inf, 0)
