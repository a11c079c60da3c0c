"""What is learned of a language model with a memory: how sharp the memory is, and how far to trust it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softdb.scoring import NegativeL2

__all__ = ["Mixture"]


class Mixture(torch.nn.Module):
    """What is learned of a language model with a memory: the temperature T, and λ, a number or a gate λ(h).

        λ = σ(b),   or with a gate   λ(h) = σ(b + w·x),  x = (h, log Σ_i exp(-‖h - k_i‖² / T)) standardised

    The second part of x tells how near the memory is at all (as in He et al. 2021, section 3.1). T is the square of the
    bandwidth of `score`. A gate begins with w = 0. `state_dict()` holds all of it.
    """

    def __init__(self, dim: int, temperature: float, interpolation: float, gated: bool) -> None:
        super().__init__()
        self.score = NegativeL2(math.sqrt(temperature), learnable=True)
        self.bias = torch.nn.Parameter(torch.tensor(math.log(interpolation / (1 - interpolation))))
        self.gate = torch.nn.Linear(dim + 1, 1, bias=False) if gated else None
        if self.gate is not None:
            torch.nn.init.zeros_(self.gate.weight)
        self.register_buffer("mean", torch.zeros(dim + 1))
        self.register_buffer("deviation", torch.ones(dim + 1))

    @property
    def temperature(self) -> float:
        """T."""
        return float(self.score.bandwidth.detach()) ** 2

    def logits(self, hidden: Tensor, lse: Tensor) -> Tensor:  # (q, d), (q,) -> (q, 1)
        """log λ / (1 - λ) at each place."""
        if self.gate is None:
            return self.bias.expand(len(hidden), 1)
        known = torch.cat([hidden, lse.unsqueeze(1)], 1).nan_to_num(neginf=0.0)
        found: Tensor = self.bias + self.gate((known - self.mean) / self.deviation)
        return found

    @torch.no_grad()
    def standardise(self, hidden: Tensor, lse: Tensor) -> None:  # (m, d), (m,)
        """Take mean and deviation of the gate's inputs from these."""
        known = torch.cat([hidden, lse.unsqueeze(1)], 1)
        self.mean, self.deviation = known.mean(0), known.std(0).clamp(min=1e-6)

    def mixed(self, memory: Tensor, model: Tensor, logits: Tensor) -> Tensor:  # (q, v), (q, v), (q, 1) -> (q, v)
        """log p of log p_memory and log p_model."""
        log = torch.nn.functional.logsigmoid
        return torch.logaddexp(log(logits) + memory, log(-logits) + model)
