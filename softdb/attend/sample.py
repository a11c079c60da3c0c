"""Records drawn from the soft distribution, exactly: from candidates by their codes, or in one pass over all."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Samples
from softdb.attend.blocks import scored_tiles
from softdb.attend.exact import log_normaliser
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Positions, Request
from softdb.attend.result import hits_of
from softdb.attend.rounds import Estimator, record_bytes
from softdb.check import Tolerance, shown
from softdb.errors import BadInput
from softdb.index.contract import Numbers
from softdb.index.planner import draw_cost, pass_cost
from softdb.index.sampler import Drawing
from softdb.scoring import Softmax

POINTS, SURE = 1.3, 4.0  # times as many points as samples are aimed at, and so many deviations more: seldom too few
SLOWER = 2  # times as long as one that pools, at least, takes a pass that draws
PROPOSED = 16  # a pass costs less than to score one of so many records where it lies
EXPECTED = 1500  # candidates of a query, where nothing is known of them
NEWER = 4096  # records younger than the index that are scored for each query
MANY = 100  # times as many points as are aimed at: B is far from log Z


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
    log_prob = (found.scores / temperature - lse.unsqueeze(1)).masked_fill(~hits.live, -torch.inf)
    return Samples(hits, torch.ones_like(total, dtype=torch.bool), lambda: log_prob)


def sample_drawn(source: IndexedRecords, request: Request, count: int, generator: torch.Generator) -> Samples:
    """As `sample`; without a pass over all records for queries of which codes tell enough, until `log_prob` is read.

    A Poisson process that gives record i points at the rate λ e^(s_i / T - B), B about log Z, has independent records
    with P(i) = exp(s_i / T) / Z for its points, given their number. Records are proposed by bounds of their rates that
    codes give, and kept by their own scores. Queries with fewer than `count` points, or more candidates than a pass is
    worth, are drawn for by `sample`.
    """
    require_softmax(request)
    anything = replace(request.detached, tolerance=Tolerance(0.0, 0.0, 0.5, None))
    estimator = Estimator.of(anything, source)
    if estimator is None:
        return sample(source, request, count, generator)
    positions = _by_points(estimator, count, int(torch.randint(1 << 62, (), generator=generator)))
    device, rest = request.queries.device, np.flatnonzero(positions[:, 0] < 0)
    if len(rest) == len(positions):
        return sample(source, request, count, generator)
    if len(rest):
        rows = sample(source, request.at(rest).detached, count, generator).hits.rows
        positions[rest] = source.positions(rows.flatten().cpu().numpy()).reshape(rows.shape)
    found, scanned = source.scored(request, positions), torch.zeros(len(positions), dtype=torch.bool)
    scanned[torch.from_numpy(rest)] = True

    def log_prob() -> Tensor:
        return found.scores / request.temperature - log_normaliser(source, request).unsqueeze(1)

    return Samples(hits_of(request, source, found, device), scanned.to(device), log_prob)


def _by_points(estimator: Estimator, count: int, seed: int) -> Positions:  # (q, count), -1 where a pass is needed
    """Positions drawn independently."""
    sampler, source, random = estimator.sampler, estimator.source, np.random.default_rng(seed)
    wanted, (q, d) = POINTS * count + SURE * math.sqrt(count) + SURE, estimator.asked.shape
    kind, positions = ("sample", estimator.kind, round(math.log2(wanted))), np.full((q, count), -1)
    most = estimator.eligible.inside // PROPOSED
    whole = SLOWER * pass_cost(q, estimator.taking_part, d, 0, record_bytes(source.snapshot, False))
    newer = np.flatnonzero(estimator.unindexed) if estimator.unindexed is not None else np.arange(0)
    each = draw_cost(q, sampler.slots, sampler.parts, EXPECTED, d, 0)
    if sampler.hopeless(kind) or each > whole or len(newer) > NEWER:
        return positions
    drawing = Drawing(estimator.asked, estimator.factor, most, seed, 0.5, points=wanted)
    drawn = sampler.draw(estimator.eligible, source.snapshot, drawing, False)
    sampler.learn(kind, 2 * float((drawn.figures.expected > most).mean()))
    scores: Numbers = np.empty((q, 0))
    if len(newer):
        scores = source.scored(estimator.request, np.tile(newer, (q, 1))).scores.cpu().double().numpy()
    for i in range(q):
        if not drawn.figures.expected[i] <= most:
            continue
        live = slice(int(drawn.figures.drawn[i]))
        base, proposed = drawn.figures.base[i], drawn.chances[i, live]
        logits = np.concatenate([drawn.scores[i, live] * estimator.factor, scores[i] / estimator.request.temperature])
        with np.errstate(over="ignore"):
            rates = wanted * np.exp(logits - base)
        chances = -np.expm1(-rates) / np.concatenate([proposed, np.ones(len(newer))])
        if (chances > 1 + 1e-9).any() or not rates.sum() < MANY * wanted:  # a bound that does not hold
            continue
        kept = np.flatnonzero(random.random(len(chances)) < chances)
        first = -np.log1p(random.random(len(kept)) * np.expm1(-rates[kept]))  # the first point of each
        points = np.repeat(kept, 1 + random.poisson(np.maximum(rates[kept] - first, 0)))
        if len(points) >= count:
            positions[i] = np.concatenate([drawn.positions[i, live], newer])[random.permutation(points)[:count]]
    return positions


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
