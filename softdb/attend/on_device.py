"""A request over columns that lie on devices: a pass by Triton, or by torch in blocks, where they lie.

Several devices hold ranges of the positions, and their answers merge.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.attend.request import Positions, Request, Source
from softdb.gpu import nearest, pooled, usable
from softdb.pool import State, merge
from softdb.scoring import Fold, Sparse

__all__ = ["entries_on_device", "find_on_device", "kernel_form", "served", "stream_on_device"]


def served(device: torch.device) -> bool:
    """Whether columns there are asked where they lie."""
    return device.type == "cuda" or usable(device) is None


def kernel_form(request: Request) -> tuple[Fold, float] | None:
    """The request as softmax of scale · metric(q, k), and the scale; None where it is no such thing."""
    if isinstance(request.weighting, Sparse) or request.streamed_score is not request.score:
        return None
    folded = request.folded
    if folded is None or folded.scale is None:
        return None
    if isinstance(folded.scale, Tensor) and folded.scale.requires_grad and torch.is_grad_enabled():
        return None  # the kernels have no gradient for it
    scale = float(folded.scale) / request.temperature
    return (folded, scale) if 1e-30 < scale < 1e30 else None  # beyond what float32 holds


def stream_on_device(request: Request, source: Source) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
    """As `stream`, where the source's columns lie on devices; None where they do not, or the score is no product.

    None, too, where a score overflows: other paths tell of it. Masks and what is allowed travel to the device.
    """
    form = kernel_form(request) if source.resident else None
    if form is None:
        return None
    folded, scale = form
    keep, mask = _taking_part(request, source)
    states = []
    for part in source.resident:
        live, own = part.taking_part(keep, mask)
        values = part.keys if part.values is None else part.values
        output, lse = pooled(
            folded.queries.to(part.keys.device),
            part.keys,
            values if request.pools else None,
            metric=folded.metric,
            scale=scale,
            keep=live,
            mask=own,
            num_classes=source.num_classes,
        )
        states.append(State(output.to(request.queries.device), lse.to(request.queries.device)))
    output, lse = states[0] if len(states) == 1 else merge(states)
    if bool(lse.isnan().any()):
        return None
    return output, lse + torch.as_tensor(folded.bias, device=lse.device).to(lse.dtype) / request.temperature


def entries_on_device(
    request: Request,  # of queries (u, q, d), mask (u, q, n)
    keys: Tensor,  # (u, n, d)
    values: Tensor,  # (u, n, v)
) -> tuple[Tensor, Tensor] | None:  # (u, q, v), (u, q)
    """The same for entries that each have records of their own, all in one pass; None as `stream_on_device`."""
    form = kernel_form(request) if served(keys.device) else None
    if form is None:
        return None
    folded, scale = form
    output, lse = pooled(folded.queries, keys, values, metric=folded.metric, scale=scale, mask=request.mask)
    if bool(lse.isnan().any()):
        return None
    return output, lse + torch.as_tensor(folded.bias, device=lse.device).to(lse.dtype) / request.temperature


def find_on_device(request: Request, source: Source, k: int) -> Positions | None:  # (q, k), -1 = none
    """The k nearest of each query by comparing all where they lie, best first, ties by position.

    None where the columns lie on no device, the score has no order of an index, or a score overflows.
    """
    folded = request.detached.folded if source.resident else None
    if folded is None:
        return None
    keep, mask = _taking_part(request, source)
    scores, places = [], []
    for part in source.resident:
        live, own = part.taking_part(keep, mask)
        found, at = nearest(
            folded.queries.to(part.keys.device), part.keys, k, metric=folded.metric, keep=live, mask=own
        )
        scores.append(found.to(request.queries.device))
        places.append(torch.where(at < 0, -1, at + part.start).to(request.queries.device))
    best, order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    if bool(best.isnan().any()):
        return None
    return np.asarray(torch.cat(places, 1).gather(1, order)[:, :k].cpu().numpy())


def _taking_part(request: Request, source: Source) -> tuple[Tensor | None, Tensor | None]:
    """What is allowed (size,), and the mask (q, size), over positions."""
    keep = None if request.allowed is None else torch.from_numpy(request.allowed)
    mask = request.mask
    if mask is not None and source.count < len(source.live):
        spread = mask.new_zeros(len(mask), len(source.live))
        spread[:, torch.from_numpy(source.live).to(mask.device)] = mask
        mask = spread
    return keep, mask
