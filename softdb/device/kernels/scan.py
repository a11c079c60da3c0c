"""The best score of each group of records, and all scores of the groups that were chosen.

The k nearest lie in the k groups whose best scores are largest, ties by position: before any other group stand k
records that are nearer than its best.
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
    """The largest score of GROUP records, -inf where none takes part, infinite where one overflows."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(queries, BQ)
    q_rows = (pid % blocks * BQ + tl.arange(0, BQ)).to(tl.int64)
    group, head = (pid // blocks % groups).to(tl.int64), (pid // blocks // groups).to(tl.int64)
    q_there = q_rows < queries
    q, k, mask = q + head * q_h, k + head * k_h, mask + head * m_h
    asked = rows_of(q, q_rows, q_q, q_there, 0, d, BD)
    best = tl.full((BQ,), float("-inf"), tl.float32)
    for low in range(0, GROUP, BN):
        at = group * GROUP + low + tl.arange(0, BN)
        there = present(keep, at, at < n, KEEP)
        scores, _ = scored(q, asked, q_rows, q_q, q_there, k, at, k_n, there, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_there, at, there, MASK)
        scores = tl.where(finite(scores), scores, float("inf"))
        best = tl.maximum(best, tl.max(tl.where(alive, scores, float("-inf")), 1))
    tl.store(bests + (head * queries + q_rows) * groups + group, best, mask=q_there)


@triton.jit(do_not_specialize=COUNTS)
def group_scores(
    q, k, keep, mask, chosen, out,  # …; (h, q, m) groups, (h, q, m, GROUP)
    queries, n, d, m,
    q_h, q_q, k_h, k_n, m_h, m_q,
    METRIC: tl.constexpr, KEEP: tl.constexpr, MASK: tl.constexpr, ONCE: tl.constexpr, GROUP: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The scores of one chosen group with one query, by the same operations: -inf where dead, NaN where not finite."""
    pid = tl.program_id(0).to(tl.int64)  # over (h, q, m)
    head, query = pid // m // queries, pid // m % queries
    group = tl.load(chosen + pid)
    q_there = tl.arange(0, BQ) == 0
    q_rows = query + tl.arange(0, BQ)
    q, k, mask = q + head * q_h, k + head * k_h, mask + head * m_h
    asked = rows_of(q, q_rows, q_q, q_there, 0, d, BD)
    for low in range(0, GROUP, BN):
        at = group * GROUP + low + tl.arange(0, BN)
        there = present(keep, at, at < n, KEEP)
        scores, _ = scored(q, asked, q_rows, q_q, q_there, k, at, k_n, there, d, METRIC, ONCE, BQ, BN, BD, BL)
        alive = together(mask, q_rows, m_q, q_there, at, there, MASK)
        scores = tl.where(finite(scores), scores, float("nan"))
        scores = tl.where(alive, scores, float("-inf"))
        inside = q_there[:, None] & tl.full((1, BN), 1, tl.int1)
        tl.store(
            out + pid * GROUP + low + (tl.arange(0, BQ) * 0)[:, None] + tl.arange(0, BN)[None, :], scores, mask=inside
        )
