"""Position encodings of a sequence: sinusoidal, learnt and rotary. Attention alone ignores the order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.errors import BadInput

BASE = 10000.0  # the slowest wave is about 2π BASE positions long
INITIAL_STD = 0.02  # initial standard deviation of learnt positions, as in BERT


class SinusoidalPositions(torch.nn.Module):
    """Adds sines and cosines of the position (Vaswani et al. 2017, section 3.5). Nothing is trained.

        y_p = x_p + P_p,  P_(p, 2i) = sin(p / 10000^(2i / d)),  P_(p, 2i + 1) = cos(p / 10000^(2i / d))

    For an even width P_(p + k) is a rotation of P_p that depends on k alone; an odd width ends with a sine that has no
    cosine. Computed in float64 at each call and added in the dtype of x. Cost n d a call, for any batch size.

    Args:
        dim: d.
        max_len: length of the longest sequence; None: unlimited.
        dropout: share of the sums dropped in training, as in the paper's section 5.4.

    Raises BadInput for a width or share out of range, for x of another width, and for positions of max_len or more.

    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4)).round(decimals=3)
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8410, 0.5400, 0.0100, 1.0000]]])
    """

    def __init__(self, dim: int, max_len: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = check.integer(dim, "dim")
        self.max_len = None if max_len is None else check.integer(max_len, "max_len")
        self.dropout = torch.nn.Dropout(check.share(dropout, "dropout"))

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # (…, n, d) -> (…, n, d)
        """Add the encodings of the positions offset, offset + 1, … to x."""
        angles = _angles(x, _span(x, self.dim, offset, self.max_len), self.dim)
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.dim]
        return self.dropout(x + waves.to(x.dtype))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the width, and the length of the longest sequence."""
        return f"{self.dim}, max_len={self.max_len}"


class LearnedPositions(torch.nn.Module):
    """Adds a trained vector for each position, y_p = x_p + W_p (Gehring et al. 2017, section 3.1). Cost b n d.

    W (max_len, d) starts as a normal distribution of standard deviation 0.02 (Devlin et al. 2019).

    Raises BadInput for sizes below 1, for x of another width, and for positions of max_len or more.

    >>> LearnedPositions(max_len=10, dim=4)(torch.zeros(2, 7, 4), offset=3).shape
    torch.Size([2, 7, 4])
    """

    def __init__(self, max_len: int, dim: int) -> None:
        super().__init__()
        self.max_len, self.dim = check.integer(max_len, "max_len"), check.integer(dim, "dim")
        self.weight = torch.nn.Parameter(torch.empty(self.max_len, self.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial vectors."""
        torch.nn.init.normal_(self.weight, std=INITIAL_STD)

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # (…, n, d) -> (…, n, d)
        """Add the vectors of the positions offset, offset + 1, … to x."""
        span = _span(x, self.dim, offset, self.max_len)
        return x + self.weight[span.start : span.stop].to(x)

    def extra_repr(self) -> str:
        """Return max_len and the width."""
        return f"{self.max_len}, {self.dim}"


class RotaryPositions(torch.nn.Module):
    """Rotates pairs of coordinates by angles that grow with the position (Su et al. 2021, equation 34).

        (y_2i, y_2i+1) = rotation by p θ_i of (x_2i, x_2i+1),  θ_i = 10000^(-2i / d),  i = 0 … d / 2 - 1

    For queries and keys, not values: the dot product of a query at p and a key at p' depends on p - p' alone. Norms do
    not change. Nothing is trained; sequences of any length. Cost b n d.

    Raises BadInput for an odd width, and for x of another width.

    >>> RotaryPositions(2)(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).round(decimals=3)
    tensor([[1.0000, 0.0000],
            [0.5400, 0.8410]])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = check.integer(dim, "dim")
        if self.dim % 2:
            raise BadInput(f"dim is {self.dim}, but rotary positions turn pairs of coordinates; choose an even width")

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # (…, n, d) -> (…, n, d)
        """Rotate x by its positions offset, offset + 1, …"""
        angles = _angles(x, _span(x, self.dim, offset, None), self.dim)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def extra_repr(self) -> str:
        """Return the width."""
        return str(self.dim)


def _span(x: Tensor, dim: int, offset: int, max_len: int | None) -> range:  # (…, n, d) -> n positions
    """Return the positions offset … offset + n - 1. Raises BadInput for another shape, or a position beyond max_len."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise BadInput(f"x is {shown(x)}; expected a floating tensor (…, n, {dim})")
    if x.ndim < 2 or x.shape[-1] != dim:
        raise BadInput(f"x has shape {tuple(x.shape)} but these positions are made for (…, n, {dim}); pass that width")
    first = check.integer(offset, "offset", low=0)
    stop = first + x.shape[-2]
    if max_len is not None and stop > max_len:
        raise BadInput(
            f"x is {x.shape[-2]} long (shape {tuple(x.shape)}) from offset {first} on, but max_len is {max_len}; "
            "shorten it, or make positions with a larger max_len"
        )
    return range(first, stop)


def _angles(x: Tensor, span: range, dim: int) -> Tensor:  # (n, ⌈d / 2⌉) float64, on the device of x
    """Return the angle p / 10000^(2i / d) for each position p and pair i of coordinates."""
    even = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device)
    positions = torch.arange(span.start, span.stop, dtype=torch.float64, device=x.device)
    return torch.outer(positions, torch.pow(BASE, -even / dim))
