"""Scores that depend on the Euclidean distance, scaled by one bandwidth or by one for each coordinate."""

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
"""A bandwidth: one number, or a number for each coordinate."""

BLOCK = 4096  # number of keys converted to float64 at once: a few MB, which fit in the CPU's cache


class DistanceScore(torch.nn.Module):
    """Base of the scores that depend on u = ‖(q - k) / h‖, where the bandwidth h is a number or has shape (d,).

    `log_bandwidth` is log h, so that h stays above 0 in training: if `learnable` a parameter, in the dtype of the given
    tensor or in torch's default dtype; otherwise a float64 buffer. Without a bandwidth h is 1.
    Raises BadInput for a bandwidth that is not finite and above 0, has more than one dimension or requires a gradient.
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
        """The bandwidth h, () or (d,); differentiable if `learnable`."""
        return torch.ones(()) if self.log_bandwidth is None else self.log_bandwidth.exp()

    @property
    def metric(self) -> Metric | None:
        """L2; None with a bandwidth for each coordinate, because it changes which records are nearest."""
        return Metric.L2 if self.log_bandwidth is None or self.log_bandwidth.numel() == 1 else None

    def fold(self, queries: Tensor) -> Fold | None:
        """Return the `Fold` for an index: the same queries, ranked by L2; None with a bandwidth for each coordinate."""
        return None if self.metric is None else Fold(self.metric, queries, None)

    def extra_repr(self) -> str:
        """Return the current bandwidth, for `repr`."""
        if self.log_bandwidth is None:
            return ""
        rounded = [float(f"{h:.6g}") for h in self.bandwidth.detach().reshape(-1).tolist()]
        bandwidth = rounded[0] if self.log_bandwidth.ndim == 0 else rounded
        return f"bandwidth={bandwidth}" + (", learnable=True" if self.learnable else "")

    def _scale(self, queries: Tensor, dtype: torch.dtype) -> Tensor | None:  # (…, q, d) -> () or (d,); None: 1
        """Return h in `dtype` on the queries' device, or None if h is 1."""
        if self.log_bandwidth is None:
            return None
        if self.log_bandwidth.ndim and len(self.log_bandwidth) != queries.shape[-1]:
            raise BadInput(
                f"queries are {queries.shape[-1]} wide (shape {tuple(queries.shape)}) but this score was made for "
                f"{len(self.log_bandwidth)}: it has a bandwidth for each coordinate; give one bandwidth, or one for "
                "each coordinate of the queries"
            )
        # a logarithm that is rounded to a narrow dtype changes the bandwidth: take the exponential in float64
        return self.log_bandwidth.double().exp().to(queries.device).to(dtype)

    def negative_squares(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return -u². Cost q n d.

        Each query's own keys are compared by differences, shared keys by ‖q‖² + ‖k‖² - 2 q·k in float64. In float32
        that sum cannot tell near duplicates apart, even after the mean is subtracted, if the keys are spread widely.
        """
        return self._compared(queries, keys, lambda differences: -differences.square().sum(-1), _expanded)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return u, computed from differences, with a gradient of 0 at u = 0. Cost q n d.

        For large d this takes a few times as long as `negative_squares`, but is more precise: a rounding error of 1e-16
        in a square near 0 is one of 1e-8 in its root. Shared keys have no second derivative.
        """
        shared = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
        return self._compared(queries, keys, functools.partial(torch.linalg.vector_norm, dim=-1), shared)

    def _compared(
        self,
        queries: Tensor,  # (…, q, d)
        keys: Tensor,  # (…, n, d) or (…, q, k, d)
        own: Callable[[Tensor], Tensor],  # a function of (q - k) / h, for each query's own keys
        shared: Callable[[Tensor, Tensor], Tensor],  # a function of q / h and k / h in float64, for shared keys
    ) -> Tensor:  # (…, q, n) or (…, q, k)
        keys = comparable(queries, keys)
        if keys.ndim > queries.ndim:
            return own(_scaled(queries.unsqueeze(-2) - keys, self._scale(queries, queries.dtype)))
        scale, batch = self._scale(queries, torch.float64), keys.shape[:-2].numel()
        widened = _scaled(queries.double(), scale)
        blocks = torch.split(keys, max(1, BLOCK // 64, BLOCK // max(1, batch)), dim=-2)
        scores = [shared(widened, _scaled(block.double(), scale)).to(queries.dtype) for block in blocks]
        return torch.cat(scores, dim=-1)


class NegativeL2(DistanceScore):
    """Minus the squared Euclidean distance, s = -Σ_i ((q_i - k_i) / h_i)², h = 1 where no bandwidth is given.

    The score avoids the square root, whose gradient at 0 is infinite. Its softmax at temperature 2 gives the weights of
    the Nadaraya–Watson mean with the Gaussian kernel. An index finds the nearest records if h is one number. Cost
    q n d.

    >>> NegativeL2(bandwidth=2.0)(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([[-6.2500]])
    """

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = -Σ_i ((q_i - k_i) / h_i)²."""
        return self.negative_squares(queries, keys)

    def fold(self, queries: Tensor) -> Fold | None:
        """Return the `Fold` for an index: L2 with the scale 1 / h²; None with a bandwidth for each coordinate."""
        if self.metric is None:
            return None
        if self.log_bandwidth is None:
            return Fold(Metric.L2, queries, 1.0)
        scale = (-2 * self.log_bandwidth.double()).exp().to(queries.device).to(queries.dtype).reshape(())
        return Fold(Metric.L2, queries, scale)


_STANDARD: dict[Metric, Score] = {Metric.DOT: Dot(), Metric.COSINE: Cosine(), Metric.L2: NegativeL2()}


def score_of(metric: Metric) -> Score:
    """Return the score of a database's metric: Dot, Cosine or NegativeL2; always the same object."""
    return _STANDARD[metric]


def _checked(bandwidth: Bandwidth) -> Tensor:
    """Return a bandwidth as a float64 tensor, () or (d,). Raises BadInput."""
    if isinstance(bandwidth, Tensor) and bandwidth.requires_grad:
        raise BadInput(
            "bandwidth is a tensor that requires a gradient, but a score copies its bandwidth; give learnable=True and "
            "train the score's log_bandwidth"
        )
    try:
        numbers = dense(bandwidth, "bandwidth") if isinstance(bandwidth, Tensor) else bandwidth
        h = torch.as_tensor(numbers, dtype=torch.float64).clone()
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


def _scaled(vectors: Tensor, scale: Tensor | None) -> Tensor:  # (…, d), () or (d,)
    """Return the vectors divided by the bandwidth."""
    return vectors if scale is None else vectors / scale


def _expanded(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) -> (…, q, n)
    """Return -‖q - k‖² as 2 q·k - ‖q‖² - ‖k‖², at most 0."""
    squares = queries.square().sum(-1, keepdim=True) + keys.square().sum(-1).unsqueeze(-2)
    return (2 * dot(queries, keys) - squares).clamp(max=0)
