"""Search with `group_by=`: find the best groups for each query, ranked by the best record of each group."""

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

FETCHED = 2, 8  # records fetched by the first and the second search, over the number of hits wanted

Codes = NDArray[np.int32]


def grouped(query: Query, source: IndexedRecords) -> tuple[Tensor, Tensor]:  # (q, m) rows, (q, m) scores
    """Return rows and scores of the best `group_size` records in each of the k best groups, group by group.

    Cost: a search for 2 (k + offset) group_size records. Queries whose records belong to too few groups search again
    for four times as many. A query that still lacks records searches among the records of incomplete groups, each time
    twice as deep. Every search yields at least one new record, so the searches end.
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
                chosen.groups = {}  # the second search finds the hits of the first again
                chosen.take(line, groups)
                chosen.ended |= bool((line < 0).any()) or fetched == count
    for i, chosen in enumerate(best):
        own = None if excluded is None else excluded[i : i + 1]
        if not chosen.complete:
            _complete(chosen, fetched, replace(query, queries=queries[i : i + 1], excluded=own), source)
    return _score_groups(original, source, best)


class _Chosen:
    """The best groups found so far for one query, best first, and the best records of each group."""

    def __init__(self, most: int, size: int) -> None:
        self.most, self.size = most, size
        self.groups: dict[int, list[int]] = {}
        self.ended = False  # True if no other record exists

    @property
    def complete(self) -> bool:
        """True if no record can be added."""
        return self.ended or (len(self.groups) == self.most and not self.incomplete)

    @property
    def incomplete(self) -> list[int]:
        """Groups with fewer than `size` records."""
        return [group for group, members in self.groups.items() if len(members) < self.size]

    def take(self, positions: Positions, groups: Codes) -> None:
        """Add positions (c,), best first, to their groups while groups have room. Earlier positions are better."""
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
        """Return the mask of the allowed records that could still be added."""
        flags = np.zeros(int(groups.max()) + 1, np.bool_)
        if len(self.groups) == self.most:
            flags[self.incomplete] = True
        else:
            flags[:] = True
            flags[list(set(self.groups) - set(self.incomplete))] = False
        keep: Live = allowed & flags[groups]  # records without a group (-1) are not allowed
        keep[[position for members in self.groups.values() for position in members]] = False
        return keep


def _complete(chosen: _Chosen, fetched: int, query: Query, source: IndexedRecords) -> None:  # query (1, d)
    """Search until the groups of one query are complete."""
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


def _score_groups(query: Query, source: IndexedRecords, best: list[_Chosen]) -> tuple[Tensor, Tensor]:  # (q, m), (q, m)
    """Return rows and scores, with gradient, of each query's groups after `query.offset`, padded to equal length."""
    queries, columns, metric = query.queries, source.columns, query.metric
    lines = [[place for own in [*chosen.groups.values()][query.offset :] for place in own] for chosen in best]
    width = max(map(len, lines), default=0)
    positions = np.array([[*line, *[-1] * (width - len(line))] for line in lines], np.int64).reshape(len(lines), width)
    if not width:
        return torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device), queries[:, :0]
    parts = []
    for chunk, own in chunks(queries, positions, GATHERED // (width * queries.shape[1])):
        if query.group_size == 1:
            parts.append(scored(chunk, columns, metric, own, None))
        else:  # in the order of the groups, not sorted by score
            rows = torch.from_numpy(columns.rows(own)).to(chunk.device)
            parts.append((rows, score_rows(score_of(metric), chunk, columns, own)))
    return joined(parts)
