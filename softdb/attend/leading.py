"""Reshape the leading dimensions of plain tensors into (entries, queries), and build masks of their keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb.check import dense, shown
from softdb.errors import BadInput
from softdb.scoring import valid_mask


def as_tensor(value: Any, name: str) -> Tensor:
    """Return a value as a tensor. Raises BadInput."""
    if isinstance(value, Tensor):
        return value if value.is_complex() else dense(value, name)
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{name} is {shown(value)}; expected a tensor, an array or a list of numbers") from None


@dataclass(frozen=True)
class Layout:
    """Mapping of leading dimensions to (u, q): u entries, each with its own records and q queries.

    A leading dimension in which keys and values do not differ only means more queries to the same records.
    """

    lead: tuple[int, ...]
    m: int
    n: int
    own: tuple[int, ...]  # leading dimensions in which keys or values differ
    shared: tuple[int, ...]  # leading dimensions in which keys and values do not differ

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Layout:  # (…, m, d_q), (…, n, d), (…, n, v)
        """Return the layout for queries, keys and values whose leading dimensions broadcast."""
        lead = np.broadcast_shapes(*(tensor.shape[:-2] for tensor in (query, key, value)))
        same = [key.shape[i] == value.shape[i] == 1 for i in range(len(lead))]
        own = tuple(i for i, alike in enumerate(same) if not alike)
        shared = tuple(i for i, alike in enumerate(same) if alike)
        return cls(lead, query.shape[-2], key.shape[-2], own, shared)

    @property
    def moved(self) -> tuple[int, ...]:
        """Sizes of the leading dimensions, those of `own` first, then `shared`, then m."""
        return (*(self.lead[i] for i in (*self.own, *self.shared)), self.m)

    @property
    def entries(self) -> int:
        """Number of entries, u."""
        return math.prod([self.lead[i] for i in self.own])

    def apart(self, tensor: Tensor, last: int) -> Tensor:  # broadcasts to (…, m, last) -> (own …, shared …, m, last)
        """Expand a tensor that belongs to the queries, and permute its dimensions: `own` first, then `shared`."""
        end = len(self.lead)
        return tensor.expand(*self.lead, self.m, last).permute(*self.own, *self.shared, end, end + 1)

    def queries(self, query: Tensor) -> Tensor:  # (…, m, d_q) -> (u, q, d_q)
        """Reshape queries to (u, q, d_q)."""
        moved = self.apart(query, query.shape[-1])
        return moved.reshape(self.entries, math.prod(moved.shape[len(self.own) : -1]), query.shape[-1])

    def records(self, records: Tensor) -> Tensor:  # (…, n, d) -> (u, n, d)
        """Reshape keys or values to (u, n, d)."""
        end = len(self.lead)
        moved = records.permute(*self.own, *self.shared, end, end + 1).flatten(len(self.own), end)
        own = (self.lead[i] for i in self.own)
        return moved.expand(*own, *moved.shape[-2:]).reshape(self.entries, *moved.shape[-2:])

    def back(self, tensor: Tensor) -> Tensor:  # (u, q) or (u, q, *) -> (…, m) or (…, m, *)
        """Reshape results to the caller's leading dimensions."""
        order = (*self.own, *self.shared)
        apart = tensor.reshape(*self.moved, *tensor.shape[2:])
        return apart.permute(*(order.index(i) for i in range(len(order))), *range(len(order), apart.ndim))


@dataclass(frozen=True)
class TakingPart:
    """The keys that take part in each query, as arguments from which `rows` computes masks."""

    layout: Layout
    mask: Tensor | None  # (own …, shared …, m, n) bool
    lengths: Tensor | None  # (own …, shared …, m)
    causal: bool
    device: torch.device

    @classmethod
    def of(cls, layout: Layout, mask: Any, valid_len: Any, causal: bool, device: torch.device) -> TakingPart | None:
        """Check the arguments and return the mask; None if all keys take part. Raises BadInput."""
        if mask is None and valid_len is None and not causal:
            return None
        return cls(
            layout,
            None if mask is None else layout.apart(_mask(mask, layout).to(device), layout.n),
            None if valid_len is None else layout.apart(_lengths(valid_len, layout).to(device), 1)[..., 0],
            causal,
            device,
        )

    def rows(self, low: int, high: int) -> Tensor:  # (high - low, n) bool
        """Return the mask of keys for queries low … high - 1, counting the queries of all entries."""
        places = torch.unravel_index(torch.arange(low, high, device=self.device), self.layout.moved)
        keys = torch.arange(self.layout.n, device=self.device)
        live = keys <= places[-1].unsqueeze(1) if self.causal else torch.ones_like(keys, dtype=torch.bool)
        if self.mask is not None:
            live = live & self.mask[places]
        if self.lengths is not None:
            live = live & valid_mask(self.lengths[places], 1, self.layout.n)[:, 0]
        return live


def _mask(mask: Any, layout: Layout) -> Tensor:
    """Check a mask. Return a bool tensor that broadcasts to (…, m, n). Raises BadInput."""
    checked = as_tensor(mask, "mask")
    if checked.dtype is not torch.bool:
        raise BadInput(f"mask has dtype {checked.dtype}; expected bool, True where the key takes part")
    expected = (*layout.lead, layout.m, layout.n)
    try:
        fits = np.broadcast_shapes(checked.shape, expected) == expected
    except ValueError:
        fits = False
    if not fits:
        raise BadInput(f"mask has shape {tuple(checked.shape)}; expected {expected} or one that broadcasts to it")
    return checked


def _lengths(valid_len: Any, layout: Layout) -> Tensor:  # (b, 1 …, m or 1, 1)
    """Check valid lengths. Return them reshaped to match the leading dimensions. Raises BadInput."""
    b = layout.lead[0] if layout.lead else 1
    lengths = as_tensor(valid_len, "valid_len")
    if tuple(lengths.shape) not in ((b,), (b, layout.m)):
        raise BadInput(
            f"valid_len has shape {tuple(lengths.shape)}; expected ({b},) or ({b}, {layout.m}) for leading dimensions "
            f"{layout.lead} and {layout.m} queries"
        )
    valid_mask(lengths.reshape(-1)[:0], 1, layout.n)  # raises BadInput unless lengths are whole numbers
    lengths = lengths.long()
    if lengths.numel():
        valid_mask(torch.stack(lengths.aminmax()), 1, layout.n)  # checking the extremes checks all
    shape = (b, *(1 for _ in layout.lead[1:]), *lengths.shape[1:])
    aligned = lengths.reshape(shape if layout.lead else shape[1:])
    return (aligned if lengths.ndim == 2 else aligned.unsqueeze(-1)).unsqueeze(-1)
