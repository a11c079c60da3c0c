"""The best groups of records for each query, by the best record in each: search with `group_by=`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.candidates import GATHERED, chunks, joined, scored, without
from softdb.attend.protocol import IndexedRecords
from softdb.attend.request import Live, Positions
from softdb.attend.scoring import score_rows
from softdb.index.query import Query
from softdb.scoring import score_of

FETCHED = 2, 8  # how many times the hits wanted are looked at, for all queries at once

Codes = NDArray[np.int32]


def grouped(query: Query, source: IndexedRecords) -> tuple[Tensor, Tensor]:  # (q, m) rows, (q, m) scores
    """Rows and scores of the best `group_size` records of each of the k best groups, group by group.

    Cost: a search for 2 (k + offset) group_size records, for 8 (k + offset) where those are of too few groups, then
    for each query that still lacks some searches without the groups that are complete, each twice as deep as the last.
    Every search finds at least one record that counts, so they end: when all is there, or no record is left.
    """
    assert query.groups is not None
    (groups, in_group), snapshot, whole = query.groups, source.snapshot, query
    if in_group is not None:
        query = replace(query, allowed=in_group if query.allowed is None else query.allowed & in_group)
    query = replace(query.excluding_by_filter(snapshot.size), queries=query.queries.detach())
    takes_part, excluded, queries = query.keep(snapshot.live), query.excluded, query.queries
    count, most = int(np.count_nonzero(takes_part)), min(query.offset + query.k, int(groups.max(initial=-1)) + 1)
    best = [_Chosen(most, query.group_size) for _ in range(len(queries))]
    fetched = 0
    for times in FETCHED:
        missing = np.array([i for i, chosen in enumerate(best) if not chosen.whole], np.int64)
        fetched = min(count, times * most * query.group_size)
        if not fetched or not len(missing):
            break
        asked = queries[torch.from_numpy(missing).to(queries.device)]
        own = None if excluded is None else excluded[missing]
        more = 0 if own is None else min(own.shape[1], snapshot.size)
        start = 0
        for part, left_out in chunks(asked, own, GATHERED // ((fetched + more) * max(queries.shape[1], more))):
            found = source.finder.find(snapshot, replace(query, queries=part, k=fetched + more))
            for line in without(found.positions, None, left_out, fetched)[0]:
                chosen, start = best[missing[start]], start + 1
                chosen.groups = {}  # what a search before has found is found again
                chosen.take(line, groups)
                chosen.ended |= bool((line < 0).any()) or fetched == count
    for i, chosen in enumerate(best):
        own = None if excluded is None else excluded[i : i + 1]
        if not chosen.whole:
            _complete(chosen, fetched, replace(query, queries=queries[i : i + 1], excluded=own), source)
    return _shown(whole, source, best)


class _Chosen:
    """The best groups of one query so far, best first, and the best records of each."""

    def __init__(self, most: int, size: int) -> None:
        self.most, self.size = most, size
        self.groups: dict[int, list[int]] = {}
        self.ended = False  # whether no record is left

    @property
    def whole(self) -> bool:
        """True if nothing better or more can come."""
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


def _complete(chosen: _Chosen, fetched: int, query: Query, source: IndexedRecords) -> None:  # query (1, d)
    """Search on for what a query lacks."""
    assert query.groups is not None
    snapshot, groups = source.snapshot, query.groups.codes
    live = query.excluding_by_filter(snapshot.size).keep(snapshot.live)
    while not chosen.whole:
        keep = chosen.left(live, groups)
        left = int(np.count_nonzero(keep))
        if not left:
            return
        fetched = min(2 * fetched, left)
        line = source.finder.find(snapshot, replace(query, k=fetched, allowed=keep)).positions[0]
        chosen.take(line, groups)
        chosen.ended = fetched == left or bool((line < 0).any())


def _shown(query: Query, source: IndexedRecords, best: list[_Chosen]) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """The groups from the offset on, as rows and scores with gradient; as wide as the longest."""
    queries, columns, metric = query.queries, source.columns, query.metric
    lines = [[place for own in [*chosen.groups.values()][query.offset :] for place in own] for chosen in best]
    width = max(map(len, lines), default=0)
    positions = np.array([[*line, *[-1] * (width - len(line))] for line in lines], np.int64).reshape(len(lines), width)
    if not width:
        return torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device), queries[:, :0]
    parts, size = [], max(1, GATHERED // (width * queries.shape[1]))
    for start in range(0, len(queries), size):
        part, own = queries[start : start + size], positions[start : start + size]
        if query.group_size == 1:
            parts.append(scored(part, columns, metric, own, None))
        else:  # group by group
            rows = torch.from_numpy(columns.rows(own)).to(part.device)
            parts.append((rows, score_rows(score_of(metric), part, columns, own)))
    return joined(parts)
