"""Multiple-instance learning: pool a bag of instances into one vector, by attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.errors import BadInput
from softdb.functional import attention
from softdb.scoring import Dot


class MILPooling(torch.nn.Module):
    """Attention-based pooling of bags (Ilse, Tomczak and Welling 2018, section 2.4).

        z = Σ_k a_k h_k,  a = softmax_k(s_k),  s_k = wᵀ tanh(V h_k)                   (equations 7 and 8)
        gated:                                 s_k = wᵀ (tanh(V h_k) ⊙ sigmoid(U h_k))  (equation 9)

    The order of a bag's instances does not matter. A weight says how much its instance contributes. An empty bag gives
    zeros, with zero gradients. Cost b n dim hidden.

    Args:
        dim: width of the instances' embeddings h.
        hidden: rows of V and U.
        gated: multiply by the gate of equation 9; tanh alone is almost linear around 0.

    Raises BadInput for sizes below 1, bags of another width, and as `softdb.attention`.

    >>> pooling = MILPooling(dim=3, hidden=8)
    >>> pooled, weights = pooling(torch.randn(2, 5, 3), valid_len=[5, 2])
    >>> pooled.shape, weights[1, 2:].tolist()
    (torch.Size([2, 3]), [0.0, 0.0, 0.0])
    """

    def __init__(self, dim: int, hidden: int = 128, gated: bool = False) -> None:
        super().__init__()
        self.dim = check.integer(dim, "dim")
        units = check.integer(hidden, "hidden")
        self.content = torch.nn.Linear(self.dim, units, bias=False)  # V
        self.gate = torch.nn.Linear(self.dim, units, bias=False) if gated else None  # U
        self.score = torch.nn.Linear(units, 1, bias=False)  # w

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def forward(
        self,
        bags: Tensor,  # (b, n, dim), padded
        valid_len: Tensor | list[int] | None = None,  # (b,)
    ) -> tuple[Tensor, Tensor]:  # (b, dim), (b, n)
        """Return the bags' vectors, and the weight of each instance in its bag.

        `valid_len` is the number of instances in each bag; None: all n. The padding after the instances must be finite.
        """
        if not isinstance(bags, Tensor) or not bags.is_floating_point():
            raise BadInput(f"bags are {shown(bags)}; expected a floating tensor (b, n, {self.dim})")
        if bags.ndim != 3 or bags.shape[-1] != self.dim:
            raise BadInput(
                f"bags have shape {tuple(bags.shape)}; expected (b, n, {self.dim}); pad short bags, and pass their "
                "lengths as valid_len"
            )
        units = self.content(bags).tanh()
        if self.gate is not None:
            units = units * self.gate(bags).sigmoid()
        # keys are the scores and queries are 1, so that the dot product of query and key is the score
        ones = bags.new_ones(len(bags), 1, 1)
        pooled = attention(ones, self.score(units), bags, score=Dot(), valid_len=valid_len, details=True)
        return pooled.output.squeeze(1), pooled.weights.squeeze(1)
