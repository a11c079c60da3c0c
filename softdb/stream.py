"""The exact soft query over every record that takes part, in blocks: memory that does not grow with the database.

Forward is one pass with an online softmax (Milakov and Gimelshein 2018); backward recomputes each block's scores
(Dao et al. 2022, algorithm 4) and goes through the score by autograd, so it serves any score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.errors import BadInput
from softdb.scores import Score, ScoreFunction
from softdb.store.snapshot import Snapshot
from softdb.weights import divisor

__all__ = ["stream"]

Live = NDArray[np.bool_]

BLOCK_BYTES = 8 << 20  # keys and values of a block: they stay in cache while every query passes over them
BLOCK_ROWS = 1 << 16
TILE = 1 << 19  # scores computed at once: queries of a chunk times records of a block


def stream(
    queries: Tensor,  # (q, d) floating, on the device and in the dtype to compute in
    snapshot: Snapshot,
    score: Score | ScoreFunction,
    temperature: float,  # above 0
    *,
    allowed: Live | None = None,  # (snapshot.size,) over positions; None: every live record
    mask: Tensor | None = None,  # (q, snapshot.count) bool over live records in row order, True = takes part
    num_classes: int | None = None,  # needed where values are labels
    value_dim: int | None = None,  # v, asked for only where the snapshot has no segment to tell it; None: d
    parameters: Sequence[Tensor] = (),  # tensors the score depends on that want gradients; an nn.Module's are known
) -> tuple[Tensor, Tensor]:  # (q, v) or (q, num_classes), (q,)
    """The softmax-weighted mean of the values of every record that takes part, and its log-normaliser.

    With s the scores and T the temperature: lse = log Σ exp(s / T), output = Σ exp(s / T - lse) v. Both carry gradients
    to the queries and to the score's parameters, once: differentiating these again raises BadInput. A
    query for which no record takes part gets zeros and -inf, with zero gradients. In backward s is recomputed (so the
    score must answer alike twice: no dropout) and ds = exp(s / T - lse) (g·v - g·output + g_lse) / T, whose rounding
    error grows as 1 / T.

    Cost: q n (d + v), half as much again in backward. Memory beyond the answer: O(block), whatever n and q.
    Raises BadInput where the score returns another shape than (q, n), where it hides tensors that want gradients, and
    for labels without `num_classes`.
    """
    task = _Task(snapshot, score, divisor(temperature, queries.dtype), allowed, mask, num_classes, value_dim)
    if isinstance(score, torch.nn.Module):
        parameters = [*parameters, *score.parameters()]
    wanted = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    if torch.is_grad_enabled() and not wanted:
        _refuse_hidden_parameters(task, queries)
    output, lse = _Stream.apply(queries, task, *wanted)  # type: ignore[no-untyped-call]
    return output, lse


class _Tile(NamedTuple):
    """A chunk of the queries and a block of records that meet."""

    chunk: slice  # of the queries
    keys: Tensor  # (m, d)
    values: Tensor  # (m, v) or labels (m,)
    dead: Tensor | None  # (chunk, m) bool; None: all take part


@dataclass(frozen=True)
class _Task:
    """A soft query but for its queries."""

    snapshot: Snapshot
    score: Score | ScoreFunction
    temperature: float
    allowed: Live | None
    mask: Tensor | None
    num_classes: int | None
    value_dim: int | None

    def width(self, d: int) -> int:
        """v, the width of the output."""
        if not self.snapshot.segments:
            return self.num_classes or self.value_dim or d
        segment = self.snapshot.segments[0]
        values = segment.keys if segment.values is None else segment.values
        if values.ndim == 2:
            return int(values.shape[1])
        if self.num_classes is None:
            raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
        return self.num_classes

    def tiles(self, queries: Tensor) -> Iterator[_Tile]:
        """Every meeting of a chunk of the queries with a block of the records."""
        bytes_a_record = queries.element_size() * (queries.shape[1] + self.width(queries.shape[1]))
        rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // bytes_a_record))
        chunk_size = max(1, TILE // rows)
        places = _Places(self.snapshot.live)
        for block in self.snapshot.blocks(rows, self.allowed):
            keys = block.keys.to(queries.device).to(queries.dtype)
            values = keys if block.values is block.keys else block.values.to(queries.device)
            if values.is_floating_point():
                values = values.to(queries.dtype)
            columns = None if self.mask is None else places.of(block.positions).to(self.mask.device)
            for low in range(0, len(queries), chunk_size):
                chunk = slice(low, low + chunk_size)
                dead = None
                if self.mask is not None and columns is not None:
                    dead = ~self.mask[chunk].index_select(1, columns).to(queries.device)
                yield _Tile(chunk, keys, values, dead)

    def scores(
        self,
        queries: Tensor,  # (chunk, d)
        tile: _Tile,
    ) -> Tensor:  # (chunk, m), -inf where dead
        scores = self.score(queries, tile.keys)
        expected = (len(queries), len(tile.keys))
        if tuple(scores.shape) != expected:
            raise BadInput(
                f"the score returned shape {tuple(scores.shape)} for queries {tuple(queries.shape)} and shared keys "
                f"{tuple(tile.keys.shape)}; expected {expected}"
            )
        scores = scores.to(queries.dtype)
        return scores if tile.dead is None else scores.masked_fill(tile.dead, -torch.inf)


class _Places:
    """Places of records among the live ones, asked for in ascending order. An index over all would be 8 n bytes."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.before, self.end = 0, 0  # how many live records stand before position `end`

    def of(
        self,
        positions: Tensor,  # (m,) ascending, of live records
    ) -> Tensor:  # (m,)
        low, high = int(positions[0]), int(positions[-1]) + 1
        before = self.before + int(np.count_nonzero(self.live[self.end : low]))
        places = before - 1 + torch.from_numpy(np.cumsum(self.live[low:high]))
        self.before, self.end = int(places[-1]) + 1, high
        return places[positions - low]


def _refuse_hidden_parameters(task: _Task, queries: Tensor) -> None:
    if not task.snapshot.segments:
        return
    key = torch.from_numpy(task.snapshot.segments[0].keys[:1].copy()).to(queries.device).to(queries.dtype)
    if task.score(queries[:1].detach(), key).requires_grad:
        raise BadInput(
            "the score depends on tensors that require gradients but were not named, so they would get none; pass them "
            "as parameters=, make the score an nn.Module, or detach them"
        )


class _State(NamedTuple):
    """The online softmax: Σ exp((s - top) / T) v, the largest score so far, Σ exp((s - top) / T)."""

    output: Tensor  # (q, v)
    top: Tensor  # (q,)
    total: Tensor  # (q,)

    def absorb(
        self,
        chunk: slice,  # of the queries
        scores: Tensor,  # (chunk, m)
        values: Tensor,  # (m, v) or labels (m,)
        temperature: float,
    ) -> None:
        """Takes a block in, in place."""
        output, top, total = self.output[chunk], self.top[chunk], self.total[chunk]
        new = torch.maximum(top, scores.amax(dim=1))
        shift = new.masked_fill(new == -torch.inf, 0)
        decay = ((top - shift) / temperature).exp_()
        parts = (scores - shift.unsqueeze(1)).div_(temperature).exp_()
        total.mul_(decay).add_(parts.sum(dim=1))
        output.mul_(decay.unsqueeze(1))
        if values.is_floating_point():
            output.addmm_(parts, values)
        else:
            output.index_add_(1, values, parts)
        top.copy_(new)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, task: _Task, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        q, d = queries.shape
        state = _State(queries.new_zeros(q, task.width(d)), queries.new_full((q,), -torch.inf), queries.new_zeros(q))
        with torch.autocast(queries.device.type, enabled=False):
            for tile in task.tiles(queries):
                state.absorb(tile.chunk, task.scores(queries[tile.chunk], tile), tile.values, task.temperature)
        empty = state.total == 0
        top, total = state.top.masked_fill(empty, 0), state.total.masked_fill(empty, 1)
        output = state.output.div_(total.unsqueeze(1))
        lse = (total.log() + top / task.temperature).masked_fill(empty, -torch.inf)
        ctx.task = task
        # top and total rather than lse: s / T - lse loses digits where s / T is large
        ctx.save_for_backward(queries, output, top, total, empty, *parameters)
        return output, lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, _, _, _, _, *parameters = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            query_grad, *parameter_grads = _backward(ctx, output_grad, lse_grad)
        if torch.is_grad_enabled():  # someone may differentiate these again
            sources = (queries, *parameters, output_grad, lse_grad)
            query_grad, *parameter_grads = (_Once.apply(grad, *sources) for grad in (query_grad, *parameter_grads))  # type: ignore[no-untyped-call]
        return query_grad, None, *parameter_grads


class _Once(torch.autograd.Function):
    """A gradient that refuses to be differentiated: torch's own guard stays silent where the loss is linear."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BadInput(
            "the soft query over every record has no second derivative; ask for the k nearest (k=), which is made of "
            "plain torch operations, or leave out create_graph=True"
        )


def _along(
    grad: Tensor,  # (q, v)
    values: Tensor,  # (m, v) or labels (m,)
) -> Tensor:  # (q, m)
    """g·v of every record."""
    return grad @ values.mT if values.is_floating_point() else grad.index_select(1, values)


def _backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> list[Tensor]:
    """Gradients of the queries and of each parameter."""
    task: _Task = ctx.task
    queries, output, top, total, empty, *parameters = ctx.saved_tensors
    output_grad = output_grad.masked_fill(empty.unsqueeze(1), 0)
    offset = (lse_grad - (output_grad * output).sum(dim=1)).masked_fill(empty, 0)
    scale = total * task.temperature
    query_grad, *parameter_grads = grads = [torch.zeros_like(tensor) for tensor in (queries, *parameters)]
    for tile in task.tiles(queries):
        chunk = tile.chunk
        with torch.enable_grad():
            part = queries[chunk].detach().requires_grad_()
            scores = task.scores(part, tile)
        if not scores.requires_grad:  # a constant
            continue
        score_grad = _along(output_grad[chunk], tile.values).add_(offset[chunk].unsqueeze(1))
        # at most 0, but a score computed twice may differ in its last digit, which a tiny temperature makes infinite
        below = (scores.detach() - top[chunk].unsqueeze(1)).clamp_(max=0)
        score_grad.mul_(below.div_(task.temperature).exp_())
        score_grad.div_(scale[chunk].unsqueeze(1))
        found = torch.autograd.grad(scores, (part, *parameters), score_grad, allow_unused=True)
        for grad, add in zip((query_grad[chunk], *parameter_grads), found, strict=True):
            if add is not None:
                grad.add_(add)
    return grads
