"""Negatives: the records that a query shall tell its positives from, mined from the database or met in the batch."""

from __future__ import annotations

import numpy as np
import torch

from softdb.nn.positives import Positives, Rows

__all__ = ["mined", "without"]


def mined(
    ask: Positives, count: int, skip: int, pool: int, generator: torch.Generator | None
) -> Rows:  # (q, count) at most, -1 = none
    """Hard negatives: `count` of the `pool` nearest that are no positives, after the first `skip` of them."""
    request, source, positions = ask
    if not count:
        return np.full((len(positions), 0), -1, np.int64)
    width = skip + pool + positions.shape[1]
    nearest = without(source.find(request, width).positions, positions)
    rank = (nearest >= 0).cumsum(1) - 1
    nearest[(rank < skip) | (rank >= skip + pool)] = -1
    order = np.zeros(nearest.shape)
    if pool > count:
        order = torch.rand(nearest.shape, generator=generator).numpy()
    first = np.argsort(np.where(nearest < 0, 2.0, order), 1, kind="stable")[:, :count]
    return np.take_along_axis(nearest, first, 1)


def without(found: Rows, positions: Rows) -> Rows:  # (q, k), (q, m) -> (q, k)
    """What was found, -1 where it is among the positions of its query."""
    return np.where((found[:, :, None] == positions[:, None, :]).any(2), -1, found)
