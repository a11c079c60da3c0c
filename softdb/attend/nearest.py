"""Answers truncated to the k nearest records, and the estimated weight of all other records."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Candidates, Live, Positions, Request
from softdb.attend.result import Doubt, answered
from softdb.index.placement import RecordColumns
from softdb.pool import missed_mass
from softdb.scoring import Softmax, Uniform

SAMPLED = 1024  # number of records drawn to estimate the missed mass, to 3 % of the spread of their weights


def nearest(
    source: SourceRecords,
    request: Request,
    candidates: Candidates | None = None,  # None: the k nearest
    complete: bool = False,  # True: no other record has weight
) -> Pooled:
    """Return the answer over candidates.

    The answer is exact for queries without other records. It is also exact if every record was compared and the worst
    candidate has no weight. Cost: the search, then q k (d + v), and q SAMPLED d for the missed mass.
    """
    if candidates is None:
        candidates = source.find(request)
    scored = source.scored(request, candidates.positions)
    live = torch.from_numpy(scored.positions >= 0).to(scored.scores.device)
    weights, lse, threshold = request.weighting.weigh(scored.scores, request.temperature, live)
    output = source.pooled(weights, scored)
    others = source.taking_part(request).to(live.device) - live.sum(1)
    exact = (others == 0) | complete
    if candidates.certain and live.shape[1]:
        worst = scored.scores.detach().masked_fill(~live, torch.inf).amin(1)
        exact = exact | (worst <= threshold)
    missed = _missed(request, source, scored.positions, others, exact, lse.detach())
    return answered(request, source, (output, lse), candidates.finder, (scored, weights), Doubt(exact, missed))


def _missed(
    request: Request, source: SourceRecords, positions: Positions, others: Tensor, exact: Tensor, lse: Tensor
) -> Tensor | None:
    """Return the share (q,) of the weight that other records than the candidates have; None if it is unknown."""
    if bool(exact.all()):
        return torch.zeros_like(lse)
    if isinstance(request.weighting, Uniform):
        share = others / source.taking_part(request).to(others.device).clamp(min=1)
    elif isinstance(request.weighting, Softmax) and source.columns is not None:
        share = _estimated(request, source.columns, positions, others, lse)
    else:  # sparse: other records could have any share of the weight
        return None
    return share.to(lse.dtype).masked_fill(exact, 0)


def _estimated(request: Request, snapshot: RecordColumns, positions: Positions, others: Tensor, lse: Tensor) -> Tensor:
    """Estimate the share (q,) of the softmax weight of records other than the candidates from a uniform sample."""
    sample = _uniform(snapshot, request.allowed)  # (m,) ascending
    with torch.no_grad():
        scores = request.score(request.queries.detach(), snapshot.keys_at(sample).to(lse.device))
    taken = np.zeros((len(positions), len(sample)), np.bool_)
    places = np.minimum(np.searchsorted(sample, positions), len(sample) - 1)
    which, _ = np.nonzero(hit := sample[places] == positions)
    taken[which, places[hit]] = True
    if request.mask is not None:
        column = np.cumsum(snapshot.live)[sample] - 1
        taken |= ~request.mask.cpu().numpy()[:, column]
    return missed_mass(scores, torch.from_numpy(taken).to(lse.device), others, lse, request.temperature)


def _uniform(snapshot: RecordColumns, allowed: Live | None) -> Positions:
    """Draw up to SAMPLED positions uniformly from the records that take part. Each generation has a fixed draw."""
    keep = snapshot.live if allowed is None else snapshot.live & allowed
    random = np.random.default_rng(snapshot.generation)
    drawn = random.choice(snapshot.size, min(snapshot.size, SAMPLED), replace=False, shuffle=False)
    taking_part = drawn[keep[drawn]]
    if len(taking_part) < SAMPLED // 2:  # few take part: draw from these records only
        among = np.flatnonzero(keep)
        taking_part = random.choice(among, min(len(among), SAMPLED), replace=False, shuffle=False)
    return np.sort(taking_part)
