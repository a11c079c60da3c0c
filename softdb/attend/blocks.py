"""Soft queries in blocks of plain torch operations, for any score, device and dtype.

The forward pass reads the records once, with an online softmax (Milakov and Gimelshein 2018). A sparse weighting reads
them several times, once for each step of Newton's method. The backward pass recomputes the scores of each block (Dao et
al. 2022, algorithm 4) and differentiates the score by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Request
from softdb.check import holds
from softdb.errors import BadInput
from softdb.scoring import Score, ScoreFunction, Sparse, Tempered, divided, fold
from softdb.scoring.once import Once
from softdb.scoring.score import alike

BLOCK_BYTES = 8 << 20  # bytes of keys and values in a block, which stay in the cache for all queries
BLOCK_ROWS = 1 << 16  # largest number of records in a block
TILE = 1 << 19  # largest number of scores computed at once: queries in a chunk times records in a block
STEPS = 60  # largest number of Newton steps for the threshold of a sparse weighting; about 10 suffice


class Tile(NamedTuple):
    """A chunk of queries and a block of records that are scored together."""

    chunk: slice  # slice of the queries
    positions: Tensor  # (m,) ascending
    keys: Tensor  # (m, d)
    values: Tensor  # (m, v) or labels (m,)
    dead: Tensor | None  # (chunk, m) bool, True = does not take part; None: all take part


def tiles(request: Request, source: SourceRecords) -> Iterator[Tile]:
    """Yield every combination of a chunk of queries and a block of records that take part."""
    queries, width = request.queries, source.width if request.pools else 0
    bytes_a_record = queries.element_size() * (queries.shape[1] + width)
    rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // bytes_a_record, len(source.live)))
    chunk_size = max(1, TILE // rows)
    mask = request.masks(source.live)[1]
    for stored in source.blocks(rows, request.allowed):
        block = source.encoded(stored)
        keys = alike(block.keys, queries)
        values = keys if block.values is block.keys else block.values.to(queries.device)
        if values.is_floating_point():
            values = values.to(queries.dtype)
        columns = None if mask is None else block.positions.to(mask.device)
        for low in range(0, len(queries), chunk_size):
            chunk = slice(low, low + chunk_size)
            dead = None
            if mask is not None and columns is not None:
                dead = ~mask[chunk].index_select(1, columns).to(queries.device)
            yield Tile(chunk, block.positions, keys, values, dead)


def scored_tiles(
    request: Request, source: SourceRecords, score: Score | ScoreFunction | None = None
) -> Iterator[tuple[Tile, Tensor]]:  # scores (chunk, m), -inf where `dead`
    """Yield each tile with its scores, computed by `score` or, if None, by the request's score."""
    score = request.score if score is None else score
    for tile in tiles(request, source):
        scores = scores_of(score, request.queries[tile.chunk], tile.keys)
        yield tile, scores if tile.dead is None else scores.masked_fill(tile.dead, -torch.inf)


def scores_of(score: Score | ScoreFunction, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, m) or (q, k)
    """Return scores of shared keys (…, m, d), or of each query's own keys (q, k, d). Raises BadInput for shapes or NaN.

    A plain callable only has to accept shared keys. If each query has its own keys, it is called once for each query.
    """
    if isinstance(score, Tempered):
        return divided(scores_of(score.score, queries[..., :-1], keys), queries)
    separate = keys.ndim > queries.ndim
    if not separate or isinstance(score, torch.nn.Module) or fold(score, queries[:1].detach()) is not None:
        scores = score(queries, keys)
    else:
        each = [score(query.unsqueeze(0), own) for query, own in zip(queries, keys.to(queries.dtype), strict=True)]
        wrong = [scores for scores in each if not isinstance(scores, Tensor)]
        scores = wrong[0] if wrong else torch.cat(each) if each else queries.new_zeros(keys.shape[:2])
    expected = (*queries.shape[:-1], keys.shape[-2])
    if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
        came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise BadInput(
            f"the score returned {came} for queries {tuple(queries.shape)} and {'own' if separate else 'shared'} keys "
            f"{tuple(keys.shape)}; expected a tensor {expected}"
        )
    if not holds(~scores.detach().isnan().any()):
        raise BadInput("the score returned NaN; a score must be a number for every query and key")
    return scores.to(queries.dtype)


class Solved(NamedTuple):
    """The answer of a soft query, and the state that its gradient needs."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,)
    mean: Tensor  # (q, v) Σ u v / Σ u, which the gradient needs; equals `output` for softmax
    empty: Tensor  # (q,) bool, True = no record takes part
    of: Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # scores (c, m) -> weights w, gradient factors u


def softmax_over(request: Request, source: SourceRecords) -> Solved:
    """Answer a softmax request in one pass over the records; w = u = exp((s - top) / T) / total."""
    queries, temperature = request.queries, request.temperature
    q, width = len(queries), source.width if request.pools else 0
    output, top, total = queries.new_zeros(q, width), queries.new_full((q,), -torch.inf), queries.new_zeros(q)
    for tile, scores in scored_tiles(request, source, request.streamed_score):
        chunk = tile.chunk
        new = torch.maximum(top[chunk], scores.amax(dim=1))
        shift = new.masked_fill(new == -torch.inf, 0)
        decay = ((top[chunk] - shift) / temperature).exp_()
        parts = (scores - shift.unsqueeze(1)).div_(temperature).exp_()
        total[chunk].mul_(decay).add_(parts.sum(dim=1))
        output[chunk].mul_(decay.unsqueeze(1))
        if width:
            pool_into(output[chunk], parts, tile.values)
        top[chunk] = new
    empty = total == 0
    top, total = top.masked_fill(empty, 0), total.masked_fill(empty, 1)
    output.div_(total.unsqueeze(1))
    lse = (total.log() + top / temperature).masked_fill(empty, -torch.inf)

    def of(scores: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        # from top and total, as s / T - lse loses digits where s / T is large; clamped, as a score computed twice may
        # differ in its last digit, which a tiny temperature makes infinite
        weights = (scores - top[chunk].unsqueeze(1)).clamp_(max=0).div_(temperature).exp_()
        weights.div_(total[chunk].unsqueeze(1))
        return weights, weights

    return Solved(output, lse, output, empty, of)


def sparse_over(request: Request, source: SourceRecords) -> Solved:
    """Answer a sparsemax or entmax15 request. Cost q n (d + v), and q n d for each of about 10 Newton steps."""
    by, queries, temperature = request.weighting, request.queries, request.temperature
    assert isinstance(by, Sparse)
    q, wide = len(queries), torch.promote_types(queries.dtype, torch.float64)
    top = queries.new_full((q,), -torch.inf)
    for tile, scores in scored_tiles(request, source):
        top[tile.chunk] = torch.maximum(top[tile.chunk], scores.amax(dim=1))
    empty = ~(top > -torch.inf)
    top = top.masked_fill(empty, 0)

    def below(scores: Tensor, chunk: slice) -> Tensor:
        """Return scores / T minus the largest, clamped to 0, as a score computed twice may differ in its last digit."""
        return (scores - top[chunk].unsqueeze(1)).clamp_(max=0).to(wide).div_(temperature)

    tau = queries.new_full((q, 1), -1, dtype=wide)
    for _ in range(STEPS):
        mass, slope = tau.new_zeros(q), tau.new_zeros(q)
        for tile, scores in scored_tiles(request, source):
            more, steeper = by.root_step(below(scores, tile.chunk), tau[tile.chunk])
            mass[tile.chunk] += more
            slope[tile.chunk] += steeper
        after = tau + ((1 - mass).clamp(max=0) / slope.masked_fill(slope == 0, -1)).unsqueeze(1)
        if bool((after <= tau).all()):
            break
        tau = torch.maximum(tau, after)

    def of(scores: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        weights, pulls = by.of(below(scores, chunk), tau[chunk])
        return weights.to(queries.dtype), pulls.to(queries.dtype)

    output, mean = queries.new_zeros(2, q, source.width, dtype=wide)
    weight, pulled, lse = tau.new_zeros(3, q)
    for tile, scores in scored_tiles(request, source):
        chunk, values = tile.chunk, tile.values
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


class Blocks(torch.autograd.Function):
    """Differentiable answer over every record of a source: output (q, v) and lse (q,)."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (q, d), queries of the request
        keys: Tensor | None,  # (n, d), keys of the source if they require a gradient
        values: Tensor | None,  # (n, v), values of the source if they require a gradient
        request: Request,
        source: SourceRecords,
        *parameters: Tensor,  # parameters of the score that require gradients
    ) -> tuple[Tensor, Tensor]:
        """Compute output and lse with the request's weighting."""
        request = replace(request, queries=queries)
        with torch.autocast(queries.device.type, enabled=False):
            solved = (sparse_over if isinstance(request.weighting, Sparse) else softmax_over)(request, source)
        ctx.request, ctx.source, ctx.columns, ctx.of = request, source, (keys, values), solved.of
        ctx.save_for_backward(queries, solved.mean, solved.empty, *parameters)
        return solved.output, solved.lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients for the queries, for keys and values if they require one, and for each parameter."""
        queries, _, _, *parameters = saved = ctx.saved_tensors  # read once, as checkpoint(use_reentrant=False) demands
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            grads = _backward(ctx, saved, output_grad, lse_grad)
        query_grad, key_grad, value_grad, *parameter_grads = Once.guarded(
            grads,
            (queries, *parameters, output_grad, lse_grad, *(column for column in ctx.columns if column is not None)),
        )
        return query_grad, key_grad, value_grad, None, None, *parameter_grads


def pool_into(output: Tensor, weights: Tensor, values: Tensor) -> None:  # (c, v), (c, m), (m, v) or labels (m,)
    """Add Σ w v to `output`. For labels add each weight to the column of its class."""
    if values.is_floating_point():
        output.addmm_(weights, values.to(weights.dtype))
    else:
        output.index_add_(1, values, weights)


def _backward(ctx: Any, saved: tuple[Tensor, ...], output_grad: Tensor, lse_grad: Tensor) -> list[Tensor | None]:
    """Return gradients for the queries, for keys and values if they require one, and for each parameter.

    ds = (u (g·v - g·mean) + g_lse w) / T, dv = w g.
    """
    request, source = ctx.request, ctx.source
    queries, mean, empty, *parameters = saved
    output_grad = output_grad.masked_fill(empty.unsqueeze(1), 0)
    lse_grad = lse_grad.masked_fill(empty, 0)
    offset = (output_grad * mean).sum(dim=1)
    query_grad, *parameter_grads = [torch.zeros_like(tensor) for tensor in (queries, *parameters)]
    key_grad, value_grad = (None if column is None else torch.zeros_like(column) for column in ctx.columns)
    for tile in tiles(request, source):
        chunk = tile.chunk
        with torch.enable_grad():
            own_queries, keys = queries[chunk].detach().requires_grad_(), tile.keys
            if key_grad is not None:
                keys = keys.detach().requires_grad_()
            scores = scores_of(request.streamed_score, own_queries, keys)
            scores = scores if tile.dead is None else scores.masked_fill(tile.dead, -torch.inf)
        weights, pulls = ctx.of(scores.detach(), chunk)
        if value_grad is not None and request.pools:
            _add_at(value_grad, tile.positions, weights.mT @ output_grad[chunk])
        if not scores.requires_grad:  # a constant
            continue
        score_grad = weights * lse_grad[chunk].unsqueeze(1)
        if request.pools:
            pull, values = output_grad[chunk], tile.values
            along = pull @ values.mT if values.is_floating_point() else pull.index_select(1, values)
            score_grad += along.sub_(offset[chunk].unsqueeze(1)).mul_(pulls)
        wanted = (own_queries, *parameters) if key_grad is None else (own_queries, *parameters, keys)
        grads = torch.autograd.grad(scores, wanted, score_grad.div_(request.temperature), allow_unused=True)
        for grad, add in zip((query_grad[chunk], *parameter_grads), grads, strict=False):
            if add is not None:
                grad.add_(add)
        if key_grad is not None and grads[-1] is not None:
            _add_at(key_grad, tile.positions, grads[-1])
    return [query_grad, key_grad, value_grad, *parameter_grads]


def _add_at(grad: Tensor, positions: Tensor, added: Tensor) -> None:
    grad.index_add_(0, positions.to(grad.device), added.to(grad.device).to(grad.dtype))
