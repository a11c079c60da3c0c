"""The computations of the Triton kernels as torch operations, for any device and dtype. Tests compare both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.device.passes import DevicePass
from softdb.scoring import score_of
from softdb.scoring.products import dot, length

SCORED = 1 << 24  # number of scores computed at once
CONVERTED = 1 << 24  # number of elements of keys and values converted at once


class PassedSums(NamedTuple):
    """Output of a pass, and the sums that the backward pass needs."""

    output: Tensor  # (h, q, v)
    top: Tensor  # (h, q) largest unscaled score; 0 if no record takes part
    total: Tensor  # (h, q) Σ exp(scale (s - top)); 0 if no record takes part, NaN if a score overflows


class _RecordBlock(NamedTuple):
    """Keys, values and mask of consecutive records."""

    rows: slice
    keys: Tensor  # (h, m, d) in the dtype of the computation
    values: Tensor | None  # (h, m, v) in the dtype of the computation, or labels (h, m)
    live: Tensor | None  # mask that broadcasts to (h, q, m); None: all take part


def computed_in(inputs: DevicePass) -> torch.dtype:
    """Return the dtype of the computation: the queries', or float64 if torch may round float32 products to TF32."""
    dtype = inputs.queries.dtype
    if dtype is torch.float32 and inputs.queries.device.type != "cpu":
        return torch.float64 if torch.get_float32_matmul_precision() != "highest" else dtype
    return torch.promote_types(dtype, torch.float32)


def _blocks(inputs: DevicePass, dtype: torch.dtype) -> Iterator[_RecordBlock]:
    h, q, d = inputs.queries.shape
    n = inputs.keys.shape[1]
    size = max(1, min(SCORED // max(1, h * q), CONVERTED // (h * (d + inputs.width))))
    for low in range(0, n, size):
        rows = slice(low, min(low + size, n))
        keys = inputs.keys[:, rows].to(dtype)
        values = None if inputs.values is None else inputs.values[:, rows]
        live = inputs.live(rows)
        if inputs.keep is not None:  # dead records may contain NaN
            dead = ~inputs.keep[rows].unsqueeze(1)
            keys = keys.masked_fill(dead, 0)
            values = None if values is None else values.masked_fill(dead[:, 0] if inputs.labels else dead, 0)
        if values is not None and not inputs.labels:
            values = values.to(dtype)
        yield _RecordBlock(rows, keys, values, live)


def _scores(inputs: DevicePass, queries: Tensor, keys: Tensor, live: Tensor | None) -> Tensor:  # (h, q, m)
    """Return scores of a block: -inf for records that take no part, NaN for scores that overflow."""
    if inputs.metric is Metric.COSINE:  # the queries' lengths are their scales
        scores = dot(queries, keys) / length(keys).unsqueeze(1)
    else:
        scores = score_of(inputs.metric)(queries, keys)
    scores = scores.masked_fill(~scores.isfinite(), torch.nan)
    return scores if live is None else scores.masked_fill(~live, -torch.inf)


def forward(inputs: DevicePass) -> PassedSums:
    """Compute the forward pass, block by block, by an online softmax."""
    dtype = computed_in(inputs)
    queries = inputs.queries.to(dtype)
    output = queries.new_zeros(*queries.shape[:2], inputs.width)
    top, total = queries.new_full(queries.shape[:2], -torch.inf), queries.new_zeros(queries.shape[:2])
    for block in _blocks(inputs, dtype):
        scores = _scores(inputs, queries, block.keys, block.live)
        new = torch.maximum(top, scores.amax(2))
        shift = new.masked_fill(new == -torch.inf, 0)
        decay = ((top - shift) * inputs.scale).exp_()
        weights = (scores - shift.unsqueeze(2)).mul_(inputs.scale).exp_()
        total = total * decay + weights.sum(2)
        output.mul_(decay.unsqueeze(2))
        if block.values is not None:
            output += _pooled(weights, block.values, inputs.labels, inputs.width)
        top = new
    empty = total == 0
    output /= total.masked_fill(empty, 1).unsqueeze(2)
    return PassedSums(output, top.masked_fill(empty, 0), total)


def _pooled(weights: Tensor, values: Tensor, labels: bool, width: int) -> Tensor:  # (h, q, v)
    if not labels:
        return weights @ values
    index = values.long().unsqueeze(1).expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], width).scatter_add_(2, index, weights)


def backward(
    inputs: DevicePass, sums: PassedSums, output_grad: Tensor, lse_grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of queries, keys and values; None for those not wanted. Computes the scores again.

    With weights w and output gradient g: ds = scale · w (g·v - g·output + g_lse) for a score, dv = w g for a value.
    """
    dtype = computed_in(inputs)
    empty = sums.total == 0
    g, g_lse = output_grad.to(dtype).masked_fill(empty.unsqueeze(2), 0), lse_grad.to(dtype).masked_fill(empty, 0)
    offset = g_lse - (g * sums.output.to(dtype)).sum(2)
    top, total = sums.top.to(dtype).unsqueeze(2), sums.total.to(dtype).masked_fill(empty, 1).unsqueeze(2)
    queries = inputs.queries.detach().to(dtype)
    shapes = (queries, inputs.keys, inputs.values)
    grads = [
        torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if wants and tensor is not None else None
        for tensor, wants in zip(shapes, wanted, strict=True)
    ]
    for block in _blocks(inputs, dtype):
        with torch.enable_grad():
            leaves = queries.detach().requires_grad_(), block.keys.detach().requires_grad_(wanted[1])
            scores = _scores(inputs, *leaves, block.live)
        weights = ((scores.detach() - top).clamp_(max=0) * inputs.scale).exp_() / total
        score_grad = offset.unsqueeze(2)
        if block.values is not None:
            index = block.values.long().unsqueeze(1).expand_as(weights) if inputs.labels else None
            score_grad = score_grad + (g @ block.values.mT if index is None else g.gather(2, index))
        if grads[2] is not None:
            grads[2][:, block.rows] = weights.mT @ g
        block_grads = torch.autograd.grad(
            scores, leaves if wanted[1] else leaves[:1], weights * score_grad * inputs.scale, allow_unused=True
        )
        if grads[0] is not None:
            grads[0] += block_grads[0]
        if grads[1] is not None:
            grads[1][:, block.rows] = block_grads[1]
    return grads[0], grads[1], grads[2]


def nearest(inputs: DevicePass, k: int) -> tuple[Tensor, Tensor]:  # (h, q, k), (h, q, k)
    """Return scores and positions of the k nearest records, best first, equal scores by position.

    A score that overflows is NaN and comes first. Pads with score -inf and position -1.
    """
    dtype = computed_in(inputs)
    queries = inputs.queries.to(dtype)
    scores, places = queries.new_empty(*queries.shape[:2], 0), queries.new_empty((*queries.shape[:2], 0)).long()
    for block in _blocks(inputs._replace(values=None), dtype):
        block_scores = _scores(inputs, queries, block.keys, block.live)
        at = torch.arange(block.rows.start, block.rows.stop, device=block_scores.device).expand_as(block_scores)
        both, where = torch.cat([scores, block_scores], 2), torch.cat([places, at], 2)
        scores, order = (column[..., :k] for column in both.sort(dim=2, descending=True, stable=True))
        places = where.gather(2, order)
    short = (0, k - scores.shape[2])
    scores = torch.nn.functional.pad(scores, short, value=-torch.inf)
    return scores, torch.nn.functional.pad(places, short, value=-1).masked_fill(scores == -torch.inf, -1)
