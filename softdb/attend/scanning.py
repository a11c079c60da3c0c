"""The k nearest by any score: every record is compared, in blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.blocks import Task
from softdb.attend.source import Live, Source
from softdb.scores import Score, ScoreFunction

__all__ = ["scan"]


@torch.no_grad()
def scan(
    queries: Tensor,  # (q, d)
    source: Source,
    score: Score | ScoreFunction,
    k: int,
    *,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
    mask: Tensor | None = None,  # (q, count) bool over live records in row order, True = takes part
) -> NDArray[np.int64]:  # (q, k)
    """Positions of the k best, best first, ties by row, then -1. For scores that no index finds for. Cost q n d."""
    task = Task(source, score, 1.0, allowed, mask, None, queries.shape[1])
    best = queries.new_full((len(queries), k), -torch.inf)
    found = torch.full((len(queries), k), -1, device=queries.device)
    for tile in task.tiles(queries):
        chunk = tile.chunk
        scores = torch.cat([best[chunk], task.scores(queries[chunk], tile)], dim=1)
        places = _top(scores, k)
        best[chunk] = scores.gather(1, places)
        positions = torch.cat([found[chunk], tile.positions.to(found.device).expand(len(scores), -1)], dim=1)
        found[chunk] = positions.gather(1, places)
    return found.masked_fill(best == -torch.inf, -1).cpu().numpy()


def _top(
    scores: Tensor,  # (q, m), m at least k
    k: int,
) -> Tensor:  # (q, k)
    """Places of the k largest, largest first, ties by place."""
    values, places = scores.topk(k)
    last = values[:, -1:]
    unsure = (scores == last).sum(1) > (values == last).sum(1)  # topk takes any of the ties
    for i in unsure.nonzero()[:, 0].tolist():
        places[i] = scores[i].sort(descending=True, stable=True).indices[:k]
    places = places.sort(dim=1).values
    order = scores.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return places.gather(1, order)
