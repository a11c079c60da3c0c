"""The k nearest by any score: every record is compared, in blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from softdb.attend.blocks import scores_of, tiles
from softdb.attend.request import Positions, Request

if TYPE_CHECKING:
    from softdb.attend.source import Source

__all__ = ["scan"]


@torch.no_grad()
def scan(request: Request, source: Source, k: int) -> Positions:  # (q, k)
    """Positions of the k best, best first, ties by row, then -1. For scores that no index finds for. Cost q n d."""
    request, k = replace(request.detached, pools=False), min(k, source.count)
    queries = request.queries
    best = queries.new_full((len(queries), k), -torch.inf)
    found = torch.full((len(queries), k), -1, device=queries.device)
    for tile in tiles(request, source):
        chunk = tile.chunk
        scores = torch.cat([best[chunk], scores_of(request.score, queries[chunk], tile)], dim=1)
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
