"""Functions that the kernels share: products in full float32 precision, scores of a tile, and masks."""

from __future__ import annotations

import os

import triton
import triton.language as tl

DOT, COSINE, L2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COUNTS = ("heads", "queries", "n", "rows", "splits", "chunks", "tiles", "groups", "m")  # not specialized by value
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter cannot multiply bfloat16


@triton.jit
def product(x, y):  # (m, k) float32, (k, n) as stored -> (m, n) float32
    """Return x y. If y is float16 (bfloat16), split x into two (three) such parts, whose products are exact."""
    if y.dtype == tl.float32:
        result = tl.dot(x, y, input_precision="ieee")
    elif y.dtype == tl.float16:
        # divide each row by a power of two, to stay within the range of float16
        bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
        x = x * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
        high = x.to(tl.float16)
        low = ((x - high.to(tl.float32)) * 2048).to(tl.float16)
        result = (tl.dot(high, y) + tl.dot(low, y) / 2048) * bits.to(tl.float32, bitcast=True)[:, None]
    else:
        high = x.to(tl.bfloat16)
        remainder = x - high.to(tl.float32)
        middle = remainder.to(tl.bfloat16)
        low = (remainder - middle.to(tl.float32)).to(tl.bfloat16)
        if INTERPRETED:
            y = y.to(tl.float32)
            high, middle, low = high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
        result = tl.dot(high, y) + (tl.dot(middle, y) + tl.dot(low, y))
    return result


@triton.jit
def rows_of(base, rows, stride, valid, first, width, B: tl.constexpr):  # -> (m, B)
    """Load B columns of rows (m,), starting at column `first`; 0 beyond the width and for rows that are not valid."""
    columns = first + tl.arange(0, B)
    at = base + rows[:, None] * stride + columns[None, :]
    return tl.load(at, mask=valid[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def squares(keys):  # (m, BD) -> (m,) three times
    """Return Σ k², Σ (2⁶⁴ k)² and Σ (2⁻⁷⁰ k)² for each key: at least one neither underflows nor overflows."""
    keys = keys.to(tl.float32)
    up, down = keys * 18446744073709551616.0, keys * 8.470329472543003e-22
    return tl.sum(keys * keys, 1), tl.sum(up * up, 1), tl.sum(down * down, 1)


@triton.jit
def inverse_lengths(sums, small, large):  # (m,) each, as `squares`
    """Return 1 / ‖k‖ for each key, from the sums of `squares`; 0 for a key of zeros."""
    inverse = tl.div_rn(1.0, tl.sqrt_rn(sums))
    tiny = tl.where(small >= 4.7e-38, tl.div_rn(18446744073709551616.0, tl.sqrt_rn(small)), 0.0)
    huge = tl.div_rn(8.470329472543003e-22, tl.sqrt_rn(large))
    return tl.where(sums < 1e-30, tiny, tl.where(sums > 1e30, huge, inverse))


@triton.jit
def distances(
    q, q_rows, q_stride, q_valid, k, k_rows, k_stride, k_valid, d,
    BQ: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Return -‖q - k‖² (BQ, BN), summed from the differences of BL columns at a time."""
    scores = tl.zeros((BQ, BN), tl.float32)
    for first in range(0, d, BL):
        queries = rows_of(q, q_rows, q_stride, q_valid, first, d, BL)
        keys = rows_of(k, k_rows, k_stride, k_valid, first, d, BL).to(tl.float32)
        difference = queries[:, None, :] - keys[None, :, :]
        scores -= tl.sum(difference * difference, 2)
    return scores


@triton.jit
def scored(
    q, q_tile, q_rows, q_stride, q_valid, k, k_rows, k_stride, k_valid, d,
    METRIC: tl.constexpr, ONCE: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Return scores (BQ, BN) and 1 / ‖k‖ (BN,), which is 1 unless the metric is cosine.

    ONCE is True if d ≤ BD: `q_tile` has all columns of the queries. There is no inner loop, so Triton can prefetch.
    """
    inverse = tl.full((BN,), 1.0, tl.float32)
    if METRIC == L2:
        scores = distances(q, q_rows, q_stride, q_valid, k, k_rows, k_stride, k_valid, d, BQ, BN, BL)
    elif ONCE:
        keys = rows_of(k, k_rows, k_stride, k_valid, 0, d, BD)
        scores = product(q_tile, tl.trans(keys))
        if METRIC == COSINE:
            sums, small, large = squares(keys)
            inverse = inverse_lengths(sums, small, large)
    else:
        scores = tl.zeros((BQ, BN), tl.float32)
        sums, small, large = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
        for first in range(0, d, BD):
            queries = rows_of(q, q_rows, q_stride, q_valid, first, d, BD)
            keys = rows_of(k, k_rows, k_stride, k_valid, first, d, BD)
            scores += product(queries, tl.trans(keys))
            if METRIC == COSINE:
                more, more_small, more_large = squares(keys)
                sums, small, large = sums + more, small + more_small, large + more_large
        if METRIC == COSINE:
            inverse = inverse_lengths(sums, small, large)
    if METRIC == COSINE:
        scores *= inverse[None, :]
    return scores, inverse


@triton.jit
def present(keep, at, valid, KEEP: tl.constexpr):  # (m,) -> (m,)
    """Return `valid` without the records that `keep` excludes from all queries."""
    if KEEP:
        valid = valid & (tl.load(keep + at, mask=valid, other=0) != 0)
    return valid


@triton.jit
def together(mask, q_rows, q_stride, q_valid, at, valid, MASK: tl.constexpr):  # (BQ,), (BN,) -> (BQ, BN)
    """Return True for each pair of a query and a record that takes part in the query."""
    both = q_valid[:, None] & valid[None, :]
    if MASK:
        both = both & (tl.load(mask + q_rows[:, None] * q_stride + at[None, :], mask=both, other=0) != 0)
    return both


@triton.jit
def finite(scores):
    """Return True for each finite score."""
    return tl.abs(scores) < float("inf")
