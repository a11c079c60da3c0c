"""The answer over every record that takes part: in one stream, with all weights, or proven from the nearest alone."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.blocks import pool_into, scored_tiles, scores_of
from softdb.attend.nearest import nearest
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Candidates, Positions, Request, Scored
from softdb.attend.result import answered
from softdb.check import shown
from softdb.errors import BadInput
from softdb.scoring import Argmax, Softmax, Sparse, Uniform
from softdb.scoring.score import alike

FIRST, GROWTH, MOST = 32, 8, 2048  # candidates tried before a pass over every record: 32, 256, 2048
GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB


def exact(source: SourceRecords, request: Request) -> Pooled:
    """The exact answer.

    Dense weightings: one pass over the records, cost q n (d + v), memory O(block). Argmax: the nearest. Sparsemax and
    entmax15: the k nearest, k grown until the threshold proves that no other record has weight; where thousands share
    it, passes over the records that find the threshold.
    """
    by = request.weighting
    if request.need_weights:
        return _dense(request, source)
    if isinstance(by, Argmax):
        return nearest(source, request, source.find(request.top(1, exact=True)))
    if isinstance(by, Sparse):
        support = _support(request, source, by)
        if support is not None:
            return nearest(source, request, support, complete=True)
    elif not isinstance(by, Softmax | Uniform):
        raise BadInput(
            f"the weighting {shown(by)} needs all scores at once, which no exact query holds; pass k=, or "
            "use one of softdb.weights"
        )
    return answered(request, source, source.stream(request), "all")


def log_normaliser(source: SourceRecords, request: Request) -> Tensor:  # (q,)
    """log Z of the softmax over every record, exactly. Nothing is pooled: cost q n d."""
    return source.stream(replace(request, pools=False))[1]


@torch.no_grad()
def _support(request: Request, source: SourceRecords, by: Sparse) -> Candidates | None:
    """The records that have weight, with proof that no other has; None if they are more than MOST."""
    q, taking_part = len(request.queries), request.taking_part(source)
    supports = np.full((q, 0), -1, np.int64)
    unproven, k, finder = np.arange(q), FIRST, "flat"
    while len(unproven):
        if k > MOST:
            return None
        open_request = request.at(unproven)
        tried = source.find(open_request.top(k, exact=True))
        finder = tried.finder
        weights, proven = _weigh(open_request, source, tried, by, taking_part[torch.from_numpy(unproven)])
        support = np.where(weights > 0, tried.positions, -1)[proven]
        width = int((support >= 0).sum(1).max(initial=0))
        if width > supports.shape[1]:
            supports = np.pad(supports, ((0, 0), (0, width - supports.shape[1])), constant_values=-1)
        # the nearest come first, and ties with the last weight nothing: what has weight is a prefix but for rounding
        order = np.argsort(support < 0, axis=1, kind="stable")[:, :width]
        supports[unproven[proven], :width] = np.take_along_axis(support, order, 1)
        unproven, k = unproven[~proven], k * GROWTH
    return Candidates(supports, finder)


def _weigh(
    request: Request, source: SourceRecords, candidates: Candidates, by: Sparse, taking_part: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (q, k) of candidates, and True for queries in which no other record can have weight, (q,)."""
    positions, weights, proven = candidates.positions, [], []
    chunk = max(1, GATHERED // max(1, positions.shape[1] * request.queries.shape[1]))
    for low in range(0, len(positions), chunk):
        chunk_slice = slice(low, low + chunk)
        own = replace(request, queries=request.queries[chunk_slice])
        live = torch.from_numpy(positions[chunk_slice] >= 0).to(request.queries.device)
        scores = source.scored(own, positions[chunk_slice]).scores
        chunk_weights, _, threshold = by.weigh(scores, request.temperature, live)
        weights.append(chunk_weights.cpu())
        complete = live.sum(1) == taking_part[chunk_slice].to(live.device)
        if live.shape[1]:
            complete |= scores.masked_fill(~live, torch.inf).amin(1) <= threshold
        proven.append(complete.cpu())
    return torch.cat(weights).numpy(), torch.cat(proven).numpy()


class AllScores(NamedTuple):
    """Scores and values of every record that takes part, in row order."""

    positions: Positions  # (n,)
    scores: Tensor  # (q, n), -inf where masked, with gradients to the queries and the score
    values: Tensor  # (n, v), or labels (n,)


def all_scores(source: SourceRecords, request: Request) -> AllScores:
    """The scores of all records. Cost q n d, memory q n and a copy of the values."""
    queries = request.queries
    columns: dict[int, list[Tensor]] = {}  # by the first position of the block
    positions, values = [np.empty(0, np.int64)], []
    with torch.autocast(queries.device.type, enabled=False):
        for tile, scores in scored_tiles(request, source):
            first = int(tile.positions[0])
            if first not in columns:
                values.append(tile.values)
                positions.append(tile.positions.cpu().numpy())
            columns.setdefault(first, []).append(scores)
    if not columns:
        return AllScores(positions[0], queries[:, :1] * queries.new_zeros(1, 0), queries.new_zeros(0, source.width))
    every = torch.cat([torch.cat(chunks) for chunks in columns.values()], 1)
    return AllScores(np.concatenate(positions), every, torch.cat(values))


def _dense(request: Request, source: SourceRecords) -> Pooled:
    """The exact answer with the weights (q, n) of all records, in row order. Cost q n (d + v)."""
    positions, scores, values = all_scores(source, request)
    live = torch.ones_like(scores, dtype=torch.bool)
    if request.mask is not None:
        columns = torch.from_numpy(np.cumsum(source.live)[positions] - 1)
        live = request.mask.to(scores.device).index_select(1, columns.to(scores.device))
    weights, lse, _ = request.weighting.weigh(scores, request.temperature, live)
    output = weights.new_zeros(len(weights), source.width)
    pool_into(output, weights, values.to(weights.device))
    own = np.where(live.cpu().numpy(), positions, -1)
    return answered(request, source, (output, lse), "all", (Scored(own, scores), weights))


def shared_scores(source: SourceRecords, request: Request, positions: Positions) -> Tensor:  # (u,) -> (q, u)
    """Scores of the same records for every query."""
    queries, columns = request.queries, source.columns
    keys = queries.new_zeros(0, queries.shape[1])
    if columns is not None and columns.size:
        keys = alike(columns.keys_at(positions), queries)
    with torch.autocast(queries.device.type, enabled=False):
        return scores_of(request.score, queries, keys)
