"""The nearest of several parts become the nearest of the whole: by score, ties by id, as one database has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from softdb.check import Id
from softdb.cluster.shard import ShardHits

__all__ = ["first", "id_order", "in_order", "ranked"]


def id_order(name: Id) -> tuple[bool, Id]:
    """What ids are sorted by where scores tie: numbers, then strings."""
    return isinstance(name, str), name


def in_order(found: ShardHits) -> ShardHits:
    """Best first, those that score alike by id; the missing last. Cost q k log k."""
    order = np.argsort(-found.scores, axis=1, kind="stable")
    rows, scores = (np.take_along_axis(column, order, 1) for column in (found.rows, found.scores))
    there = found.rows >= 0
    places = np.cumsum(there, axis=1) - 1  # of each hit among its query's ids
    places = np.take_along_axis(np.where(there, places, -1), order, 1)
    ids = [
        [names[place] for place in mine if place >= 0] for names, mine in zip(found.ids, places.tolist(), strict=True)
    ]
    same = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    for line in np.flatnonzero(same.any(1)):
        names, own = ids[line], scores[line].tolist()
        best = sorted(range(len(names)), key=lambda i: (-own[i], id_order(names[i])))
        rows[line, : len(best)], ids[line] = rows[line, best], [names[i] for i in best]
    return found._replace(rows=rows, scores=scores, ids=ids)


def first(found: ShardHits, k: int) -> ShardHits:
    """The k first of each query."""
    return found._replace(rows=found.rows[:, :k], scores=found.scores[:, :k], ids=[mine[:k] for mine in found.ids])


def ranked(parts: Sequence[ShardHits], k: int | None) -> ShardHits:
    """The k best of all parts; None: all of them, as wide as the query with the most."""
    rows, scores = (np.concatenate([part[i] for part in parts], axis=1) for i in (0, 1))
    ids = [[name for mine in line for name in mine] for line in zip(*(part.ids for part in parts), strict=True)]
    unsure = [part.finder for part in parts if not part.certain]
    finder = unsure[0] if unsure else parts[0].finder
    whole = in_order(ShardHits(rows, scores, ids, finder, not unsure, sum(part.taking_part for part in parts)))
    return first(whole, max(map(len, ids), default=0) if k is None else k)
