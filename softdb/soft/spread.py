"""Drawn candidates pooled in place, and the error of the answer: compiled loops over the values where they lie."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.compiled.threads import by_lines
from softdb.index.contract import Floats
from softdb.soft.query import Positions
from softdb.store import Snapshot

__all__ = ["SKEWED", "Spread", "f_quantile", "pooled_at", "spread_at"]

SKEWED = 0.65  # squared weights are skewed: of the error they tell as much as so many of their effective number


class Spread(NamedTuple):
    """How far a drawn answer may be from the one over all records."""

    bar: Tensor  # (q,) quantile of ‖ô - o‖
    stderr: Tensor  # (q,)
    lse_bar: Tensor  # (q,) quantile of |Ẑ / Z - 1|
    lse_stderr: Tensor  # (q,)
    weights: Tensor  # (q, k) of the candidates in the answer


def pooled_at(
    logits: NDArray[np.floating],  # (q, k) s / T + log(1/p), -inf = takes no part
    snapshot: Snapshot,
    positions: Positions,  # (q, k), -1 = none
    width: int,  # v; 0: nothing is pooled
) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
    """The softmax over candidates, o = Σ w v and its normaliser; zeros and -inf where there are none. Cost q k v.

    As `softdb.pool.sampled`, without a gradient and without a copy of the values.
    """
    from softdb.compiled import pooling

    output, lse = np.empty((len(logits), width), logits.dtype), np.empty(len(logits), logits.dtype)
    column = _values(snapshot, width)

    def work(part: slice) -> None:
        pooling.pooled(logits[part], positions[part], *column, output[part], lse[part])

    by_lines(work, len(logits), logits.size * (4 * width + 64))
    return torch.from_numpy(output), torch.from_numpy(lse)


def spread_at(
    logits: NDArray[np.floating],  # (q, k) s / T + log(1/p), -inf = takes no part
    log_weights: Floats,  # (q, k) log(1/p)
    snapshot: Snapshot,
    positions: Positions,  # (q, k), -1 = none
    output: NDArray[np.floating],  # (q, v) the answer; v = 0: nothing was pooled
    lse: NDArray[np.floating],  # (q,) its normaliser, of whatever else was added to the candidates, too
    confidence: float,
) -> Spread:
    """Standard errors and error bars of an answer whose candidates were drawn independently.

    stderr² = Σ c ‖v - o‖², c = (1 - p) w² (Särndal, Swensson and Wretman 1992, section 5.6); of Z relative to it Σ c.
    The bar is √F stderr, F the quantile of an F distribution with ν and m degrees of freedom: ‖ô - o‖² spreads as
    Σ λ χ², λ the eigenvalues of the error's covariance C = Σ c (v - o)(v - o)ᵀ, which is about stderr² χ²_ν / ν with
    ν = tr(C)² / tr(C²) (Satterthwaite 1946): one direction gives 1.96 stderr, many 1.1. tr(C²) is the mean of (y·y')²
    over y = Σ ±√c (v - o), random signs (Hutchinson 1989). The covariance itself is known from m = (Σ c)² / Σ c²
    effective draws. Cost q k v SIGNS.
    """
    from softdb.compiled import pooling

    weights, found = np.empty(logits.shape, logits.dtype), np.empty((4, len(logits)))
    column, z = _values(snapshot, output.shape[1]), statistics.NormalDist().inv_cdf(confidence)

    def work(part: slice) -> None:
        answer = output[part], lse[part], z, SKEWED, weights[part], found[:, part]
        pooling.spread(logits[part], log_weights[part], positions[part], *column, *answer)

    by_lines(work, len(logits), logits.size * (4 * output.shape[1] * pooling.SIGNS + 64))
    bar, stderr, lse_bar, lse_stderr = torch.from_numpy(found.astype(logits.dtype))
    return Spread(bar, stderr, lse_bar, lse_stderr, torch.from_numpy(weights))


def f_quantile(confidence: float, above: float, below: float) -> float:
    """The quantile of F with so many degrees of freedom above and below, to a tenth."""
    from softdb.compiled import pooling

    return float(pooling.f_quantile(statistics.NormalDist().inv_cdf(confidence), above, below))


def _values(snapshot: Snapshot, width: int) -> tuple[Any, Any, int]:
    """Where the values of each segment begin, the segments' first positions, and what a value is."""
    from softdb.compiled import pooling

    first = snapshot.segments[0].values_or_keys.dtype
    kinds = {"float32": pooling.WIDE, "float16": pooling.HALF, "int32": pooling.LABEL}
    return snapshot.value_addresses, snapshot.starts, kinds[first.name] if width else pooling.NONE
