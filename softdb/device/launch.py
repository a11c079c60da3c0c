"""The kernels' launches: passes forward and backward, and the nearest. Same results as `twin`."""

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

METRICS = {Metric.DOT: 0, Metric.COSINE: 1, Metric.L2: 2}
MERGED = 64, 32  # ranges, and numbers of a value, that are merged at once
CANDIDATES = 1 << 26  # scores of chosen groups at once: 256 MB
GROUPS = 64, 1024  # records of a group, at least and at most


def forward(what: DevicePass) -> tuple[PassedSums, Tensor]:
    """Result of a pass, and lse (h, q)."""
    plan, (h, q, _) = plan_of(what), what.queries.shape
    width, chunks = what.width, max(1, -(-what.width // plan.BV))
    blocks = -(-q // plan.BQ)
    columns = _Arguments(what, plan)
    n = what.keys.shape[1]
    splits, rows = splits_of(n, h * blocks * chunks, h * q * (width + 2), plan, what.queries.device)
    new = what.queries.new_empty
    sums, tops, totals = new(splits, h, q, width), new(splits, h, q), new(splits, h, q)
    output, top, total, lse = new(h, q, width), new(h, q), new(h, q), new(h, q)
    if h * q:
        from softdb.device.kernels.forward import merge_splits, pass_forward

        c = what.scale / math.log(2)
        with on(what.queries.device):
            pass_forward[(chunks * blocks * splits * h,)](
                *columns.given, sums, tops, totals,
                c, h, q, n, columns.d, width, rows, splits, chunks, *columns.strides,
                **columns.flags, **plan.options,
            )  # fmt: skip
            most, wide = MERGED
            parts = max(1, -(-width // wide))
            merge_splits[(h * q * parts,)](
                sums, tops, totals, output, top, total, lse, c, what.scale, h * q, width, splits, parts,
                POOL=columns.flags["POOL"] > 0, BS=most, BV=wide, num_warps=4,
            )  # fmt: skip
    return PassedSums(output, top, total), lse


def backward(
    what: DevicePass, sums: PassedSums, output_grad: Tensor, lse_grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the queries, the keys and the values, in float32, where wanted."""
    q = what.queries.shape[1]
    empty = sums.total == 0
    g = output_grad.float().masked_fill(empty.unsqueeze(2), 0).contiguous()
    offset = (lse_grad - (g * sums.output).sum(2)).masked_fill(empty, 0)
    inverse = (1 / sums.total).masked_fill(empty, 0)
    centre = what.queries.mean(1) if what.metric is Metric.L2 else what.queries.new_empty(0)
    given = centre, g, sums.top, inverse, offset
    to_queries = torch.zeros_like(what.queries) if wanted[0] else None
    if wanted[0] and q:
        to_queries = _to_queries(what, given)
    return to_queries, *(_to_records(what, given, wanted) if any(wanted[1:]) else (None, None))


def _to_queries(what: DevicePass, given: tuple[Tensor, ...]) -> Tensor:  # (h, q, d)
    from softdb.device.kernels.backward import pass_backward

    plan, (h, q, d), n = plan_of(what, Way.TO_QUERIES), what.queries.shape, what.keys.shape[1]
    columns, chunks, blocks = _Arguments(what, plan), -(-d // plan.BD), -(-q // plan.BQ)
    splits, rows = splits_of(n, h * blocks * chunks, h * q * (d + 1), plan, what.queries.device)
    pulled, masses = what.queries.new_empty(splits, h, q, d), what.queries.new_empty(splits, h, q)
    with on(what.queries.device):
        pass_backward[(chunks * blocks * splits * h,)](
            *columns.given, *given, pulled, masses,
            what.scale / math.log(2), h, q, n, d, what.width, rows, splits, chunks, *columns.strides,
            **columns.flags, WHOLE=what.width <= plan.BV, **plan.options,
        )  # fmt: skip
    found = pulled.sum(0, dtype=torch.float64)
    if what.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        seen = (what.queries - given[0].unsqueeze(1)).double()
        found = 2 * (found - masses.sum(0, dtype=torch.float64).unsqueeze(2) * seen)
    return found.mul_(what.scale).float()


def _to_records(
    what: DevicePass, given: tuple[Tensor, ...], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:  # (h, n, d), (h, n, v)
    from softdb.device.kernels.backward import records_backward

    plan, (h, q, d), n, width = plan_of(what, Way.TO_RECORDS), what.queries.shape, what.keys.shape[1], what.width
    columns, zeros = _Arguments(what, plan), what.queries.new_zeros  # of records that take no part nothing is written
    key_grad = zeros(h, n, d) if wanted[1] else zeros(0)
    value_grad = zeros(h, n, width) if wanted[2] else zeros(0)
    chunks = max(-(-d // plan.BD) if wanted[1] else 1, -(-width // plan.BV) if wanted[2] else 1)
    tiles = -(-n // plan.BN)
    if h * q * n:
        with on(what.queries.device):
            records_backward[(chunks * tiles * h,)](
                *columns.given, *given, key_grad, value_grad,
                what.scale / math.log(2), q, n, d, width, tiles, chunks, *columns.strides,
                **columns.flags, WHOLE=width <= plan.BV, TO_KEYS=wanted[1], TO_VALUES=wanted[2], **plan.options,
            )  # fmt: skip
    return key_grad.mul_(what.scale) if wanted[1] else None, value_grad if wanted[2] else None


def nearest(what: DevicePass, k: int) -> tuple[Tensor, Tensor]:  # (h, q, k), (h, q, k)
    """Scores and positions of the k nearest, best first, ties by position, as `twin.nearest`."""
    (h, q, _), n = what.queries.shape, what.keys.shape[1]
    plan = plan_of(what)
    size = max(plan.BN, min(max(GROUPS[0], 1 << (math.isqrt(max(1, n // max(1, k)))).bit_length()), GROUPS[1]))
    groups = -(-n // size)
    chosen = min(k, groups)
    some = max(1, CANDIDATES // max(1, h * chosen * size), 1) if chosen else q
    some = min(some, max(1, CANDIDATES // max(1, h * groups)))
    parts = []
    for low in range(0, max(1, q), some):
        rows = slice(low, low + some)
        mask = None if what.mask is None else what.mask[:, rows]
        parts.append(_nearest(what._replace(queries=what.queries[:, rows], mask=mask), k, plan, size, groups))
    return torch.cat([one[0] for one in parts], 1), torch.cat([one[1] for one in parts], 1)


def _nearest(what: DevicePass, k: int, plan: Plan, size: int, groups: int) -> tuple[Tensor, Tensor]:
    from softdb.device.kernels.scan import group_bests, group_scores

    (h, q, d), n, m = what.queries.shape, what.keys.shape[1], min(k, groups)
    bests = what.queries.new_empty(h, q, groups)
    found = what.queries.new_full((h, q, k), -torch.inf)
    places = torch.full((h, q, k), -1, dtype=torch.int64, device=found.device)
    if not h * q * m:
        return found, places
    columns = _Arguments(what, plan)
    (asked, keys, _, keep, mask), (q_h, q_q, k_h, k_n, _, _, m_h, m_q) = columns.given, columns.strides
    strides = q_h, q_q, k_h, k_n, m_h, m_q
    flags: dict[str, Any] = {name: columns.flags[name] for name in ("METRIC", "KEEP", "MASK", "ONCE")}
    flags |= {name: size for name, size in plan.options.items() if name != "BV"} | {"GROUP": size}
    with on(what.queries.device):
        group_bests[(-(-q // plan.BQ) * groups * h,)](
            asked, keys, keep, mask, bests, q, n, d, groups, *strides, **flags
        )  # fmt: skip
        chosen = _first(bests, m).sort(dim=2).values.contiguous()
        scores = what.queries.new_empty(h, q, m, size)
        group_scores[(h * q * m,)](asked, keys, keep, mask, chosen, scores, q, n, d, m, *strides, **flags)
    scores = scores.flatten(2)
    best = _first(scores, min(k, m * size))
    found[..., : best.shape[2]] = scores.gather(2, best)
    places[..., : best.shape[2]] = chosen.gather(2, best // size) * size + best % size
    return found, places.masked_fill_(found == -torch.inf, -1)


def _first(scores: Tensor, k: int) -> Tensor:  # (…, m) -> (…, k), int64
    """Places of the k largest, ties by place; NaN is the largest. Unique integers, for torch leaves ties open."""
    bits = (scores + 0.0).masked_fill(scores.isnan(), torch.inf).view(torch.int32)  # + 0: -0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = torch.arange(scores.shape[-1], device=scores.device)
    unique = order.long() * (1 << 32) + ((1 << 32) - 1 - place)
    return (1 << 32) - 1 - (unique.topk(k, dim=-1).values & 0xFFFFFFFF)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; its interpreter overflows in numpy, which a GPU does silently."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


class _Arguments:
    """The tensors of a pass as kernels take them."""

    def __init__(self, what: DevicePass, plan: Plan) -> None:
        queries, keys = _inner(what.queries), _inner(what.keys)
        values = keys if what.values is None else what.values if what.labels else _inner(what.values)
        keep = keys if what.keep is None else what.keep.contiguous().view(torch.uint8)
        mask = keys if what.mask is None else _inner(what.mask).view(torch.uint8)
        if what.labels and values.stride(1) != 1:
            values = values.contiguous()
        self.d = queries.shape[2]
        self.given = queries, keys, values, keep, mask
        three = queries, keys, values, mask
        self.strides = [stride for one in three for stride in (one.stride(0), one.stride(1))]
        self.flags: dict[str, Any] = {
            "METRIC": METRICS[what.metric],
            "POOL": 0 if what.values is None else 2 if what.labels else 1,
            "KEEP": what.keep is not None,
            "MASK": what.mask is not None,
            "ONCE": self.d <= plan.BD,
        }


def _inner(tensor: Tensor) -> Tensor:
    """With its last dimension contiguous; heads and rows lie as they do."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
