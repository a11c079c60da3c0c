"""Gradients that raise an error if they are differentiated again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softdb.errors import BadInput


class Once(torch.autograd.Function):
    """Identity whose derivative raises BadInput; torch's `once_differentiable` raises nothing if the loss is linear."""

    @staticmethod
    def guarded(grads: list[Tensor | None], sources: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Return the gradients, passed through `Once` if autograd records a graph of them (`create_graph=True`)."""
        if not torch.is_grad_enabled():
            return grads
        return [None if grad is None else Once.apply(grad, *sources) for grad in grads]  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        """Return a copy of the gradient, which autograd regards as a function of the sources."""
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise BadInput: a second derivative was requested."""
        raise BadInput(
            "the soft query over every record has no second derivative; ask a database for the k nearest (k=), which "
            "is made of plain torch operations, or leave out create_graph=True"
        )


REFUSAL = (
    "{} cannot run here inside torch.func.grad, vmap or jvp; use torch.autograd.grad or backward() for the gradient, "
    "and leading dimensions or one call with all queries for vmap"
)


@contextlib.contextmanager
def plain_calls(name: str) -> Iterator[None]:
    """Raise BadInput for an operation that torch refuses inside a transform of torch.func or in forward mode."""
    try:
        yield
    except RuntimeError as error:
        if not transformed(error):
            raise
        raise BadInput(REFUSAL.format(name)) from error


def transformed(error: RuntimeError) -> bool:
    """Return True if torch raised the error in forward mode, or inside a transform of torch.func.

    A transform refuses every Function without `setup_context`.
    """
    if isinstance(error, NotImplementedError) and " AD" in str(error):
        return True
    with contextlib.suppress(RuntimeError):
        Once.apply(torch.zeros(()))  # type: ignore[no-untyped-call]
        return False
    return True
