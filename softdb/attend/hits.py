"""Hits of a search: what is found, less what is left out, scored with gradient and put in order."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from softdb.attend.request import Live, Positions
from softdb.attend.scoring import metric_in_place, score_rows
from softdb.check import Asked, Metric
from softdb.index.contract import Floats, Found
from softdb.index.device import radius_search
from softdb.index.diverse import diverse
from softdb.index.rerank import ordered
from softdb.scoring import score_of
from softdb.store import Snapshot

__all__ = ["GATHERED", "Find", "chunks", "hits", "joined", "scored", "without"]

GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB
MASKED = 64  # records left out of every query: beyond it a filter is cheaper than finding so many more
RANGED = 256  # queries whose range is found at once

Find = Callable[[Tensor, int, Live | None], Found]  # queries (q, d), k, allowed (size,) -> the nearest (q, k)


def hits(
    ask: Asked,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    metric: Metric,
    find: Find,
    allowed: Live | None,  # (size,) over positions; None: every live record
    excluded: Positions | None,  # (q, e), or (1, e) for every query; -1 = none
) -> tuple[Tensor, Tensor]:  # (q, k) rows, (q, k) scores
    """Rows and scores, best first, or in the order of choosing where diverse ones are asked for."""
    if excluded is not None and len(excluded) == 1 and excluded.shape[1] > MASKED:
        allowed = np.ones(snapshot.size, np.bool_) if allowed is None else allowed.copy()
        allowed[excluded[excluded >= 0]] = False
        excluded = None
    if ask.least is not None:
        in_radius = functools.partial(_in_radius, ask.least, snapshot=snapshot, metric=metric, allowed=allowed)
        return joined([in_radius(*chunk) for chunk in chunks(queries, excluded, RANGED)])
    k, more = min(ask.offset + ask.k, snapshot.count), 0 if excluded is None else min(excluded.shape[1], snapshot.size)
    if k <= ask.offset:
        return torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device), queries[:, :0]
    fetched = min(max(k, ask.fetch_k), snapshot.count)
    parts = []
    for part, own in chunks(queries, excluded, GATHERED // ((fetched + more) * max(queries.shape[1], more))):
        found = find(part.detach(), fetched + more, allowed)
        positions, scores = without(found.positions, found.scores, own, fetched)
        if ask.diversity:
            positions = _diverse(ask.diversity, k, part.detach(), snapshot, positions, metric)
            rows = torch.from_numpy(snapshot.rows(positions)).to(part.device)
            parts.append((rows, score_rows(score_of(metric), part, snapshot, positions)))
        else:
            parts.append(scored(part, snapshot, metric, positions[:, :k], scores))
    rows, found_scores = joined(parts)
    return rows[:, ask.offset :], found_scores[:, ask.offset :]


def chunks(queries: Tensor, excluded: Positions | None, count: int) -> list[tuple[Tensor, Positions | None]]:
    """So many queries at a time, at least one, and what they leave out."""
    if len(queries) <= count:
        return [(queries, excluded)]
    parts = torch.split(queries, max(1, count))
    if excluded is None or len(excluded) == 1:
        return [(part, excluded) for part in parts]
    return list(zip(parts, np.split(excluded, range(len(parts[0]), len(queries), len(parts[0]))), strict=True))


def without(
    found: Positions,  # (q, c) best first
    scores: Floats | None,  # (q, c)
    excluded: Positions | None,  # (q, e) or (1, e)
    k: int | None,  # None: all
) -> tuple[Positions, Floats | None]:  # (q, k), (q, k)
    """The first k that are not left out, and their scores."""
    if excluded is not None:
        drop = np.zeros(found.shape, np.bool_)
        for column in excluded.T:
            drop |= found == column[:, None]
        order = np.argsort(drop | (found < 0), axis=1, kind="stable")
        found = np.take_along_axis(np.where(drop, -1, found), order, 1)
        if scores is not None:
            scores = np.take_along_axis(np.where(drop, np.float32(-np.inf), scores), order, 1)
    return found[:, :k], None if scores is None else scores[:, :k]


def scored(
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    metric: Metric,
    found: Positions,  # (q, k)
    scores: Floats | None,  # (q, c ≥ k) where the finder computed them
) -> tuple[Tensor, Tensor]:  # (q, k), (q, k)
    """Rows and exact scores, with gradient to the queries. Nothing is scored twice unless a gradient needs it."""
    score = score_of(metric)
    if metric_in_place(score, queries, snapshot) is not None:
        if scores is None:
            found, scores = ordered(snapshot, queries.detach().numpy(), found, found.shape[1], metric)
        scores = scores[:, : found.shape[1]]
        if not np.isnan(scores).any():  # too large for float32: torch says so
            return torch.from_numpy(snapshot.rows(found)), torch.from_numpy(scores)
    exact, order = score_rows(score, queries, snapshot, found).sort(dim=1, descending=True, stable=True)
    return torch.from_numpy(snapshot.rows(found)).to(queries.device).gather(1, order), exact


def _diverse(
    diversity: float,
    k: int,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    found: Positions,  # (q, c)
    metric: Metric,
) -> Positions:  # (q, k)
    """The candidates to take, in the order of taking."""
    with torch.no_grad():
        scores, order = score_rows(score_of(metric), queries, snapshot, found).sort(dim=1, descending=True, stable=True)
        found = np.take_along_axis(found, order.cpu().numpy(), 1)
        keys = snapshot.keys_at(found).to(queries.device).to(scores.dtype)
        picks = diverse(queries, keys, scores, k, metric, diversity)
    return np.take_along_axis(found, picks.cpu().numpy(), 1)


def _in_radius(
    least: float,
    queries: Tensor,  # (q, d)
    excluded: Positions | None,
    snapshot: Snapshot,
    metric: Metric,
    allowed: Live | None,
) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """The records whose score, as it is shown, reaches the least one, best first; m is the most that a query has."""
    found, _ = without(radius_search(snapshot, queries, least, metric, allowed), None, excluded, None)
    score, pieces, columns = score_of(metric), [], max(1, GATHERED // queries.shape[1])
    lines = max(1, columns // max(1, found.shape[1]))
    for part, own in zip(torch.split(queries, lines), np.split(found, range(lines, len(found), lines)), strict=True):
        some = np.split(own, range(columns, own.shape[1], columns), axis=1)
        pieces.append(torch.cat([score_rows(score, part, snapshot, one) for one in some], 1))
    scores, rows = torch.cat(pieces), torch.from_numpy(snapshot.rows(found)).to(queries.device)
    near = (scores >= least) & (rows >= 0)
    scores, order = scores.masked_fill(~near, -torch.inf).sort(dim=1, descending=True, stable=True)
    most = int(near.sum(1).amax()) if near.numel() else 0
    return rows.masked_fill(~near, -1).gather(1, order)[:, :most], scores[:, :most]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows and scores (q_i, k_i) one below the other, as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(rows.shape[1] for rows, _ in parts)
    rows, scores = (
        torch.cat([torch.nn.functional.pad(part[i], (0, width - part[i].shape[1]), value=none) for part in parts])
        for i, none in enumerate((-1, -torch.inf))
    )
    return rows, scores
