"""Kernels: scores that are nonnegative and fall with the distance, for Nadaraya–Watson means and densities.

A kernel K is a function of u = ‖(q - k) / h‖, where the bandwidth h is a number or has shape (d,). K / Σ K are the
weights of the Nadaraya–Watson mean (Nadaraya 1964, Watson 1964). The mean of K over the records, divided by the
kernel's volume, is the kernel density (Silverman 1986, section 4.2.1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from softdb.check import Metric, integer
from softdb.errors import BadInput
from softdb.scoring.distance import Bandwidth, DistanceScore
from softdb.scoring.score import Fold, comparable

ROUNDING = 16  # a record counts as inside if u² exceeds 1 by at most this number of machine epsilons


class Kernel(DistanceScore, ABC):
    """A kernel K(u) ≥ 0 of the distance u = ‖(q - k) / h‖. Cost q n d.

    Calling a kernel returns K; `log` returns log K, which does not underflow at large distances. See `DistanceScore`
    for the bandwidth.
    """

    compact: ClassVar[bool]
    """True if K is exactly 0 beyond u = 1."""

    rooted: ClassVar[bool]
    """True if K is computed from u (`distances`); False if from -u² (`negative_squares`), which costs less."""

    def __init__(self, bandwidth: Bandwidth = 1.0, learnable: bool = False) -> None:  # h, or (d,)
        super().__init__(bandwidth, learnable)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return the kernel's value K(u) for each query and key, with u = ‖(q - k) / h‖."""
        return self.value(self._measured(queries, keys))

    def log(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return log K(u): -inf outside the support of a compact kernel, with a gradient of 0."""
        return self.log_value(self._measured(queries, keys))

    def log_volume(self, d: int) -> Tensor:  # ()
        """Return log ∫ K(‖x / h‖) dx over d coordinates, in float64, with gradient to a trained bandwidth.

        The density at q is the mean of K over the records, divided by this volume. Raises BadInput for a kernel without
        one, and for as many bandwidths as coordinates if d is another number.
        """
        d = integer(d, "d")
        h = torch.zeros(1) if self.log_bandwidth is None else self.log_bandwidth.reshape(-1)
        if len(h) not in (1, d):
            raise BadInput(f"log_volume: d is {d} but this kernel has {len(h)} bandwidths, one for each coordinate")
        return h.double().expand(d).sum() + self._log_unit_volume(d)

    def value(self, measured: Tensor) -> Tensor:  # (…)
        """Return K, where `measured` is u if `rooted`, else -u²."""
        return self.log_value(measured).exp()

    @abstractmethod
    def log_value(self, measured: Tensor) -> Tensor:  # (…)
        """Return log K, where `measured` is u if `rooted`, else -u²."""

    @staticmethod
    @abstractmethod
    def _log_unit_volume(d: int) -> float:
        """Return log ∫ K(‖x‖) dx over d coordinates."""

    def _measured(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.distances(queries, keys) if self.rooted else self.negative_squares(queries, keys)


class Gaussian(Kernel):
    """The Gaussian kernel K = exp(-u² / 2), scikit-learn's "gaussian".

    >>> Gaussian()(torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([[1.]])
    """

    compact, rooted = False, False

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K = -u² / 2."""
        return measured / 2

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        return d / 2 * math.log(2 * math.pi)


class Laplacian(Kernel):
    """The Laplacian kernel K = exp(-u), scikit-learn's "exponential"; its gradient at the corner u = 0 is 0."""

    compact, rooted = False, True

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K = -u."""
        return -measured

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        return _log_ball(d) + math.lgamma(d + 1)


class Boxcar(Kernel):
    """The boxcar kernel K = 1 where u ≤ 1, else 0, to average the neighbours within h. scikit-learn's "tophat".

    A record at distance h counts as inside, even if rounding makes the distance slightly larger. The gradient of K is 0
    wherever it exists, so this kernel trains neither queries nor bandwidth: use Epanechnikov for that.
    """

    compact, rooted = True, False

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K: 0 where u ≤ 1, else -inf."""
        inside = measured >= -1 - ROUNDING * torch.finfo(measured.dtype).eps
        return measured.masked_fill(inside, 0).masked_fill(~inside, -torch.inf)

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        return _log_ball(d)


class Epanechnikov(Kernel):
    """The Epanechnikov kernel K = max(0, 1 - u²) (Epanechnikov 1969), scikit-learn's "epanechnikov"."""

    compact, rooted = True, False

    def value(self, measured: Tensor) -> Tensor:
        """Return K = max(0, 1 - u²)."""
        return (1 + measured).clamp(min=0)

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K = log(1 - u²), -inf where u ≥ 1."""
        return _log_one_plus(measured)

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        return _log_ball(d) + math.log(2 / (d + 2))


class Triangular(Kernel):
    """The triangular kernel K = max(0, 1 - u), scikit-learn's "linear"; its gradient at the corner u = 0 is 0."""

    compact, rooted = True, True

    def value(self, measured: Tensor) -> Tensor:
        """Return K = max(0, 1 - u)."""
        return (1 - measured).clamp(min=0)

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K = log(1 - u), -inf where u ≥ 1."""
        return _log_one_plus(-measured)

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        return _log_ball(d) - math.log(d + 1)


class Constant(Kernel):
    """The constant kernel K = 1: every query gets the mean of all records. It has no bandwidth. Cost q n.

    All gradients are 0. All records tie, so the k nearest are the k lowest rows.
    """

    compact, rooted = False, False
    metric = Metric.DOT  # every order is right, as all records tie

    def __init__(self) -> None:
        DistanceScore.__init__(self)

    def log_value(self, measured: Tensor) -> Tensor:
        """Return log K = 0 for each query and key."""
        return _zeros(measured)

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: queries of zeros, by dot product with the bias 1, so all records score 1."""
        return Fold(Metric.DOT, _zeros(queries), 1.0, 1.0)

    @staticmethod
    def _log_unit_volume(d: int) -> float:
        raise BadInput("the constant kernel has no density: its integral is infinite; use another kernel")

    def _measured(self, queries: Tensor, keys: Tensor) -> Tensor:
        keys = comparable(queries, keys)[..., 0]  # (…, n) or (…, q, k); only the shape matters
        return queries[..., :1] + (keys if keys.ndim == queries.ndim else keys.unsqueeze(-2))


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros in the shape of a tensor that stay in its autograd graph, with a gradient of 0."""
    return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0)


def _log_one_plus(x: Tensor) -> Tensor:  # (…)
    """Return log(1 + x) for x ≤ 0; -inf with a gradient of 0 where 1 + x ≤ 0."""
    outside = 1 + x <= 0
    return x.masked_fill(outside, 0).log1p().masked_fill(outside, -torch.inf)


def _log_ball(d: int) -> float:
    """Return the log of the volume of the unit ball in d coordinates, π^(d/2) / Γ(d/2 + 1)."""
    return d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1)
