"""Soft queries (with gradients of queries, keys and values) and searches over tensors on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.device import launch, twin
from softdb.device.passes import DevicePass, folded
from softdb.device.twin import PassedSums
from softdb.scoring.once import Once
from softdb.scoring.products import length


def pooled(
    queries: Tensor,  # (q, d); or (h, q, d) for h heads: then all others but `keep` have heads, too
    keys: Tensor,  # (n, d) or (h, n, d)
    values: Tensor | None,  # (n, v) or (h, n, v), or int labels (n,) or (h, n); None: nothing is pooled
    *,
    metric: Metric,
    scale: float | Tensor = 1.0,  # a tensor in the shape of the queries' leading dimensions: not for l2
    keep: Tensor | None = None,  # (n,) bool
    mask: Tensor | None = None,  # (q, n) or (h, q, n) bool
    num_classes: int | None = None,
) -> tuple[Tensor, Tensor]:  # (q, v) or (h, q, v), and (q,) or (h, q)
    """Return the mean of the values, weighted by the softmax of S = scale · metric(q, k), and lse = log Σ exp(S).

    Larger is closer, so metric l2 is minus the squared distance. A record takes part if `keep` and `mask` are True;
    other records have no effect. If no record takes part, the output is 0 and lse -inf, with zero gradients.
    lse is NaN for a query with a score that overflows. Queries, keys and values get first derivatives. float32 queries
    lose no precision with columns of float32, float16 and bfloat16. Equal calls give equal bits; autocast and TF32
    have no effect.

    Cost: q n (d + v) products; about 64 queries share a read of the columns, and backward reads them again. Uses
    Triton kernels where `usable`, for float32 queries and widths up to 1,024; else blocks of torch operations.
    Raises BadInput for shapes that do not fit, and for labels without num_classes.
    """
    if metric is Metric.COSINE:
        queries = queries / length(queries).unsqueeze(-1)
    if isinstance(scale, Tensor):
        queries, scale = queries * scale.to(queries).unsqueeze(-1), 1.0
    inputs = folded(queries, keys, values, metric, float(scale), keep, mask, num_classes)
    trained = inputs.values if inputs.values is not None and inputs.values.is_floating_point() else None
    output, lse = PooledPass.apply(inputs.queries, inputs.keys, trained, inputs)  # type: ignore[no-untyped-call]
    return output.reshape(*inputs.lead, inputs.width), lse.reshape(inputs.lead)


@torch.no_grad()
def nearest(
    queries: Tensor,  # (q, d) or (h, q, d)
    keys: Tensor,  # (n, d) or (h, n, d)
    k: int,
    *,
    metric: Metric,
    keep: Tensor | None = None,  # (n,) bool
    mask: Tensor | None = None,  # (q, n) or (h, q, n) bool
) -> tuple[Tensor, Tensor]:  # (q, k) or (h, q, k), in the queries' dtype, and int64 of the same shape
    """Return scores and positions of the k nearest records that take part, best first, equal scores by position.

    Pads with -inf and -1 if fewer take part. A score that overflows is NaN and comes first, so `scores[:, 0]` shows it.
    No gradient. Scores are metric(q, k), with rounding errors of float32; equal calls give equal bits. Cost: about
    64 queries share a read of the keys, and about k √(n / k) keys are read again. Uses kernels or torch, as `pooled`.
    """
    if metric is Metric.COSINE:
        queries = queries / length(queries).unsqueeze(-1)
    inputs = folded(queries, keys, None, metric, 1.0, keep, mask, None)
    with torch.autocast(queries.device.type, enabled=False):
        scores, positions = (launch if inputs.unfit() is None else twin).nearest(inputs, k)
    return scores.to(queries.dtype).reshape(*inputs.lead, k), positions.reshape(*inputs.lead, k)


class PooledPass(torch.autograd.Function):
    """Autograd function of a pass over all records: returns output (h, q, v) and lse (h, q)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor | None, inputs: DevicePass
    ) -> tuple[Tensor, Tensor]:
        """Compute the pass. `inputs` contains queries, keys and values; they are also arguments, to get gradients."""
        if inputs.unfit() is None:
            sums, lse = launch.forward(inputs)
        else:
            with torch.autocast(queries.device.type, enabled=False):
                sums = twin.forward(inputs)
            lse = (sums.total.log() + sums.top * inputs.scale).to(queries.dtype)
        ctx.inputs = inputs
        ctx.save_for_backward(queries, keys, values, *sums)
        return sums.output.to(queries.dtype), lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of queries, keys and values, as far as autograd needs them."""
        queries, keys, values, *saved = ctx.saved_tensors
        inputs = ctx.inputs._replace(queries=queries, keys=keys)
        if values is not None:
            inputs = inputs._replace(values=values)
        wanted = ctx.needs_input_grad[:3]
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            module = launch if inputs.unfit() is None else twin
            grads = module.backward(inputs, PassedSums(*saved), output_grad, lse_grad, wanted)
        pairs = zip(grads, (queries, keys, values), strict=True)
        converted = [None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs]
        sources = queries, output_grad, lse_grad, *(column for column in (keys, values) if column is not None)
        return *Once.guarded(converted, sources), None
