"""Sparse weightings over every record, whatever their number: the threshold by Newton's method, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from softdb.attend.blocks import Solved, pool_into, scores_of, tiles
from softdb.attend.request import Request
from softdb.weights import Sparse

if TYPE_CHECKING:
    from softdb.attend.source import Source

__all__ = ["sparse_over"]

STEPS = 60  # of Newton's method at most; it takes about 10


def sparse_over(request: Request, source: Source) -> Solved:
    """Sparsemax or entmax15 over the source's records. Cost q n (d + v), and q n d for each of some 10 Newton steps."""
    by, queries, temperature = request.weighting, request.queries, request.temperature
    assert isinstance(by, Sparse)
    q, wide = len(queries), torch.promote_types(queries.dtype, torch.float64)
    top = queries.new_full((q,), -torch.inf)
    for chunk, scores, _ in _scores(request, source):
        top[chunk] = torch.maximum(top[chunk], scores.amax(dim=1))
    empty = ~(top > -torch.inf)
    top = top.masked_fill(empty, 0)

    def below(scores: Tensor, chunk: slice) -> Tensor:
        """z less its largest; two scores of one pair may differ in their last digit."""
        return (scores - top[chunk].unsqueeze(1)).clamp_(max=0).to(wide).div_(temperature)

    tau = queries.new_full((q, 1), -1, dtype=wide)
    for _ in range(STEPS):
        mass, slope = tau.new_zeros(q), tau.new_zeros(q)
        for chunk, scores, _ in _scores(request, source):
            more, steeper = by.root_step(below(scores, chunk), tau[chunk])
            mass[chunk] += more
            slope[chunk] += steeper
        after = tau + ((1 - mass).clamp(max=0) / slope.masked_fill(slope == 0, -1)).unsqueeze(1)
        if bool((after <= tau).all()):
            break
        tau = torch.maximum(tau, after)

    def of(scores: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        weights, pulls = by.of(below(scores, chunk), tau[chunk])
        return weights.to(queries.dtype), pulls.to(queries.dtype)

    output, mean = queries.new_zeros(2, q, source.width, dtype=wide)
    weight, pulled, lse = tau.new_zeros(3, q)
    for chunk, scores, values in _scores(request, source):
        z = below(scores, chunk)
        weights, pulls = by.of(z, tau[chunk])
        some = values.to(wide) if values.is_floating_point() else values
        pool_into(output[chunk], weights, some)
        pool_into(mean[chunk], pulls, some)
        weight[chunk] += weights.sum(dim=1)
        pulled[chunk] += pulls.sum(dim=1)
        lse[chunk] += (weights * z.masked_fill(weights == 0, 0)).sum(dim=1) + by.entropy(weights)
    pulled = pulled.masked_fill(empty, 1)
    narrow = queries.dtype
    lse = (lse + top / temperature).to(narrow).masked_fill(empty, -torch.inf)
    output, mean = output / weight.masked_fill(empty, 1).unsqueeze(1), mean / pulled.unsqueeze(1)
    return Solved(output.to(narrow), lse, mean.to(narrow), empty, of)


def _scores(request: Request, source: Source) -> Iterator[tuple[slice, Tensor, Tensor]]:
    for tile in tiles(request, source):
        yield tile.chunk, scores_of(request.score, request.queries[tile.chunk], tile), tile.values
