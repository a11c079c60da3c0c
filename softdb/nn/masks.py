"""Masks of multi-head attention in torch's polarity: True = may NOT attend, or floats added to the scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import shown
from softdb.errors import BadInput

__all__ = ["Masks", "masks_of"]


class Masks(NamedTuple):
    """What may not attend, and what is added to the scores; each (N or 1, heads or 1, L or 1, n) or None."""

    blocked: Tensor | None  # bool
    added: Tensor | None  # floating


def masks_of(
    query: Tensor,  # (N, L, E)
    n: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
    each: bool,  # whether every batch entry has its own key_padding_mask
) -> Masks:
    """Both masks as one. Raises BadInput for a shape, dtype or number that does not fit."""
    batch, length = query.shape[:2]
    masks = []
    if key_padding_mask is not None:
        padding = _parsed(key_padding_mask, "key_padding_mask", [(batch, n) if each else (n,)])
        masks.append(_split(padding.view(batch if each else 1, 1, 1, n)))
    if attn_mask is not None:
        pairs = _parsed(attn_mask, "attn_mask", [(length, n), (batch * num_heads, length, n)])
        by_head = pairs.ndim == 3
        masks.append(_split(pairs.view(batch if by_head else 1, num_heads if by_head else 1, length, n)))
    blocked = [one.blocked.to(query.device) for one in masks if one.blocked is not None]
    added = [one.added.to(query) for one in masks if one.added is not None]
    return Masks(
        None if not blocked else blocked[0] if len(blocked) == 1 else blocked[0] | blocked[1],
        None if not added else added[0] if len(added) == 1 else added[0] + added[1],
    )


def _parsed(mask: Tensor, name: str, shapes: list[tuple[int, ...]]) -> Tensor:
    """A mask of one of the shapes, bool, or of floats that are finite or -inf."""
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise BadInput(f"{name} is {shown(mask)}; expected a bool tensor, True = may not attend, or a floating one")
    if tuple(mask.shape) not in shapes:
        raise BadInput(f"{name} has shape {tuple(mask.shape)}; expected {' or '.join(str(one) for one in shapes)}")
    if mask.is_floating_point() and not bool((mask.detach() < torch.inf).all()):
        raise BadInput(f"{name} holds NaN or +inf; floats are added to the scores, -inf = may not attend")
    return mask


def _split(mask: Tensor) -> Masks:
    """What a mask blocks, and what it adds to the others, None where that is 0."""
    if mask.dtype is torch.bool:
        return Masks(mask, None)
    blocked = mask == -torch.inf
    added = mask.masked_fill(blocked, 0)
    return Masks(blocked, added if added.requires_grad or bool(added.any()) else None)
