"""Encoder of the keys, trained together with the projection of the queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softdb import check


class KeyEncoder(torch.nn.Module):
    """A residual layer on the keys, f(k) = k + B relu(A k + a) + b, initially the identity. Cost 2 d h a key.

    Args:
        dim: d, the width of the keys, before and after.
        hidden: h; None: d.
        seed: seed of the random initial A and a; B and b start as zeros.

    Raises BadInput for arguments that are no whole numbers above 0.

    >>> KeyEncoder(2)(torch.tensor([[3.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """

    def __init__(self, dim: int, hidden: int | None = None, seed: int = 0) -> None:
        super().__init__()
        dim = check.integer(dim, "dim", 1, check.MAX_DIM)
        width = dim if hidden is None else check.integer(hidden, "hidden", 1, check.MAX_DIM)
        draws, bound = torch.Generator().manual_seed(check.integer(seed, "seed", 0, 2**63 - 1)), 1 / math.sqrt(dim)
        inner = torch.empty(width, dim, dtype=torch.float32).uniform_(-bound, bound, generator=draws)
        inner_bias = torch.empty(width, dtype=torch.float32).uniform_(-bound, bound, generator=draws)
        self.inner, self.inner_bias = torch.nn.Parameter(inner), torch.nn.Parameter(inner_bias)
        self.outer = torch.nn.Parameter(torch.zeros(dim, width, dtype=torch.float32))
        self.outer_bias = torch.nn.Parameter(torch.zeros(dim, dtype=torch.float32))

    def forward(self, keys: Tensor) -> Tensor:  # (m, d) -> (m, d)
        """Return f(k) of each key."""
        inner = torch.nn.functional.linear(keys, self.inner, self.inner_bias).relu()
        return keys + torch.nn.functional.linear(inner, self.outer, self.outer_bias)
