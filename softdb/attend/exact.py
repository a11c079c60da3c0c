"""The answer over every record that takes part: in one stream, or proven from the nearest alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.dense import dense
from softdb.attend.nearest import nearest
from softdb.attend.request import Request
from softdb.attend.result import answered
from softdb.attend.scoring import Candidates
from softdb.attend.source import Source
from softdb.attend.streaming import stream
from softdb.check import shown
from softdb.errors import BadInput
from softdb.weights import Argmax, Softmax, Sparse, Uniform

__all__ = ["exact", "log_normaliser"]

FIRST, GROWTH, MOST = 32, 8, 2048  # candidates tried before every record is asked: 32, 256, 2048
GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB


def exact(request: Request, source: Source) -> Pooled:
    """The exact answer.

    Dense weightings: one pass over the records, cost q n (d + v), memory O(block). Argmax: the nearest. Sparsemax and
    entmax15: the k nearest, k grown until the threshold proves that no other record has weight; where thousands share
    it, passes over the records that find the threshold.
    """
    by = request.weighting
    if request.need_weights:
        return dense(request, source)
    if isinstance(by, Argmax):
        return nearest(request, source, source.find(request, 1, exact=True))
    if isinstance(by, Sparse):
        support = _support(request, source, by)
        if support is not None:
            return nearest(request, source, support, complete=True)
    elif not isinstance(by, Softmax | Uniform):
        raise BadInput(
            f"the weighting {shown(by)} needs all scores at once, which no exact query holds; pass k=, or "
            "use one of softdb.weights"
        )
    return answered(request, source, *stream(request, source), finder="all")


def log_normaliser(request: Request, source: Source) -> Tensor:  # (q,)
    """log Z of the softmax over every record, exactly. Nothing is pooled: cost q n d."""
    return stream(replace(request, pools=False), source)[1]


@torch.no_grad()
def _support(request: Request, source: Source, by: Sparse) -> Candidates | None:
    """The records that have weight, proven; None where more than MOST share it."""
    q, taking_part = len(request.queries), request.taking_part(source)
    found = np.full((q, 0), -1, np.int64)
    unproven, k, finder = np.arange(q), FIRST, "flat"
    while len(unproven):
        if k > MOST:
            return None
        part = request.at(unproven)
        tried = source.find(part, k, exact=True)
        finder = tried.finder
        weights, proven = _weigh(part, source, tried, by, taking_part[torch.from_numpy(unproven)])
        support = np.where(weights > 0, tried.positions, -1)[proven]
        width = int((support >= 0).sum(1).max(initial=0))
        if width > found.shape[1]:
            found = np.pad(found, ((0, 0), (0, width - found.shape[1])), constant_values=-1)
        # the nearest come first, and ties with the last weight nothing: what has weight is a prefix but for rounding
        order = np.argsort(support < 0, axis=1, kind="stable")[:, :width]
        found[unproven[proven], :width] = np.take_along_axis(support, order, 1)
        unproven, k = unproven[~proven], k * GROWTH
    return Candidates(found, finder)


def _weigh(
    request: Request, source: Source, found: Candidates, by: Sparse, taking_part: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (q, k) of candidates, and where no other record can have any, (q,)."""
    positions, weights, proven = found.positions, [], []
    chunk = max(1, GATHERED // max(1, positions.shape[1] * request.queries.shape[1]))
    for low in range(0, len(positions), chunk):
        part = slice(low, low + chunk)
        own = replace(request, queries=request.queries[part])
        live = torch.from_numpy(positions[part] >= 0).to(request.queries.device)
        scores = source.scored(own, positions[part]).scores
        mine, _, threshold = by.weigh(scores, request.temperature, live)
        weights.append(mine.cpu())
        complete = live.sum(1) == taking_part[part].to(live.device)
        if live.shape[1]:
            complete |= scores.masked_fill(~live, torch.inf).amin(1) <= threshold
        proven.append(complete.cpu())
    return torch.cat(weights).numpy(), torch.cat(proven).numpy()
