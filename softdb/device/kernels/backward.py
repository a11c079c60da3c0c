"""Kernels of the backward pass, which compute scores again (Dao et al. 2022, algorithm 4), without atomic additions.

With p = 2^(c (S - top)) / total and offset = g_lse - g·output, the gradient of a score is ds = p (g·v + offset). For
queries, a program sums ds k over one range of the records (`pulled`). For keys and values, a program sums ds q and p g
over all queries, for one tile of records. The caller multiplies by the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softdb.device.kernels.forward import LABELS, VALUES
from softdb.device.kernels.tiles import COSINE, COUNTS, L2, finite, present, product, rows_of, scored, together


@triton.jit
def pulls(
    scores, alive, g, grads, q_rows, g_q, q_valid, v, at, v_n, valid, tops, inverse_totals, offsets, out, c, width,
    POOL: tl.constexpr, WHOLE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return p and ds for a tile, (BQ, BN) each. WHOLE is True if v ≤ BV, so that `grads` has all columns of g."""
    top = tl.load(tops + out, mask=q_valid, other=0.0)
    inverse = tl.load(inverse_totals + out, mask=q_valid, other=0.0)
    along = tl.zeros_like(scores) + tl.load(offsets + out, mask=q_valid, other=0.0)[:, None]
    if POOL == VALUES and WHOLE:
        along += product(grads, tl.trans(rows_of(v, at, v_n, valid, 0, width, BV)))
    elif POOL == VALUES:
        for first in range(0, width, BV):
            g_tile = rows_of(g, q_rows, g_q, q_valid, first, width, BV)
            along += product(g_tile, tl.trans(rows_of(v, at, v_n, valid, first, width, BV)))
    elif POOL == LABELS:
        label = tl.load(v + at, mask=valid, other=0)
        inside = (label >= 0) & (label < width)  # do not read beyond g if a label is invalid
        along += tl.load(g + q_rows[:, None] * g_q + label[None, :], mask=alive & inside[None, :], other=0.0)
    # by rounding, a recomputed score may exceed the top; with a tiny temperature, exp2 would overflow
    p = tl.exp2(tl.minimum(scores - top[:, None], 0.0) * c) * inverse[:, None]
    p = tl.where(alive & finite(scores), p, 0.0)
    return p, p * along


@triton.jit(do_not_specialize=COUNTS)
def pass_backward(
    q, k, v, keep, mask, centre, g, tops, inverse_totals, offsets, pulled, masses,  # (splits, h, q, d), (splits, h, q)
    c, heads, queries, n, d, width, rows, splits, chunks,
    q_h, q_q, k_h, k_n, v_h, v_n, m_h, m_q,
    METRIC: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr,
    WHOLE: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store BD columns of Σ ds k for BQ queries and one range of records; for l2, k is relative to `centre` (h, d)."""
    pid = tl.program_id(0)
    first = (pid % chunks) * BD
    blocks = tl.cdiv(queries, BQ)
    q_rows = ((pid // chunks) % blocks * BQ + tl.arange(0, BQ)).to(tl.int64)
    split = (pid // chunks // blocks % splits).to(tl.int64)
    head = (pid // chunks // blocks // splits).to(tl.int64)
    q_valid, columns = q_rows < queries, first + tl.arange(0, BD)
    q, k, v, mask = q + head * q_h, k + head * k_h, v + head * v_h, mask + head * m_h
    g, row = g + head * queries * width, head * queries + q_rows
    q_tile = rows_of(q, q_rows, q_q, q_valid, 0, d, BD)
    grads = rows_of(g, q_rows, width, q_valid, 0, width, BV)
    acc, mass = tl.zeros((BQ, BD), tl.float32), tl.zeros((BQ,), tl.float32)
    start = split * rows
    stop = tl.minimum(start + rows, n)
    for low in range(0, rows, BN):
        at = start + low + tl.arange(0, BN)
        valid = present(keep, at, at < stop, KEEP)
        scores, inverse = scored(q, q_tile, q_rows, q_q, q_valid, k, at, k_n, valid, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_valid, at, valid, MASK)
        _, ds = pulls(
            scores, alive, g, grads, q_rows, width, q_valid, v, at, v_n, valid, tops, inverse_totals, offsets, row, c,
            width, POOL, WHOLE, BV,
        )  # fmt: skip
        keys = rows_of(k, at, k_n, valid, first, d, BD)
        if METRIC == L2:
            centred = keys.to(tl.float32) - tl.load(centre + head * d + columns, mask=columns < d, other=0.0)[None, :]
            acc += product(ds, centred)
            mass += tl.sum(ds, 1)
        else:
            acc += product(ds * inverse[None, :], keys)
    out = (split * heads + head) * queries + q_rows
    tl.store(pulled + out[:, None] * d + columns[None, :], acc, mask=q_valid[:, None] & (columns < d)[None, :])
    if METRIC == L2 and pid % chunks == 0:
        tl.store(masses + out, mass, mask=q_valid)


@triton.jit(do_not_specialize=COUNTS)
def records_backward(
    q, k, v, keep, mask, centre, g, tops, inverse_totals, offsets, key_grad, value_grad,  # (h, n, d), (h, n, v)
    c, queries, n, d, width, tiles, chunks,
    q_h, q_q, k_h, k_n, v_h, v_n, m_h, m_q,
    METRIC: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr,
    WHOLE: tl.constexpr, TO_KEYS: tl.constexpr, TO_VALUES: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store BD columns of the key gradients, and BV of the value gradients, for one tile of records."""
    pid = tl.program_id(0)
    chunk, tile, head = pid % chunks, (pid // chunks % tiles).to(tl.int64), (pid // chunks // tiles).to(tl.int64)
    at = tile * BN + tl.arange(0, BN)
    valid = present(keep, at, at < n, KEEP)
    q, k, v, mask = q + head * q_h, k + head * k_h, v + head * v_h, mask + head * m_h
    g = g + head * queries * width
    key_columns, value_columns = chunk * BD + tl.arange(0, BD), chunk * BV + tl.arange(0, BV)
    middle = tl.zeros((BD,), tl.float32)
    if METRIC == L2:
        middle = tl.load(centre + head * d + key_columns, mask=key_columns < d, other=0.0)
    to_keys, to_values = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BV), tl.float32)
    mass, lengths = tl.zeros((BN,), tl.float32), tl.full((BN,), 1.0, tl.float32)
    for low in range(0, queries, BQ):
        q_rows = low + tl.arange(0, BQ).to(tl.int64)
        q_valid = q_rows < queries
        q_tile = rows_of(q, q_rows, q_q, q_valid, 0, d, BD)
        grads = rows_of(g, q_rows, width, q_valid, 0, width, BV)
        scores, lengths = scored(q, q_tile, q_rows, q_q, q_valid, k, at, k_n, valid, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_valid, at, valid, MASK)
        p, ds = pulls(
            scores, alive, g, grads, q_rows, width, q_valid, v, at, v_n, valid, tops, inverse_totals, offsets,
            head * queries + q_rows, c, width, POOL, WHOLE, BV,
        )  # fmt: skip
        if TO_VALUES:
            g_tile = rows_of(g, q_rows, width, q_valid, chunk * BV, width, BV)
            to_values += tl.dot(tl.trans(p), g_tile, input_precision="ieee")
        if TO_KEYS:
            centred = rows_of(q, q_rows, q_q, q_valid, chunk * BD, d, BD) - middle[None, :]
            to_keys += tl.dot(tl.trans(ds), centred, input_precision="ieee")
            mass += tl.sum(ds * scores if METRIC == COSINE else ds, 0)
    out = head * n + at
    if TO_VALUES:
        inside = valid[:, None] & (value_columns < width)[None, :]
        tl.store(value_grad + out[:, None] * width + value_columns[None, :], to_values, mask=inside)
    if TO_KEYS:
        keys = rows_of(k, at, k_n, valid, chunk * BD, d, BD).to(tl.float32)
        if METRIC == COSINE:  # derivative of q·k / ‖k‖: (q - s k / ‖k‖) / ‖k‖
            to_keys = (to_keys - keys * (lengths * mass)[:, None]) * lengths[:, None]
        elif METRIC == L2:  # derivative of -‖q - k‖²: 2 (q - k)
            to_keys = 2 * (to_keys - (keys - middle[None, :]) * mass[:, None])
        inside = valid[:, None] & (key_columns < d)[None, :]
        tl.store(key_grad + out[:, None] * d + key_columns[None, :], to_keys, mask=inside)
