"""The planner: decides by which way a question is answered.

A search asks the index, or compares records where few are left: in blocks, or one by one. An estimate draws records, or
passes over all; what these cost is measured on this machine when an estimate is first asked for, in some fifty
milliseconds. A count draws while that is faster than a pass by a fixed ratio. A sample is one exact pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

from softdb.index.contract import Index
from softdb.index.timing import fastest

FEW = 4096  # matches of a filter that are compared exactly sooner than an index in FAISS is asked
SHARE = 0.125  # of the records, likewise
FEWEST = 2048  # likewise where the index scans the matches alone
PAIRS = 1 << 19  # queries times matches that are compared one by one sooner than in blocks

PASSES = 2  # turns of a pass and of a round
SOME, FIRST = 8, 3  # queries asked together of a pass, and of a round, where each takes milliseconds
DEAR = 1.1  # times as long as a pass over every record that estimates may take on the average
NEWEST = 0.2  # share of the last of them in that average
MOST = 2.0  # and for how many times a pass it counts at most
FORGOTTEN = 0.99  # of what is above 1, with each answer that was not tried to be estimated
SLOWER = 30  # times as long as in a pass over all it takes to draw and score a record for a count

Way = Literal["index", "blocks", "pairs"]


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

    def __init__(self, index: Index) -> None:
        self.index = index
        self._estimates: dict[int, EstimateCosts] = {}  # by the width of values
        self._shares: dict[object, float] = {}  # of a pass that estimates of a kind took, on the average

    def way(self, matches: int, queries: int, k: int, filtered: bool, pairs: bool = False) -> Way:
        """Return how to search among `matches` records; `pairs`: they may be scored one by one for each query."""
        index, few = self.index, 4 * k
        if index.filters_inside:
            few = max(FEWEST, few)
        elif filtered:
            few = max(FEW, few, int(SHARE * index.covered))
        if matches > few and k <= index.covered // 8:
            return "index"
        return "pairs" if pairs and queries * matches <= PAIRS else "blocks"

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
