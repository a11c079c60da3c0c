"""Kernels of the forward pass: one sums over each range of the records by an online softmax, one merges the ranges.

With scores S and the best score of each tile, p = 2^(c (S - best)), total = Σ p and acc = Σ p v (Milakov and Gimelshein
2018; ranges as in flash-decoding). c is scale / log 2, since the kernels use exponentials of base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softdb.device.kernels.tiles import COUNTS, finite, present, product, rows_of, scored, together

NOTHING, VALUES, LABELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_pooled(p, v, at, v_stride, valid, first, width, POOL: tl.constexpr, BV: tl.constexpr):  # (BQ, BN) -> (BQ, BV)
    """Return Σ p v over the records of a tile; for labels, the sum of p for each class."""
    if POOL == VALUES:
        values = rows_of(v, at, v_stride, valid, first, width, BV)
    else:
        classes = first + tl.arange(0, BV)
        values = (tl.load(v + at, mask=valid, other=-1)[:, None] == classes[None, :]).to(tl.float16)
    return product(p, values)


@triton.jit(do_not_specialize=COUNTS)
def pass_forward(
    q, k, v, keep, mask, sums, tops, totals,  # (h, q, d), (h, n, d), …; (splits, h, q, v), (splits, h, q) twice
    c, heads, queries, n, d, width, rows, splits, chunks,
    q_h, q_q, k_h, k_n, v_h, v_n, m_h, m_q,
    METRIC: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store top, total and BV columns of Σ p v, for BQ queries and one range of the records."""
    pid = tl.program_id(0)
    first = (pid % chunks) * BV
    blocks = tl.cdiv(queries, BQ)
    q_rows = ((pid // chunks) % blocks * BQ + tl.arange(0, BQ)).to(tl.int64)
    split = (pid // chunks // blocks % splits).to(tl.int64)
    head = (pid // chunks // blocks // splits).to(tl.int64)
    q_valid = q_rows < queries
    q, k, v, mask = q + head * q_h, k + head * k_h, v + head * v_h, mask + head * m_h
    q_tile = rows_of(q, q_rows, q_q, q_valid, 0, d, BD)
    top, total = tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    acc, bad = tl.zeros((BQ, BV), tl.float32), tl.zeros((BQ,), tl.int32)
    start = split * rows
    stop = tl.minimum(start + rows, n)
    for low in range(0, rows, BN):
        at = start + low + tl.arange(0, BN)
        valid = present(keep, at, at < stop, KEEP)
        scores, _ = scored(q, q_tile, q_rows, q_q, q_valid, k, at, k_n, valid, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_valid, at, valid, MASK)
        bad = tl.maximum(bad, tl.max((alive & (finite(scores) == 0)).to(tl.int32), 1))
        scores = tl.where(alive & finite(scores), scores, float("-inf"))
        best = tl.max(scores, 1)
        new = tl.maximum(top, best)
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((scores - tl.where(best == float("-inf"), 0.0, best)[:, None]) * c)
        decay, fresh = tl.exp2((top - shift) * c), tl.exp2((best - shift) * c)
        total = total * decay + tl.sum(p, 1) * fresh
        if POOL != NOTHING:
            more = tile_pooled(p, v, at, v_n, valid, first, width, POOL, BV)
            acc = acc * decay[:, None] + more * fresh[:, None]
        top = new
    out = (split * heads + head) * queries + q_rows
    if pid % chunks == 0:
        tl.store(tops + out, top, mask=q_valid)
        tl.store(totals + out, tl.where(bad > 0, float("nan"), total), mask=q_valid)
    if POOL != NOTHING:
        columns = first + tl.arange(0, BV)
        tl.store(
            sums + out[:, None] * width + columns[None, :], acc, mask=q_valid[:, None] & (columns < width)[None, :]
        )


@triton.jit(do_not_specialize=COUNTS)
def merge_splits(
    sums, tops, totals, output, top_out, total_out, lse, c, scale, rows, width, splits, chunks,
    POOL: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Merge the sums over all ranges for one query, in float64. `rows` is the number of heads times queries."""
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
        valid = at < splits
        share = tl.exp2((tl.load(tops + at * rows + row, mask=valid, other=float("-inf")) - most) * c).to(tl.float64)
        total += share * tl.load(totals + at * rows + row, mask=valid, other=0.0).to(tl.float64)
        if POOL:
            offsets = (at * rows + row)[:, None] * width + columns[None, :]
            split_sums = tl.load(sums + offsets, mask=valid[:, None] & (columns < width)[None, :], other=0.0)
            acc += tl.sum(share[:, None] * split_sums.to(tl.float64), 0)
    grand_total = tl.sum(total, 0)
    if pid % chunks == 0:
        tl.store(top_out + row, most)
        tl.store(total_out + row, grand_total.to(tl.float32))
        tl.store(lse + row, (tl.log(grand_total) + most.to(tl.float64) * scale).to(tl.float32))
    if POOL:
        tl.store(
            output + row * width + columns,
            (acc / tl.where(grand_total == 0, 1.0, grand_total)).to(tl.float32),
            mask=columns < width,
        )
