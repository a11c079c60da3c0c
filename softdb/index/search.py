"""Candidates for queries: by the index where it is worth it, exactly otherwise, and always as many as there can be."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Live, Rows, prepared
from softdb.index.flat import nearest
from softdb.index.rerank import best
from softdb.store import Snapshot

__all__ = ["border_of", "find"]

FEW = 4096  # records that are compared exactly sooner than an index is asked
FLOOR = 64  # candidates that are looked at again at least


def find(
    snapshot: Snapshot,
    index: Index | None,
    queries: Tensor,  # (q, d)
    k: int,
    metric: Metric,
    allowed: Live | None,  # (size,) over positions; None: every live record
) -> Rows:  # (q, k)
    """Positions of the k nearest that are allowed and live, -1 only beyond their number.

    Rows younger than the index are compared exactly and merged. Cost of the index's search, k times its candidates in
    exact scores, and the young rows.
    """
    if index is None or k > index.covered // 8:
        return nearest(snapshot, queries, k, metric, allowed)
    if allowed is None and snapshot.count == snapshot.size:
        keep, count = None, snapshot.size
    else:
        keep = snapshot.live if allowed is None else snapshot.live & allowed
        count = int(np.count_nonzero(keep))
    if count <= max(FEW, 4 * k):
        return nearest(snapshot, queries, k, metric, allowed)
    vectors = np.ascontiguousarray(queries.detach().cpu().numpy(), np.float32)
    border = border_of(snapshot, index)
    found = _covered(snapshot, index, vectors, k, None if keep is None else keep[:border], border)
    if border < snapshot.size:
        young = nearest(snapshot, queries, min(k, snapshot.size - border), metric, allowed, start=border)
        found = best(snapshot, vectors, np.concatenate([found, young], axis=1), k, metric)
    short = (found < 0).any(axis=1) if count >= k else np.ones(len(found), np.bool_)
    if short.any():  # the index gave out before the records did
        found[short] = nearest(snapshot, queries[np.flatnonzero(short)], k, metric, allowed)
    return found


def border_of(snapshot: Snapshot, index: Index) -> int:
    """The first position whose row is younger than the index."""
    if snapshot.contiguous:
        return min(index.covered, snapshot.size)
    return int(np.searchsorted(snapshot.rows(np.arange(snapshot.size)), index.covered))


def _covered(
    snapshot: Snapshot, index: Index, queries: Floats, k: int, keep: Live | None, border: int
) -> Rows:  # (q, k) positions
    """The k best of the rows that the index holds."""
    allowed, effort = None, index.effort * max(1, -(-k // index.tuned_for))  # farther neighbours lie in more places
    if keep is not None:
        allowed = np.zeros(index.covered, np.bool_)
        allowed[snapshot.rows(np.flatnonzero(keep))] = True
        share = max(1, int(np.count_nonzero(keep))) / border
        effort = int(np.ceil(effort / share))  # the same number of records that count
    rows = index.find(prepared(queries, index.metric), max(FLOOR, index.candidates * k), allowed, effort)
    return best(snapshot, queries, snapshot.positions(rows), k, index.metric)
