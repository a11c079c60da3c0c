"""Check the inputs of multi-head attention. Masks have torch's polarity: True = may NOT attend; floats are added."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.database import Verbs
from softdb.errors import BadInput


class Masks(NamedTuple):
    """Records that queries may not attend to, and numbers to add to scores; each (N or 1, heads or 1, L or 1, n)."""

    blocked: Tensor | None  # bool
    added: Tensor | None  # floating


def masks_of(
    query: Tensor,  # (N, L, E)
    n: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
    batched: bool,  # key_padding_mask is (N, n), not (n,)
) -> Masks:
    """Combine key_padding_mask and attn_mask. Raises BadInput for a shape, dtype or number that does not fit."""
    batch, length = query.shape[:2]
    masks = []
    if key_padding_mask is not None:
        padding = _parsed(key_padding_mask, "key_padding_mask", [(batch, n) if batched else (n,)])
        masks.append(_split(padding.view(batch if batched else 1, 1, 1, n)))
    if attn_mask is not None:
        pairs = _parsed(attn_mask, "attn_mask", [(length, n), (batch * num_heads, length, n)])
        by_head = pairs.ndim == 3
        masks.append(_split(pairs.view(batch if by_head else 1, num_heads if by_head else 1, length, n)))
    blocked = [mask.blocked.to(query.device) for mask in masks if mask.blocked is not None]
    added = [mask.added.to(query) for mask in masks if mask.added is not None]
    return Masks(
        functools.reduce(torch.logical_or, blocked) if blocked else None,
        functools.reduce(torch.add, added) if added else None,
    )


def _parsed(mask: Tensor, name: str, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return the mask if it has one of the shapes and is bool, or holds floats that are finite or -inf."""
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise BadInput(f"{name} is {shown(mask)}; expected a bool tensor, True = may not attend, or a floating one")
    if tuple(mask.shape) not in shapes:
        raise BadInput(f"{name} has shape {tuple(mask.shape)}; expected {' or '.join(str(shape) for shape in shapes)}")
    if mask.is_floating_point() and not check.holds((mask.detach() < torch.inf).all()):
        raise BadInput(f"{name} holds NaN or +inf; floats are added to the scores, -inf = may not attend")
    return mask


def _split(mask: Tensor) -> Masks:
    """Split a mask into the positions that it blocks and the numbers that it adds to scores (None if all are 0)."""
    if mask.dtype is torch.bool:
        return Masks(mask, None)
    blocked = mask == -torch.inf
    added = mask.masked_fill(blocked, 0)
    return Masks(blocked, added if added.requires_grad or check.holds(added.any()) else None)


def records_blocked(
    query: Tensor,  # (N, L, E)
    n: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
) -> Tensor | None:  # (n,) or (N·L·heads, n) bool
    """Combine both masks over a database's n records, True = blocked. Raises BadInput for floats added to scores."""
    masks = masks_of(query, n, key_padding_mask, attn_mask, num_heads, False)
    if masks.added is not None:
        raise BadInput(
            "a float mask holds other numbers than 0 and -inf, but records take no bias on their scores; pass a "
            "bool mask, True = may not attend, or use db=None with the records as tensors"
        )
    if masks.blocked is None or attn_mask is None:
        return None if masks.blocked is None else masks.blocked.view(n)
    shape = (*query.shape[:2], num_heads, n)
    return masks.blocked.transpose(1, 2).expand(shape).reshape(math.prod(shape[:-1]), n)


def widths_of(db: Verbs | None, kdim: int | None, vdim: int | None) -> tuple[int | None, int | None]:
    """Return kdim and vdim, taken from the database if there is one. Raises BadInput if they differ from its widths."""
    kdim = None if kdim is None else check.integer(kdim, "kdim")
    vdim = None if vdim is None else check.integer(vdim, "vdim")
    if db is None:
        return kdim, vdim
    if not isinstance(db, Verbs):
        raise BadInput(f"db is {shown(db)}; expected an open softdb database, or None for plain tensors")
    db.core.require_width()
    dim, pooled = db.core.schema.dim, db.core.schema.pooled_dim
    for name, width, stored, columns in (("kdim", kdim, dim, "keys"), ("vdim", vdim, pooled, "values")):
        if width is not None and width != stored:
            raise BadInput(f"{name} is {width} but the {columns} of the database are {stored} wide; omit {name}")
    return dim, pooled


def batch_of(
    tensor: Tensor,  # (L, N, width), or (N, L, width) if batch_first, or (L, width)
    width: int,
    name: str,
    batch_first: bool,
    dtype: torch.dtype,  # of the parameters
) -> Tensor:  # (N, L, width)
    """Return the input with the batch first. Raises BadInput for another shape or dtype."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise BadInput(f"{name} is {shown(tensor)}; expected a floating tensor")
    batch = f"(N, L, {width})" if batch_first else f"(L, N, {width})"
    if tensor.ndim not in (2, 3) or tensor.shape[-1] != width:
        raise BadInput(
            f"{name} has shape {tuple(tensor.shape)} but this module takes {batch} or (L, {width}); pass one of these"
        )
    if tensor.dtype != dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise BadInput(f"{name} is {tensor.dtype} but the parameters are {dtype}; convert one of them")
    tensor = tensor if tensor.ndim == 3 else tensor.unsqueeze(0 if batch_first else 1)
    return tensor if batch_first else tensor.transpose(0, 1)
