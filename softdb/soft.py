"""Soft queries over a snapshot: exact over every record that takes part, or truncated to the k nearest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Hits, Pooled, Resolve
from softdb.pool import missed_mass, pool
from softdb.scores import Score, ScoreFunction
from softdb.store import Snapshot
from softdb.stream import stream
from softdb.weights import softmax

__all__ = ["Finder", "SoftQuery", "attend_all", "attend_nearest", "nearest", "score_rows"]

Positions: TypeAlias = NDArray[np.int64]
Live: TypeAlias = NDArray[np.bool_]
Finder: TypeAlias = Callable[[Tensor, int, "Live | None"], Positions]  # queries (q, d), k, allowed -> positions (q, k)

SAMPLED = 1024  # records drawn to estimate the mass beyond the k nearest: 3 % of that mass's own spread


def score_rows(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    positions: Positions,  # (q, k), -1 = none
) -> Tensor:  # (q, k), -inf for none
    """Exact scores of candidates, from the stored keys, with gradient to the queries. Cost q k d."""
    live = torch.from_numpy(positions >= 0).to(queries.device)
    keys = snapshot.keys_at(positions) if snapshot.size else queries.new_zeros(*positions.shape, queries.shape[1])
    return score(queries, keys.to(queries.device)).masked_fill(~live, -torch.inf)


def nearest(
    score: Score | ScoreFunction,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    find: Callable[[Tensor], Positions],  # queries (q, d) -> positions (q, k)
) -> tuple[Tensor, Tensor]:  # (q, k), (q, k)
    """Rows of the nearest records, best first, and their exact scores with gradient to the queries."""
    positions = find(queries.detach())
    scores, order = score_rows(score, queries, snapshot, positions).sort(dim=1, descending=True, stable=True)
    rows = torch.from_numpy(snapshot.rows(positions)).to(queries.device)
    return rows.gather(1, order), scores


@dataclass(frozen=True)
class SoftQuery:
    """A soft query's fixed parts, checked."""

    queries: Tensor  # (q, d)
    score: Score | ScoreFunction
    temperature: float
    allowed: Live | None  # (size,) over positions
    mask: Tensor | None  # (q, live records) in row order, True = takes part
    num_classes: int | None
    pooled_dim: int  # v of the answer


def attend_all(query: SoftQuery, snapshot: Snapshot) -> Pooled:
    """Softmax attention over every record that takes part, in blocks. Cost q n (d + v), memory O(block)."""
    output, lse = stream(
        query.queries,
        snapshot,
        query.score,
        query.temperature,
        allowed=query.allowed,
        mask=query.mask,
        num_classes=query.num_classes,
        value_dim=query.pooled_dim,
    )
    q, device = len(query.queries), query.queries.device
    return Pooled(
        output,
        lse,
        exact=torch.ones(q, dtype=torch.bool, device=device),
        missed_mass=torch.zeros_like(lse.detach()),
        candidates=_taking_part(query, snapshot).to(device),
        hits=None,
        weights=None,
    )


def attend_nearest(query: SoftQuery, snapshot: Snapshot, k: int, find: Finder, resolve: Resolve) -> Pooled:
    """Softmax attention over the k nearest that take part, with an estimate of what the others hold.

    Cost of the search, then q k (d + v) and q SAMPLED d for the estimate.
    """
    queries, device = query.queries, query.queries.device
    positions = _nearest(query, snapshot, k, find)
    live = torch.from_numpy(positions >= 0).to(device)
    scores = score_rows(query.score, queries, snapshot, positions)
    weights, lse = softmax(scores, query.temperature, live)
    values = snapshot.values_at(positions) if snapshot.size else queries.new_zeros(*positions.shape, query.pooled_dim)
    others = _taking_part(query, snapshot).to(device) - live.sum(1)
    return Pooled(
        pool(weights, values, query.num_classes),
        lse,
        exact=others == 0,
        missed_mass=_missed(query, snapshot, positions, others, lse.detach()),
        candidates=live.sum(1),
        hits=Hits(torch.from_numpy(snapshot.rows(positions)).to(device), scores, resolve),
        weights=weights,
    )


def _taking_part(query: SoftQuery, snapshot: Snapshot) -> Tensor:
    """How many records each query may weigh, (q,)."""
    if query.mask is None:
        count = snapshot.count if query.allowed is None else int(np.count_nonzero(query.allowed & snapshot.live))
        return torch.full((len(query.queries),), count)
    mask = query.mask.cpu()
    if query.allowed is not None:
        mask = mask & torch.from_numpy(query.allowed[snapshot.live])
    return mask.sum(1)


def _nearest(query: SoftQuery, snapshot: Snapshot, k: int, find: Finder) -> Positions:
    """Positions of the k nearest, (q, k). With a mask each query searches its own records."""
    queries = query.queries.detach()
    if query.mask is None:
        return find(queries, k, query.allowed)
    found = np.full((len(queries), k), -1, np.int64)
    for i, mine in enumerate(query.mask.cpu().numpy()):
        allowed = np.zeros(snapshot.size, np.bool_)
        allowed[snapshot.live] = mine
        if query.allowed is not None:
            allowed &= query.allowed
        found[i] = find(queries[i : i + 1], k, allowed)[0]
    return found


def _missed(query: SoftQuery, snapshot: Snapshot, positions: Positions, others: Tensor, lse: Tensor) -> Tensor:
    """Estimated share of the weight beyond the candidates, (q,): a uniform sample of the others stands for them."""
    if not bool((others > 0).any()):
        return torch.zeros_like(lse)
    sample = _uniform(snapshot, query.allowed)  # (m,) ascending
    with torch.no_grad():
        scores = query.score(query.queries.detach(), snapshot.keys_at(sample).to(lse.device))
    taken = np.zeros((len(positions), len(sample)), np.bool_)
    places = np.minimum(np.searchsorted(sample, positions), len(sample) - 1)
    which, _ = np.nonzero(hit := sample[places] == positions)
    taken[which, places[hit]] = True
    if query.mask is not None:
        column = np.cumsum(snapshot.live)[sample] - 1
        taken |= ~query.mask.cpu().numpy()[:, column]
    return missed_mass(scores, torch.from_numpy(taken).to(lse.device), others, lse, query.temperature)


def _uniform(snapshot: Snapshot, allowed: Live | None) -> Positions:
    """Up to SAMPLED positions drawn uniformly from those that take part, ascending; the same for one generation."""
    keep = snapshot.live if allowed is None else snapshot.live & allowed
    random = np.random.default_rng(snapshot.generation)
    drawn = random.choice(snapshot.size, min(snapshot.size, SAMPLED), replace=False, shuffle=False)
    kept = drawn[keep[drawn]]
    if len(kept) < SAMPLED // 2:  # few take part: draw among them alone
        among = np.flatnonzero(keep)
        kept = random.choice(among, min(len(among), SAMPLED), replace=False, shuffle=False)
    return np.sort(kept)
