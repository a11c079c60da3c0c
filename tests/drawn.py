"""Answers over candidates of which some were drawn, and their errors, by plain torch: a reference for the loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.error import ErrorEstimate
from softdb.kernels import native
from softdb.pool import merge, pool
from softdb.store import Snapshot
from softdb.weights import softmax

Numbers = NDArray[np.float64]


class Moments(NamedTuple):
    """Moments of the error of a drawn answer: sums of c = (1 - p) w² over its candidates.

    w is a candidate's weight in the answer and p its inclusion probability, 1 for those that entered surely.
    """

    squares: Tensor  # (q,) Σ c ‖v‖²
    values: Tensor  # (q, v) Σ c v
    weights: Tensor  # (q,) Σ c


class Drawn(NamedTuple):
    """A soft query over some of the records, and the moments of its error."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,), -inf where nothing takes part
    moments: Moments

    @property
    def stderr(self) -> Tensor:  # (q,)
        """Standard error of the output, in the norm: √(Σ c ‖v - o‖²), from the moments."""
        a, b, c = self.moments
        return _root(a - 2 * (self.output * b).sum(1) + self.output.square().sum(1) * c)

    @property
    def lse_stderr(self) -> Tensor:  # (q,)
        """Standard error of the normaliser, relative to it, which is that of lse: √(Σ c)."""
        return _root(self.moments.weights)


def sampled(
    scores: Tensor,  # (q, k)
    temperature: float,
    live: Tensor,  # (q, k) bool
    log_weights: Tensor,  # (q, k) at least 0: log of the inverse of each candidate's inclusion probability p
    values: Tensor,  # (q, k, v), or int64 labels (q, k)
    num_classes: int | None = None,  # needed for labels
) -> Drawn:
    """The softmax of s / T + log(1/p), and its error (Särndal, Swensson and Wretman 1992, section 5.6)."""
    weights, lse = softmax(scores / temperature + log_weights, 1.0, live)
    noise = -torch.expm1(-log_weights) * weights.square()
    squares = torch.linalg.vector_norm(values, dim=-1).square() if num_classes is None else torch.ones_like(noise)
    moments = Moments((noise * squares).sum(1), pool(noise, values, num_classes), noise.sum(1))
    return Drawn(pool(weights, values, num_classes), lse, moments)


def exact(output: Tensor, lse: Tensor) -> Drawn:
    """An answer without error."""
    nothing = torch.zeros_like(lse)
    return Drawn(output, lse, Moments(nothing, torch.zeros_like(output), nothing))


def merged(parts: Sequence[Drawn]) -> Drawn:
    """The whole: moments add up, rescaled by e^(2 (lse_i - lse))."""
    output, lse = merge([part[:2] for part in parts])
    lses = torch.stack([part.lse for part in parts], dim=1)
    noise = softmax(lses, 1.0, lses > -torch.inf)[0].square()
    squares, values, weights = (
        torch.stack(column, dim=1) for column in zip(*(part.moments for part in parts), strict=True)
    )
    return Drawn(output, lse, Moments((noise * squares).sum(1), pool(noise, values), (noise * weights).sum(1)))


def _root(square: Tensor) -> Tensor:
    """√x, 0 with a gradient of 0 where rounding left nothing above it."""
    none = square <= 0
    return square.masked_fill(none, 1).sqrt().masked_fill(none, 0)


def pooled_at(
    logits: Numbers,  # (q, k) log-weights included, -inf = takes no part
    snapshot: Snapshot,
    positions: NDArray[np.int64],  # (q, k), -1 = none
    width: int,  # v, or the number of classes
) -> tuple[Numbers, Numbers]:  # (q, v), (q,)
    """The softmax over candidates and its normaliser; zeros and -inf where there are none."""
    values = snapshot.values_at(positions)
    weights, lse = softmax(torch.from_numpy(logits), 1.0, torch.from_numpy(logits > -np.inf))
    if values.is_floating_point():
        return pool(weights, values.double()).numpy(), lse.numpy()
    return pool(weights, values, width).numpy(), lse.numpy()


def errors_of(
    logits: Numbers,  # (q, k) log-weights included, -inf = takes no part
    logs: NDArray[np.floating],  # (q, k) log of the inverse of each one's probability
    snapshot: Snapshot,
    positions: NDArray[np.int64],  # (q, k), -1 = none
    answer: tuple[Numbers, Numbers],  # (q, v), (q,)
    salt: int = 0,
) -> ErrorEstimate:
    """Sums over the terms of the error of such an answer, by the kernel, where nothing is corrected."""
    (output, lse), (q, v), signs = answer, answer[0].shape, native().SIGNS
    weights = np.exp(logits - np.where(np.isneginf(lse), 0, lse)[:, None])
    chances, none, lists = (
        -np.expm1(-logs.astype(np.float64)),
        np.zeros(positions.shape),
        np.zeros(positions.shape, np.int32),
    )
    sums, first, roots, signed = (
        np.zeros((6, q)),
        np.zeros((q, v)),
        np.zeros((q, signs)),
        np.zeros((q, signs * v), np.float32),
    )
    native().spread(
        positions, chances, weights, none, none, lists, np.zeros((1, v), np.float32), snapshot.value_column, salt,
        output, sums, first, signed, roots,
    )  # fmt: skip
    each: Numbers = np.zeros(q)
    noise, noises, variance, variances, *_ = sums
    return ErrorEstimate(
        output, lse, noise, noises, variance, variances, first, signed.reshape(q, signs, v), roots, each, each, each,
        each, each, each, each, each,
    )  # fmt: skip
