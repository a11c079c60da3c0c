"""Sample exactly from the softmax distribution, from candidates that codes propose or in a pass over all records."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Samples
from softdb.attend.blocks import scored_tiles
from softdb.attend.exact import log_normaliser
from softdb.attend.fused import run_masses
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Positions, Request
from softdb.attend.result import hits_of
from softdb.attend.rounds import Estimator, record_bytes
from softdb.check import Tolerance, shown
from softdb.errors import BadInput
from softdb.index.contract import Numbers
from softdb.index.planner import draw_cost, pass_cost
from softdb.index.sampler import Drawing, FirstRound
from softdb.scoring import Softmax

POINTS, SURE = 1.3, 4.0  # for n samples, POINTS n + SURE (√n + 1) points are expected, so that fewer than n are rare
TURNS, MORE = 2, 6  # a query with fewer points, as B is far above log Z, has another turn with MORE times as many
PROPOSED = 16  # at most 1 / PROPOSED of the records may be candidates: with more of them, a pass costs less
EXPECTED = 1500  # number of candidates of a query, assumed before the first draw
SPARE = 3  # room for candidates, over the largest expected number of the latest queries
FORGOTTEN = 0.7  # factor on this room after each batch, as few queries may need much more than others
NEWER = 4096  # largest number of unindexed records that are scored for each query
RUN = 2048  # number of records in a run, of which a pass computes the mass
PAIRS = 256  # number of runs that are scored again together
ROUNDED = 2.0**-30  # share of a run's weight that rounding may move to the next run
MANY = 100  # if points are more than MANY times the wanted number, B is too far from log Z


def sample(source: SourceRecords, request: Request, count: int, generator: torch.Generator) -> Samples:
    """Draw `count` independent records for each query, P(i) = exp(s_i / T) / Z, with their log-probabilities.

    The records are read once, and once more if the queries require a gradient. Cost q n d, memory O(block).
    """
    require_softmax(request)
    with torch.no_grad():
        total, drawn = _by_runs(source, request, count, generator) or _by_blocks(source, request, count, generator)
    scored = source.scored(request, drawn)
    lse = log_normaliser(source, request) if request.wants_gradient else total
    hits = hits_of(request, source, scored, request.queries.device)
    log_prob = (scored.scores / request.temperature - lse.unsqueeze(1)).masked_fill(~hits.live, -torch.inf)
    return Samples(hits, torch.ones_like(total, dtype=torch.bool), lambda: log_prob)


def _by_runs(
    source: SourceRecords, request: Request, count: int, generator: torch.Generator
) -> tuple[Tensor, Positions] | None:  # (q,), (q, count)
    """Return log Z and positions drawn by kernels: first a run for each sample by the runs' masses, then its record.

    The records of the chosen runs are scored again. None: kernels cannot compute the masses of runs.
    """
    runs = run_masses(request, source, RUN)
    if runs is None:
        return None
    (bounds, table), keep, mask = runs, request.keep(source.live), request.masks(source.live)[1]
    masses, drawn = torch.from_numpy(table), np.full((len(table), count), -1)
    lse = masses.logsumexp(1)
    chosen = _places((masses - lse.unsqueeze(1)).exp().nan_to_num(0), count, generator).numpy()
    pairs, pair_of = np.unique(chosen + np.arange(len(table))[:, None] * table.shape[1], return_inverse=True)
    pair_of = pair_of.reshape(chosen.shape)
    for low in range(0, len(pairs), PAIRS):
        which, numbers = np.divmod(pairs[low : low + PAIRS], table.shape[1])
        positions = bounds[numbers][:, None] + np.arange(RUN)
        places = np.minimum(positions, len(keep) - 1)
        takes_part = (positions < bounds[numbers + 1][:, None]) & keep[places]
        if mask is not None:
            takes_part &= mask.cpu().numpy()[which[:, None], places]
        own = replace(request, queries=request.queries.detach()[torch.from_numpy(which)], mask=None, allowed=None)
        scored = source.scored(own, np.where(takes_part, positions, -1))
        weights = (scored.scores.double() / request.temperature).softmax(1).nan_to_num(0)
        samples = (pair_of >= low) & (pair_of < low + len(which))
        drawn[samples] = scored.positions.reshape(-1)[_among(weights, pair_of[samples] - low, generator)]
    drawn[lse.isneginf().numpy()] = -1
    return lse.to(request.queries), drawn


def _among(weights: Tensor, lines: Positions, generator: torch.Generator) -> Positions:  # (p, m), (k,) -> (k,)
    """Sample an element of each given line by its share of the line's weights; return indices into all elements."""
    cumulative = weights.cumsum(1)
    ends = (cumulative / cumulative[:, -1:]).nan_to_num(1) + torch.arange(len(weights)).unsqueeze(1)
    chances = torch.rand(len(lines), generator=generator, dtype=torch.float64) * (1 - ROUNDED)
    return torch.searchsorted(ends.flatten(), torch.from_numpy(lines) + chances, right=True).numpy()


def _by_blocks(
    source: SourceRecords, request: Request, count: int, generator: torch.Generator
) -> tuple[Tensor, Positions]:  # (q,), (q, count)
    """Return log Z and positions drawn in a pass by torch.

    Each sample moves to a record of the next block with a probability equal to the block's share of all weight so far
    (weighted reservoir sampling, Chao 1982). So every record has probability P(i) in the end.
    """
    queries = request.queries.detach()
    total = queries.new_full((len(queries),), -torch.inf)
    drawn = torch.full((len(queries), count), -1, device=queries.device)
    for tile, scores in scored_tiles(request.detached, source):
        logits = scores / request.temperature
        block_lse = logits.logsumexp(1)
        new_total = torch.logaddexp(total[tile.chunk], block_lse)
        share = (block_lse - new_total).exp().nan_to_num(0)  # NaN while no record takes part
        chances = torch.rand(len(block_lse), count, generator=generator).to(share)
        moves = chances < share.unsqueeze(1)
        lines = moves.any(1).nonzero()[:, 0]
        if len(lines):
            places = _places(logits[lines].softmax(1), count, generator)
            moved = tile.positions.to(places.device)[places].to(drawn)
            chunk_drawn = drawn[tile.chunk]
            chunk_drawn[lines] = torch.where(moves[lines], moved, chunk_drawn[lines])
        total[tile.chunk] = new_total
    return total, drawn.cpu().numpy()


def sample_drawn(source: IndexedRecords, request: Request, count: int, generator: torch.Generator) -> Samples:
    """Draw samples as `sample` does, if possible without a pass over all records. Reading `log_prob` takes a pass.

    A Poisson process gives record i points at the rate λ e^(s_i / T - B), B about log Z. Given their number, the points
    are independent records with P(i) = exp(s_i / T) / Z. Codes bound the rates and propose candidates, which are
    accepted by their exact scores. `sample` answers queries with fewer than `count` points, and queries with so many
    candidates that a pass costs less.
    """
    require_softmax(request)
    anything = replace(request.detached, tolerance=Tolerance(0.0, 0.0, 0.5, None))
    estimator = Estimator.of(anything, source)
    if estimator is None:
        return sample(source, request, count, generator)
    positions = _by_points(estimator, count, int(torch.randint(1 << 62, (), generator=generator)))
    device, by_pass = request.queries.device, np.flatnonzero(positions[:, 0] < 0)
    if len(by_pass) == len(positions):
        return sample(source, request, count, generator)
    if len(by_pass):
        rows = sample(source, request.at(by_pass).detached, count, generator).hits.rows
        positions[by_pass] = source.positions(rows.flatten().cpu().numpy()).reshape(rows.shape)
    scored, scanned = source.scored(request, positions), torch.zeros(len(positions), dtype=torch.bool)
    scanned[torch.from_numpy(by_pass)] = True

    def log_prob() -> Tensor:
        return scored.scores / request.temperature - log_normaliser(source, request).unsqueeze(1)

    return Samples(hits_of(request, source, scored, device), scanned.to(device), log_prob)


def _by_points(estimator: Estimator, count: int, seed: int) -> Positions:  # (q, count), -1: the query needs a pass
    """Sample positions from the points of a Poisson process, without a pass over all records."""
    sampler, source, random = estimator.sampler, estimator.source, np.random.default_rng(seed)
    wanted, (q, d) = POINTS * count + SURE * math.sqrt(count) + SURE, estimator.queries.shape
    kind, positions = ("sample", estimator.kind, round(math.log2(wanted))), np.full((q, count), -1)
    most = estimator.eligible.inside // PROPOSED
    full_cost = pass_cost(q, estimator.taking_part, d, 0, record_bytes(source.snapshot, False))
    unindexed = np.flatnonzero(estimator.unindexed) if estimator.unindexed is not None else np.arange(0)
    each = draw_cost(q, sampler.slots_for(kind), sampler.parts, EXPECTED, d, 0)
    if sampler.hopeless(kind) or each > full_cost or len(unindexed) > NEWER:
        return positions
    room = min(sampler.plans.get(kind, FirstRound(most)).budget, most)  # few, as large arrays take longer than the draw
    near: Numbers = np.empty((q, 0))
    if len(unindexed):
        near = source.scored(estimator.request, np.tile(unindexed, (q, 1))).scores.cpu().double().numpy()
    which = np.arange(q)
    for turn in range(TURNS):
        points = wanted * MORE**turn
        drawing = Drawing(estimator.queries[which], estimator.factor[which], room, seed + turn, 0.5, points=points)
        drawn = sampler.draw(estimator.eligible, source.snapshot, drawing, False)
        expected = drawn.figures.expected
        if turn == 0:
            sampler.read(kind, float(drawn.figures.scanned.mean()))
            sampler.learn(kind, 2 * float((expected > most).mean()))
            usual = SPARE * expected[expected <= most].max(initial=EXPECTED)
            sampler.plans[kind] = FirstRound(int(max(usual, FORGOTTEN * room)))
        for j in np.flatnonzero(expected <= room):
            i, live = which[j], slice(int(drawn.figures.drawn[j]))
            logits = drawn.scores[j, live] * estimator.factor[i], near[i] / estimator.request.temperature
            chances = drawn.chances[j, live], np.ones(len(unindexed))
            chosen = _points(np.concatenate(logits) - drawn.figures.base[j], np.concatenate(chances), points, random)
            if len(chosen) >= count:
                positions[i] = np.concatenate([drawn.positions[j, live], unindexed])[chosen[:count]]
        which = which[(expected <= room) & (positions[which, 0] < 0)]  # B was above log Z: they need more points
        if not len(which):
            break
    return positions


def _points(logits: Numbers, proposed: Numbers, wanted: float, random: np.random.Generator) -> Positions:  # (c,), (c,)
    """Accept candidates; return a Poisson process' points as indices of candidates, in random order.

    None are returned if a bound by codes does not hold, or if B is far from log Z.
    """
    with np.errstate(over="ignore"):
        rates = wanted * np.exp(logits)
    chances = -np.expm1(-rates) / proposed
    if (chances > 1 + 1e-9).any() or not rates.sum() < MANY * wanted:
        return np.arange(0)
    accepted = np.flatnonzero(random.random(len(chances)) < chances)
    first = -np.log1p(random.random(len(accepted)) * np.expm1(-rates[accepted]))  # first point of each record
    return random.permutation(np.repeat(accepted, 1 + random.poisson(np.maximum(rates[accepted] - first, 0))))


def require_softmax(request: Request) -> None:
    """Raise BadInput unless the weighting is softmax."""
    if not isinstance(request.weighting, Softmax):
        raise BadInput(f"the weighting is {shown(request.weighting)}; sampling draws by softmax weights: use softmax")


def _places(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (q, m) -> (q, count)
    """Sample indices into m by inverting the cumulative weights. The generator is on the CPU for any device."""
    cumulative = weights.double().cumsum(1)
    chances = torch.rand(len(weights), count, generator=generator, dtype=torch.float64).to(weights.device)
    places = torch.searchsorted(cumulative, chances * cumulative[:, -1:], right=True)
    return places.clamp(max=weights.shape[1] - 1)
