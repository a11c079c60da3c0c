"""Gradients that refuse to be differentiated again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softdb.errors import BadInput


class Once(torch.autograd.Function):
    """Identity that refuses a second derivative; torch's `once_differentiable` does not if the loss is linear."""

    @staticmethod
    def guarded(grads: list[Tensor | None], sources: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Return the gradients, guarded if a graph of them is built (`create_graph=True`)."""
        if not torch.is_grad_enabled():
            return grads
        return [None if grad is None else Once.apply(grad, *sources) for grad in grads]  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        """Return the gradient; autograd takes it as a function of the sources."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise BadInput."""
        raise BadInput(
            "the soft query over every record has no second derivative; ask a database for the k nearest (k=), which "
            "is made of plain torch operations, or leave out create_graph=True"
        )
