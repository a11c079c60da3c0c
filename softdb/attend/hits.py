"""Hits of a search: what is found, less what is left out, scored with gradient and put in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from softdb.attend.nearest import nearest
from softdb.attend.request import Live, Positions, score_rows
from softdb.check import Asked, Metric
from softdb.index.diverse import diverse
from softdb.index.range import within
from softdb.scores import Score, score_of
from softdb.store import Snapshot

__all__ = ["hits"]

GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB
MASKED = 64  # records left out of every query: beyond it a filter is cheaper than finding so many more
RANGED = 256  # queries whose range is found at once

Find = Callable[[Tensor, int, Live | None], Positions]  # queries (q, d), k, allowed (size,) -> positions (q, k)


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
    candidates = max(ask.k, min(ask.candidates, snapshot.count))
    more = 0 if excluded is None else min(excluded.shape[1], snapshot.size)
    chunk = RANGED if ask.least is not None else max(1, GATHERED // ((candidates + more) * max(queries.shape[1], more)))
    parts = []
    for low in range(0, max(1, len(queries)), chunk):
        part, mine = queries[low : low + chunk], _mine(excluded, low, chunk)
        if ask.least is not None:
            found = _without(within(snapshot, part, ask.least, metric, allowed), mine, None)
            parts.append(_reaching(ask.least, part, snapshot, found, score_of(metric)))
        else:
            found = _without(find(part.detach(), candidates + more, allowed), mine, candidates)
            parts.append(_scored(ask, part, snapshot, found, metric))
    return _joined([rows for rows, _ in parts], -1), _joined([scores for _, scores in parts], -torch.inf)


def _mine(excluded: Positions | None, low: int, count: int) -> Positions | None:
    """What some of the queries leave out."""
    return excluded if excluded is None or len(excluded) == 1 else excluded[low : low + count]


def _without(
    found: Positions,  # (q, c) best first
    excluded: Positions | None,  # (q, e) or (1, e)
    k: int | None,  # None: all
) -> Positions:  # (q, k)
    """The first k that are not left out."""
    if excluded is not None:
        drop = np.zeros(found.shape, np.bool_)
        for one in excluded.T:
            drop |= found == one[:, None]
        found = np.where(drop, -1, found)
        found = np.take_along_axis(found, np.argsort(found < 0, axis=1, kind="stable"), 1)
    return found[:, :k]


def _scored(
    ask: Asked,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    found: Positions,  # (q, c)
    metric: Metric,
) -> tuple[Tensor, Tensor]:  # (q, k), (q, k)
    if not ask.diversity:
        return nearest(score_of(metric), queries, snapshot, lambda _: found[:, : ask.k])
    found = _diverse(ask, queries.detach(), snapshot, found, metric)
    rows = torch.from_numpy(snapshot.rows(found)).to(queries.device)
    return rows, score_rows(score_of(metric), queries, snapshot, found)


def _diverse(
    ask: Asked,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    found: Positions,  # (q, c)
    metric: Metric,
) -> Positions:  # (q, k)
    """The candidates to take, in the order of taking."""
    if not snapshot.size:
        return found[:, : ask.k]
    with torch.no_grad():
        scores, order = score_rows(score_of(metric), queries, snapshot, found).sort(dim=1, descending=True, stable=True)
        found = np.take_along_axis(found, order.cpu().numpy(), 1)
        keys = snapshot.keys_at(found).to(queries.device).to(scores.dtype)
        picks = diverse(queries, keys, scores, ask.k, metric, ask.diversity)
    return np.take_along_axis(found, picks.cpu().numpy(), 1)


def _reaching(
    least: float,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    found: Positions,  # (q, c)
    score: Score,
) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """The candidates whose score, as it is shown, reaches the least one; m is the most that a query has."""
    width = max(1, found.shape[1] * queries.shape[1])
    lines, columns = max(1, GATHERED // width), max(1, GATHERED // queries.shape[1])
    pieces = [
        torch.cat([score_rows(score, part, snapshot, one) for one in _columns(own, columns)], 1)
        for part, own in zip(torch.split(queries, lines), np.split(found, range(lines, len(found), lines)), strict=True)
    ]
    scores, rows = torch.cat(pieces), torch.from_numpy(snapshot.rows(found)).to(queries.device)
    near = (scores >= least) & (rows >= 0)
    rows, scores = _best_first(rows.masked_fill(~near, -1), scores.masked_fill(~near, -torch.inf))
    most = int(near.sum(1).amax()) if near.numel() else 0
    return rows[:, :most], scores[:, :most]


def _columns(found: Positions, count: int) -> list[Positions]:
    return np.split(found, range(count, found.shape[1], count), axis=1)


def _best_first(
    rows: Tensor,  # (q, k)
    scores: Tensor,  # (q, k)
) -> tuple[Tensor, Tensor]:  # (q, k), (q, k)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return rows.gather(1, order), scores


def _joined(parts: list[Tensor], none: float) -> Tensor:
    """The parts (q_i, k_i) one below the other, as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=none) for part in parts])
