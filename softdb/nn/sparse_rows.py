"""Base of modules whose parameters are rows with sparse gradients, for one process or several."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from softdb.errors import BadInput
from softdb.nn.eager import untraced
from softdb.pool import pool

SPARSE = "torch.optim.SparseAdam, Adagrad without weight_decay, or SGD without momentum and weight_decay"


@untraced
def sums_of_rows(weights: Tensor, values: Tensor, rows: Tensor) -> Tensor:  # (q, k), (n, v), (q, k) -> (q, v)
    """Return Σ w v of each query, with a sparse gradient to the values and second derivatives."""
    return _Bags.apply(weights, values, rows)  # type: ignore[no-any-return, no-untyped-call]


class _Bags(torch.autograd.Function):
    """Weighted sums of rows; copies the rows (q, k, v) only for second derivatives, which embedding_bag lacks."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, rows: Tensor) -> Tensor:  # (q, k), (n, v), (q, k) -> (q, v)
        ctx.save_for_backward(weights, values, rows)
        return F.embedding_bag(rows, values, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights, values, rows), again = ctx.saved_tensors, torch.is_grad_enabled()
        wanted = [tensor for tensor in (weights, values) if tensor.requires_grad]
        with torch.enable_grad():
            if again:
                output = pool(weights, F.embedding(rows, values, sparse=True))
            else:
                output = F.embedding_bag(rows, values, mode="sum", per_sample_weights=weights, sparse=True)
            grads = iter(torch.autograd.grad(output, wanted, grad, create_graph=again))
        return *(next(grads) if tensor.requires_grad else None for tensor in (weights, values)), None


class SparseRows(torch.nn.Embedding):
    """Module that records which rows of its parameters training has changed since the last commit.

    It is an nn.Embedding, as DistributedDataParallel accepts sparse gradients from no other module. `weight` is empty,
    so functions that initialise every nn.Embedding of a model leave the rows as they are.
    """

    sparse, padding_idx, weight = True, None, torch.empty(0, 1)
    _touched: Tensor  # (n,) True: had a gradient since the last commit

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self._gradient_hooks: list[RemovableHandle] = []

    @property
    def columns(self) -> dict[str, torch.nn.Parameter]:
        """The trained columns, "keys" and "values"."""
        return {name: own for name in ("keys", "values") if (own := self._parameters.get(name)) is not None}

    def _watch(self) -> None:
        """Register hooks that record in `_touched` which rows get gradients."""
        _WATCHED.add(self)
        while self._gradient_hooks:
            self._gradient_hooks.pop().remove()
        for parameter in self.columns.values():
            requires_grad, parameter.requires_grad = parameter.requires_grad, True
            self._gradient_hooks.append(parameter.register_post_accumulate_grad_hook(self._mark))  # type: ignore[no-untyped-call]
            parameter.requires_grad = requires_grad

    def _mark(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            self._touched.index_fill_(0, parameter.grad._indices()[0], True)
        else:  # a dense gradient: the loss uses the whole parameter
            self._touched[:] = True

    def __setattr__(self, name: str, attribute: Any) -> None:
        if isinstance(attribute, torch.nn.Parameter) and hasattr(attribute, "placements"):  # a DTensor
            raise BadInput(
                "the parameters of a memory cannot be sharded, as torch reduces no sparse gradients into shards; use "
                "fully_shard(model, ignored_params=set(memory.parameters())) and DistributedDataParallel(memory)"
            )
        super().__setattr__(name, attribute)


_WATCHED: weakref.WeakSet[SparseRows] = weakref.WeakSet()


def _stepped(*_: object) -> None:
    """Record the rows that other processes changed: DistributedDataParallel adds them to `grad` after the hooks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for module in list(_WATCHED):
            for parameter in module.columns.values():
                module._mark(parameter)


def _refuse_adam(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise BadInput, in place of torch's RuntimeError, if Adam has sparse gradients of a memory."""
    columns = (own for module in list(_WATCHED) for own in module.columns.values())
    sparse = {id(own) for own in columns if own.grad is not None and own.grad.is_sparse}
    given = (id(item) for group in optimizer.param_groups for item in group["params"])
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and not sparse.isdisjoint(given):
        raise BadInput(f"{type(optimizer).__name__} takes no sparse gradients; use {SPARSE} for the memory")


register_optimizer_step_pre_hook(_refuse_adam)
register_optimizer_step_post_hook(_stepped)
