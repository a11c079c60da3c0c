"""Cross entropy of a softmax over trainable rows: exact, truncated to the largest scores, or estimated from draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from softdb import check
from softdb.attend import Columns, Request
from softdb.attend.leading import as_tensor
from softdb.check import shown
from softdb.device import placed_tensors
from softdb.errors import BadInput
from softdb.index.flat import nearest
from softdb.scoring import Dot

__all__ = ["linear_cross_entropy"]

REDUCED = {"mean": Tensor.mean, "sum": Tensor.sum}
WORTH = 4  # drawing M rows costs about WORTH times as much a row as the exact pass, which reads rows in order


def linear_cross_entropy(
    queries: Any,  # (…, d)
    weight: Tensor,  # (n, d)
    targets: Any,  # (…) int
    *,
    temperature: float | Tensor = 1.0,
    k: int | None = None,
    max_draws: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    sparse: bool | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # (), or (…) for "none"
    """Return the cross entropy of a softmax over the rows of a matrix that is trained, without a (q, n) matrix.

        loss_i = log Σ_j exp(q_i·w_j / T) - q_i·w_t(i) / T

    Exact by default: the loss and the gradients of F.cross_entropy(F.linear(queries / T, weight), targets), computed in
    the promoted dtype of queries and float32. Cost 8 q n d; memory O(q d + n) beyond the dense gradient of the weight.
    """
    queries, weight, targets = _checked(queries, weight, targets, ignore_index)
    if reduction not in ("mean", "sum", "none"):
        raise BadInput(f"reduction is {shown(reduction)}; expected 'mean', 'sum' or 'none'")
    heat = check.temperature(temperature, targets.shape)
    with check.precise():
        flat = queries.reshape(-1, queries.shape[-1])
        flat = flat / (heat.to(flat).unsqueeze(1) if isinstance(heat, Tensor) else heat)
        rows = targets.reshape(-1)
        keep = rows != ignore_index
        every = bool(keep.all())
        flat, rows = (flat, rows) if every else (flat[keep], rows[keep])
        losses = _losses(flat, weight, rows, k, max_draws, sparse, check.generator(generator))
        if not bool(losses.detach().isfinite().all()):
            raise BadInput(
                "a loss is NaN or infinite: queries or weight hold NaN or infinity, or training has moved them too "
                "far; begin again from a checkpoint with smaller steps"
            )
        if reduction != "none":
            return REDUCED[reduction](losses)
        return (
            losses.view(targets.shape)
            if every
            else losses.new_zeros(targets.shape).masked_scatter(keep.view(targets.shape), losses)
        )


def _checked(queries: Any, weight: Any, targets: Any, ignore_index: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments as tensors, queries in the dtype of the computation. Raises BadInput."""
    queries, weight, targets = as_tensor(queries, "queries"), as_tensor(weight, "weight"), as_tensor(targets, "targets")
    for name, tensor in (("queries", queries), ("weight", weight)):
        if not tensor.is_floating_point():
            raise BadInput(f"{name} is of type {tensor.dtype}; expected floating-point numbers")
    if weight.ndim != 2 or not weight.numel() or queries.ndim < 1 or queries.shape[-1] != weight.shape[1]:
        raise BadInput(
            f"queries have shape {tuple(queries.shape)} and weight {tuple(weight.shape)}; expected queries (…, d) and "
            "weight (n, d) of the same width d, with at least one row"
        )
    if targets.is_floating_point() or targets.dtype is torch.bool or targets.is_complex():
        raise BadInput(f"targets are of type {targets.dtype}; expected row numbers of weight, as int64")
    if targets.shape != queries.shape[:-1]:
        raise BadInput(
            f"targets have shape {tuple(targets.shape)} for queries {tuple(queries.shape)}; expected one row number for "
            f"each query, shape {tuple(queries.shape[:-1])}"
        )
    targets = targets.long()
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))
    if bool(wrong.any()):
        raise BadInput(
            f"target {int(targets[wrong][0])} is no row of weight; expected 0 to {len(weight) - 1}, or ignore_index "
            f"({shown(ignore_index)}) for a query without loss"
        )
    wide = torch.promote_types(queries.dtype, torch.float32)
    return queries.to(wide), weight, targets


def _losses(
    queries: Tensor,  # (q, d)
    weight: Tensor,  # (n, d)
    targets: Tensor,  # (q,)
    k: int | None,
    max_draws: int | None,
    sparse: bool | None,
    generator: torch.Generator | None,
) -> Tensor:  # (q,)
    """Return the losses by the method that the arguments choose."""
    if k is None and max_draws is None:
        return _exact(queries, weight, targets)
    near = torch.empty(len(queries), 0, dtype=torch.int64)
    if k is not None:
        count = min(check.integer(k, "k"), len(weight))
        near = _nearest(queries, weight, count)
    drawn, logs = torch.empty(0, dtype=torch.int64), queries.new_empty(0)
    if max_draws is not None:
        drawn, logs = _drawn(len(weight), check.integer(max_draws, "max_draws"), generator)
    return _estimated(queries, weight, targets, near, drawn, logs, sparse is not False)


def _exact(queries: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    # the last operation is differentiated first: autograd then adds the targets' few rows to the dense gradient in place
    positive = (queries * F.embedding(targets, weight, sparse=True)).sum(1)
    rows = weight.detach()
    request = Request.of(queries, Dot())
    lse = Columns(weight, rows, placed=placed_tensors(weight, rows)).log_normaliser(request)
    return lse - positive


def _nearest(queries: Tensor, weight: Tensor, k: int) -> Tensor:  # (q, k)
    """Return the rows with the largest products. Cost q n d."""
    rows = weight.detach()
    source = Columns(rows, rows, placed=placed_tensors(rows, rows))
    request = Request.of(queries.detach(), Dot()).top(k)
    if source.columns is not None and queries.device.type == "cpu":
        return torch.from_numpy(nearest(source.columns, request))
    return torch.from_numpy(source.find(request).positions)


def _drawn(n: int, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw rows, one in each of `count` equal strata, and return them with the logs of their inverse rates."""
    places = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) * (n / count)
    drawn = places.long().clamp(max=n - 1)
    return drawn, torch.full((count,), n / count).log()


def _estimated(
    queries: Tensor,  # (q, d)
    weight: Tensor,  # (n, d)
    targets: Tensor,  # (q,)
    near: Tensor,  # (q, k)
    drawn: Tensor,  # (m,)
    logs: Tensor,  # (m,)
    sparse: bool,
) -> Tensor:
    distinct, places = torch.cat([targets, drawn.to(targets), near.to(targets).flatten()]).unique(return_inverse=True)
    table = F.embedding(distinct, weight, sparse=sparse).to(queries.dtype)
    own, shared, best = places.split([len(targets), len(drawn), near.numel()])
    positive = (queries * F.embedding(own, table)).sum(1, keepdim=True)
    known = torch.cat([own.unsqueeze(1), best.view(near.shape)], 1)  # (q, 1 + k)
    top = (F.embedding(known[:, 1:], table) @ queries.unsqueeze(2)).squeeze(2)
    top = top.masked_fill(known[:, 1:] == known[:, :1], -torch.inf)
    tail = queries @ F.embedding(shared, table).mT + logs.to(queries)
    ordered = known.sort(1).values
    at = torch.searchsorted(ordered, shared.expand(len(queries), -1).contiguous()).clamp(max=ordered.shape[1] - 1)
    tail = tail.masked_fill(ordered.gather(1, at) == shared, -torch.inf)
    return torch.cat([positive, top, tail], 1).logsumexp(1) - positive[:, 0]
