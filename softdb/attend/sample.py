"""Records drawn from the soft distribution, exactly, in one pass over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.answers import Samples
from softdb.attend.blocks import scored_tiles
from softdb.attend.exact import log_normaliser
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Request
from softdb.attend.result import hits_of
from softdb.check import shown
from softdb.errors import BadInput
from softdb.scoring import Softmax


def sample(source: SourceRecords, request: Request, count: int, generator: torch.Generator) -> Samples:
    """`count` independent records for each query, P(i) = exp(s_i / T) / Z, with their log-probabilities.

    Block by block: a draw moves to a record of the block with the block's share of all weight so far, which leaves
    every record its own share in the end (weighted reservoir sampling, Chao 1982). Cost q n d, memory O(block), and a
    second pass where the queries want a gradient.
    """
    require_softmax(request)
    queries, temperature = request.queries.detach(), request.temperature
    total = queries.new_full((len(queries),), -torch.inf)
    drawn = torch.full((len(queries), count), -1, device=queries.device)
    with torch.no_grad():
        for tile, scores in scored_tiles(request.detached, source):
            logits = scores / temperature
            mine = logits.logsumexp(1)
            whole = torch.logaddexp(total[tile.chunk], mine)
            share = (mine - whole).exp().nan_to_num(0)  # where nothing takes part yet
            chances = torch.rand(len(mine), count, generator=generator).to(share)
            moves = chances < share.unsqueeze(1)
            lines = moves.any(1).nonzero()[:, 0]
            if len(lines):
                places = _places(logits[lines].softmax(1), count, generator)
                there = tile.positions.to(places.device)[places].to(drawn)
                part = drawn[tile.chunk]
                part[lines] = torch.where(moves[lines], there, part[lines])
            total[tile.chunk] = whole
    found = source.scored(request, drawn.cpu().numpy())
    lse = log_normaliser(source, request) if request.wants_gradient else total
    hits = hits_of(request, source, found, queries.device)
    return Samples(hits, (found.scores / temperature - lse.unsqueeze(1)).masked_fill(~hits.live, -torch.inf))


def require_softmax(request: Request) -> None:
    """Raises BadInput for other weights, by which nothing is drawn."""
    if not isinstance(request.weighting, Softmax):
        raise BadInput(f"the weighting is {shown(request.weighting)}; records are drawn by softmax weights")


def _places(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (q, m) -> (q, count)
    """Places by inversion of the cumulative weights, which a generator of the CPU serves on any device."""
    cumulative = weights.double().cumsum(1)
    chances = torch.rand(len(weights), count, generator=generator, dtype=torch.float64).to(weights.device)
    places = torch.searchsorted(cumulative, chances * cumulative[:, -1:], right=True)
    return places.clamp(max=weights.shape[1] - 1)
