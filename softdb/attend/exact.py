"""Exact soft answers: in one pass over the records, with all weights, or from the nearest records with a proof."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.blocks import pool_into, scored_tiles, scores_of
from softdb.attend.candidates import GATHERED, chunks
from softdb.attend.nearest import nearest
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Candidates, Positions, Request, Scored
from softdb.attend.result import answered
from softdb.check import shown
from softdb.errors import BadInput
from softdb.scoring import Argmax, Softmax, Sparse, Uniform
from softdb.scoring.score import alike

FIRST, GROWTH, MOST = 32, 8, 2048  # numbers of candidates tried before a pass over every record: 32, 256, 2048


def exact(source: SourceRecords, request: Request) -> Pooled:
    """Return the exact answer of a soft query.

    Dense weightings need one pass over the records: cost q n (d + v), memory O(block). Argmax needs the nearest record.
    Sparsemax and entmax15 need the k nearest; k grows until the threshold proves that no other record has weight. If
    thousands of records have weight, several passes over the records find the threshold.
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
            f"the weighting {shown(by)} needs all scores at once, which an exact query does not store; pass k=, or "
            "use one of softdb.weights"
        )
    return answered(request, source, source.stream(request), "all")


def log_normaliser(source: SourceRecords, request: Request) -> Tensor:  # (q,)
    """Return the exact log Z of the softmax over every record, without pooling values. Cost q n d."""
    return source.stream(replace(request, pools=False))[1]


@torch.no_grad()
def _support(request: Request, source: SourceRecords, by: Sparse) -> Candidates | None:
    """Find the records with weight, and prove that no other record has weight. None: they are more than MOST."""
    q, taking_part = len(request.queries), source.taking_part(request)
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
        # candidates are sorted, so but for rounding those with weight come first
        order = np.argsort(support < 0, axis=1, kind="stable")[:, :width]
        supports[unproven[proven], :width] = np.take_along_axis(support, order, 1)
        unproven, k = unproven[~proven], k * GROWTH
    return Candidates(supports, finder)


def _weigh(
    request: Request, source: SourceRecords, candidates: Candidates, by: Sparse, taking_part: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights (q, k) of candidates, and a mask (q,), True = no other record can have weight."""
    positions, weights, proven = candidates.positions, [], []
    size = GATHERED // max(1, positions.shape[1] * request.queries.shape[1])
    for queries, own in chunks(request.queries, positions, size):
        live = torch.from_numpy(own >= 0).to(queries.device)
        scores = source.scored(replace(request, queries=queries), own).scores
        chunk_weights, _, threshold = by.weigh(scores, request.temperature, live)
        weights.append(chunk_weights.cpu())
        proven.append((live & (scores <= threshold.unsqueeze(1))).any(1).cpu())
    complete = (positions >= 0).sum(1) == taking_part.cpu().numpy()
    return torch.cat(weights).numpy(), complete | torch.cat(proven).numpy()


class AllScores(NamedTuple):
    """Positions, scores and values of every record that takes part, sorted by row."""

    positions: Positions  # (n,)
    scores: Tensor  # (q, n), -inf where masked, with gradients to the queries and the score
    values: Tensor  # (n, v), or labels (n,)


def all_scores(source: SourceRecords, request: Request) -> AllScores:
    """Return the scores of all records that take part. Cost q n d, memory q n and a copy of the values."""
    queries = request.queries
    columns: dict[int, list[Tensor]] = {}  # scores by the first position of their block
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
    """Return the exact answer with the weights (q, n) of all records, sorted by row. Cost q n (d + v)."""
    positions, scores, values = all_scores(source, request)
    live = torch.ones_like(scores, dtype=torch.bool)
    mask = request.masks(source.live)[1]
    if mask is not None:
        live = mask.to(scores.device).index_select(1, torch.from_numpy(positions).to(scores.device))
    weights, lse, _ = request.weighting.weigh(scores, request.temperature, live)
    output = weights.new_zeros(len(weights), source.width)
    pool_into(output, weights, values.to(weights.device))
    own = np.where(live.cpu().numpy(), positions, -1)
    return answered(request, source, (output, lse), "all", (Scored(own, scores), weights))


def shared_scores(source: SourceRecords, request: Request, positions: Positions) -> Tensor | None:  # (u,) -> (q, u)
    """Score the same records, at `positions`, for every query; None if the source has no columns to read."""
    queries, columns = request.queries, source.columns
    if columns is None:
        return None
    keys = queries.new_zeros(0, queries.shape[1])
    if columns.size:
        keys = alike(columns.keys_at(positions), queries)
    with torch.autocast(queries.device.type, enabled=False):
        return scores_of(request.score, queries, keys)
