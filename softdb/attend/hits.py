"""Compute the hits of a search: find candidates, drop excluded records, score them with gradient, and sort."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Hits
from softdb.attend.candidates import GATHERED, chunks, joined, score_all, scored, without
from softdb.attend.grouped import grouped
from softdb.attend.protocol import IndexedRecords
from softdb.attend.request import Positions
from softdb.attend.scoring import score_rows
from softdb.index.diverse import diverse
from softdb.index.placement import RecordColumns
from softdb.index.query import Query
from softdb.scoring import score_of

MASKED = 64  # if more records are excluded, a filter is cheaper than fetching that many additional candidates
RANGED = 256  # number of queries in one radius search


def hits(source: IndexedRecords, query: Query) -> Hits:  # (q, k)
    """Return the hits, best first. Diverse hits are in the order of choice; grouped hits are group by group."""
    if query.groups is not None:
        return Hits(*grouped(query, source), source.resolve)
    query = query.excluding_by_filter(source.snapshot.size, MASKED)
    if query.least is not None:
        return Hits(*_in_radius(query, source), source.resolve)
    queries, columns, metric, excluded = query.queries, source.columns, query.metric, query.excluded
    k = min(query.offset + query.k, columns.count)
    more = 0 if excluded is None else min(excluded.shape[1], columns.size)
    if k <= query.offset:
        none = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        return Hits(none, queries[:, :0], source.resolve)
    fetched = min(max(k, query.fetch_k), columns.count)
    parts = []
    for chunk, own in chunks(queries, excluded, GATHERED // ((fetched + more) * max(queries.shape[1], more))):
        result = source.finder.find(source.snapshot, replace(query, queries=chunk.detach(), k=fetched + more))
        positions, scores = without(result.positions, result.scores, own, fetched)
        if query.diversity:
            positions = _diverse(query, k, chunk.detach(), columns, positions)
            rows = torch.from_numpy(columns.rows(positions)).to(chunk.device)
            parts.append((rows, score_rows(score_of(metric), chunk, columns, positions)))
        else:
            parts.append(scored(chunk, columns, metric, positions[:, :k], scores))
    rows, hit_scores = joined(parts)
    return Hits(rows[:, query.offset :], hit_scores[:, query.offset :], source.resolve)


def _diverse(
    query: Query,
    k: int,
    queries: Tensor,  # (q, d)
    columns: RecordColumns,
    candidates: Positions,  # (q, c)
) -> Positions:  # (q, k)
    """Choose k candidates by maximal marginal relevance, and return them in the order of choice."""
    with torch.no_grad():
        score = score_of(query.metric)
        scores, order = score_rows(score, queries, columns, candidates).sort(dim=1, descending=True, stable=True)
        candidates = np.take_along_axis(candidates, order.cpu().numpy(), 1)
        keys = columns.keys_at(candidates).to(queries.device).to(scores.dtype)
        picks = diverse(queries, keys, scores, k, query.metric, query.diversity)
    return np.take_along_axis(candidates, picks.cpu().numpy(), 1)


def _in_radius(query: Query, source: IndexedRecords) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """Return the records whose score is at least `query.least`, best first; m: largest number of hits of a query."""
    parts = chunks(query.queries, query.excluded, RANGED)
    return joined([_near_enough(replace(query, queries=chunk, excluded=own), source) for chunk, own in parts])


def _near_enough(query: Query, source: IndexedRecords) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    queries, columns = query.queries, source.columns
    candidates, _ = without(source.in_radius(query), None, query.excluded, None)
    scores = score_all(score_of(query.metric), queries, columns, candidates)
    rows = torch.from_numpy(columns.rows(candidates)).to(queries.device)
    near = (scores >= cast("float", query.least)) & (rows >= 0)
    scores, order = scores.masked_fill(~near, -torch.inf).sort(dim=1, descending=True, stable=True)
    most = int(near.sum(1).amax()) if near.numel() else 0
    return rows.masked_fill(~near, -1).gather(1, order)[:, :most], scores[:, :most]
