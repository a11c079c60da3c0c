"""Weightings that give most records a weight of exactly 0: argmax, sparsemax and entmax15."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from entmax import entmax15, sparsemax
from torch import Tensor

from softdb.scoring.weighting import Weighed, divisor, masked

FLOOR = -4.0  # clamp for z less the largest z; weights are 0 at -1 and below (sparsemax), at -2 and below (entmax15)
MARGIN = 2.0**-26  # bound of the threshold's rounding error, in units of z, if very many entries are close to it


@dataclass(frozen=True)
class Argmax:
    """Weight 1 for the largest live score, 0 elsewhere, at every temperature: entropy 0, lse = the largest z.

    Of equal largest scores the first entry gets the weight, so candidates must be sorted by row. The weights have no
    gradient (they are constant between ties): to learn through a choice use entmax15 or a small temperature. The
    gradient of lse is the weights. The threshold is the largest score, as later equal scores change nothing. Cost q k.
    """

    name: ClassVar[str] = "argmax"
    sparse: ClassVar[bool] = True

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """Return weight 1 for the first of the largest scores, and 0 for all other entries."""
        scores, top = masked(scores, live)
        if not scores.shape[-1]:
            return Weighed(scores.detach(), scores.sum(dim=-1).masked_fill(top == -torch.inf, -torch.inf), top)
        best = scores.detach().argmax(dim=-1, keepdim=True)  # the first of ties
        weights = torch.zeros_like(scores).scatter_(-1, best, 1)
        weights.masked_fill_((top == -torch.inf).unsqueeze(-1), 0).masked_fill_(top.isnan().unsqueeze(-1), torch.nan)
        best_scores = scores.gather(-1, best).squeeze(-1)
        lse = (best_scores / divisor(temperature, scores.dtype)).masked_fill(top == -torch.inf, -torch.inf)
        return Weighed(weights, lse, top.masked_fill(top.isnan(), -torch.inf))


class Sparse(ABC):
    """α-entmax for α = 2 (sparsemax) and α = 1.5: p = [(α-1) z - τ]₊^(1/(α-1)), with τ such that Σ p = 1.

    Source: Peters, Niculae and Martins 2019. Entropy H(p) = Σ (p - p^α) / (α (α-1)); lse = <p, z> + H(p). The
    threshold τ is for (α-1) z, as in the `entmax` package: for entmax15 z / 2. An entry weighs 0 where z ≤ τ / (α-1);
    `Weighed.threshold` is that times T. T → 0: all weight on the nearest, shared among ties. T → ∞: equal weights.

    The package finds τ by sorting. Its sums of squares lose digits where many entries share little weight (in float32
    from the third digit on), so it runs in float64 here, and one Newton step restores the digits. Cost q k log k. The
    gradients equal the package's. The package's second derivative of entmax15 is NaN beside a weight of 0; here the
    second derivatives of lse and of the weights are right wherever they exist (not where z = τ/(α-1)).

    For more records than fit into memory, find τ by Newton's method over blocks. Subtract the largest z and start at
    τ = -1; sum `root_step` over the blocks and set τ += (1 - mass) / slope until mass ≤ 1 or τ is constant. The mass
    is convex and decreasing in τ and at least 1 at the start, so τ rises to the root and never exceeds it: each step is
    a valid lower bound of the threshold. Then `of` returns the weights of each block, <p, z> + `entropy` sum to lse,
    and dL/dz = u (g - Σ u g / Σ u) with sums over all blocks.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = True
    alpha: ClassVar[float]
    _package: ClassVar[Any]  # function of the package `entmax`: z (…, k) float64, k ≥ 1 -> weights (…, k)

    @abstractmethod
    def of(
        self,
        z_below: Tensor,  # (…, m): z minus a constant, such as the largest z; -inf for dead entries
        tau: Tensor,  # (…, 1), threshold of (α-1) z_below
    ) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """Return the weights p under a threshold, and u = p^(2-α), or 0 where p = 0. Cost q m."""

    def _solve(self, z: Tensor) -> Tensor:  # (…, k) float64, whose largest number is 0 -> (…, 1)
        """Return the threshold τ: the value of the package `entmax` after one Newton step, at most the exact root."""
        if not z.shape[-1]:
            return z.new_full((*z.shape[:-1], 1), -1)
        tau: Tensor = -(self._package(z, dim=-1).amax(dim=-1, keepdim=True) ** (self.alpha - 1))
        mass, slope = self.root_step(z, tau)
        return tau + ((1 - mass) / slope).unsqueeze(-1)

    def root_step(self, z: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, 1) -> (…), (…)
        """Return a block's mass Σ p at a threshold and the slope dΣp/dτ = -Σ u / (α-1). Cost q m."""
        weights, factors = self.of(z, tau)
        return weights.sum(dim=-1), factors.sum(dim=-1) / (1 - self.alpha)

    def entropy(self, weights: Tensor) -> Tensor:  # (…, m) -> (…)
        """Return a block's entropy H(p) = Σ (p - p^α) / (α (α-1)). Cost q m."""
        return (weights - weights**self.alpha).sum(dim=-1) / (self.alpha * (self.alpha - 1))

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """Return p = [(α-1) z - τ]₊^(1/(α-1))."""
        dtype, temperature = scores.dtype, divisor(temperature, scores.dtype)
        scores, top = masked(scores, live)
        usable = top.isfinite()
        origin = top.masked_fill(~usable, 0).double()
        z = ((scores.double() - origin.unsqueeze(-1)) / temperature).clamp(min=FLOOR)
        z = z.masked_fill(~usable.unsqueeze(-1), 0)
        tau = self._solve(z.detach())
        weights, lse = _Simplex.apply(z, tau, self)  # type: ignore[no-untyped-call]
        rounding = 4 * torch.finfo(dtype).eps * (origin.abs() + 2 * temperature) + MARGIN * temperature
        threshold = origin + temperature * tau.squeeze(-1) / (self.alpha - 1) - rounding
        fallback = torch.where(top == -torch.inf, 0.0, torch.nan).to(dtype).unsqueeze(-1)
        return Weighed(
            torch.where(usable.unsqueeze(-1), weights.to(dtype), fallback),
            torch.where(usable, (lse + origin / temperature).to(dtype), top),
            threshold.to(dtype).masked_fill(~usable, -torch.inf),
        )


@dataclass(frozen=True)
class Sparsemax(Sparse):
    """Sparsemax p = [z - τ]₊, the probabilities nearest to z; entropy ½ Σ p (1 - p). Martins and Astudillo 2016."""

    name: ClassVar[str] = "sparsemax"
    alpha: ClassVar[float] = 2.0
    _package: ClassVar[Any] = staticmethod(sparsemax)

    def of(self, z_below: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """Return p = [z - τ]₊, u = 1 where p > 0."""
        weights = (z_below - tau).clamp(min=0)
        return weights, (weights > 0).to(weights.dtype)


@dataclass(frozen=True)
class Entmax15(Sparse):
    """1.5-entmax p = [z/2 - τ]₊², between softmax and sparsemax; entropy 4/3 Σ (p - p^1.5). Peters et al. 2019."""

    name: ClassVar[str] = "entmax15"
    alpha: ClassVar[float] = 1.5
    _package: ClassVar[Any] = staticmethod(entmax15)

    def of(self, z_below: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """Return p = [z/2 - τ]₊², u = √p."""
        roots = (z_below / 2 - tau).clamp(min=0)
        return roots.square(), roots


class _Simplex(torch.autograd.Function):
    """Weights p for τ, and lse, with dL/dz = u (g - Σ u g / Σ u) + g_lse p for their gradients g, g_lse; u = p^(2-α).

    Backward uses the saved weights and differentiable operations, so it can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, tau: Tensor, weighting: Sparse) -> tuple[Tensor, Tensor]:
        weights, _ = weighting.of(z, tau)
        ctx.alpha = weighting.alpha
        ctx.save_for_backward(weights)
        return weights, (weights * z).sum(dim=-1) + weighting.entropy(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        support = weights > 0
        factors = torch.where(support, weights.masked_fill(~support, 1) ** (2 - ctx.alpha), 0)  # √0 has no slope
        mean = (factors * grad).sum(dim=-1, keepdim=True) / factors.sum(dim=-1, keepdim=True)
        return factors * (grad - mean) + lse_grad.unsqueeze(-1) * weights, None, None
