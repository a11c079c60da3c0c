"""Merge the replies of several shards: sort hits, average outputs by their log-normalisers, and sum counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.answers import Records
from softdb.cluster import shard as messages
from softdb.cluster.shard import ShardHits
from softdb.errors import SoftDBError

_JOINED = (messages.PassOver, messages.Nearest, messages.CountWithin, messages.Explain)  # replies to these are merged


def in_order(hits: ShardHits) -> ShardHits:
    """Sort hits by score, best first, and equal scores by id; row -1 comes last. Takes O(q k log k) time."""
    order = np.argsort(-hits.scores, axis=1, kind="stable")
    rows, scores = (np.take_along_axis(column, order, 1) for column in (hits.rows, hits.scores))
    present = hits.rows >= 0
    places = np.cumsum(present, axis=1) - 1  # index of each hit in the query's list of ids
    places = np.take_along_axis(np.where(present, places, -1), order, 1)
    ids = [
        [names[i] for i in own_places if i >= 0] for names, own_places in zip(hits.ids, places.tolist(), strict=True)
    ]
    same = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    for line in np.flatnonzero(same.any(1)):
        # numbers come before strings
        names, own = ids[line], scores[line].tolist()
        best = sorted(range(len(names)), key=lambda i: (-own[i], isinstance(names[i], str), names[i]))
        rows[line, : len(best)], ids[line] = rows[line, best], [names[i] for i in best]
    return hits._replace(rows=rows, scores=scores, ids=ids)


def first(hits: ShardHits, k: int) -> ShardHits:
    """Return the first k hits of each query."""
    return hits._replace(rows=hits.rows[:, :k], scores=hits.scores[:, :k], ids=[names[:k] for names in hits.ids])


def ranked(parts: Sequence[ShardHits], k: int | None) -> ShardHits:
    """Return the k best hits of all shards; with k=None all hits, padded to the longest list of hits."""
    if len(parts) == 1:  # one shard's hits are sorted already
        return first(parts[0], max(map(len, parts[0].ids), default=0) if k is None else k)
    rows, scores = (np.concatenate([reply[i] for reply in parts], axis=1) for i in (0, 1))
    ids = [list(itertools.chain(*lists)) for lists in zip(*(reply.ids for reply in parts), strict=True)]
    unsure = [reply.finder for reply in parts if not reply.certain]
    finder = unsure[0] if unsure else parts[0].finder
    merged = in_order(ShardHits(rows, scores, ids, finder, not unsure, sum(reply.taking_part for reply in parts)))
    return first(merged, max(map(len, ids), default=0) if k is None else k)


def together(asks: Mapping[int, messages.Message], replies: Mapping[int, Any]) -> dict[tuple[int, ...], Any]:
    """Merge the replies of shards on one host, so that less data is sent; return {(shard, …): merged reply}.

    Merges replies to PassOver, Nearest, CountWithin, Explain and Backward. Does not merge other replies or errors.
    """
    groups = dict[Any, list[int]]()
    for shard, ask in asks.items():
        apart = isinstance(replies[shard], Exception) or (isinstance(ask, messages.PassOver) and ask.apart)
        joined = not apart and type(ask.of if isinstance(ask, messages.Backward) else ask) in _JOINED
        groups.setdefault(type(ask) if joined else shard, []).append(shard)
    return {
        tuple(group): replies[group[0]] if len(group) == 1 else _merged(asks[group[0]], [replies[s] for s in group])
        for group in groups.values()
    }


def of_owners(answers: Mapping[tuple[int, ...], Any], missing: Mapping[int, str]) -> messages.ShardReplies:
    """Convert replies of `together` to `ShardReplies`. If a reply is an error of softdb, raise that error."""
    for owners in sorted(answers):
        if isinstance(answers[owners], SoftDBError):
            raise answers[owners]
    failed = {owners[0]: str(reply) for owners, reply in answers.items() if isinstance(reply, Exception)}
    replies = {owners[0]: reply for owners, reply in answers.items() if owners[0] not in failed}
    merged = {owners[0]: owners for owners in answers if len(owners) > 1}
    return messages.ShardReplies(replies, {**missing, **failed}, merged)


def _merged(ask: messages.Message, parts: Sequence[Any]) -> Any:
    """Merge replies that several shards gave to the same message."""
    if isinstance(ask, messages.PassOver):
        return passed_over(parts)
    if isinstance(ask, messages.Backward):
        columns = zip(*(reply.parameters for reply in parts), strict=True)
        return messages.Gradient(sum(reply.queries for reply in parts), tuple(sum(column) for column in columns))
    if isinstance(ask, messages.CountWithin):
        return sum(parts)
    if isinstance(ask, messages.Explain):
        return messages.Explained(ranked([reply.hits for reply in parts], ask.k), sum(reply.entropy for reply in parts))
    assert isinstance(ask, messages.Nearest)
    return ranked(parts, ask.k)


def passed_over(parts: Sequence[messages.Passed]) -> messages.Passed:
    """Merge outputs weighted by e^lse: `softdb.pool.merge` without gradients, six times as fast for one query."""
    if len(parts) == 1:
        return parts[0]
    lses = np.stack([reply.lse for reply in parts]).astype(np.float64)
    most = lses.max(0)
    shares = np.exp(lses - np.where(most > -np.inf, most, 0))
    total = shares.sum(0)
    with np.errstate(divide="ignore"):
        lse = most + np.log(total)
    shares /= np.where(total > 0, total, 1)
    output = sum(share[:, None] * reply.output for share, reply in zip(shares, parts, strict=True))
    dtype = parts[0].lse.dtype
    return messages.Passed(np.asarray(output, dtype), lse.astype(dtype), sum(reply.taking_part for reply in parts))


def joined_records(parts: list[Records], order: NDArray[np.int64]) -> Records:
    """Concatenate the records of several shards, and return the concatenated records at indices `order` (n,)."""

    def listed(name: str) -> list[Any]:
        items = [item for records in parts for item in getattr(records, name)]
        return [items[i] for i in order.tolist()]

    places = torch.from_numpy(order)
    keys, keyed = (torch.cat([getattr(records, name) for records in parts])[places] for name in ("keys", "keyed"))
    columns = [records.values for records in parts if records.values is not None]
    values = torch.cat(columns)[places] if columns else None
    return Records(listed("ids"), keys, values, listed("payload_texts"), listed("texts"), keyed)
