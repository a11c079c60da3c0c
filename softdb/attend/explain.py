"""Which records carry a soft answer: the heaviest of them, how much they hold, and among how many it is spread."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Explanation, Hits, Pooled, Resolve
from softdb.attend.blocks import Task
from softdb.attend.request import Finder, SoftQuery, candidates, score_rows
from softdb.store import Snapshot
from softdb.weights import Uniform

__all__ = ["explained"]


@torch.no_grad()
def explained(
    query: SoftQuery, snapshot: Snapshot, pooled: Pooled, count: int, find: Finder, resolve: Resolve
) -> list[Explanation]:
    """One explanation a query, of the `count` heaviest records. Cost of a search and a pass over what was weighed."""
    count = min(count, max(1, snapshot.count))
    if pooled.hits is not None and pooled.weights is not None:
        weights, order = pooled.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(pooled.hits.rows.gather(1, order), pooled.hits.scores.detach().gather(1, order), resolve)
        entropy = -torch.special.xlogy(pooled.weights.detach(), pooled.weights.detach()).sum(1)
        weights = weights * (1 - pooled.missed_mass.nan_to_num(0)).unsqueeze(1)
    else:
        positions = candidates(query, snapshot, count, find).positions
        scores = score_rows(query.score, query.queries.detach(), snapshot, positions)
        live = torch.from_numpy(positions >= 0).to(scores.device)
        weights, entropy = _all_weights(query, snapshot, pooled.lse.detach(), scores, live)
        rows = torch.from_numpy(snapshot.rows(positions)).to(scores.device)
        hits = Hits(rows, query.shown_scores(scores), resolve)
    ids, payloads = hits.ids, hits.payloads
    found = []
    for i, (names, what, mine) in enumerate(zip(ids, payloads, weights.tolist(), strict=True)):
        kept = [j for j in range(len(names)) if mine[j] > 0]
        found.append(
            Explanation(
                [names[j] for j in kept],
                [mine[j] for j in kept],
                [what[j] for j in kept],
                hits.scores[i, kept].tolist(),
                mass=float(np.sum([mine[j] for j in kept])),
                effective=float(entropy[i].exp()) if pooled.lse[i] > -torch.inf else 0.0,
            )
        )
    return found


def _all_weights(
    query: SoftQuery, snapshot: Snapshot, lse: Tensor, scores: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights (q, k) of some records and the entropy (q,) of the weights of all."""
    if isinstance(query.weighting, Uniform):
        return live / query.taking_part(snapshot).to(lse).clamp(min=1).unsqueeze(1), lse
    weights = (scores / query.temperature - lse.unsqueeze(1)).exp().masked_fill(~live, 0)
    mean = torch.zeros_like(lse)  # of log w
    task = Task(
        snapshot, query.score, query.temperature, query.allowed, query.mask, query.num_classes, query.pooled_dim
    )
    for tile in task.tiles(query.queries.detach()):
        logs = task.scores(query.queries.detach()[tile.chunk], tile) / query.temperature - lse[tile.chunk].unsqueeze(1)
        mean[tile.chunk] += (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
    return weights, -mean
