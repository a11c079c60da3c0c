"""The forward pass: sums of each range of the records, by an online softmax, and how the ranges merge.

S = q·k, p = exp(c (S - best)) of each tile by its own best, total = Σ p, acc = Σ p v (Milakov and Gimelshein 2018;
ranges as flash-decoding has them). c is the scale over log 2, for exponentials of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softdb.device.kernels.tiles import COUNTS, finite, present, product, rows_of, scored, together

NOTHING, VALUES, LABELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_pooled(p, v, at, v_stride, there, first, width, POOL: tl.constexpr, BV: tl.constexpr):  # (BQ, BN) -> (BQ, BV)
    """Σ p v of a tile; of labels, how much each class gets."""
    if POOL == VALUES:
        values = rows_of(v, at, v_stride, there, first, width, BV)
    else:
        classes = first + tl.arange(0, BV)
        values = (tl.load(v + at, mask=there, other=-1)[:, None] == classes[None, :]).to(tl.float16)
    return product(p, values)


@triton.jit(do_not_specialize=COUNTS)
def pass_forward(
    q, k, v, keep, mask, sums, tops, totals,  # (h, q, d), (h, n, d), …; (splits, h, q, v), (splits, h, q) twice
    c, heads, queries, n, d, width, rows, splits, chunks,
    q_h, q_q, k_h, k_n, v_h, v_n, m_h, m_q,
    METRIC: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The sums of one range of the records, for BQ queries and BV numbers of the values."""
    pid = tl.program_id(0)
    first = (pid % chunks) * BV
    blocks = tl.cdiv(queries, BQ)
    q_rows = ((pid // chunks) % blocks * BQ + tl.arange(0, BQ)).to(tl.int64)
    split = (pid // chunks // blocks % splits).to(tl.int64)
    head = (pid // chunks // blocks // splits).to(tl.int64)
    q_there = q_rows < queries
    q, k, v, mask = q + head * q_h, k + head * k_h, v + head * v_h, mask + head * m_h
    asked = rows_of(q, q_rows, q_q, q_there, 0, d, BD)
    top, total = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    acc, bad = tl.zeros((BQ, BV), tl.float32), tl.zeros((BQ,), tl.int32)
    start = split * rows
    stop = tl.minimum(start + rows, n)
    for low in range(0, rows, BN):
        at = start + low + tl.arange(0, BN)
        there = present(keep, at, at < stop, KEEP)
        scores, _ = scored(q, asked, q_rows, q_q, q_there, k, at, k_n, there, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_there, at, there, MASK)
        bad = tl.maximum(bad, tl.max((alive & (finite(scores) == 0)).to(tl.int32), 1))
        scores = tl.where(alive & finite(scores), scores, float("-inf"))
        best = tl.max(scores, 1)
        new = tl.maximum(top, best)
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((scores - tl.where(best == float("-inf"), 0.0, best)[:, None]) * c)
        decay, fresh = tl.exp2((top - shift) * c), tl.exp2((best - shift) * c)
        total = total * decay + tl.sum(p, 1) * fresh
        if POOL != NOTHING:
            more = tile_pooled(p, v, at, v_n, there, first, width, POOL, BV)
            acc = acc * decay[:, None] + more * fresh[:, None]
        top = new
    out = (split * heads + head) * queries + q_rows
    if pid % chunks == 0:
        tl.store(tops + out, top, mask=q_there)
        tl.store(totals + out, tl.where(bad > 0, float("nan"), total), mask=q_there)
    if POOL != NOTHING:
        columns = first + tl.arange(0, BV)
        tl.store(
            sums + out[:, None] * width + columns[None, :], acc, mask=q_there[:, None] & (columns < width)[None, :]
        )


@triton.jit(do_not_specialize=COUNTS)
def merge_splits(
    sums, tops, totals, output, top_out, total_out, lse, c, scale, rows, width, splits, chunks,
    POOL: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state of the whole, of one query, from those of its splits; sums in float64. Rows count heads and queries."""
    pid = tl.program_id(0)
    row, first = (pid // chunks).to(tl.int64), (pid % chunks) * BV
    top = tl.full((BS,), float("-inf"), tl.float32)
    for low in range(0, splits, BS):
        at = low + tl.arange(0, BS)
        top = tl.maximum(top, tl.load(tops + at * rows + row, mask=at < splits, other=float("-inf")))
    most = tl.max(top, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    total, acc = tl.zeros((BS,), tl.float64), tl.zeros((BV,), tl.float64)
    columns = first + tl.arange(0, BV)
    for low in range(0, splits, BS):
        at = low + tl.arange(0, BS)
        there = at < splits
        share = tl.exp2((tl.load(tops + at * rows + row, mask=there, other=float("-inf")) - most) * c).to(tl.float64)
        total += share * tl.load(totals + at * rows + row, mask=there, other=0.0).to(tl.float64)
        if POOL:
            mine = (at * rows + row)[:, None] * width + columns[None, :]
            part = tl.load(sums + mine, mask=there[:, None] & (columns < width)[None, :], other=0.0)
            acc += tl.sum(share[:, None] * part.to(tl.float64), 0)
    whole = tl.sum(total, 0)
    if pid % chunks == 0:
        tl.store(top_out + row, most)
        tl.store(total_out + row, whole.to(tl.float32))
        tl.store(lse + row, (tl.log(whole) + most.to(tl.float64) * scale).to(tl.float32))
    if POOL:
        tl.store(
            output + row * width + columns,
            (acc / tl.where(whole == 0, 1.0, whole)).to(tl.float32),
            mask=columns < width,
        )
