"""Protocol of weightings, and functions that all weightings use."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class Weighed(NamedTuple):
    """Result of a weighting of scores (…, k); z = score / temperature."""

    weights: Tensor  # (…, k)
    lse: Tensor  # (…): a smooth maximum of z; -inf without a live entry
    threshold: Tensor  # (…) a score: any further live entry that scores at most this would weigh 0 and change nothing


@runtime_checkable
class Weighting(Protocol):
    """A function from scores to weights.

    Rules for all weightings: a dead (not live) entry weighs exactly 0 and gets no gradient, whatever its score. With no
    live entry weights and gradients are 0 and lse is -inf. A single live entry weighs 1. A live score of -inf weighs 0
    like a dead entry (but `Uniform` ignores scores); a live NaN makes its row NaN. The threshold has no gradient, is
    rounded down, and is -inf if the weighting has none.
    """

    @property
    def name(self) -> str:
        """Name that `softdb.weights.weighting` accepts."""

    @property
    def sparse(self) -> bool:
        """True if live entries with finite scores may weigh exactly 0."""

    def weigh(
        self,
        scores: Tensor,  # (…, k)
        temperature: float,  # above 0
        live: Tensor,  # (…, k) bool
    ) -> Weighed:  # (…, k), (…), (…)
        """Return the weights, lse and threshold of the scores; see `Weighed`."""


def divisor(temperature: float, dtype: torch.dtype) -> float:
    """Clamp the temperature to the range of a dtype, so that the dtype does not round it to 0 or infinity."""
    bounds = torch.finfo(dtype)
    return min(max(temperature, bounds.tiny), bounds.max)


def masked(scores: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:  # (…, k), (…, k) bool -> (…, k), (…)
    """Return the scores with -inf for dead entries, and the largest score of each row, without gradient."""
    scores = scores.masked_fill(~live, -torch.inf)
    return scores, largest(scores, -torch.inf)


def largest(numbers: Tensor, empty: float) -> Tensor:  # (…, k) -> (…)
    """Return the largest number of each row, without gradient; `empty` if the rows have no numbers."""
    if not numbers.shape[-1]:
        return numbers.new_full(numbers.shape[:-1], empty)
    return numbers.detach().amax(dim=-1)
