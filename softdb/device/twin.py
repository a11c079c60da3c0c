"""The kernels' work in blocks of torch operations: any device, any dtype. What the kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from softdb.device.passes import DevicePass
from softdb.scoring import score_of

SCORED = 1 << 24  # scores at once
CONVERTED = 1 << 24  # numbers of keys and values at once


class PassedSums(NamedTuple):
    """Result of a pass: the answer, and the state that its gradient needs."""

    output: Tensor  # (h, q, v)
    top: Tensor  # (h, q), the largest score, before it is scaled; 0 where nothing takes part
    total: Tensor  # (h, q), Σ exp(scale (s - top)); 0 where nothing takes part, NaN where a score overflows


class _Part(NamedTuple):
    """Some of the records."""

    rows: slice
    keys: Tensor  # (h, m, d) in the dtype computed in
    values: Tensor | None  # (h, m, v) in that dtype, or labels (h, m)
    live: Tensor | None  # broadcasts to (h, q, m)


def computed_in(what: DevicePass) -> torch.dtype:
    """The queries' dtype, or float64 where torch may multiply float32 in less."""
    dtype = what.queries.dtype
    if dtype is torch.float32 and what.queries.device.type != "cpu":
        return torch.float64 if torch.get_float32_matmul_precision() != "highest" else dtype
    return torch.promote_types(dtype, torch.float32)


def _parts(what: DevicePass, dtype: torch.dtype) -> Iterator[_Part]:
    h, q, d = what.queries.shape
    n = what.keys.shape[1]
    size = max(1, min(SCORED // max(1, h * q), CONVERTED // (h * (d + what.width))))
    for low in range(0, n, size):
        rows = slice(low, min(low + size, n))
        keys = what.keys[:, rows].to(dtype)
        values = None if what.values is None else what.values[:, rows]
        live = what.live(rows)
        if what.keep is not None:  # the bytes of a dead record may be anything
            dead = ~what.keep[rows].unsqueeze(1)
            keys = keys.masked_fill(dead, 0)
            values = None if values is None else values.masked_fill(dead[:, 0] if what.labels else dead, 0)
        if values is not None and not what.labels:
            values = values.to(dtype)
        yield _Part(rows, keys, values, live)


def _scores(what: DevicePass, queries: Tensor, keys: Tensor, live: Tensor | None) -> Tensor:  # (h, q, m)
    """-inf where dead, NaN where a score overflows."""
    scores = score_of(what.metric)(queries, keys)
    scores = scores.masked_fill(~scores.isfinite(), torch.nan)
    return scores if live is None else scores.masked_fill(~live, -torch.inf)


def forward(what: DevicePass) -> PassedSums:
    """One pass of the online softmax."""
    dtype = computed_in(what)
    queries = what.queries.to(dtype)
    output = queries.new_zeros(*queries.shape[:2], what.width)
    top, total = queries.new_full(queries.shape[:2], -torch.inf), queries.new_zeros(queries.shape[:2])
    for part in _parts(what, dtype):
        scores = _scores(what, queries, part.keys, part.live)
        new = torch.maximum(top, scores.amax(2))
        shift = new.masked_fill(new == -torch.inf, 0)
        decay = ((top - shift) * what.scale).exp_()
        weights = (scores - shift.unsqueeze(2)).mul_(what.scale).exp_()
        total = total * decay + weights.sum(2)
        output.mul_(decay.unsqueeze(2))
        if part.values is not None:
            output += _pooled(weights, part.values, what.labels, what.width)
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
    what: DevicePass, sums: PassedSums, output_grad: Tensor, lse_grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the queries, the keys and the values, where wanted. Scores are computed again.

    ds = scale · w (g·v - g·output + g_lse), dv = w g.
    """
    dtype = computed_in(what)
    empty = sums.total == 0
    g, g_lse = output_grad.to(dtype).masked_fill(empty.unsqueeze(2), 0), lse_grad.to(dtype).masked_fill(empty, 0)
    offset = g_lse - (g * sums.output.to(dtype)).sum(2)
    top, total = sums.top.to(dtype).unsqueeze(2), sums.total.to(dtype).masked_fill(empty, 1).unsqueeze(2)
    queries = what.queries.detach().to(dtype)
    shapes = (queries, what.keys, what.values)
    found = [
        torch.zeros(one.shape, dtype=dtype, device=one.device) if want and one is not None else None
        for one, want in zip(shapes, wanted, strict=True)
    ]
    for part in _parts(what, dtype):
        with torch.enable_grad():
            asked, keys = queries.detach().requires_grad_(), part.keys.detach().requires_grad_(wanted[1])
            scores = _scores(what, asked, keys, part.live)
        weights = ((scores.detach() - top).clamp_(max=0) * what.scale).exp_() / total
        score_grad = offset.unsqueeze(2)
        if part.values is not None:
            index = part.values.long().unsqueeze(1).expand_as(weights) if what.labels else None
            score_grad = score_grad + (g @ part.values.mT if index is None else g.gather(2, index))
        if found[2] is not None:
            found[2][:, part.rows] = weights.mT @ g
        grads = torch.autograd.grad(
            scores, (asked, keys) if wanted[1] else (asked,), weights * score_grad * what.scale, allow_unused=True
        )
        if found[0] is not None:
            found[0] += grads[0]
        if found[1] is not None:
            found[1][:, part.rows] = grads[1]
    return found[0], found[1], found[2]


def nearest(what: DevicePass, k: int) -> tuple[Tensor, Tensor]:  # (h, q, k), (h, q, k)
    """Scores and positions of the k nearest, best first, ties by position; -inf and -1 where there are fewer.

    A score that overflows is NaN and stands first.
    """
    dtype = computed_in(what)
    queries = what.queries.to(dtype)
    scores, places = queries.new_empty(*queries.shape[:2], 0), queries.new_empty((*queries.shape[:2], 0)).long()
    for part in _parts(what._replace(values=None), dtype):
        here = _scores(what, queries, part.keys, part.live)
        at = torch.arange(part.rows.start, part.rows.stop, device=here.device).expand_as(here)
        both, where = torch.cat([scores, here], 2), torch.cat([places, at], 2)
        scores, order = (one[..., :k] for one in both.sort(dim=2, descending=True, stable=True))
        places = where.gather(2, order)
    short = (0, k - scores.shape[2])
    scores = torch.nn.functional.pad(scores, short, value=-torch.inf)
    return scores, torch.nn.functional.pad(places, short, value=-1).masked_fill(scores == -torch.inf, -1)
