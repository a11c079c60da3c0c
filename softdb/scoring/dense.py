"""Weightings by softmax, by normalised kernel values, and by equal weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from softdb.check import holds, shown
from softdb.errors import BadInput
from softdb.scoring.weighting import Weighed, divisor, largest, masked


def softmax(
    scores: Tensor,  # (…, k); scores of dead entries are ignored
    temperature: float,  # above 0
    live: Tensor,  # (…, k) bool
) -> tuple[Tensor, Tensor]:  # (…, k), (…)
    """Return the softmax weights of the live entries, and their log-normaliser lse.

    With scores s and temperature T, over live entries: lse = log Σ exp(s / T) and w = exp(s / T - lse). A dead entry
    weighs exactly 0. Without a live entry above -inf the weights and all gradients are zeros and lse is -inf. Scores
    of any size neither overflow nor lose digits: the largest is subtracted before the division by T. Cost q k.
    """
    temperature = divisor(temperature, scores.dtype)
    scores, top = masked(scores, live)
    empty = top == -torch.inf  # (…)
    top = top.masked_fill(empty, 0)  # -inf - 0 is -inf, but -inf - -inf would be NaN
    exponentials = ((scores - top.unsqueeze(-1)) / temperature).exp()
    total = exponentials.sum(dim=-1).masked_fill(empty, 1)
    lse = (total.log() + top / temperature).masked_fill(empty, -torch.inf)
    return exponentials / total.unsqueeze(-1), lse


@dataclass(frozen=True)
class Softmax:
    """Softmax weights w = exp(z) / Σ exp(z), z = score / T. Entropy H(w) = -Σ w log w, and lse = log Σ exp(z).

    T → 0: all weight on the nearest records, shared among ties. T → ∞: equal weights. Every live record weighs
    something, so the threshold is -inf. Cost q k.
    """

    name: ClassVar[str] = "softmax"
    sparse: ClassVar[bool] = False

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """Return w = exp(z - lse), z = s / T."""
        weights, lse = softmax(scores, temperature, live)
        return Weighed(weights, lse, torch.full_like(lse, -torch.inf))


@dataclass(frozen=True)
class Normalised:
    """Normalised weights w = s / Σ s, lse = log Σ s, of kernel values s (Nadaraya 1964, Watson 1964).

    The kernel's bandwidth replaces the temperature, so a temperature other than 1 raises BadInput. The gradient of lse
    with respect to log s is w. If all live scores are 0 (no record in the kernel's support), weights and gradients are
    0 and lse is -inf; far from all records use the softmax of log s. The threshold is 0. Cost q k.
    Raises BadInput for a live score that is negative, NaN or infinite.
    """

    name: ClassVar[str] = "normalised"
    sparse: ClassVar[bool] = True

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """Return w = s / Σ s."""
        if temperature != 1:
            raise BadInput(
                f"temperature is {shown(temperature)} but normalised weights have none; leave it at 1 and set the "
                "kernel's bandwidth, or use softmax"
            )
        scores = scores.masked_fill(~live, 0)
        bad = ~((scores >= 0) & (scores < torch.inf))
        if not holds(~bad.any()):
            raise BadInput(
                f"a live score is {scores[bad][0].item()}; normalised weights need kernel values, finite and at least "
                "0: use softmax, or a score that is a kernel"
            )
        top = largest(scores, 0)
        empty = top == 0
        scaled = scores.masked_fill(empty.unsqueeze(-1), 0) / top.masked_fill(empty, 1).unsqueeze(-1)
        total = scaled.sum(dim=-1).masked_fill(empty, 1)
        lse = (total.log() + top.log()).masked_fill(empty, -torch.inf)
        return Weighed(scaled / total.unsqueeze(-1), lse, torch.zeros_like(top))


@dataclass(frozen=True)
class Uniform:
    """Equal weights w = 1 / m for m live entries (average pooling), lse = log m, at every temperature.

    The scores are ignored, so the gradients of the weights and of lse are 0. The threshold is -inf. Cost q k.
    """

    name: ClassVar[str] = "uniform"
    sparse: ClassVar[bool] = False

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """Return w = 1 / m for each of the m live entries."""
        zeros = scores.masked_fill(torch.ones_like(live), 0)  # part of the graph: backward gives gradients of 0
        count = live.sum(dim=-1).to(scores.dtype)
        lse = zeros.sum(dim=-1) + count.log()
        weights = zeros + live / count.clamp(min=1).unsqueeze(-1)
        return Weighed(weights, lse, torch.full_like(lse, -torch.inf))
