"""The best groups of records for each query, by the best record in each: search with `group_by=`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.hits import GATHERED, Find, chunks, joined, scored, without
from softdb.attend.request import Live, Positions
from softdb.attend.scoring import score_rows
from softdb.check import Asked, Metric
from softdb.scoring import score_of
from softdb.store import Snapshot
from softdb.store.groups import Grouping

__all__ = ["grouped"]

FETCHED = 2, 8  # how many times the hits wanted are looked at, for all queries at once

Codes = NDArray[np.int32]


def grouped(
    ask: Asked,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    metric: Metric,
    find: Find,
    allowed: Live | None,  # (size,) over positions; None: every live record
    excluded: Positions | None,  # (q, e), or (1, e) for every query; -1 = none
    grouping: Grouping,
) -> tuple[Tensor, Tensor]:  # (q, m) rows, (q, m) scores
    """Rows and scores of the best `group_size` records of each of the k best groups, group by group.

    Cost: a search for 2 (k + offset) group_size records, for 8 (k + offset) where those are of too few groups, then
    for each query that still lacks some searches without the groups that are complete, each twice as deep as the last.
    Every search finds at least one record that counts, so they end: when all is there, or no record is left.
    """
    groups, in_group = grouping
    if in_group is not None:
        allowed = in_group if allowed is None else allowed & in_group
    if excluded is not None and len(excluded) == 1:
        allowed = snapshot.live.copy() if allowed is None else allowed.copy()
        allowed[excluded[excluded >= 0]] = False
        excluded = None
    takes_part = snapshot.live if allowed is None else snapshot.live & allowed
    count, most = int(np.count_nonzero(takes_part)), min(ask.offset + ask.k, int(groups.max(initial=-1)) + 1)
    best = [_Chosen(most, ask.group_size) for _ in range(len(queries))]
    fetched = 0
    for times in FETCHED:
        missing = np.array([i for i, one in enumerate(best) if not one.whole], np.int64)
        fetched = min(count, times * most * ask.group_size)
        if not fetched or not len(missing):
            break
        asked = queries.detach()[torch.from_numpy(missing).to(queries.device)]
        own = None if excluded is None else excluded[missing]
        more = 0 if own is None else min(own.shape[1], snapshot.size)
        start = 0
        for part, left_out in chunks(asked, own, GATHERED // ((fetched + more) * max(queries.shape[1], more))):
            positions = find(part, fetched + more, allowed).positions
            for line in without(positions, None, left_out, fetched)[0]:
                one, start = best[missing[start]], start + 1
                one.groups = {}  # what a search before has found is found again
                one.take(line, groups)
                one.ended |= bool((line < 0).any()) or fetched == count
    for i, one in enumerate(best):
        own = None if excluded is None else excluded[i]
        _complete(one, fetched, queries.detach()[i : i + 1], find, takes_part, own, groups)
    return _shown(ask, queries, snapshot, metric, best)


class _Chosen:
    """The best groups of one query so far, best first, and the best records of each."""

    def __init__(self, most: int, size: int) -> None:
        self.most, self.size = most, size
        self.groups: dict[int, list[int]] = {}
        self.ended = False  # whether no record is left

    @property
    def whole(self) -> bool:
        """Whether nothing better or more can come."""
        return self.ended or (len(self.groups) == self.most and not self.incomplete)

    @property
    def incomplete(self) -> list[int]:
        """Groups that may take more records."""
        return [group for group, mine in self.groups.items() if len(mine) < self.size]

    def take(self, positions: Positions, groups: Codes) -> None:
        """Take what is new of some positions (c,), best first, all of them worse than those before."""
        positions = positions[positions >= 0]
        for position, group in zip(positions.tolist(), groups[positions].tolist(), strict=True):
            mine = self.groups.get(group)
            if mine is None:
                if len(self.groups) == self.most:
                    continue
                mine = self.groups[group] = []
            if len(mine) < self.size:
                mine.append(position)

    def left(self, allowed: Live, groups: Codes) -> Live:
        """The records that it would take."""
        flags = np.zeros(int(groups.max()) + 1, np.bool_)
        if len(self.groups) == self.most:
            flags[self.incomplete] = True
        else:
            flags[:] = True
            flags[list(set(self.groups) - set(self.incomplete))] = False
        keep: Live = allowed & flags[groups]  # -1 is not allowed
        keep[[position for mine in self.groups.values() for position in mine]] = False
        return keep


def _complete(
    one: _Chosen,
    fetched: int,
    query: Tensor,  # (1, d)
    find: Find,
    allowed: Live,
    excluded: Positions | None,  # (e,)
    groups: Codes,
) -> None:
    """Search on for what a query lacks."""
    while not one.whole:
        keep = one.left(allowed, groups)
        if excluded is not None:
            keep[excluded[excluded >= 0]] = False
        left = int(np.count_nonzero(keep))
        if not left:
            return
        fetched = min(2 * fetched, left)
        line = find(query, fetched, keep).positions[0]
        one.take(line, groups)
        one.ended = fetched == left or bool((line < 0).any())


def _shown(
    ask: Asked,
    queries: Tensor,  # (q, d)
    snapshot: Snapshot,
    metric: Metric,
    best: list[_Chosen],
) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """The groups from the offset on, as rows and scores with gradient; as wide as the longest."""
    lines = [[place for mine in [*one.groups.values()][ask.offset :] for place in mine] for one in best]
    width = max(map(len, lines), default=0)
    positions = np.array([[*line, *[-1] * (width - len(line))] for line in lines], np.int64).reshape(len(lines), width)
    if not width:
        return torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device), queries[:, :0]
    parts, size = [], max(1, GATHERED // (width * queries.shape[1]))
    for start in range(0, len(queries), size):
        part, mine = queries[start : start + size], positions[start : start + size]
        if ask.group_size == 1:
            parts.append(scored(part, snapshot, metric, mine, None))
        else:  # group by group
            rows = torch.from_numpy(snapshot.rows(mine)).to(part.device)
            parts.append((rows, score_rows(score_of(metric), part, snapshot, mine)))
    return joined(parts)
