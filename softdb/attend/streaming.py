"""The exact soft query over every record that takes part: memory that does not grow with the database.

The one place that picks the path: compiled loops where the score is a product, a cosine or a squared distance of
float32 queries on a CPU; else blocks of torch operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.attend import fused
from softdb.attend.blocks import Blocks, Once, Task, hidden_parameters, softmax_over, width_of
from softdb.attend.source import Columns, Live, Source
from softdb.attend.sparse import sparse_over
from softdb.check import Metric
from softdb.compiled.threads import available
from softdb.errors import BadInput
from softdb.scores import Fold, Score, ScoreFunction, fold
from softdb.weights import Sparse, divisor

__all__ = ["stream"]

WORTH = 1 << 22  # products: less than a compiler's start, and no slower in torch


def stream(
    queries: Tensor,  # (q, d) floating, on the device and in the dtype to compute in
    source: Source,
    score: Score | ScoreFunction,
    temperature: float,  # above 0
    *,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
    mask: Tensor | None = None,  # (q, count) bool over live records in row order, True = takes part
    num_classes: int | None = None,  # needed where values are labels
    value_dim: int | None = None,  # v, asked for only where nothing is stored to tell it; None: d
    parameters: Sequence[Tensor] = (),  # tensors the score depends on that want gradients; an nn.Module's are known
    sparse: Sparse | None = None,  # sparsemax or entmax15 in softmax's place
) -> tuple[Tensor, Tensor]:  # (q, v) or (q, num_classes), (q,)
    """The softmax-weighted mean of the values of every record that takes part, and its log-normaliser.

    With s the scores and T the temperature: lse = log Σ exp(s / T), output = Σ exp(s / T - lse) v. Both carry gradients
    to the queries, to the score's parameters, and to `Columns` that want them, once: differentiating these again raises
    BadInput. A query for which no record takes part gets zeros and -inf, with zero gradients. In backward s is
    recomputed (so the score must answer alike twice: no dropout) and
    ds = exp(s / T - lse) (g·v - g·output + g_lse) / T, whose rounding error grows as 1 / T.

    Cost: q n (d + v), half as much again in backward. Memory beyond the answer: O(block), whatever n and q.
    Raises BadInput where the score returns another shape than (q, n) or NaN, where it hides tensors that want
    gradients, and for labels without `num_classes`.
    """
    temperature = divisor(temperature, queries.dtype)
    width = width_of(source, num_classes, value_dim or queries.shape[1])
    plan = None
    if sparse is None:
        plan = _plan(queries, source, score, temperature, allowed, mask, num_classes, width)
    if plan is not None:
        found = _fused(plan, source)
        if found is not None:
            return found
    task = Task(source, score, temperature, allowed, mask, num_classes, width)
    if isinstance(score, torch.nn.Module):
        parameters = [*parameters, *score.parameters()]
    wanted = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    if torch.is_grad_enabled() and not wanted and hidden_parameters(task, queries):
        raise BadInput(
            "the score depends on tensors that require gradients but were not named, so they would get none; pass them "
            "as parameters=, make the score an nn.Module, or detach them"
        )
    solve = softmax_over if sparse is None else functools.partial(sparse_over, by=sparse)
    output, lse = Blocks.apply(queries, *_trained(source), task, solve, *wanted)  # type: ignore[no-untyped-call]
    return output, lse


class _Plan(NamedTuple):
    """A soft query for the compiled loops: the softmax of scale · metric(query, k) / T, plus a bias in lse."""

    queries: Tensor  # (q, d) float32, with gradient
    ask: fused.Ask
    shift: Tensor | float  # (q,) what the bias adds to lse


def _plan(
    queries: Tensor,
    source: Source,
    score: Score | ScoreFunction,
    temperature: float,
    allowed: Live | None,
    mask: Tensor | None,
    num_classes: int | None,
    width: int,
) -> _Plan | None:
    """The query as the compiled loops take it; None where they don't."""
    if queries.dtype is not torch.float32 or queries.device.type != "cpu" or not available():
        return None
    if len(queries) * source.count * (queries.shape[1] + width) < WORTH or not _plain(source, score):
        return None
    folded = fold(score, queries)
    scale = _known_scale(folded)
    if folded is None or scale is None:
        return None
    inverse = scale / temperature
    if not 1e-30 < inverse < 1e30:  # beyond what float32 holds
        return None
    asked = folded.queries
    if folded.metric is Metric.COSINE:
        asked = asked / _length(asked)
    snapshot = source.snapshot if isinstance(source, Columns) else source
    ask = fused.Ask(
        snapshot.segments,
        snapshot.starts,  # type: ignore[attr-defined]
        source.live if allowed is None else source.live & allowed,
        source.live,
        None if mask is None else np.ascontiguousarray(mask.cpu().numpy()),
        folded.metric,
        1 / inverse,
        num_classes,
    )
    return _Plan(asked, ask, torch.as_tensor(folded.bias) / temperature)


def _plain(source: Source, score: Score | ScoreFunction) -> bool:
    """Whether the compiled loops can read the columns, and give the gradients that they want."""
    if not isinstance(source, Columns):
        return True
    keys, values = source.keys, source.values
    if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.float16):
        return False
    if values.is_floating_point() and values.dtype is not keys.dtype:
        return False
    if not torch.is_grad_enabled() or not (keys.requires_grad or values.requires_grad):
        return True
    metric = getattr(score, "metric", None)
    return keys.dtype is torch.float32 and metric is Metric.DOT and values.is_floating_point()


def _known_scale(folded: Fold | None) -> float | None:
    """The factor between score and metric, if it is a number that nobody trains."""
    if folded is None or folded.scale is None:
        return None
    if isinstance(folded.scale, Tensor) and folded.scale.requires_grad and torch.is_grad_enabled():
        return None
    return float(folded.scale)


def _length(
    queries: Tensor,  # (q, d)
) -> Tensor:  # (q, 1)
    length: Tensor = torch.linalg.vector_norm(queries, dim=1, keepdim=True, dtype=torch.float64).float()
    return length.masked_fill(length < torch.finfo(length.dtype).tiny, torch.inf)


def _trained(source: Source) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values, where they want gradients."""
    if not isinstance(source, Columns):
        return None, None
    return tuple(column if column.requires_grad else None for column in (source.keys, source.values))  # type: ignore[return-value]


def _fused(plan: _Plan, source: Source) -> tuple[Tensor, Tensor] | None:
    """The answer of the compiled loops; None where a score overflows float32."""
    output, lse = _Fused.apply(plan.queries, *_trained(source), plan.ask)  # type: ignore[no-untyped-call]
    if bool(lse.isnan().any()):
        return None
    return output, lse + plan.shift


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor | None, values: Tensor | None, ask: fused.Ask
    ) -> tuple[Tensor, Tensor]:
        state = fused.forward(np.ascontiguousarray(queries.detach().numpy()), ask)
        ctx.ask, ctx.columns = ask, (keys, values)
        output, top, total = (torch.from_numpy(one) for one in state)
        ctx.save_for_backward(queries, output, top, total)
        if not bool(torch.isfinite(top).all()):
            return output, torch.full_like(top, math.nan)
        return output, (total.log() + top / ask.temperature).float()

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, *state = ctx.saved_tensors
        columns = [None if one is None else torch.zeros_like(one) for one in ctx.columns]
        query_grad = fused.backward(
            np.ascontiguousarray(queries.detach().numpy()),
            ctx.ask,
            fused.State(*(one.detach().numpy() for one in state)),
            output_grad.detach().numpy(),
            lse_grad.detach().numpy(),
            *(None if one is None else one.numpy() for one in columns),
        )
        guarded = Once.guarded(
            [torch.from_numpy(query_grad), *columns],
            (queries, output_grad, lse_grad, *(one for one in ctx.columns if one is not None)),
        )
        return *guarded, None
