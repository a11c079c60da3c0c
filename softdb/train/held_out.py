"""Split queries into training and held-out ones without leakage, and rank the right records of held-out queries."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.check import Id
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.nn.targets import handle, listed
from softdb.nn.view import View
from softdb.train.pairs import require_known

DEPTH = 100  # number of nearest records in which a right record is looked for
BATCH = 256  # number of queries searched at once
VIEW_BATCH = 1024  # number of queries searched at once in a view, which encodes all keys for each batch


class Ranking(NamedTuple):
    """Recall and reciprocal rank with which exact search finds the right records of held-out queries."""

    recall_1: float  # share of the queries whose nearest record is a right record
    recall_10: float  # share of the queries with a right record among the ten nearest
    mrr_100: float  # mean of 1 / rank of the first right record, with 0 for a rank above 100
    queries: int  # number of queries


def ranking(
    db: Verbs | View,
    queries: Tensor,  # (m, d)
    positives: Any,  # m ids, or m lists of ids
    projection: torch.nn.Module | None = None,
) -> Ranking:
    """Measure the rank at which exact search finds the first right record of each query. Cost m n d.

    A query counts as found with any of its right records (as in Karpukhin et al. 2020, section 5). A `View` is searched
    by the vectors of its last reindexing. Raises BadInput for no queries, if positives and queries differ in number,
    and for ids that are not stored.
    """
    if not isinstance(queries, Tensor | np.ndarray) or queries.ndim != 2 or not len(queries):
        came = check.shown(queries) if not hasattr(queries, "shape") else f"of shape {tuple(queries.shape)}"
        raise BadInput(f"queries are {came}; expected one or more, (m, d)")
    right = listed(positives, len(queries))
    require_known(handle(db), right)
    return ranked(db, torch.as_tensor(queries), right, projection)


@torch.no_grad()
def ranked(
    db: Verbs | View,
    queries: Tensor,
    positives: list[list[Id]],
    projection: torch.nn.Module | None,
    view: View | None = None,
) -> Ranking:
    """Compute the `Ranking` of checked queries; ids that are not stored are never found. `view`: search this view."""
    blocks: list[np.ndarray] = []
    size = BATCH if view is None else VIEW_BATCH
    for start in range(0, len(queries), size):
        batch, lists = queries[start : start + size], positives[start : start + size]
        batch = batch if projection is None else projection(batch)
        if isinstance(db, View):
            hits = db.indexed_nearest(batch, DEPTH)
        else:
            hits = (view or db).search(batch, DEPTH, exact=True).rows
        rows = handle(db).core.located([name for ids in lists for name in ids])
        # padding is -2, as -1 in hits means no record
        right = check.padded(np.where(rows < 0, -2, rows), [len(ids) for ids in lists], -2)
        blocks.append(_ranks(hits.cpu().numpy(), right))
    ranks = np.concatenate(blocks)
    return Ranking(float((ranks <= 1).mean()), float((ranks <= 10).mean()), float((1 / ranks).mean()), len(ranks))


def _ranks(rows: np.ndarray, right: np.ndarray) -> np.ndarray:  # (q, k), (q, p) with -2 = none -> (q,)
    """Return the rank, counted from 1, of the first right row among each query's rows; infinity if there is none."""
    if not rows.shape[1]:
        return np.full(len(rows), np.inf)
    hit = np.zeros(rows.shape, np.bool_)
    for column in right.T:
        hit |= rows == column[:, None]
    return np.where(hit.any(axis=1), hit.argmax(axis=1) + 1.0, np.inf)


class Split(NamedTuple):
    """Indices of the queries that train, of those that choose the best epoch, and of those that are reported."""

    train: Tensor
    choose: Tensor  # empty if the last epoch is always used
    test: Tensor


def split(
    queries: Tensor,  # (m, d)
    positives: list[list[Id]],  # m
    holdout: Any,  # a share, or (m,) bool, True = held out
    choose: bool,
    seed: int,
) -> Split:
    """Split the queries into training and held-out ones; with `choose`, half of the held-out ones choose the epoch.

    Queries that share a positive, or are equal, form a group, and all queries of a group go to the same side: no right
    record of a held-out query is ever trained on. Groups are assigned in random order; a group that no longer fits on
    a held-out side goes to another side.

    Raises BadInput if a side stays empty, or if the caller's mask puts queries of one right record on both sides.
    """
    m = len(positives)
    sides: list[list[int]] = [[], [], []]
    if isinstance(holdout, np.ndarray | Tensor):
        mask = _held_out_mask(holdout, positives)
        sides[0], chosen = np.flatnonzero(~mask).tolist(), np.flatnonzero(mask).tolist()
        groups = [[chosen[i] for i in group] for group in _groups(queries[chosen], [positives[i] for i in chosen])]
        held_out, share = len(chosen), len(chosen) / max(1, m)
    else:
        groups, held_out, share = _groups(queries, positives), round(m * holdout), holdout
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    room = [m, held_out // 2 if choose else 0, held_out - held_out // 2 if choose else held_out]
    lowest = 1 if choose and sides[0] else 0  # the caller's held-out queries are never trained on
    for i in order:
        fits = (side for side in (2, 1, 0) if len(sides[side]) + len(groups[i]) <= room[side])
        sides[max(next(fits), lowest)] += groups[i]
    if not sides[0] or not sides[2] or (choose and not sides[1]):
        _refuse_empty(m, groups, share, choose)
    return Split(*(torch.tensor(sorted(side), dtype=torch.int64) for side in sides))


def _held_out_mask(holdout: Any, positives: list[list[Id]]) -> NDArray[np.bool_]:  # (m,)
    """Check and return the caller's mask. Raises BadInput if a held-out and a training query share a right record."""
    mask, m = np.asarray(holdout.cpu() if isinstance(holdout, Tensor) else holdout), len(positives)
    if mask.dtype != np.bool_ or mask.shape != (m,):
        raise BadInput(
            f"holdout has dtype {mask.dtype} and shape {mask.shape}; expected a share between 0 and 1, or ({m},) "
            "bool, True = held out"
        )
    trained = {name for i in np.flatnonzero(~mask) for name in positives[i]}
    shared = [i for i in np.flatnonzero(mask).tolist() if not trained.isdisjoint(positives[i])]
    if shared:
        raise BadInput(
            f"{len(shared)} held-out queries, the first is query {shared[0]}, share a right record with a training "
            "query; hold out all queries of a record, or none"
        )
    return mask


def _refuse_empty(m: int, groups: list[list[int]], share: float, choose: bool) -> None:
    largest, held_out_sides = max(map(len, groups), default=0), 2 if choose else 1
    enough = held_out_sides + 1
    if 0 < share < 1:
        enough = max(math.floor((held_out_sides - 0.5) / share) + 1, math.floor(0.5 / (1 - share)) + 1, enough)
    ways = [f"give more pairs, such as {enough:,} that share none"]
    ways += ["another holdout"] * (len(groups) > held_out_sides)
    ways += ["patience None (--patience 0 on the command line)"] * (choose and len(groups) > 1)
    raise BadInput(
        f"holdout={share:g} leaves the training or a held-out set empty: queries that share a positive stay together, "
        f"and the {m} queries form {len(groups)} groups, the largest of {largest}; {', or '.join(ways)}"
    )


def _groups(queries: Tensor, positives: list[list[Id]]) -> list[list[int]]:  # (m, d), m lists
    """Return the groups of queries connected by equal queries or a shared positive, found by union-find."""
    parent = list(range(len(positives)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    first: dict[Id | bytes, int] = {}
    vectors = queries.cpu().numpy() + 0.0  # turns -0.0 into 0.0, so that equal queries have equal bytes
    for i, (query, ids) in enumerate(zip(vectors, positives, strict=True)):
        for name in (query.tobytes(), *ids):
            parent[root(i)] = root(first.setdefault(name, i))
    groups: dict[int, list[int]] = {}
    for i in range(len(parent)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())
