"""The planner: measures what each way of answering costs on this machine, once for an index, and decides by that.

A search asks the index, or compares records: in blocks, or one by one where a filter leaves few. An estimate draws
records, or passes over all. A count draws while that is faster than a pass by a fixed ratio. A sample is one exact
pass, so nothing is to be decided. Measuring takes some twenty milliseconds when an index is first searched, and some
fifty when an estimate is first asked for: with this machine and these records, not with others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch

from softdb.index.contract import Floats, Index, prepared, sampled
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.index.timing import fastest
from softdb.store import Segment, Snapshot

FEW = 4096  # matches of a filter that are compared exactly sooner than the index is asked
FEWEST = 128  # and where the index scans the matches alone
KINDS = 256  # of searches whose way is kept
PAIRS = 1 << 19  # queries times matches that are compared one by one sooner than in blocks

NUMBERS = 1 << 19  # of keys that are compared: beyond the inner caches
LISTED = 512  # records that are scored one by one
LEAST = 64  # records that are compared to know what a comparison costs that compares next to nothing
BATCH = 64  # queries: so many that what a busy machine adds to a call does not count
TURNS = 5  # of a search, of which the fastest counts
HARDER = 4  # times the usual effort, to know what a code costs
K = 10

PASSES = 2  # turns of a pass and of a round
SOME, FIRST = 8, 3  # queries asked together of a pass, and of a round, where each takes milliseconds
DEAR = 1.1  # times as long as a pass over every record that estimates may take on the average
NEWEST = 0.2  # share of the last of them in that average
MOST = 2.0  # and for how many times a pass it counts at most
FORGOTTEN = 0.99  # of what is above 1, with each answer that was not tried to be estimated
SLOWER = 30  # times as long as in a pass over all it takes to draw and score a record for a count

Way = Literal["index", "blocks", "pairs"]


class Costs(NamedTuple):
    """Costs of a search, in seconds or any other unit: they are only compared with each other."""

    called: float  # a search by the index, whatever it looks at
    code: float  # of a code that it compares, for a query, and of the candidates that go with it
    scored: float  # of a record that is scored for a query, one by one
    fetched: float  # of a record that is compared in a block, once for all queries
    compared: float  # and for each query
    alone: float = 0  # of a code for a single query; 0: as for several, which threads share
    begun: float = 0  # of comparing records at all
    asked: float = 0  # a search by the index for a single query, whatever it looks at

    def search(self, codes: float, queries: int = 1) -> float:
        """Cost of a search by the index that compares so many codes for each query."""
        if queries == 1 and self.alone:
            return self.asked + self.alone * codes
        return self.called + queries * self.code * codes

    def blocks(self, records: int, queries: int = 1) -> float:
        """Cost of comparing records with all queries at once."""
        return self.begun + records * (self.fetched + queries * self.compared)


FORCED = Costs(called=0, code=0, scored=1, fetched=1, compared=1)  # as if a search by the index cost nothing


class PassRate(NamedTuple):
    """Costs of a pass over every record, in seconds."""

    read: float  # of a number of a record, once for all queries
    passed: float  # and for each query

    def seconds(self, numbers: int, queries: int) -> float:
        """Time of a pass over so many numbers."""
        return numbers * (self.read + queries * self.passed)


class EstimateCosts(NamedTuple):
    """Costs of a pass and of the first round of an estimate, in seconds."""

    exact: PassRate
    called: float  # of the first round of an estimate, whatever it draws
    each: float  # and for each query

    def round(self, queries: float) -> float:
        """Time of a first round; of another one for so many times as many queries."""
        return self.called + queries * self.each


class Planner:
    """Decides by which way a question to one index is answered. Safe to use from several threads."""

    def __init__(self, index: Index, costs: Costs | None = None) -> None:
        self.index = index
        self.costs = costs  # None: to be measured
        self._ways: dict[object, Way] = {}  # for single queries, which feel the microseconds
        self._estimates: dict[int, EstimateCosts] = {}  # by the width of values
        self._shares: dict[object, float] = {}  # of a pass that estimates of a kind took, on the average

    def search_costs(self, snapshot: Snapshot) -> Costs:
        """Costs of searches, measured when the index is first searched."""
        if self.costs is None:
            self.costs = search_costs(snapshot, self.index)
        return self.costs

    def way(self, snapshot: Snapshot, matches: int, queries: int, k: int, filtered: bool, pairs: bool = False) -> Way:
        """Return how to search among `matches` records; `pairs`: they may be scored one by one for each query."""
        kind = matches, queries, k, filtered, pairs, self.index.effort, self.costs
        way = self._ways.get(kind)
        if way is None:
            if len(self._ways) >= KINDS:
                self._ways = {}
            way = self._ways[kind] = self._way(snapshot, matches, queries, k, filtered, pairs)
        return way

    def _way(self, snapshot: Snapshot, matches: int, queries: int, k: int, filtered: bool, pairs: bool) -> Way:
        if self.index.filters_inside:  # whose scan costs less than comparing, but for next to nothing
            few = max(FEWEST, 4 * k)
            return ("pairs" if pairs else "blocks") if matches <= few or k > self.index.covered // 8 else "index"
        if pairs and queries * matches <= PAIRS and self._pairs_are_cheaper(snapshot, matches, k):
            return "pairs"
        if k > self.index.covered // 8 or matches <= (max(FEW, 4 * k) if filtered else 4 * k):
            return "blocks"
        if filtered or not self.blocks_are_cheaper(snapshot, matches, queries, self.index.effort_for(k)):
            return "index"
        return "blocks"

    def blocks_are_cheaper(self, snapshot: Snapshot, matches: int, queries: int, effort: int) -> bool:
        """Return True if comparing all matches costs less than a search with that effort."""
        costs = self.search_costs(snapshot)
        return costs.blocks(matches, queries) <= costs.search(self.index.codes_at(effort), queries)

    def _pairs_are_cheaper(self, snapshot: Snapshot, matches: int, k: int) -> bool:
        """Return True if scoring matches one by one costs less than a search with twice the usual effort."""
        if matches <= FEW:
            return True
        costs = self.search_costs(snapshot)
        return matches * costs.scored <= costs.search(self.index.codes_at(2 * self.index.effort_for(k)))

    def estimate_costs(self, width: int, measure: Callable[[], EstimateCosts]) -> EstimateCosts:
        """Costs of estimates for values of that width, measured when one is first asked for."""
        known = self._estimates.get(width)
        if known is None:
            known = self._estimates[width] = measure()
        return known

    def hopeless(self, kind: object) -> bool:
        """Return True if estimates of a kind were slower than passes. Now and then one is tried again."""
        share = self._shares.get(kind, 0.0)
        if share > DEAR:
            self._shares[kind] = 1 + FORGOTTEN * (share - 1)
        return share > DEAR

    def learn(self, kind: object, share: float) -> None:
        """Take in the time of an estimate of a kind, a pass over every record as 1."""
        known = self._shares.get(kind, 0.0)
        self._shares[kind] = known + NEWEST * (min(share, MOST) - known)

    def most_counted(self, records: int) -> int:
        """Draws for a count among so many records beyond which a pass over all is faster."""
        return records // SLOWER


def estimate_costs(
    pass_over: Callable[[int], object],  # by so many queries, over so many numbers
    numbers: int,
    first_round: Callable[[int], object],  # of an estimate, for so many queries
) -> EstimateCosts:
    """Measure a pass over records and a round of an estimate."""
    rate = pass_rate(pass_over, numbers)
    alone, together = (fastest(functools.partial(first_round, count), PASSES) for count in (1, FIRST))
    each = max((together - alone) / (FIRST - 1), 0.01 * alone)
    return EstimateCosts(rate, max(alone - each, 0.0), each)


def pass_rate(pass_over: Callable[[int], object], numbers: int) -> PassRate:
    """Measure a pass by so many queries over so many numbers."""
    single, several = (fastest(functools.partial(pass_over, count), PASSES) / numbers for count in (1, SOME))
    passed = max((several - single) / (SOME - 1), 0.01 * single)
    return PassRate(max(single - passed, 0.0), passed)


def search_costs(snapshot: Snapshot, index: Index) -> Costs:
    """Measure searches on stored keys: single queries and a batch, by the index and by comparing records.

    One way after the other, those by the index first: after a product of torch its idle threads keep the cores for some
    milliseconds, and FAISS, which has threads of its own, waits for them.
    """
    size = min(snapshot.size, max(256, NUMBERS // snapshot.segments[0].keys.shape[1]))
    few = sampled(snapshot.live, size, 5)
    keys = np.ascontiguousarray(snapshot.keys_at(few).float().numpy())
    some, least = (
        Snapshot.of(0, (Segment(0, 0, None, part, None),), np.ones(len(part), np.bool_))
        for part in (keys, keys[:LEAST])
    )
    queries: Floats = keys[np.linspace(0, len(keys) - 1, BATCH).astype(int)]
    listed = few[np.linspace(0, len(few) - 1, LISTED).astype(int)][None]
    c = index.kept_for(index.tuned_for)

    def search(count: int, effort: int = index.effort) -> Callable[[], object]:
        def run() -> None:
            vectors = prepared(queries[:count], index.metric)
            positions = snapshot.positions(index.find(vectors, c, None, effort))
            ordered(snapshot, queries[:count], positions, index.tuned_for, index.metric, vectors)

        return run

    def compare(records: Snapshot, count: int) -> Callable[[], object]:
        return functools.partial(nearest, records, Query(torch.from_numpy(queries[:count]), K, index.metric))

    most = min(HARDER * index.effort, index.effort_most)
    pairs = functools.partial(ordered, snapshot, queries[:1], listed, K, index.metric)
    ways = search(1), search(1, most), search(BATCH), compare(least, 1), compare(some, 1), compare(some, BATCH), pairs
    alone, hard, together, begun, single, many, one_by_one = (fastest(run, TURNS) for run in ways)
    codes, harder = (max(1.0, index.codes_at(effort)) for effort in (index.effort, most))
    each = max((together - alone) / (BATCH - 1), 0.1 * alone)
    code = alone / codes
    if harder > codes:
        code = min(max((hard - alone) / (harder - codes), 0.01 * code), code)
    compared = max((many - single) / (BATCH - 1), 0.01 * single) / len(keys)
    return Costs(
        called=max(alone - each, 0.0),
        code=each / codes,
        alone=code,
        asked=alone - code * codes,
        scored=one_by_one / LISTED,
        fetched=max((single - begun) / len(keys) - compared, 0.0),
        compared=compared,
        begun=begun,
    )
