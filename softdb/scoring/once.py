"""Gradients that refuse to be differentiated again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softdb.errors import BadInput


class Once(torch.autograd.Function):
    """A gradient that refuses to be differentiated: torch's own guard stays silent where the loss is linear."""

    @staticmethod
    def guarded(grads: list[Tensor | None], sources: tuple[Tensor, ...]) -> list[Tensor | None]:
        """The gradients, guarded if someone may differentiate them again."""
        if not torch.is_grad_enabled():
            return grads
        return [None if grad is None else Once.apply(grad, *sources) for grad in grads]  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        """The same gradient, which depends on its sources."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Refused."""
        raise BadInput(
            "the soft query over every record has no second derivative; ask a database for the k nearest (k=), which "
            "is made of plain torch operations, or leave out create_graph=True"
        )
