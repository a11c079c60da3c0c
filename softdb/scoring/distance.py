"""Scores of the Euclidean distance, with one bandwidth or one for each coordinate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from softdb.check import Metric, dense, shown
from softdb.errors import BadInput
from softdb.scoring.products import Cosine, Dot, dot
from softdb.scoring.score import Fold, Score, comparable

Bandwidth: TypeAlias = float | Sequence[float] | Tensor
"""One number, or one for each coordinate."""

WIDENED = 4096  # keys held in float64 at once: a few MB, which stay in cache


class DistanceScore(torch.nn.Module):
    """Base of scores of u = ‖(q - k) / h‖: the bandwidth h, one number or one for each coordinate.

    h is kept as its logarithm, `log_bandwidth`, so that a trained one stays above 0: a parameter where `learnable`, in
    the dtype of the tensor given or else torch's default; else a float64 buffer. Without a bandwidth h is 1.
    Raises BadInput for a bandwidth that is not above 0 and finite, has more than one dimension or wants a gradient.
    """

    log_bandwidth: Tensor | None  # () or (d,)

    def __init__(self, bandwidth: Bandwidth | None = None, learnable: bool = False) -> None:  # h, or (d,)
        super().__init__()
        self.learnable = learnable
        log = None if bandwidth is None else _checked(bandwidth).log()
        if learnable:
            floating = isinstance(bandwidth, Tensor) and bandwidth.is_floating_point()
            dtype = bandwidth.dtype if isinstance(bandwidth, Tensor) and floating else torch.get_default_dtype()
            self.log_bandwidth = torch.nn.Parameter(torch.zeros(()) if log is None else log.to(dtype))
        else:
            self.register_buffer("log_bandwidth", log)

    @property
    def bandwidth(self) -> Tensor:
        """h, () or (d,), with gradient to `log_bandwidth` where that is a parameter."""
        return torch.ones(()) if self.log_bandwidth is None else self.log_bandwidth.exp()

    @property
    def metric(self) -> Metric | None:
        """L2, or None with a bandwidth for each coordinate: then the order is not that of the plain distance."""
        return Metric.L2 if self.log_bandwidth is None or self.log_bandwidth.numel() == 1 else None

    def fold(self, queries: Tensor) -> Fold | None:
        """The order of L2, or None with a bandwidth for each coordinate."""
        return None if self.metric is None else Fold(self.metric, queries, None)

    def extra_repr(self) -> str:
        """The bandwidth as it is now."""
        if self.log_bandwidth is None:
            return ""
        rounded = [float(f"{h:.6g}") for h in self.bandwidth.detach().reshape(-1).tolist()]
        shape = rounded[0] if self.log_bandwidth.ndim == 0 else rounded
        return f"bandwidth={shape}" + (", learnable=True" if self.learnable else "")

    def _scale(self, queries: Tensor, dtype: torch.dtype) -> Tensor | None:  # (…, q, d) -> () or (d,); None: 1
        """h where the queries are."""
        if self.log_bandwidth is None:
            return None
        if self.log_bandwidth.ndim and len(self.log_bandwidth) != queries.shape[-1]:
            raise BadInput(
                f"queries are {queries.shape[-1]} wide (shape {tuple(queries.shape)}) but this score was made for "
                f"{len(self.log_bandwidth)}: it has a bandwidth for each coordinate; give one bandwidth, or one for "
                "each coordinate of the queries"
            )
        # the exponential of a rounded logarithm is not the bandwidth: take it before narrowing
        return self.log_bandwidth.double().exp().to(queries.device).to(dtype)

    def negative_squares(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """-u². Cost q n d.

        Each query's own keys are compared by differences, shared keys by ‖q‖² + ‖k‖² - 2 q·k in float64: in float32
        that form loses near duplicates, and so does centring it as soon as the records are spread wide (a column in
        metres, two far groups).
        """
        return self._compared(queries, keys, lambda apart: -apart.square().sum(-1), _expanded)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """u, by differences, with a gradient of 0 at 0. Cost q n d, a few times that of `negative_squares` where d is
        large: the root of an expanded square that is rounded at 1e-16 is wrong at 1e-8. With shared keys it has no
        second derivative; each query's own keys (…, q, k, d) have one.
        """
        shared = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
        return self._compared(queries, keys, functools.partial(torch.linalg.vector_norm, dim=-1), shared)

    def _compared(
        self,
        queries: Tensor,  # (…, q, d)
        keys: Tensor,  # (…, n, d) or (…, q, k, d)
        own: Callable[[Tensor], Tensor],  # of the differences from each query's own keys, over the bandwidth
        shared: Callable[[Tensor, Tensor], Tensor],  # of queries and keys in float64, over the bandwidth
    ) -> Tensor:  # (…, q, n) or (…, q, k)
        keys = comparable(queries, keys)
        if keys.ndim > queries.ndim:
            return own(_over(queries.unsqueeze(-2) - keys, self._scale(queries, queries.dtype)))
        scale, batch = self._scale(queries, torch.float64), keys.shape[:-2].numel()
        widened = _over(queries.double(), scale)
        parts = torch.split(keys, max(1, WIDENED // 64, WIDENED // max(1, batch)), dim=-2)
        return torch.cat([shared(widened, _over(part.double(), scale)).to(queries.dtype) for part in parts], dim=-1)


class NegativeL2(DistanceScore):
    """Minus the squared Euclidean distance, s = -Σ_i ((q_i - k_i) / h_i)², h = 1 where no bandwidth is given.

    No square root, whose gradient is not finite at 0. Softmax at temperature 2 of it is the Gaussian kernel's
    Nadaraya–Watson weighting. An index finds for it where h is one number. Cost q n d.

    >>> NegativeL2(bandwidth=2.0)(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([[-6.2500]])
    """

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """s = -Σ_i ((q_i - k_i) / h_i)²."""
        return self.negative_squares(queries, keys)

    def fold(self, queries: Tensor) -> Fold | None:
        """L2 over h²; None with a bandwidth for each coordinate."""
        if self.metric is None:
            return None
        if self.log_bandwidth is None:
            return Fold(Metric.L2, queries, 1.0)
        scale = (-2 * self.log_bandwidth.double()).exp().to(queries.device).to(queries.dtype).reshape(())
        return Fold(Metric.L2, queries, scale)


_STANDARD: dict[Metric, Score] = {Metric.DOT: Dot(), Metric.COSINE: Cosine(), Metric.L2: NegativeL2()}


def score_of(metric: Metric) -> Score:
    """The score of a database's metric: Dot, Cosine or NegativeL2; always the same object."""
    return _STANDARD[metric]


def _checked(bandwidth: Bandwidth) -> Tensor:
    """A bandwidth as a float64 tensor, () or (d,)."""
    if isinstance(bandwidth, Tensor) and bandwidth.requires_grad:
        raise BadInput(
            "bandwidth is a tensor that wants a gradient, but a score keeps a copy of its own; give learnable=True "
            "and train the score's log_bandwidth"
        )
    try:
        given = dense(bandwidth, "bandwidth") if isinstance(bandwidth, Tensor) else bandwidth
        h = torch.as_tensor(given, dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError, ArithmeticError):
        raise BadInput(
            f"bandwidth is {shown(bandwidth)}; expected a number above 0, or one for each coordinate"
        ) from None
    if isinstance(bandwidth, bool) or h.ndim > 1 or h.numel() == 0:
        raise BadInput(
            f"bandwidth is {shown(bandwidth)} of shape {tuple(h.shape)}; expected a number above 0, or one for each "
            "coordinate, shape (d,)"
        )
    if not bool(((h > 0) & h.isfinite()).all()):
        raise BadInput(f"bandwidth is {shown(bandwidth)}; expected finite numbers above 0")
    return h


def _over(vectors: Tensor, scale: Tensor | None) -> Tensor:  # (…, d)
    """Vectors in units of the bandwidth, () or (d,)."""
    return vectors if scale is None else vectors / scale


def _expanded(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) -> (…, q, n)
    lengths = queries.square().sum(-1, keepdim=True) + keys.square().sum(-1).unsqueeze(-2)
    return (2 * dot(queries, keys) - lengths).clamp(max=0)
