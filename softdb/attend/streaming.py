"""Soft queries in a pass over every record that takes part, in memory that does not grow with the records.

`stream` chooses one of four methods: on the device that holds the columns; by kernels, if the score is a product, a
cosine or a squared distance of float32 queries on a CPU; in blocks of torch operations; or, if an encoder is trained,
in blocks that the backward pass computes again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from softdb.attend.blocks import Blocks, pool_into, scores_of
from softdb.attend.fused import Fused, kernel_form, pass_of
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Request
from softdb.errors import BadInput
from softdb.index.placement import ColumnPass, SoftmaxPass
from softdb.pool import State, merge
from softdb.scoring import Softmax, Uniform, divisor
from softdb.scoring.score import alike
from softdb.store.snapshot import Block


def stream(source: SourceRecords, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
    """Return the weighted mean of the values of every record that takes part, and the log-normaliser.

    With s the scores and T the temperature: lse = log Σ exp(s / T), output = Σ exp(s / T - lse) v; or the formulas of a
    sparse weighting. If `request.pools` is False, output is (q, 0). Both carry gradients for the queries, the score's
    parameters, and trained sources. Second derivatives raise BadInput unless the source trains an encoder. A query for
    which no record takes part gets zeros and -inf, with zero gradients. Backward recomputes s, so the score must be
    deterministic (no dropout). ds = exp(s / T - lse) (g·v - g·output + g_lse) / T has a rounding error that grows as
    1 / T.

    Cost: q n (d + v), half as much again in backward. Memory beyond the answer: O(block), for any n and q.
    Raises BadInput if the score returns another shape than (q, n) or NaN, or if it uses tensors that require gradients
    but are not its parameters.
    """
    if source.encodes:
        return _stream_encoded(request, source)
    temperature = divisor(request.temperature, request.queries.dtype)
    if temperature != request.temperature:
        request = replace(request, temperature=temperature)
    answered = None if source.placed is None else _on_device(request, source, source.placed)
    if answered is not None:
        return answered
    passed = pass_of(request, source)
    if passed is not None:
        queries, scales, what, lacking = passed
        output, lse = Fused.apply(queries, scales, *source.trained, what)  # type: ignore[no-untyped-call]
        if not bool(lse.isnan().any()):  # NaN: a score overflowed, so torch computes the answer below
            return output, lse + lacking
    parameters = request.score.parameters() if isinstance(request.score, torch.nn.Module) else ()
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and not wanted and _hides_parameters(request, source):
        raise BadInput(
            "the score depends on tensors that require gradients but are not its parameters, so they would get none; "
            "make the score an nn.Module, or detach the tensors"
        )
    return Blocks.apply(request.queries, *source.trained, request, source, *wanted)  # type: ignore[no-any-return, no-untyped-call]


def _on_device(
    request: Request, source: SourceRecords, columns: ColumnPass
) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
    """Answer by a pass on the device. Return None if the score has no kernel form or overflows."""
    form = kernel_form(request)
    if form is None:
        return None
    folded, scale = form
    what = folded.queries, folded.metric, scale, *request.masks(source.live), source.num_classes, request.pools
    answer = columns.pooled(SoftmaxPass(*what))
    if answer is None or bool(answer[1].isnan().any()):
        return None
    output, lse = answer
    return output, lse + torch.as_tensor(folded.bias, device=lse.device).to(lse.dtype) / request.temperature


def _hides_parameters(request: Request, source: SourceRecords) -> bool:
    """Return True if the score depends on tensors that require gradients."""
    first = int(np.argmax(source.live)) if source.count else 0
    block = next(source.blocks(1, start=first), None)
    if block is None:
        return False
    scores = request.streamed_score(request.queries[:1].detach(), alike(block.keys, request.queries))
    return isinstance(scores, Tensor) and scores.requires_grad  # other types raise BadInput later


def _stream_encoded(request: Request, source: SourceRecords) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
    """Answer block by block by autograd, for a source that trains an encoder. Backward computes each block again."""
    if not isinstance(request.weighting, Softmax | Uniform):
        raise BadInput(f"the weighting is {request.weighting.name}; trained encoders need softmax or uniform; pass k=")
    queries, width = request.queries, source.width if request.pools else 0
    nothing = queries[:, :1] * 0
    parts = [State(nothing.expand(-1, width), nothing[:, 0] - torch.inf)]
    for block in source.blocks(source.encodes, request.allowed):
        # backward recomputes one block at a time, with the same random state
        state = checkpoint(_part, request, source, block, queries, use_reentrant=False)
        parts = [*parts, state] if state.lse.requires_grad else [merge([*parts, state])]
    return merge(parts)


def _part(request: Request, source: SourceRecords, stored: Block, queries: Tensor) -> State:
    """Return the answer over one block. `queries` is an argument, as torch's checkpoint differentiates arguments."""
    block = source.encoded(stored)
    scores = scores_of(request.score, queries, alike(block.keys, queries))
    weights, lse, _ = request.weighting.weigh(scores, request.temperature, scores > -torch.inf)
    output = weights.new_zeros(len(weights), source.width if request.pools else 0)
    if request.pools:
        pool_into(output, weights, block.values.to(weights.device))
    return State(output, lse)
