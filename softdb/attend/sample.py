"""Records drawn from the soft distribution, exactly, in one pass over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.answers import Hits, Resolve, Samples
from softdb.attend.blocks import Task
from softdb.attend.request import SoftQuery, score_rows
from softdb.attend.streaming import stream
from softdb.check import shown
from softdb.errors import BadInput
from softdb.store import Snapshot
from softdb.weights import Softmax

__all__ = ["drawn"]


def drawn(query: SoftQuery, snapshot: Snapshot, count: int, generator: torch.Generator, resolve: Resolve) -> Samples:
    """`count` independent records for each query, P(i) = exp(s_i / T) / Z, with their log-probabilities.

    Block by block: a draw moves to a record of the block with the block's share of all weight so far, which leaves
    every record its own share in the end (weighted reservoir sampling, Chao 1982). Cost q n d, memory O(block), and a
    second pass where the queries want a gradient.
    """
    if not isinstance(query.weighting, Softmax):
        raise BadInput(f"the weighting is {shown(query.weighting)}; records are drawn by softmax weights")
    queries = query.queries.detach()
    task = Task(snapshot, query.score, query.temperature, query.allowed, query.mask, None, queries.shape[1])
    total = queries.new_full((len(queries),), -torch.inf)
    found = torch.full((len(queries), count), -1, device=queries.device)
    with torch.no_grad():
        for tile in task.tiles(queries):
            logits = task.scores(queries[tile.chunk], tile) / query.temperature
            mine = logits.logsumexp(1)
            whole = torch.logaddexp(total[tile.chunk], mine)
            share = (mine - whole).exp().nan_to_num(0)  # where nothing takes part yet
            chances = torch.rand(len(mine), count, generator=generator).to(share)
            moves = chances < share.unsqueeze(1)
            lines = moves.any(1).nonzero()[:, 0]
            if len(lines):
                places = _places(logits[lines].softmax(1), count, generator)
                there = tile.positions.to(places.device)[places].to(found)
                part = found[tile.chunk]
                part[lines] = torch.where(moves[lines], there, part[lines])
            total[tile.chunk] = whole
    positions = found.cpu().numpy()
    scores = score_rows(query.score, query.queries, snapshot, positions)
    lse = total
    if query.queries.requires_grad and torch.is_grad_enabled():
        _, lse = stream(
            query.queries, snapshot, query.score, query.temperature, allowed=query.allowed, mask=query.mask,
            num_classes=query.num_classes, value_dim=query.pooled_dim,
        )  # fmt: skip
    rows = torch.from_numpy(snapshot.rows(positions)).to(queries.device)
    log_prob = (scores / query.temperature - lse.unsqueeze(1)).masked_fill(rows < 0, -torch.inf)
    return Samples(Hits(rows, query.shown_scores(scores), resolve), log_prob)


def _places(
    weights: Tensor,  # (q, m)
    count: int,
    generator: torch.Generator,
) -> Tensor:  # (q, count)
    """Places by inversion of the cumulative weights, which a generator of the CPU serves on any device."""
    cumulative = weights.double().cumsum(1)
    chances = torch.rand(len(weights), count, generator=generator, dtype=torch.float64).to(weights.device)
    places = torch.searchsorted(cumulative, chances * cumulative[:, -1:], right=True)
    return places.clamp(max=weights.shape[1] - 1)
