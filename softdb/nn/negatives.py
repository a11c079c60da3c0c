"""Negatives: the records that a query shall tell its positives from, mined from the database or met in the batch."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from softdb.attend import Task
from softdb.attend.blocks import Tile
from softdb.attend.request import candidates
from softdb.database import SoftDB
from softdb.nn.positives import Positives, Rows

__all__ = ["mined", "shared_scores", "without"]


def mined(
    db: SoftDB, ask: Positives, count: int, skip: int, pool: int, generator: torch.Generator | None
) -> Rows:  # (q, count) at most, -1 = none
    """Hard negatives: `count` of the `pool` nearest that are no positives, after the first `skip` of them."""
    query, snapshot, positions = ask
    if not count:
        return np.full((len(positions), 0), -1, np.int64)
    find = functools.partial(db.finder.find_folded, snapshot)
    width = skip + pool + positions.shape[1]
    nearest = without(candidates(query, snapshot, width, find).positions, positions)
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


def shared_scores(
    ask: Positives,
    positions: Rows,  # (u,)
) -> Tensor:  # (q, u)
    """Scores of the same records for every query."""
    query, snapshot, _ = ask
    queries = query.queries
    keys = (snapshot.keys_at(positions) if snapshot.size else queries.new_zeros(0, queries.shape[1])).to(queries)
    task = Task(snapshot, query.score, query.temperature, None, None, query.num_classes, query.pooled_dim)
    with torch.autocast(queries.device.type, enabled=False):
        return task.scores(queries, Tile(slice(None), torch.from_numpy(positions), keys, keys, None))
