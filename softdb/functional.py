"""Soft queries on plain tensors: attention with any score and any weighting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.attend import Columns, Request
from softdb.attend.blocks import scores_of
from softdb.attend.fused import kernel_form
from softdb.attend.leading import Layout, TakingPart, as_tensor
from softdb.attend.request import indifferent
from softdb.check import attribute, shown
from softdb.device import placed_tensors, pooled, served
from softdb.errors import BadInput
from softdb.scoring import Argmax, ScaledDot, Score, ScoreFunction, Softmax, Sparse, Uniform, Weighting, query_width

__all__ = ["Attended", "attention"]

DENSE = 1 << 24  # scores held at once: 64 MB in float32; more are streamed
MASKED = 1 << 26  # entries of the mask made at once where scores are streamed: 64 MB


class Attended(NamedTuple):
    """All that `attention` found. Everything is differentiable; lse and weights stay in the dtype computed in."""

    output: Tensor  # (…, m, v)
    lse: Tensor  # (…, m): log-normaliser, the smoothed largest score / temperature; -inf where nothing takes part
    weights: Tensor  # (…, m, n)


@contextlib.contextmanager
def _without_transforms() -> Iterator[None]:
    """Raises BadInput for what torch.func cannot go through."""
    try:
        yield
    except RuntimeError as error:
        names = [one.key().name.lower() for one in torch._C._functorch.get_interpreter_stack() or ()]
        if not names:
            raise
        way = "use torch.autograd.grad or backward(), or softmax weights over fewer scores"
        if "vmap" in names:
            way = "give the batch as leading dimensions of query, key and value"
        raise BadInput(f"softdb.attention cannot run inside torch.func.{names[-1]} here; {way}") from error


@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    score: Score | ScoreFunction | None = None,
    temperature: float = 1.0,
    weights: str | Weighting | None = None,
    mask: Any = None,
    valid_len: Any = None,
    is_causal: bool = False,
    details: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    score: Score | ScoreFunction | None = None,
    temperature: float = 1.0,
    weights: str | Weighting | None = None,
    mask: Any = None,
    valid_len: Any = None,
    is_causal: bool = False,
    details: Literal[True],
) -> Attended: ...


@_without_transforms()
def attention(
    query: Any,  # (…, m, d_q)
    key: Any,  # (…, n, d)
    value: Any,  # (…, n, v)
    *,
    score: Score | ScoreFunction | None = None,
    temperature: float = 1.0,
    weights: str | Weighting | None = None,
    mask: Any = None,  # bool, broadcasts to (…, m, n)
    valid_len: Any = None,  # (b,) or (b, m)
    is_causal: bool = False,
    details: bool = False,
) -> Tensor | Attended:  # (…, m, v)
    """The soft query of `SoftDB.attend` on plain tensors: the mean of the values, weighted by softmax(score / T).

        w_ij = exp(s(q_i, k_j) / T) / Σ_j' exp(s(q_i, k_j') / T),  output_i = Σ_j w_ij v_j,  lse_i = log Σ_j exp(…)

    As it stands it agrees with torch.nn.functional.scaled_dot_product_attention (Vaswani et al. 2017, equation 1).

    Args:
        query, key, value: tensors, arrays or lists; leading dimensions (batch, heads) broadcast. All are computed in
            the query's dtype and on its device (a list as float32); half precision in float32, and the output is cast
            back.
        score: a `softdb.scores` object or a callable (q, d_q), (n, d) -> (q, n); None: ScaledDot,
            q·k/√d, as torch has. `SoftDB.attend` ranks by the database's metric instead, as its index does: Dot(),
            Cosine() or NegativeL2() here give that.
        temperature: towards 0 the nearest key's value, towards infinity the mean of all values.
        weights: "softmax", "sparsemax", "entmax15", "normalised" (a kernel's plain normalisation), "uniform" (average
            pooling; the score is not asked), "argmax" (a lookup, without gradient to query and key), or a Weighting;
            None: normalised for a kernel, else softmax.
        mask: True = takes part.
        valid_len: how many of the first keys take part, for each entry of the first leading dimension or each of its
            queries.
        is_causal: query i sees keys 0 … i.
        details: return `Attended` in place of the output.

    A key must pass mask, valid_len and is_causal, where given. A query for which none takes part gets zeros, as torch
    gives, and lse = -inf, with zero gradients.

    Up to 2^24 scores, and always with `details`, the scores are held: plain torch operations, twice differentiable
    where the score is (the Laplacian and Triangular kernels are not). More are streamed: memory O(block) beyond copies
    of what came, scores recomputed in backward, gradients once, to query, key, value and the score's parameters, so a
    score that trains something must be an nn.Module. A Weighting of your own is always held. Cost b m n (d + v).

    Raises BadInput, before anything is computed, for shapes that do not fit, NaN or infinity, and unknown weights; and
    where the score returns another shape or NaN; and inside torch.func.vmap (leading dimensions are its batches), or
    torch.func.grad of sparse weightings and of what is streamed (torch.autograd.grad serves them).

    >>> attention([[1.0, 0.0]], [[9.0, 0.0], [0.0, 9.0]], [[1.0], [2.0]]).round(decimals=3)
    tensor([[1.0020]])
    """
    if score is not None and not callable(score):
        raise BadInput(f"score is {shown(score)}; expected an object of softdb.scores or a callable")
    score = ScaledDot() if score is None else score
    asked, narrow = _checked(query, key, value)
    full = callable(attribute(score, "fold"))  # a whole softdb score; what other callables compare only they know
    if full and asked[0].shape[-1] != query_width(score, asked[1].shape[-1]):
        raise BadInput(
            f"query is {asked[0].shape[-1]} wide but this score of keys {asked[1].shape[-1]} wide compares queries "
            f"{query_width(score, asked[1].shape[-1])} wide (shapes {tuple(asked[0].shape)} and "
            f"{tuple(asked[1].shape)}); encode them alike, or use a score that takes both widths"
        )
    layout = Layout.of(*asked)
    live = TakingPart.of(layout, mask, valid_len, is_causal, asked[0].device)
    queries, keys, values = layout.queries(asked[0]), layout.records(asked[1]), layout.records(asked[2])
    # it knows what a weighting makes of a score, whatever the shape of the queries
    request = Request.of(queries, score, weights, check.temperature(temperature))
    call = _Call(request, keys, values, isinstance(request.weighting, Uniform) or full, live)
    streamed = isinstance(request.weighting, Softmax | Sparse | Uniform | Argmax)
    if streamed and not details and queries.shape[:2].numel() * layout.n > DENSE:
        return layout.back(_streamed(call)).to(narrow)
    output, lse, found = (layout.back(one) for one in _dense(call))
    return Attended(output.to(narrow), lse, found) if details else output.to(narrow)


# -- the door ----------------------------------------------------------------------------------------------------------


def _checked(query: Any, key: Any, value: Any) -> tuple[tuple[Tensor, Tensor, Tensor], torch.dtype]:
    """The three in one dtype, on one device, with as many dimensions; and the dtype of the output."""
    named = {"query": as_tensor(query, "query"), "key": as_tensor(key, "key"), "value": as_tensor(value, "value")}
    for name, one in named.items():
        if one.dtype is torch.bool or one.is_complex():
            raise BadInput(f"{name} is of type {one.dtype}; expected real numbers")
    shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in named.items())
    expected = f"the shapes are {shapes}; expected query (…, m, d_q), key (…, n, d) and value (…, n, v)"
    if any(one.ndim < 2 or not one.shape[-1] for one in named.values()):
        raise BadInput(f"{expected}, of two dimensions or more and at least one number wide")
    if named["key"].shape[-2] != named["value"].shape[-2]:
        raise BadInput(f"{expected}, with one value for each key")
    try:
        np.broadcast_shapes(*(one.shape[:-2] for one in named.values()))
    except ValueError:
        raise BadInput(f"{expected}, whose leading dimensions are equal or 1") from None
    first = named["query"]
    if isinstance(query, list | tuple) and first.dtype is torch.float64:
        first = named["query"] = first.float()
    narrow = first.dtype if first.is_floating_point() else torch.float32
    wide = torch.promote_types(narrow, torch.float32)
    ndim = max(one.ndim for one in named.values())
    for name, one in named.items():
        named[name] = one = one.to(first.device).to(wide)
        finite = one.detach().isfinite()
        if not bool(finite.all()):
            place = tuple((~finite).nonzero()[0].tolist())
            raise BadInput(f"{name} holds NaN or infinity (in {wide}), first at {place}; remove or repair it")
    query, key, value = (one[(None,) * (ndim - one.ndim)] for one in named.values())
    return (query, key, value), narrow


# -- the answer --------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A soft query of u entries."""

    request: Request  # of queries (u, q, d_q)
    keys: Tensor  # (u, n, d)
    values: Tensor  # (u, n, v)
    together: bool  # whether the score takes all entries at once
    live: TakingPart | None


def _dense(call: _Call) -> tuple[Tensor, Tensor, Tensor]:  # (u, q, v), (u, q), (u, q, n)
    """Output, lse and weights, by all scores at once."""
    score, pair = call.request.streamed_score, (call.request.queries, call.keys)
    with torch.autocast(call.request.queries.device.type, enabled=False):
        if call.together:
            scores = scores_of(score, *pair)
        else:
            each = [scores_of(score, queries, keys) for queries, keys in zip(*pair, strict=True)]
            scores = torch.stack(each) if each else indifferent(*pair)
        u, q, n = scores.shape
        if call.live is None:
            live = torch.ones((), dtype=torch.bool, device=scores.device).expand(scores.shape)
        else:
            live = call.live.rows(0, u * q).reshape(u, q, n)
        weights, lse, _ = call.request.weighting.weigh(scores, call.request.temperature, live)
        return weights @ call.values, lse, weights


def _streamed(call: _Call) -> Tensor:  # (u, q, v)
    """The output, block by block."""
    u, q, _ = call.request.queries.shape
    if call.live is None or u * q * call.keys.shape[1] <= MASKED:
        mask = None if call.live is None else call.live.rows(0, u * q).reshape(u, q, -1)
        output = _on_device(replace(call.request, mask=mask), call.keys, call.values)
        if output is not None:
            return output
    rows = q if call.live is None else max(1, MASKED // call.keys.shape[1])
    found, low = [], 0
    for queries, keys, values in zip(call.request.queries, call.keys, call.values, strict=True):
        source = Columns(keys, values, placed=placed_tensors(keys, values))
        for chunk in torch.split(queries, rows):
            mask = None if call.live is None else call.live.rows(low, low + len(chunk))
            request = replace(call.request, queries=chunk, mask=mask)
            if isinstance(request.weighting, Argmax):
                found.append(source.nearest(request.top(1)).output)
            else:
                found.append(source.stream(request)[0])
            low += len(chunk)
    return torch.cat(found).reshape(u, q, -1)


def _on_device(
    request: Request,  # of queries (u, q, d), mask (u, q, n)
    keys: Tensor,  # (u, n, d)
    values: Tensor,  # (u, n, v)
) -> Tensor | None:  # (u, q, v)
    """The output of all entries by one pass on their device; None on the CPU, and where a score overflows."""
    form = kernel_form(request) if served(keys.device) else None
    if form is None:
        return None
    folded, scale = form
    output, lse = pooled(folded.queries, keys, values, metric=folded.metric, scale=scale, mask=request.mask)
    return None if bool(lse.isnan().any()) else output
