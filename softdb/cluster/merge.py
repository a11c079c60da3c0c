"""Replies of several shards become one: the nearest by score, ties by id, as one database has them; states and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.answers import Records
from softdb.check import Id
from softdb.cluster import shard as say
from softdb.cluster.shard import ShardHits
from softdb.errors import SoftDBError

_JOINED = (say.PassOver, say.Nearest, say.CountWithin, say.Explain)  # questions whose replies join


def id_order(name: Id) -> tuple[bool, Id]:
    """Sort key of ids where scores tie: numbers, then strings."""
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
    if len(parts) == 1:  # its own are in order
        return first(parts[0], max(map(len, parts[0].ids), default=0) if k is None else k)
    rows, scores = (np.concatenate([part[i] for part in parts], axis=1) for i in (0, 1))
    ids = [[name for mine in line for name in mine] for line in zip(*(part.ids for part in parts), strict=True)]
    unsure = [part.finder for part in parts if not part.certain]
    finder = unsure[0] if unsure else parts[0].finder
    whole = in_order(ShardHits(rows, scores, ids, finder, not unsure, sum(part.taking_part for part in parts)))
    return first(whole, max(map(len, ids), default=0) if k is None else k)


def together(asks: Mapping[int, say.Message], replies: Mapping[int, Any]) -> dict[tuple[int, ...], Any]:
    """Replies of shards that lie together, by whose they are: those to one question merged before anything is sent.

    Of a pass, a search, a count, an explanation or the gradients of a pass; others, and errors, stay each shard's own.
    """
    groups = dict[Any, list[int]]()
    for shard, ask in asks.items():
        apart = isinstance(replies[shard], Exception) or (isinstance(ask, say.PassOver) and ask.apart)
        joined = not apart and type(ask.of if isinstance(ask, say.Backward) else ask) in _JOINED
        groups.setdefault(type(ask) if joined else shard, []).append(shard)
    return {
        tuple(group): replies[group[0]] if len(group) == 1 else _whole(asks[group[0]], [replies[one] for one in group])
        for group in groups.values()
    }


def of_owners(found: Mapping[tuple[int, ...], Any], missing: Mapping[int, str]) -> say.ShardReplies:
    """Replies by `together`, as a transport returns them; raises the first that is an error of softdb."""
    for mine in sorted(found):
        if isinstance(found[mine], SoftDBError):
            raise found[mine]
    failed = {mine[0]: str(reply) for mine, reply in found.items() if isinstance(reply, Exception)}
    replies = {mine[0]: reply for mine, reply in found.items() if mine[0] not in failed}
    return say.ShardReplies(replies, {**missing, **failed}, {mine[0]: mine for mine in found if len(mine) > 1})


def _whole(ask: say.Message, parts: Sequence[Any]) -> Any:
    """The reply of several shards together."""
    if isinstance(ask, say.PassOver):
        return passed_over(parts)
    if isinstance(ask, say.Backward):
        columns = zip(*(part.parameters for part in parts), strict=True)
        return say.Gradient(sum(part.queries for part in parts), tuple(sum(column) for column in columns))
    if isinstance(ask, say.CountWithin):
        return say.Counted(sum(part.counts for part in parts))
    if isinstance(ask, say.Explain):
        return say.Explained(ranked([part.found for part in parts], ask.k), sum(part.entropy for part in parts))
    assert isinstance(ask, say.Nearest)
    return ranked(parts, ask.k)


def passed_over(parts: Sequence[say.Passed]) -> say.Passed:
    """As `softdb.pool.merge`, without a graph, in float64: a sixth of the time for one query."""
    if len(parts) == 1:
        return parts[0]
    lses = np.stack([part.lse for part in parts]).astype(np.float64)
    most = lses.max(0)
    shares = np.exp(lses - np.where(most > -np.inf, most, 0))
    total = shares.sum(0)
    with np.errstate(divide="ignore"):
        lse = most + np.log(total)
    shares /= np.where(total > 0, total, 1)
    output = sum(share[:, None] * part.output for share, part in zip(shares, parts, strict=True))
    dtype = parts[0].lse.dtype
    return say.Passed(np.asarray(output, dtype), lse.astype(dtype), sum(part.taking_part for part in parts))


def joined_records(parts: list[Records], order: NDArray[np.int64]) -> Records:
    """Records of several shards as one batch, in the order (n,) of their places."""

    def listed(name: str) -> list[Any]:
        whole = [one for part in parts for one in getattr(part, name)]
        return [whole[i] for i in order.tolist()]

    places = torch.from_numpy(order)
    keys, keyed = (torch.cat([getattr(part, name) for part in parts])[places] for name in ("keys", "keyed"))
    values = None if parts[0].values is None else torch.cat([part.values for part in parts if part.values is not None])
    own = None if values is None else values[places]
    return Records(listed("ids"), keys, own, listed("payload_texts"), listed("texts"), keyed)
