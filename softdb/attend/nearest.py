"""The soft query truncated to the k nearest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Hits, Pooled, Resolve
from softdb.attend.explain import explained
from softdb.attend.request import (
    Candidates,
    Finder,
    Live,
    Positions,
    SoftQuery,
    candidates,
    pool_rows,
    score_rows,
)
from softdb.pool import missed_mass, pool
from softdb.store import Snapshot
from softdb.weights import Softmax, Uniform

__all__ = ["attend_nearest", "weighed"]

SAMPLED = 1024  # records drawn to estimate the mass beyond the k nearest: 3 % of that mass's own spread


def attend_nearest(query: SoftQuery, snapshot: Snapshot, k: int, find: Finder, resolve: Resolve) -> Pooled:
    """The soft query over the k nearest that take part, and what is known of the others.

    Exact where nothing else takes part, or where the k nearest are certain and the last of them proves that no other
    record has weight. Cost of the search, then q k (d + v), and q SAMPLED d for the missed mass.
    """
    return weighed(query, snapshot, candidates(query, snapshot, k, find), find, resolve)


def weighed(query: SoftQuery, snapshot: Snapshot, found: Candidates, find: Finder, resolve: Resolve) -> Pooled:
    """The soft query over its candidates."""
    queries, device, positions = query.queries, query.queries.device, found.positions
    live = torch.from_numpy(positions >= 0).to(device)
    scores = score_rows(query.score, queries, snapshot, positions)
    weights, lse, threshold = query.weighting.weigh(scores, query.temperature, live)
    if snapshot.size:
        output = pool_rows(weights, snapshot, positions, query.num_classes)
    else:
        output = pool(weights, weights.new_zeros(*positions.shape, query.pooled_dim))
    others = query.taking_part(snapshot).to(device) - live.sum(1)
    exact = others == 0
    if found.certain and positions.shape[1]:
        worst = scores.detach().masked_fill(~live, torch.inf).amin(1)
        exact = exact | (worst <= threshold)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    pooled = Pooled(
        output,
        lse,
        exact=exact,
        missed_mass=_missed(query, snapshot, positions, others, exact, lse.detach()),
        candidates=live.sum(1),
        hits=Hits(torch.from_numpy(snapshot.rows(positions)).to(device), query.shown_scores(scores), resolve),
        weights=weights,
        finder=found.finder,
        explanation=lambda count: explained(query, snapshot, pooled, count, find, resolve),
        bar=unknown,
        stderr=unknown.clone(),
        lse_stderr=unknown.clone(),
        met=exact.clone(),
    )
    return pooled


def _missed(
    query: SoftQuery, snapshot: Snapshot, positions: Positions, others: Tensor, exact: Tensor, lse: Tensor
) -> Tensor:
    """Share of the weight beyond the candidates, (q,); NaN where nobody can tell."""
    if bool(exact.all()):
        return torch.zeros_like(lse)
    if isinstance(query.weighting, Uniform):
        found = others / query.taking_part(snapshot).to(others.device).clamp(min=1)
    elif isinstance(query.weighting, Softmax):
        found = _estimated(query, snapshot, positions, others, lse)
    else:  # a sparse weighting of more records may take all weight from these
        found = torch.full_like(lse, torch.nan)
    return found.to(lse.dtype).masked_fill(exact, 0)


def _estimated(query: SoftQuery, snapshot: Snapshot, positions: Positions, others: Tensor, lse: Tensor) -> Tensor:
    """The softmax mass of the others, (q,): a uniform sample of them stands for them."""
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
