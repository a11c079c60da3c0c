"""Queries that are held out, without leakage, and how soon they find a right record."""

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

DEPTH = 100  # ranks that count
BATCH = 256  # queries searched at once
ENCODED = 1024  # with keys that are encoded each time


class Ranking(NamedTuple):
    """Recall of held-out queries by exact search."""

    recall_1: float  # share of the queries whose nearest record is a right one
    recall_10: float  # share with a right one among the ten nearest
    mrr_100: float  # mean of 1 / rank of the first right one, 0 beyond rank 100
    queries: int


def ranking(
    db: Verbs | View,
    queries: Tensor,  # (m, d)
    positives: Any,  # m ids, or m lists of ids
    projection: torch.nn.Module | None = None,
) -> Ranking:
    """Evaluate how soon queries find one of their right records. Cost m n d: an exact search.

    Recall counts queries, whatever the number of right records each has (as in Karpukhin et al. 2020, section 5). Of a
    `View` by its encoder as of the last reindexing.
    Raises BadInput for no queries, another number of positives than of queries, and ids that are not stored.
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
    """As `ranking`, of what is checked; an id that is not stored is never found. `view`: by its keys as they are."""
    places: list[np.ndarray] = []
    size = BATCH if view is None else ENCODED
    for start in range(0, len(queries), size):
        asked, mine = queries[start : start + size], positives[start : start + size]
        asked = asked if projection is None else projection(asked)
        if isinstance(db, View):
            hits = db.indexed_nearest(asked, DEPTH)
        else:
            hits = (view or db).search(asked, DEPTH, exact=True).rows
        rows = handle(db).core.located([one for ids in mine for one in ids])
        # -2: -1 stands in hits where there are none
        right = check.padded(np.where(rows < 0, -2, rows), [len(ids) for ids in mine], -2)
        places.append(_first(hits.cpu().numpy(), right))
    ranks = np.concatenate(places)
    return Ranking(float((ranks <= 1).mean()), float((ranks <= 10).mean()), float((1 / ranks).mean()), len(ranks))


def _first(rows: np.ndarray, right: np.ndarray) -> np.ndarray:  # (q, k), (q, p) with -2 = none -> (q,)
    """At which rank the first right row of each query stands, from 1 on; infinity where none does."""
    if not rows.shape[1]:
        return np.full(len(rows), np.inf)
    hit = np.zeros(rows.shape, np.bool_)
    for column in right.T:
        hit |= rows == column[:, None]
    return np.where(hit.any(axis=1), hit.argmax(axis=1) + 1.0, np.inf)


class Split(NamedTuple):
    """Positions of the queries to train on, to choose the best epoch by, and to measure with."""

    train: Tensor
    choose: Tensor  # empty where every epoch counts
    test: Tensor


def split(
    queries: Tensor,  # (m, d)
    positives: list[list[Id]],  # m
    holdout: Any,  # a share, or (m,) bool, True = held out
    choose: bool,
    seed: int,
) -> Split:
    """Hold a share of the queries out, half of them to choose an epoch by if asked.

    Queries that share a positive, or are equal, are connected, and a connected group goes to one side whole: no right
    answer of a held-out query is ever trained on. Groups come in random order; one that is too large for what is left
    of a side is passed over.

    Raises BadInput where a side stays empty, or a right record is on both sides of the caller's choice.
    """
    m = len(positives)
    sides: list[list[int]] = [[], [], []]
    if isinstance(holdout, np.ndarray | Tensor):
        named = _named(holdout, positives)
        sides[0], mine = np.flatnonzero(~named).tolist(), np.flatnonzero(named).tolist()
        groups = [[mine[i] for i in group] for group in _groups(queries[mine], [positives[i] for i in mine])]
        held_out, share = len(mine), len(mine) / max(1, m)
    else:
        groups, held_out, share = _groups(queries, positives), round(m * holdout), holdout
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    room = [m, held_out // 2 if choose else 0, held_out - held_out // 2 if choose else held_out]
    last = 1 if choose and sides[0] else 0  # a group too large for what is left: to choose by, where not to train on
    for i in order:
        fits = (side for side in (2, 1, 0) if len(sides[side]) + len(groups[i]) <= room[side])
        sides[max(next(fits), last)] += groups[i]
    if not sides[0] or not sides[2] or (choose and not sides[1]):
        _refuse_empty(m, groups, share, choose)
    return Split(*(torch.tensor(sorted(side), dtype=torch.int64) for side in sides))


def _named(holdout: Any, positives: list[list[Id]]) -> NDArray[np.bool_]:  # (m,)
    """Return the held-out queries. Raises BadInput where one shares a right record with a training query."""
    found, m = np.asarray(holdout.cpu() if isinstance(holdout, Tensor) else holdout), len(positives)
    if found.dtype != np.bool_ or found.shape != (m,):
        raise BadInput(
            f"holdout has dtype {found.dtype} and shape {found.shape}; expected a share between 0 and 1, or ({m},) "
            "bool, True = held out"
        )
    trained = {name for i in np.flatnonzero(~found) for name in positives[i]}
    shared = [i for i in np.flatnonzero(found).tolist() if not trained.isdisjoint(positives[i])]
    if shared:
        raise BadInput(
            f"{len(shared)} held-out queries, the first is query {shared[0]}, share a right record with a training "
            "query; hold out all queries of a record, or none"
        )
    return found


def _refuse_empty(m: int, groups: list[list[int]], share: float, choose: bool) -> None:
    largest, parts = max(map(len, groups), default=0), 2 if choose else 1
    enough = parts + 1
    if 0 < share < 1:
        enough = max(math.floor((parts - 0.5) / share) + 1, math.floor(0.5 / (1 - share)) + 1, enough)
    ways = [f"give more pairs, such as {enough:,} that share none"]
    ways += ["another holdout"] * (len(groups) > parts)
    ways += ["patience None (--patience 0 on the command line)"] * (choose and len(groups) > 1)
    raise BadInput(
        f"{m} queries in {len(groups)} groups, the largest of {largest}, leave a side empty when {share:g} are "
        f"held out: queries that share a positive stay together; {', or '.join(ways)}"
    )


def _groups(queries: Tensor, positives: list[list[Id]]) -> list[list[int]]:  # (m, d), m lists
    """The connected components of queries that share a positive or are equal."""
    leader = list(range(len(positives)))

    def root(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
        return i

    first: dict[Id | bytes, int] = {}
    alike = queries.cpu().numpy() + 0.0  # makes -0.0 equal to 0.0 in bytes, too
    for i, (query, mine) in enumerate(zip(alike, positives, strict=True)):
        for name in (query.tobytes(), *mine):
            leader[root(i)] = root(first.setdefault(name, i))
    groups: dict[int, list[int]] = {}
    for i in range(len(leader)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())
