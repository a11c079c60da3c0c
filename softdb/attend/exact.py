"""The soft query over every record that takes part: in one stream, or proven from the nearest alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled, Resolve
from softdb.attend.explain import explained
from softdb.attend.nearest import weighed
from softdb.attend.request import Candidates, Finder, SoftQuery, candidates, indifferent, score_rows
from softdb.attend.streaming import stream
from softdb.check import shown
from softdb.errors import BadInput
from softdb.store import Snapshot
from softdb.weights import Argmax, Softmax, Sparse, Uniform

__all__ = ["attend_all", "log_all"]

FIRST, GROWTH, MOST = 32, 8, 2048  # candidates tried before every record is asked: 32, 256, 2048
GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB


def attend_all(query: SoftQuery, snapshot: Snapshot, find: Finder, resolve: Resolve) -> Pooled:
    """The exact answer. `find` must be an exact finder.

    Dense weightings: one pass over the records, cost q n (d + v), memory O(block). Argmax: the nearest. Sparsemax and
    entmax15: the k nearest, k grown until the threshold proves that no other record has weight; where thousands share
    it, passes over the records that find the threshold.
    """
    if isinstance(query.weighting, Argmax):
        return weighed(query, snapshot, candidates(query, snapshot, 1, find), find, resolve)
    if isinstance(query.weighting, Sparse):
        held = _support(query, snapshot, query.weighting, find)
        if held is not None:
            return _certified(query, snapshot, held, find, resolve)
    elif not isinstance(query.weighting, Softmax | Uniform):
        raise BadInput(
            f"the weighting {shown(query.weighting)} needs all scores at once, which no exact query holds; pass k=, or "
            "use one of softdb.weights"
        )
    score = indifferent if isinstance(query.weighting, Uniform) else query.score
    output, lse = stream(
        query.queries,
        snapshot,
        score,
        query.temperature,
        allowed=query.allowed,
        mask=query.mask,
        num_classes=query.num_classes,
        value_dim=query.pooled_dim,
        sparse=query.weighting if isinstance(query.weighting, Sparse) else None,
    )
    q, device = len(query.queries), query.queries.device
    pooled = Pooled(
        output,
        lse,
        exact=torch.ones(q, dtype=torch.bool, device=device),
        missed_mass=torch.zeros_like(lse.detach()),
        candidates=query.taking_part(snapshot).to(device),
        hits=None,
        weights=None,
        finder="all",
        explanation=lambda count: explained(query, snapshot, pooled, count, find, resolve),
        bar=torch.zeros_like(lse.detach()),
        stderr=torch.zeros_like(lse.detach()),
        lse_stderr=torch.zeros_like(lse.detach()),
        met=torch.ones(q, dtype=torch.bool, device=device),
    )
    return pooled


def log_all(query: SoftQuery, snapshot: Snapshot) -> Tensor:  # (q,)
    """log Z of the softmax over every record, exactly. Nothing is pooled: cost q n d."""
    nothing = (np.zeros(len(segment), np.int32) for segment in snapshot.segments)  # as values a label, always 0
    segments = tuple(replace(segment, values=none) for segment, none in zip(snapshot.segments, nothing, strict=True))
    unvalued = replace(snapshot, segments=segments)
    return stream(query.queries, unvalued, query.score, query.temperature, allowed=query.allowed, num_classes=1)[1]


def _certified(query: SoftQuery, snapshot: Snapshot, held: Candidates, find: Finder, resolve: Resolve) -> Pooled:
    """The soft query over the records that have weight, which is the soft query over all."""
    pooled = weighed(query, snapshot, held, find, resolve)
    pooled.exact.fill_(True)
    pooled.met.fill_(True)
    for error in (pooled.missed_mass, pooled.bar, pooled.stderr, pooled.lse_stderr):
        error.zero_()
    return pooled


@torch.no_grad()
def _support(query: SoftQuery, snapshot: Snapshot, by: Sparse, find: Finder) -> Candidates | None:
    """The records that have weight, proven; None where more than MOST share it."""
    q = len(query.queries)
    found = np.full((q, 0), -1, np.int64)
    unproven, k, finder = np.arange(q), FIRST, "flat"
    while len(unproven):
        if k > MOST:
            return None
        part = query.of(unproven)
        nearest = candidates(part, snapshot, k, find)
        finder = nearest.finder
        weights, proven = _weigh(part, snapshot, nearest, by, query.taking_part(snapshot)[unproven])
        support = np.where(weights > 0, nearest.positions, -1)[proven]
        width = int((support >= 0).sum(1).max(initial=0))
        if width > found.shape[1]:
            found = np.pad(found, ((0, 0), (0, width - found.shape[1])), constant_values=-1)
        # the nearest come first, and ties with the last weight nothing: what has weight is a prefix but for rounding
        order = np.argsort(support < 0, axis=1, kind="stable")[:, :width]
        found[unproven[proven], :width] = np.take_along_axis(support, order, 1)
        unproven, k = unproven[~proven], k * GROWTH
    return Candidates(found, finder)


def _weigh(
    query: SoftQuery, snapshot: Snapshot, found: Candidates, by: Sparse, taking_part: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (q, k) of candidates, and where no other record can have any, (q,)."""
    positions, weights, proven = found.positions, [], []
    chunk = max(1, GATHERED // max(1, positions.shape[1] * query.queries.shape[1]))
    for low in range(0, len(positions), chunk):
        part = slice(low, low + chunk)
        live = torch.from_numpy(positions[part] >= 0).to(query.queries.device)
        scores = score_rows(query.score, query.queries[part], snapshot, positions[part])
        mine, _, threshold = by.weigh(scores, query.temperature, live)
        weights.append(mine.cpu())
        worst = scores.masked_fill(~live, torch.inf).amin(1)
        proven.append(((worst <= threshold) | (live.sum(1) == taking_part[part].to(live.device))).cpu())
    return torch.cat(weights).numpy(), torch.cat(proven).numpy()
