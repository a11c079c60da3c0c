"""Protocol of weightings, and functions that their files share."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class Weighed(NamedTuple):
    """Weights that a weighting makes of scores (…, k)."""

    weights: Tensor  # (…, k)
    lse: Tensor  # (…): the smoothed largest z; -inf where nothing is live
    threshold: Tensor  # (…), in units of scores: an unseen live entry that scores no more weighs 0, and changes nothing


@runtime_checkable
class Weighting(Protocol):
    """Makes weights of scores.

    Common to all: a dead entry weighs exactly 0 and gets no gradient, whatever stands there. Nothing live: weights 0,
    lse -inf, gradients 0. One live: it weighs 1. A live score of -inf weighs 0, as if dead (but `Uniform` reads no
    scores); a live NaN makes its row NaN. The threshold has no gradient, is rounded down, and is -inf where nothing is
    proven.
    """

    @property
    def name(self) -> str:
        """Name by which `weighting` knows it."""

    @property
    def sparse(self) -> bool:
        """True if live entries with finite scores may weigh exactly 0."""

    def weigh(
        self,
        scores: Tensor,  # (…, k)
        temperature: float,  # above 0
        live: Tensor,  # (…, k) bool
    ) -> Weighed:  # (…, k), (…), (…)
        """Weights of the live entries, the smoothed largest z, and the score below which nothing counts."""


def divisor(temperature: float, dtype: torch.dtype) -> float:
    """The temperature as something scores of that dtype can be divided by: never rounded to 0 or to infinity."""
    bounds = torch.finfo(dtype)
    return min(max(temperature, bounds.tiny), bounds.max)


def masked(scores: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:  # (…, k), (…, k) bool -> (…, k), (…)
    """Scores, -inf where dead, and the largest of each row, without gradient."""
    scores = scores.masked_fill(~live, -torch.inf)
    return scores, largest(scores, -torch.inf)


def largest(numbers: Tensor, none: float) -> Tensor:  # (…, k) -> (…)
    """The largest number of each row, without gradient; `none` where there are no numbers."""
    if not numbers.shape[-1]:
        return numbers.new_full(numbers.shape[:-1], none)
    return numbers.detach().amax(dim=-1)
