"""The soft query over columns on a device, with gradients to queries, keys and values; and the k nearest there."""

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
    queries: Tensor,  # (q, d) or (h, q, d), and so all but `keep`
    keys: Tensor,  # (n, d) or (h, n, d)
    values: Tensor | None,  # (n, v) or (h, n, v), or int labels (n,) or (h, n); None: nothing is pooled
    *,
    metric: Metric,
    scale: float = 1.0,
    keep: Tensor | None = None,  # (n,) bool
    mask: Tensor | None = None,  # (q, n) or (h, q, n) bool
    num_classes: int | None = None,
) -> tuple[Tensor, Tensor]:  # (q, v) or (h, q, v), and (q,) or (h, q)
    """The mean of the values by the softmax of scale · metric(q, k), and log Σ exp(scale · metric(q, k)).

    Larger is closer, so metric l2 is minus the squared distance. A record takes part where `keep` and `mask` are True;
    where none does, the output is 0 and lse -inf, with zero gradients. What lies in the other records is not looked at.
    lse is NaN for a query of which a score overflows. Gradients, once, to queries, keys and values where they want
    one. float32 queries are compared without losing digits with columns of float32, float16 and bfloat16; two calls
    are equal to the bit; autocast and TF32 change nothing.

    Cost: q n (d + v) products, and the columns read once for some 64 queries; backward reads them once more.
    Triton kernels where `usable` says so, for float32 queries and widths up to 1,024; else blocks of torch operations.
    Raises BadInput for shapes that do not fit, and for labels without num_classes.
    """
    if metric is Metric.COSINE:
        queries = queries / length(queries).unsqueeze(-1)
    what = folded(queries, keys, values, metric, float(scale), keep, mask, num_classes)
    trained = what.values if what.values is not None and what.values.is_floating_point() else None
    output, lse = PooledPass.apply(what.queries, what.keys, trained, what)  # type: ignore[no-untyped-call]
    return output.reshape(*what.lead, what.width), lse.reshape(what.lead)


@torch.no_grad()
def nearest(
    queries: Tensor,  # (q, d) or (h, q, d)
    keys: Tensor,  # (n, d) or (h, n, d)
    k: int,
    *,
    metric: Metric,
    keep: Tensor | None = None,  # (n,) bool
    mask: Tensor | None = None,  # (q, n) or (h, q, n) bool
) -> tuple[Tensor, Tensor]:  # (q, k) or (h, q, k), in the queries' dtype, and int64 alike
    """Scores and positions of the k nearest records that take part, best first, ties by position.

    -inf and -1 where there are fewer. A score that overflows is NaN and stands first, so that `scores[:, 0]` tells of
    it. No gradient. Scores are those of `pooled` before they are scaled, rounded as float32; two calls are equal to the
    bit. Cost: the keys read once for some 64 queries, and some k √(n / k) of them again. Kernels or torch as `pooled`.
    """
    if metric is Metric.COSINE:
        queries = queries / length(queries).unsqueeze(-1)
    what = folded(queries, keys, None, metric, 1.0, keep, mask, None)
    with torch.autocast(queries.device.type, enabled=False):
        scores, positions = (launch if what.unfit() is None else twin).nearest(what, k)
    return scores.to(queries.dtype).reshape(*what.lead, k), positions.reshape(*what.lead, k)


class PooledPass(torch.autograd.Function):
    """A pass over every record: output (h, q, v) and lse (h, q)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor | None, what: DevicePass
    ) -> tuple[Tensor, Tensor]:
        """The queries, keys and values are those of `what`, given for their gradients."""
        if what.unfit() is None:
            sums, lse = launch.forward(what)
        else:
            with torch.autocast(queries.device.type, enabled=False):
                sums = twin.forward(what)
            lse = (sums.total.log() + sums.top * what.scale).to(queries.dtype)
        ctx.what = what
        ctx.save_for_backward(queries, keys, values, *sums)
        return sums.output.to(queries.dtype), lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the queries, and of the columns that want them."""
        queries, keys, values, *saved = ctx.saved_tensors
        what = ctx.what._replace(queries=queries, keys=keys)
        if values is not None:
            what = what._replace(values=values)
        wanted = ctx.needs_input_grad[:3]
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            by = launch if what.unfit() is None else twin
            found = by.backward(what, PassedSums(*saved), output_grad, lse_grad, wanted)
        grads = [
            None if one is None else one.to(of.dtype) for one, of in zip(found, (queries, keys, values), strict=True)
        ]
        sources = queries, output_grad, lse_grad, *(one for one in (keys, values) if one is not None)
        return *Once.guarded(grads, sources), None
