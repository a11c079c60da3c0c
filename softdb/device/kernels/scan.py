"""Kernels of a search: one stores the best score of each group of records, one stores all scores of chosen groups.

The k groups with the largest best scores contain the k nearest records: the best records of these k groups score
higher than every record in any other group (or equal, at a lower position).
"""

from __future__ import annotations

import triton
import triton.language as tl

from softdb.device.kernels.tiles import COUNTS, finite, present, rows_of, scored, together


@triton.jit(do_not_specialize=COUNTS)
def group_bests(
    q, k, keep, mask, bests,  # (h, q, d), (h, n, d), …; (h, q, groups)
    queries, n, d, groups,
    q_h, q_q, k_h, k_n, m_h, m_q,
    METRIC: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr, GROUP: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store the largest score in a group of GROUP records: -inf if no record takes part, inf if a score overflows."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(queries, BQ)
    q_rows = (pid % blocks * BQ + tl.arange(0, BQ)).to(tl.int64)
    group, head = (pid // blocks % groups).to(tl.int64), (pid // blocks // groups).to(tl.int64)
    q_valid = q_rows < queries
    q, k, mask = q + head * q_h, k + head * k_h, mask + head * m_h
    q_tile = rows_of(q, q_rows, q_q, q_valid, 0, d, BD)
    best = tl.full((BQ,), float("-inf"), tl.float32)
    for low in range(0, GROUP, BN):
        at = group * GROUP + low + tl.arange(0, BN)
        valid = present(keep, at, at < n, KEEP)
        scores, _ = scored(q, q_tile, q_rows, q_q, q_valid, k, at, k_n, valid, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_valid, at, valid, MASK)
        scores = tl.where(finite(scores), scores, float("inf"))
        best = tl.maximum(best, tl.max(tl.where(alive, scores, float("-inf")), 1))
    tl.store(bests + (head * queries + q_rows) * groups + group, best, mask=q_valid)


@triton.jit(do_not_specialize=COUNTS)
def group_scores(
    q, k, keep, mask, chosen, out,  # …; (h, q, m) groups, (h, q, m, GROUP)
    queries, n, d, m,
    q_h, q_q, k_h, k_n, m_h, m_q,
    METRIC: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr, GROUP: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store all scores in a group for one query, computed as in `group_bests`: -inf if dead, NaN if not finite."""
    pid = tl.program_id(0).to(tl.int64)  # index into (h, q, m), flattened
    head, query = pid // m // queries, pid // m % queries
    group = tl.load(chosen + pid)
    q_valid = tl.arange(0, BQ) == 0
    q_rows = query + tl.arange(0, BQ)
    q, k, mask = q + head * q_h, k + head * k_h, mask + head * m_h
    q_tile = rows_of(q, q_rows, q_q, q_valid, 0, d, BD)
    for low in range(0, GROUP, BN):
        at = group * GROUP + low + tl.arange(0, BN)
        valid = present(keep, at, at < n, KEEP)
        scores, _ = scored(q, q_tile, q_rows, q_q, q_valid, k, at, k_n, valid, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_valid, at, valid, MASK)
        scores = tl.where(finite(scores), scores, float("nan"))
        scores = tl.where(alive, scores, float("-inf"))
        inside = q_valid[:, None] & tl.full((1, BN), 1, tl.int1)
        tl.store(
            out + pid * GROUP + low + (tl.arange(0, BQ) * 0)[:, None] + tl.arange(0, BN)[None, :], scores, mask=inside
        )
