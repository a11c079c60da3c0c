"""The k nearest records of columns on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.gpu import launch, twin
from softdb.gpu.asked import folded
from softdb.scoring.products import length

__all__ = ["nearest"]


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
