"""A request over columns that lie on devices: a pass by Triton, or by torch in blocks, where they lie.

Several devices hold ranges of the positions, and their answers merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from softdb.attend.request import Request
from softdb.gpu import pooled
from softdb.pool import State, merge
from softdb.scores import Fold
from softdb.weights import Sparse

if TYPE_CHECKING:
    from softdb.attend.source import Source

__all__ = ["Resident", "kernel_form", "stream_on_device"]


class Resident(NamedTuple):
    """Columns of a range of positions, on one device; those that want a gradient are given with their graph."""

    keys: Tensor  # (m, d), float32, float16 or bfloat16
    values: Tensor | None  # (m, v), or int labels (m,); None: the key serves
    live: Tensor | None = None  # (m,) bool; None: all are live
    start: int = 0  # the first position


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
    keep = None if request.allowed is None else torch.from_numpy(request.allowed)
    mask = request.mask
    if mask is not None and source.count < len(source.live):
        spread = mask.new_zeros(len(mask), len(source.live))
        spread[:, torch.from_numpy(source.live).to(mask.device)] = mask
        mask = spread
    states = []
    for part in source.resident:
        device, rows = part.keys.device, slice(part.start, part.start + len(part.keys))
        live = part.live
        if keep is not None:
            allowed = keep[rows].to(device)
            live = allowed if live is None else live & allowed
        values = part.keys if part.values is None else part.values
        output, lse = pooled(
            folded.queries.to(device),
            part.keys,
            values if request.pools else None,
            metric=folded.metric,
            scale=scale,
            keep=live,
            mask=None if mask is None else mask[:, rows].to(device),
            num_classes=source.num_classes,
        )
        states.append(State(output.to(request.queries.device), lse.to(request.queries.device)))
    output, lse = states[0] if len(states) == 1 else merge(states)
    if bool(lse.isnan().any()):
        return None
    return output, lse + torch.as_tensor(folded.bias, device=lse.device).to(lse.dtype) / request.temperature
