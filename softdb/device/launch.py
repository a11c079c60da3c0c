"""Launch the Triton kernels: forward pass, backward pass and search. Same functions and results as in `twin`."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.device.passes import DevicePass
from softdb.device.plan import Plan, Way, plan_of, splits_of
from softdb.device.twin import PassedSums
from softdb.index.rerank import CODES

MERGED = 64, 32  # number of ranges, and of value columns, that a program merges at once
CANDIDATES = 1 << 26  # number of scores in chosen groups computed at once: 256 MB
GROUPS = 64, 1024  # least and largest number of records in a group


def forward(inputs: DevicePass) -> tuple[PassedSums, Tensor]:
    """Run the forward pass; return its output and sums, and lse (h, q)."""
    plan, (h, q, _) = plan_of(inputs), inputs.queries.shape
    width, chunks = inputs.width, max(1, -(-inputs.width // plan.BV))
    blocks = -(-q // plan.BQ)
    columns = _Arguments(inputs, plan)
    n = inputs.keys.shape[1]
    splits, rows = splits_of(n, h * blocks * chunks, h * q * (width + 2), plan, inputs.queries.device)
    new = inputs.queries.new_empty
    sums, tops, totals = new(splits, h, q, width), new(splits, h, q), new(splits, h, q)
    output, top, total, lse = new(h, q, width), new(h, q), new(h, q), new(h, q)
    if h * q:
        from softdb.device.kernels.forward import merge_splits, pass_forward

        c = inputs.scale / math.log(2)
        with on(inputs.queries.device):
            pass_forward[(chunks * blocks * splits * h,)](
                *columns.tensors, sums, tops, totals,
                c, h, q, n, columns.d, width, rows, splits, chunks, *columns.strides,
                **columns.flags, **plan._asdict(),
            )  # fmt: skip
            most, wide = MERGED
            parts = max(1, -(-width // wide))
            merge_splits[(h * q * parts,)](
                sums, tops, totals, output, top, total, lse, c, inputs.scale, h * q, width, splits, parts,
                POOL=columns.flags["POOL"] > 0, BS=most, BV=wide, num_warps=4,
            )  # fmt: skip
    return PassedSums(output, top, total), lse


def backward(
    inputs: DevicePass, sums: PassedSums, output_grad: Tensor, lse_grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of queries, keys and values in float32; None for those that are not wanted."""
    q = inputs.queries.shape[1]
    empty = sums.total == 0
    g = output_grad.float().masked_fill(empty.unsqueeze(2), 0).contiguous()
    offset = (lse_grad - (g * sums.output).sum(2)).masked_fill(empty, 0)
    inverse = (1 / sums.total).masked_fill(empty, 0)
    centre = inputs.queries.mean(1) if inputs.metric is Metric.L2 else inputs.queries.new_empty(0)
    state = centre, g, sums.top, inverse, offset
    to_queries = torch.zeros_like(inputs.queries) if wanted[0] else None
    if wanted[0] and q:
        to_queries = _to_queries(inputs, state)
    return to_queries, *(_to_records(inputs, state, wanted) if any(wanted[1:]) else (None, None))


def _to_queries(inputs: DevicePass, state: tuple[Tensor, ...]) -> Tensor:  # (h, q, d)
    from softdb.device.kernels.backward import pass_backward

    plan, (h, q, d), n = plan_of(inputs, Way.TO_QUERIES), inputs.queries.shape, inputs.keys.shape[1]
    columns, chunks, blocks = _Arguments(inputs, plan), -(-d // plan.BD), -(-q // plan.BQ)
    splits, rows = splits_of(n, h * blocks * chunks, h * q * (d + 1), plan, inputs.queries.device)
    pulled, masses = inputs.queries.new_empty(splits, h, q, d), inputs.queries.new_empty(splits, h, q)
    with on(inputs.queries.device):
        pass_backward[(chunks * blocks * splits * h,)](
            *columns.tensors, *state, pulled, masses,
            inputs.scale / math.log(2), h, q, n, d, inputs.width, rows, splits, chunks, *columns.strides,
            **columns.flags, WHOLE=inputs.width <= plan.BV, **plan._asdict(),
        )  # fmt: skip
    grad = pulled.sum(0, dtype=torch.float64)
    if inputs.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        centred = (inputs.queries - state[0].unsqueeze(1)).double()
        grad = 2 * (grad - masses.sum(0, dtype=torch.float64).unsqueeze(2) * centred)
    return grad.mul_(inputs.scale).float()


def _to_records(
    inputs: DevicePass, state: tuple[Tensor, ...], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:  # (h, n, d), (h, n, v)
    from softdb.device.kernels.backward import records_backward

    plan, (h, q, d) = plan_of(inputs, Way.TO_RECORDS), inputs.queries.shape
    n, width, columns = inputs.keys.shape[1], inputs.width, _Arguments(inputs, plan)
    zeros = inputs.queries.new_zeros  # zeros: the kernel skips records that take no part
    key_grad = zeros(h, n, d) if wanted[1] else zeros(0)
    value_grad = zeros(h, n, width) if wanted[2] else zeros(0)
    chunks = max(-(-d // plan.BD) if wanted[1] else 1, -(-width // plan.BV) if wanted[2] else 1)
    tiles = -(-n // plan.BN)
    if h * q * n:
        with on(inputs.queries.device):
            records_backward[(chunks * tiles * h,)](
                *columns.tensors, *state, key_grad, value_grad,
                inputs.scale / math.log(2), q, n, d, width, tiles, chunks, *columns.strides,
                **columns.flags, WHOLE=width <= plan.BV, TO_KEYS=wanted[1], TO_VALUES=wanted[2], **plan._asdict(),
            )  # fmt: skip
    return key_grad.mul_(inputs.scale) if wanted[1] else None, value_grad if wanted[2] else None


def nearest(inputs: DevicePass, k: int) -> tuple[Tensor, Tensor]:  # (h, q, k), (h, q, k)
    """Return scores and positions of the k nearest, best first, equal scores by position; see `twin.nearest`."""
    (h, q, _), n = inputs.queries.shape, inputs.keys.shape[1]
    plan = plan_of(inputs)
    size = max(plan.BN, min(max(GROUPS[0], 1 << (math.isqrt(max(1, n // max(1, k)))).bit_length()), GROUPS[1]))
    groups = -(-n // size)
    chosen = min(k, groups)
    at_once = max(1, CANDIDATES // max(1, h * chosen * size), 1) if chosen else q
    at_once = min(at_once, max(1, CANDIDATES // max(1, h * groups)))
    chunks = []
    for low in range(0, max(1, q), at_once):
        rows = slice(low, low + at_once)
        mask = None if inputs.mask is None else inputs.mask[:, rows]
        chunks.append(_nearest(inputs._replace(queries=inputs.queries[:, rows], mask=mask), k, plan, size, groups))
    scores, places = (torch.cat(column, 1) for column in zip(*chunks, strict=True))
    return scores, places


def _nearest(inputs: DevicePass, k: int, plan: Plan, size: int, groups: int) -> tuple[Tensor, Tensor]:
    from softdb.device.kernels.scan import group_bests, group_scores

    (h, q, d), n, m = inputs.queries.shape, inputs.keys.shape[1], min(k, groups)
    bests = inputs.queries.new_empty(h, q, groups)
    best_scores = inputs.queries.new_full((h, q, k), -torch.inf)
    places = torch.full((h, q, k), -1, dtype=torch.int64, device=best_scores.device)
    if not h * q * m:
        return best_scores, places
    columns = _Arguments(inputs, plan)
    (queries, keys, _, keep, mask), (q_h, q_q, k_h, k_n, _, _, m_h, m_q) = columns.tensors, columns.strides
    strides = q_h, q_q, k_h, k_n, m_h, m_q
    flags: dict[str, Any] = {name: columns.flags[name] for name in ("METRIC", "KEEP", "MASK", "ONCE")}
    flags |= {name: size for name, size in plan._asdict().items() if name != "BV"} | {"GROUP": size}
    with on(inputs.queries.device):
        group_bests[(-(-q // plan.BQ) * groups * h,)](
            queries, keys, keep, mask, bests, q, n, d, groups, *strides, **flags
        )  # fmt: skip
        chosen = _first(bests, m).sort(dim=2).values.contiguous()
        scores = inputs.queries.new_empty(h, q, m, size)
        group_scores[(h * q * m,)](queries, keys, keep, mask, chosen, scores, q, n, d, m, *strides, **flags)
    scores = scores.flatten(2)
    best = _first(scores, min(k, m * size))
    best_scores[..., : best.shape[2]] = scores.gather(2, best)
    places[..., : best.shape[2]] = chosen.gather(2, best // size) * size + best % size
    return best_scores, places.masked_fill_(best_scores == -torch.inf, -1)


def _first(scores: Tensor, k: int) -> Tensor:  # (…, m) -> (…, k), int64
    """Return indices of the k largest scores, NaN first, ties by index. Sorts integers: torch does not order ties."""
    bits = (scores + 0.0).masked_fill(scores.isnan(), torch.inf).view(torch.int32)  # + 0: -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = torch.arange(scores.shape[-1], device=scores.device)
    unique = order.long() * (1 << 32) + ((1 << 32) - 1 - place)
    return (1 << 32) - 1 - (unique.topk(k, dim=-1).values & 0xFFFFFFFF)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device current for launches; on the CPU, silence overflow warnings of Triton's interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


class _Arguments:
    """Arguments of the kernels for one pass: tensors, strides and compile-time flags."""

    def __init__(self, inputs: DevicePass, plan: Plan) -> None:
        queries, keys = _inner(inputs.queries), _inner(inputs.keys)
        values = keys if inputs.values is None else inputs.values if inputs.labels else _inner(inputs.values)
        keep = keys if inputs.keep is None else inputs.keep.contiguous().view(torch.uint8)
        mask = keys if inputs.mask is None else _inner(inputs.mask).view(torch.uint8)
        if inputs.labels and values.stride(1) != 1:
            values = values.contiguous()
        self.d = queries.shape[2]
        self.tensors = queries, keys, values, keep, mask
        strided = queries, keys, values, mask
        self.strides = [stride for tensor in strided for stride in (tensor.stride(0), tensor.stride(1))]
        self.flags: dict[str, Any] = {
            "METRIC": CODES[inputs.metric],
            "POOL": 0 if inputs.values is None else 2 if inputs.labels else 1,
            "KEEP": inputs.keep is not None,
            "MASK": inputs.mask is not None,
            "ONCE": self.d <= plan.BD,
        }


def _inner(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its last dimension is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
