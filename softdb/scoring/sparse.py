"""Weightings that give most records exactly 0: argmax, sparsemax and entmax15."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from entmax import entmax15, sparsemax
from torch import Tensor

from softdb.scoring.weighting import Weighed, divisor, masked

FLOOR = -4.0  # z that far below the largest weighs 0 in sparsemax (from -1) and entmax15 (from -2); its square is small
MARGIN = 2.0**-26  # in z: the rounding error of a threshold at which very many entries lie


@dataclass(frozen=True)
class Argmax:
    """1 at the best live entry, 0 elsewhere: a database lookup. H(p) = 0, lse = the largest z. At every temperature.

    Ties go to the first entry, so candidates must come in row order among ties. The weights carry no gradient (they
    are constant between ties): to learn through a choice use entmax15 or a small temperature; lse carries its own,
    which is the weights. The threshold is the largest score: a tie that stands later changes nothing. Cost q k.
    """

    name: ClassVar[str] = "argmax"
    sparse: ClassVar[bool] = True

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """w = 1 at the first of the best."""
        scores, top = masked(scores, live)
        if not scores.shape[-1]:
            return Weighed(scores.detach(), scores.sum(dim=-1).masked_fill(top == -torch.inf, -torch.inf), top)
        best = scores.detach().argmax(dim=-1, keepdim=True)  # of ties torch promises the first
        weights = torch.zeros_like(scores).scatter_(-1, best, 1)
        weights.masked_fill_((top == -torch.inf).unsqueeze(-1), 0).masked_fill_(top.isnan().unsqueeze(-1), torch.nan)
        found = scores.gather(-1, best).squeeze(-1)
        lse = (found / divisor(temperature, scores.dtype)).masked_fill(top == -torch.inf, -torch.inf)
        return Weighed(weights, lse, top.masked_fill(top.isnan(), -torch.inf))


class Sparse(ABC):
    """The α-entmax of α = 2 (sparsemax) and 1.5: p = [(α-1) z - τ]₊^(1/(α-1)), where Σ p = 1 fixes τ.

    Peters, Niculae and Martins 2019. H(p) = Σ (p - p^α) / (α (α-1)) and lse = <p, z> + H(p). τ belongs to
    (α-1) z: for entmax15 it is that of the halved z, in which the `entmax` package works too. An entry weighs 0
    exactly where z ≤ τ / (α-1); `threshold` is T times that.

    T → 0: the nearest, ties shared; T → ∞: all live alike. The package finds τ by sorting, here in float64, for its
    sums of squares lose digits where many entries share little weight (in float32 the third); one Newton step gives
    them back. Cost q k log k. Gradients are those of the package, but its second derivative of entmax15 is NaN beside
    a weight of 0; here that of lse and of the weights is right, for both, wherever it exists (not where z = τ/(α-1)).

    Over more records than memory holds, find τ by Newton over blocks. With z less its largest, start at τ = -1; add up
    `root_step` over the blocks, then τ += (1 - mass) / slope, until mass ≤ 1 or τ stands still. The mass is convex and
    decreasing in τ and at least 1 at the start, so τ rises to the root and never passes it: each step is a threshold
    that proves no more than is true. Then `of` gives each block's weights, <p, z> + `entropy` adds up to lse, and
    dL/dz = u (g - Σ u g / Σ u), sums over all blocks.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = True
    alpha: ClassVar[float]
    _package: ClassVar[Any]  # z (…, k) float64, k at least 1 -> the package's weights (…, k)

    @abstractmethod
    def of(
        self,
        z_below: Tensor,  # (…, m): z less any constant, such as the largest z; -inf where dead
        tau: Tensor,  # (…, 1), belonging to (α-1) z less (α-1) times that constant
    ) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """The weights p that a threshold gives, and their pulls u = p^(2-α), 0 where p is. Cost q m."""

    def _solve(self, z: Tensor) -> Tensor:  # (…, k) float64, the largest 0 -> (…, 1)
        """τ: the package's, and a Newton step, which leaves it at or below the root."""
        if not z.shape[-1]:
            return z.new_full((*z.shape[:-1], 1), -1)
        tau: Tensor = -(self._package(z, dim=-1).amax(dim=-1, keepdim=True) ** (self.alpha - 1))
        mass, slope = self.root_step(z, tau)
        return tau + ((1 - mass) / slope).unsqueeze(-1)

    def root_step(self, z: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, 1) -> (…), (…)
        """The mass Σ p at a threshold and its slope dΣp/dτ = -Σ u / (α-1), to be added up over blocks. Cost q m."""
        weights, pulls = self.of(z, tau)
        return weights.sum(dim=-1), pulls.sum(dim=-1) / (1 - self.alpha)

    def entropy(self, weights: Tensor) -> Tensor:  # (…, m) -> (…)
        """H(p) = Σ (p - p^α) / (α (α-1)), to be added up over blocks. Cost q m."""
        return (weights - weights**self.alpha).sum(dim=-1) / (self.alpha * (self.alpha - 1))

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        """p = [(α-1) z - τ]₊^(1/(α-1))."""
        dtype, temperature = scores.dtype, divisor(temperature, scores.dtype)
        scores, top = masked(scores, live)
        usable = top.isfinite()
        origin = top.masked_fill(~usable, 0).double()
        z = ((scores.double() - origin.unsqueeze(-1)) / temperature).clamp(min=FLOOR)
        z = z.masked_fill(~usable.unsqueeze(-1), 0)
        tau = self._solve(z.detach())
        weights, above = _Simplex.apply(z, tau, self)  # type: ignore[no-untyped-call]
        slack = 4 * torch.finfo(dtype).eps * (origin.abs() + 2 * temperature) + MARGIN * temperature
        threshold = origin + temperature * tau.squeeze(-1) / (self.alpha - 1) - slack
        nothing = torch.where(top == -torch.inf, 0.0, torch.nan).to(dtype).unsqueeze(-1)
        return Weighed(
            torch.where(usable.unsqueeze(-1), weights.to(dtype), nothing),
            torch.where(usable, (above + origin / temperature).to(dtype), top),
            threshold.to(dtype).masked_fill(~usable, -torch.inf),
        )


@dataclass(frozen=True)
class Sparsemax(Sparse):
    """p = [z - τ]₊, the point of the simplex nearest to z; H(p) = ½ Σ p (1 - p). Martins and Astudillo 2016."""

    name: ClassVar[str] = "sparsemax"
    alpha: ClassVar[float] = 2.0
    _package: ClassVar[Any] = staticmethod(sparsemax)

    def of(self, z_below: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """p = [z - τ]₊, u = 1 where p > 0."""
        weights = (z_below - tau).clamp(min=0)
        return weights, (weights > 0).to(weights.dtype)


@dataclass(frozen=True)
class Entmax15(Sparse):
    """p = [z/2 - τ]₊², H(p) = 4/3 Σ (p - p^1.5): between softmax and sparsemax. Peters, Niculae and Martins 2019."""

    name: ClassVar[str] = "entmax15"
    alpha: ClassVar[float] = 1.5
    _package: ClassVar[Any] = staticmethod(entmax15)

    def of(self, z_below: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:  # (…, m), (…, m)
        """p = [z/2 - τ]₊², u = √p."""
        pulls = (z_below / 2 - tau).clamp(min=0)
        return pulls.square(), pulls


class _Simplex(torch.autograd.Function):
    """The weights at a threshold, Σ p = 1, and lse: dL/dz = u (g - Σ u g / Σ u) + g_lse p.

    Written of the saved weights with operations that can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, tau: Tensor, by: Sparse) -> tuple[Tensor, Tensor]:
        weights, _ = by.of(z, tau)
        ctx.alpha = by.alpha
        ctx.save_for_backward(weights)
        return weights, (weights * z).sum(dim=-1) + by.entropy(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        held = weights > 0
        pulls = torch.where(held, weights.masked_fill(~held, 1) ** (2 - ctx.alpha), 0)  # a root has no slope at 0
        mean = (pulls * grad).sum(dim=-1, keepdim=True) / pulls.sum(dim=-1, keepdim=True)
        return pulls * (grad - mean) + lse_grad.unsqueeze(-1) * weights, None, None
