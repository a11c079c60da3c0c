"""All scores of a request at once, (q, n): for who asks for the weights of every record, and for small sources."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.blocks import Tile, scores_of, tiles
from softdb.attend.request import Positions, Request
from softdb.attend.result import answered
from softdb.attend.scoring import Scored
from softdb.attend.source import Source
from softdb.scores.contract import alike

__all__ = ["AllScores", "all_scores", "dense", "shared_scores"]


class AllScores(NamedTuple):
    """Every record that takes part, in row order."""

    positions: Positions  # (n,)
    scores: Tensor  # (q, n), -inf where masked, with gradients to the queries and the score
    values: Tensor  # (n, v), or labels (n,)


def all_scores(request: Request, source: Source) -> AllScores:
    """The scores of all records. Cost q n d, memory q n and a copy of the values."""
    queries = request.queries
    columns: dict[int, list[Tensor]] = {}  # by the first position of the block
    positions, values = [np.empty(0, np.int64)], []
    with torch.autocast(queries.device.type, enabled=False):
        for tile in tiles(request, source):
            first = int(tile.positions[0])
            if first not in columns:
                values.append(tile.values)
                positions.append(tile.positions.cpu().numpy())
            columns.setdefault(first, []).append(scores_of(request.score, queries[tile.chunk], tile))
    if not columns:
        return AllScores(positions[0], queries[:, :1] * queries.new_zeros(1, 0), queries.new_zeros(0, source.width))
    scores = torch.cat([torch.cat(chunks) for chunks in columns.values()], 1)
    return AllScores(np.concatenate(positions), scores, torch.cat(values))


def dense(request: Request, source: Source) -> Pooled:
    """The exact answer with the weights (q, n) of all records, in row order. Cost q n (d + v)."""
    positions, scores, values = all_scores(request, source)
    live = torch.ones_like(scores, dtype=torch.bool)
    if request.mask is not None:
        columns = torch.from_numpy(np.cumsum(source.live)[positions] - 1)
        live = request.mask.to(scores.device).index_select(1, columns.to(scores.device))
    weights, lse, _ = request.weighting.weigh(scores, request.temperature, live)
    if values.is_floating_point():
        output = weights @ values.to(weights)
    else:
        output = weights.new_zeros(len(weights), source.width).index_add(1, values, weights)
    own = np.where(live.cpu().numpy(), positions, -1)
    return answered(request, source, output, lse, finder="all", found=Scored(own, scores), weights=weights)


def shared_scores(request: Request, source: Source, positions: Positions) -> Tensor:  # (u,) -> (q, u)
    """Scores of the same records for every query."""
    queries, columns = request.queries, source.columns
    keys = queries.new_zeros(0, queries.shape[1])
    if columns is not None and columns.size:
        keys = alike(columns.keys_at(positions), queries)
    with torch.autocast(queries.device.type, enabled=False):
        return scores_of(request.score, queries, Tile(slice(None), torch.from_numpy(positions), keys, keys, None))
