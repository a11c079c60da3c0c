"""Soft queries on plain tensors: attention with any score and any weighting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.attend import Columns, Request
from softdb.attend.blocks import scores_of
from softdb.attend.fused import kernel_form
from softdb.attend.leading import Layout, TakingPart, as_tensor
from softdb.attend.request import indifferent
from softdb.check import attribute, holds, shown
from softdb.device import placed_tensors, pooled, served
from softdb.errors import BadInput
from softdb.kernels import available
from softdb.scoring import Argmax, ScaledDot, Score, ScoreFunction, Softmax, Sparse, Uniform, Weighting, query_width
from softdb.scoring.once import plain_calls, transformed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Attended", "attention"]

DENSE = 1 << 24  # largest number of scores in memory, 64 MB in float32; more scores are streamed
FEW = 1 << 20  # largest number of scores of an entry for which torch is used although kernels may be faster: a few ms
MASKED = 1 << 26  # largest number of mask entries in memory while scores are streamed, 64 MB


class Attended(NamedTuple):
    """Answer of `attention(details=True)`, differentiable; lse and weights have the dtype of the computation."""

    output: Tensor  # (…, m, v)
    lse: Tensor  # (…, m): log-normaliser, a smoothed maximum of score / temperature; -inf if no key takes part
    weights: Tensor  # (…, m, n)


class _Options(TypedDict, total=False):
    score: Score | ScoreFunction | None
    temperature: float | Tensor
    weights: str | Weighting | None
    mask: Any
    valid_len: Any
    is_causal: bool


@overload
def attention(
    query: Any, key: Any, value: Any, *, details: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def attention(query: Any, key: Any, value: Any, *, details: Literal[True], **options: Unpack[_Options]) -> Attended: ...


@plain_calls("softdb.attention")
def attention(
    query: Any,  # (…, m, d_q)
    key: Any,  # (…, n, d)
    value: Any,  # (…, n, v)
    *,
    score: Score | ScoreFunction | None = None,
    temperature: float | Tensor = 1.0,
    weights: str | Weighting | None = None,
    mask: Any = None,  # bool, broadcasts to (…, m, n)
    valid_len: Any = None,  # (b,) or (b, m)
    is_causal: bool = False,
    details: bool = False,
) -> Tensor | Attended:  # (…, m, v)
    """Soft query on plain tensors, as `SoftDB.attend`: return the mean of the values, weighted by softmax(score / T).

        w_ij = exp(s(q_i, k_j) / T) / Σ_j' exp(s(q_i, k_j') / T),  output_i = Σ_j w_ij v_j,  lse_i = log Σ_j exp(…)

    With the defaults this is torch.nn.functional.scaled_dot_product_attention (Vaswani et al. 2017, equation 1).

    Args:
        query, key, value: tensors, arrays or lists; leading dimensions (batch, heads) broadcast. They are computed in
            the query's dtype and on its device; a list is float32. Half precision is computed in float32, and the
            output is cast back.
        score: a `softdb.scores` object or a callable (q, d_q), (n, d) -> (q, n); None: ScaledDot, q·k/√d, as in torch.
            `SoftDB.attend` scores by the database's metric instead; Dot(), Cosine() or NegativeL2() give the same here.
        temperature: towards 0 the output is the nearest key's value, towards infinity the mean of all values. A number,
            or a floating tensor that broadcasts to (…, m), with a gradient; for heads (…, h, m, d_q) shape (h, 1).
        weights: "softmax", "sparsemax", "entmax15", "normalised" (plain normalisation of a kernel), "uniform" (average
            pooling, which ignores the score), "argmax" (a lookup, without gradient to query and key), or a Weighting;
            None: normalised for a kernel, else softmax.
        mask: True = takes part.
        valid_len: only the first valid_len keys take part; one number for each entry of the first leading dimension, or
            for each query in it.
        is_causal: for query i only the keys 0 … i take part.
        details: return `Attended` instead of the output.

    A key takes part if mask, valid_len and is_causal all allow it. A query without any key gets zeros, as in torch,
    and lse = -inf, with zero gradients.

    Up to 2^24 scores, and always with `details` or a Weighting of your own, all scores are in memory. Plain torch
    operations compute them, twice differentiable if the score is (the Laplacian and Triangular kernels are not). More
    scores are streamed, in O(block) memory beyond copies of the arguments. Backward then computes the scores again, and
    gives first derivatives for query, key, value, temperature and the parameters of a score that is an nn.Module. On a
    CPU, a softmax over more than 2^20 scores is streamed by kernels if no gradient is wanted. Cost b m n (d + v).

    Raises BadInput before any computation for shapes that do not fit, NaN or infinity, and unknown weights; later if
    the score returns another shape or NaN; also inside transforms of torch.func for sparse weightings and streamed
    scores (use torch.autograd.grad and leading dimensions). Under torch.compile and in torch.func.vmap no value can be
    read, so NaN and infinity are not refused.

    >>> attention([[1.0, 0.0]], [[9.0, 0.0], [0.0, 9.0]], [[1.0], [2.0]]).round(decimals=3)
    tensor([[1.0020]])
    """
    if score is not None and not callable(score):
        raise BadInput(f"score is {shown(score)}; expected an object of softdb.scores or a callable")
    score = ScaledDot() if score is None else score
    tensors, narrow = _checked(query, key, value)
    has_width = callable(attribute(score, "fold"))  # a softdb score; other callables have no known query width
    width = tensors[1].shape[-1]
    if has_width and tensors[0].shape[-1] != query_width(score, width):
        raise BadInput(
            f"query is {tensors[0].shape[-1]} wide but for keys {width} wide this score needs queries "
            f"{query_width(score, width)} wide (shapes {tuple(tensors[0].shape)} and {tuple(tensors[1].shape)}); "
            "encode them alike, or use a score that takes both widths"
        )
    layout = Layout.of(*tensors)
    live = TakingPart.of(layout, mask, valid_len, is_causal, tensors[0].device)
    queries, keys, values = layout.queries(tensors[0]), layout.records(tensors[1]), layout.records(tensors[2])
    heat = check.temperature(temperature, (*layout.lead, layout.m))
    if isinstance(heat, Tensor):
        heat = layout.queries(heat.view(*layout.lead, layout.m, 1)).squeeze(-1)
    request = Request.of(queries, score, weights, heat)
    call = _Call(request, keys, values, isinstance(request.weighting, Uniform) or has_width, live)
    streamed = isinstance(request.weighting, Softmax | Sparse | Uniform | Argmax)
    many = queries.shape[:2].numel() * layout.n > DENSE
    if streamed and not details and (many or _by_kernels(call)):
        return layout.back(_streamed(call)).to(narrow)
    output, lse, shares = (layout.back(tensor) for tensor in _dense(call))
    return Attended(output.to(narrow), lse, shares) if details else output.to(narrow)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _checked(query: Any, key: Any, value: Any) -> tuple[tuple[Tensor, Tensor, Tensor], torch.dtype]:
    """Check query, key and value; return them with one dtype, device and rank, and the dtype of the output."""
    named = {"query": as_tensor(query, "query"), "key": as_tensor(key, "key"), "value": as_tensor(value, "value")}
    for name, tensor in named.items():
        if tensor.dtype is torch.bool or tensor.is_complex():
            raise BadInput(f"{name} is of type {tensor.dtype}; expected real numbers")
    if any(tensor.ndim < 2 or not tensor.shape[-1] for tensor in named.values()):
        raise BadInput(f"{_expected(named)}, each with two dimensions or more, and the last at least 1 wide")
    if named["key"].shape[-2] != named["value"].shape[-2]:
        raise BadInput(f"{_expected(named)}, with one value for each key")
    try:
        np.broadcast_shapes(*(tensor.shape[:-2] for tensor in named.values()))
    except ValueError:
        raise BadInput(f"{_expected(named)}, whose leading dimensions are equal or 1") from None
    first = named["query"]
    if isinstance(query, list | tuple) and first.dtype is torch.float64:
        first = named["query"] = first.float()
    narrow = first.dtype if first.is_floating_point() else torch.float32
    wide = torch.promote_types(narrow, torch.float32)
    ndim = max(tensor.ndim for tensor in named.values())
    for name, tensor in named.items():
        named[name] = tensor.to(first.device).to(wide)
        finite = named[name].detach().isfinite()
        if not holds(finite.all()):
            place = tuple((~finite).nonzero()[0].tolist())
            raise BadInput(f"{name} holds NaN or infinity (in {wide}), first at {place}; remove or repair it")
    query, key, value = (tensor[(None,) * (ndim - tensor.ndim)] for tensor in named.values())
    return (query, key, value), narrow


def _expected(named: dict[str, Tensor]) -> str:
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
    return f"the shapes are {shapes}; expected query (…, m, d_q), key (…, n, d) and value (…, n, v)"


# -- the answer --------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One call of `attention`: u independent soft queries, each with its own queries, keys and values."""

    request: Request  # its queries have shape (u, q, d_q)
    keys: Tensor  # (u, n, d)
    values: Tensor  # (u, n, v)
    together: bool  # True if one call of the score can take all u entries
    live: TakingPart | None


def _by_kernels(call: _Call) -> bool:
    """Return True if streaming is faster than torch: for a softmax on a CPU without derivatives, of many scores."""
    request, column = call.request, call.request.queries
    if torch.compiler.is_compiling() or column.dtype is not torch.float32 or column.device.type != "cpu":
        return False
    if column.shape[1] * call.keys.shape[1] <= FEW or not isinstance(request.weighting, Softmax) or not available():
        return False
    form = None if transformed(RuntimeError()) else kernel_form(request, scaled_l2=True)
    if form is None:
        return False
    tensors = [tensor for tensor in (form[0].queries, form[1], call.keys, call.values) if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(torch.autograd.forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors)  # type: ignore[no-untyped-call]


def _dense(call: _Call) -> tuple[Tensor, Tensor, Tensor]:  # (u, q, v), (u, q), (u, q, n)
    """Return output, lse and weights, with all scores in memory."""
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
    """Return the output; compute the scores block by block, to save memory."""
    u, q, _ = call.request.queries.shape
    if call.live is None or u * q * call.keys.shape[1] <= MASKED:
        mask = None if call.live is None else call.live.rows(0, u * q).reshape(u, q, -1)
        output = _on_device(replace(call.request, mask=mask), call.keys, call.values)
        if output is not None:
            return output
    rows = q if call.live is None else max(1, MASKED // call.keys.shape[1])
    outputs, low = [], 0
    for queries, keys, values in zip(call.request.queries, call.keys, call.values, strict=True):
        source = Columns(keys, values, placed=placed_tensors(keys, values))
        for chunk in torch.split(queries, rows):
            mask = None if call.live is None else call.live.rows(low, low + len(chunk))
            request = replace(call.request, queries=chunk, mask=mask)
            if isinstance(request.weighting, Argmax):
                outputs.append(source.nearest(request.top(1)).output)
            else:
                outputs.append(source.stream(request)[0])
            low += len(chunk)
    return torch.cat(outputs).reshape(u, q, -1)


def _on_device(
    request: Request,  # with queries (u, q, d) and mask (u, q, n)
    keys: Tensor,  # (u, n, d)
    values: Tensor,  # (u, n, v)
) -> Tensor | None:  # (u, q, v)
    """Compute the output by one GPU kernel; None on the CPU, without a kernel for the score, or if it overflows."""
    form = kernel_form(request) if served(keys.device) else None
    if form is None:
        return None
    folded, scale = form
    output, lse = pooled(folded.queries, keys, values, metric=folded.metric, scale=scale, mask=request.mask)
    return None if bool(lse.isnan().any()) else output
