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

FETCHED = 2, 8  # records fetched, in multiples of the hits wanted, by the first and second search of all queries

Codes = NDArray[np.int32]


def grouped(query: Query, source: IndexedRecords) -> tuple[Tensor, Tensor]:  # (q, m) rows, (q, m) scores
    """Rows and scores of the best `group_size` records of each of the k best groups, group by group.

    Cost: a search for 2 (k + offset) group_size records; a second for four times as many, for queries whose records
    are of too few groups; then, for each query that still lacks some, searches among the records of incomplete groups,
    each twice as deep as the last. Every search yields at least one new record, so the searches end.
    """
    assert query.groups is not None
    (groups, in_group), snapshot, original = query.groups, source.snapshot, query
    if in_group is not None:
        query = replace(query, allowed=in_group if query.allowed is None else query.allowed & in_group)
    query = replace(query.excluding_by_filter(snapshot.size), queries=query.queries.detach())
    takes_part, excluded, queries = query.keep(snapshot.live), query.excluded, query.queries
    count, most = int(np.count_nonzero(takes_part)), min(query.offset + query.k, int(groups.max(initial=-1)) + 1)
    best = [_Chosen(most, query.group_size) for _ in range(len(queries))]
    fetched = 0
    for times in FETCHED:
        missing = np.array([i for i, chosen in enumerate(best) if not chosen.complete], np.int64)
        fetched = min(count, times * most * query.group_size)
        if not fetched or not len(missing):
            break
        few = queries[torch.from_numpy(missing).to(queries.device)]
        own = None if excluded is None else excluded[missing]
        more = 0 if own is None else min(own.shape[1], snapshot.size)
        start = 0
        for chunk, excluded_rows in chunks(few, own, GATHERED // ((fetched + more) * max(queries.shape[1], more))):
            result = source.finder.find(snapshot, replace(query, queries=chunk, k=fetched + more))
            for line in without(result.positions, None, excluded_rows, fetched)[0]:
                chosen, start = best[missing[start]], start + 1
                chosen.groups = {}  # this search finds the earlier hits again
                chosen.take(line, groups)
                chosen.ended |= bool((line < 0).any()) or fetched == count
    for i, chosen in enumerate(best):
        own = None if excluded is None else excluded[i : i + 1]
        if not chosen.complete:
            _complete(chosen, fetched, replace(query, queries=queries[i : i + 1], excluded=own), source)
    return _shown(original, source, best)


class _Chosen:
    """The best groups of one query so far, best first, and the best records of each."""

    def __init__(self, most: int, size: int) -> None:
        self.most, self.size = most, size
        self.groups: dict[int, list[int]] = {}
        self.ended = False  # True once no record remains

    @property
    def complete(self) -> bool:
        """True if no record can be added or replaced."""
        return self.ended or (len(self.groups) == self.most and not self.incomplete)

    @property
    def incomplete(self) -> list[int]:
        """Groups that may take more records."""
        return [group for group, members in self.groups.items() if len(members) < self.size]

    def take(self, positions: Positions, groups: Codes) -> None:
        """Add the new ones of some positions (c,), best first, all worse than those taken before."""
        positions = positions[positions >= 0]
        for position, group in zip(positions.tolist(), groups[positions].tolist(), strict=True):
            members = self.groups.get(group)
            if members is None:
                if len(self.groups) == self.most:
                    continue
                members = self.groups[group] = []
            if len(members) < self.size:
                members.append(position)

    def addable(self, allowed: Live, groups: Codes) -> Live:
        """Mask of the allowed records that could still be added."""
        flags = np.zeros(int(groups.max()) + 1, np.bool_)
        if len(self.groups) == self.most:
            flags[self.incomplete] = True
        else:
            flags[:] = True
            flags[list(set(self.groups) - set(self.incomplete))] = False
        keep: Live = allowed & flags[groups]  # -1 is not allowed
        keep[[position for members in self.groups.values() for position in members]] = False
        return keep


def _complete(chosen: _Chosen, fetched: int, query: Query, source: IndexedRecords) -> None:  # query (1, d)
    """Search until the groups of a query are complete."""
    assert query.groups is not None
    snapshot, groups = source.snapshot, query.groups.codes
    live = query.excluding_by_filter(snapshot.size).keep(snapshot.live)
    while not chosen.complete:
        keep = chosen.addable(live, groups)
        remaining = int(np.count_nonzero(keep))
        if not remaining:
            return
        fetched = min(2 * fetched, remaining)
        line = source.finder.find(snapshot, replace(query, k=fetched, allowed=keep)).positions[0]
        chosen.take(line, groups)
        chosen.ended = fetched == remaining or bool((line < 0).any())


def _shown(query: Query, source: IndexedRecords, best: list[_Chosen]) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """Rows and scores, with gradient, of the groups from the offset on, padded to the longest line."""
    queries, columns, metric = query.queries, source.columns, query.metric
    lines = [[place for own in [*chosen.groups.values()][query.offset :] for place in own] for chosen in best]
    width = max(map(len, lines), default=0)
    positions = np.array([[*line, *[-1] * (width - len(line))] for line in lines], np.int64).reshape(len(lines), width)
    if not width:
        return torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device), queries[:, :0]
    parts, size = [], max(1, GATHERED // (width * queries.shape[1]))
    for start in range(0, len(queries), size):
        chunk, own = queries[start : start + size], positions[start : start + size]
        if query.group_size == 1:
            parts.append(scored(chunk, columns, metric, own, None))
        else:  # group by group
            rows = torch.from_numpy(columns.rows(own)).to(chunk.device)
            parts.append((rows, score_rows(score_of(metric), chunk, columns, own)))
    return joined(parts)
