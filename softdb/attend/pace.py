"""What a pass over every record costs, and a round of an estimate: measured when that is first asked for, and kept.

Some fifty milliseconds of measuring, once for a sampler and a width of values: by what an answer takes then, and not by
what it took on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Pace", "PassRate", "measured", "rate"]

TURNS = 2  # of which the fastest counts: the first one warms up
SOME, FEW = 8, 3  # queries asked together of a pass, and of a round, where each takes milliseconds
DEAR = 1.1  # times as long as a pass over every record that estimates may take on the average
NEWEST = 0.2  # what the last of them counts of that average
MOST = 2.0  # and for how many times a pass it counts at most
FORGOTTEN = 0.99  # of what is above 1, with each answer that was not tried to be estimated


class PassRate(NamedTuple):
    """What a pass over every record costs, in seconds."""

    read: float  # of a number of a record, once for all queries
    passed: float  # and for each query

    def seconds(self, numbers: int, queries: int) -> float:
        """Of a pass over so many numbers."""
        return numbers * (self.read + queries * self.passed)


@dataclass
class Pace:
    """In seconds."""

    read: float  # of a number of a record in a pass, once for all queries
    passed: float  # and for each query
    called: float  # of the first round of an estimate, whatever it draws
    each: float  # and for each query
    shares: dict[object, float] = field(default_factory=dict)  # of a pass that estimates of a kind took

    def exact(self, numbers: int, queries: int) -> float:
        """Of a pass over so many numbers."""
        return PassRate(self.read, self.passed).seconds(numbers, queries)

    def round(self, queries: float) -> float:
        """Of a first round; of another one for so many times as many queries."""
        return self.called + queries * self.each

    def hopeless(self, kind: object) -> bool:
        """Whether estimates of a kind were slower than passes. Now and then it is tried again."""
        share = self.shares.get(kind, 0.0)
        if share > DEAR:
            self.shares[kind] = 1 + FORGOTTEN * (share - 1)
        return share > DEAR

    def tell(self, kind: object, share: float) -> None:
        """How long an estimate took, a pass as 1."""
        known = self.shares.get(kind, 0.0)
        self.shares[kind] = known + NEWEST * (min(share, MOST) - known)


def measured(
    pass_over: Callable[[int], object],  # by so many queries, over so many numbers
    numbers: int,
    one_round: Callable[[int], object],  # of an estimate, for so many queries
) -> Pace:
    """By the clock."""
    read, passed = rate(pass_over, numbers)
    alone, together = (_fastest(one_round, count) for count in (1, FEW))
    each = max((together - alone) / (FEW - 1), 0.01 * alone)
    return Pace(read, passed, max(alone - each, 0.0), each)


def rate(pass_over: Callable[[int], object], numbers: int) -> PassRate:
    """By the clock: a pass by so many queries over so many numbers."""
    one, some = (_fastest(pass_over, count) / numbers for count in (1, SOME))
    passed = max((some - one) / (SOME - 1), 0.01 * one)
    return PassRate(max(one - passed, 0.0), passed)


def _fastest(run: Callable[[int], object], queries: int) -> float:
    """Seconds of the fastest of a few turns."""
    return min(_seconds(run, queries) for _ in range(TURNS))


def _seconds(run: Callable[[int], object], queries: int) -> float:
    start = time.perf_counter()
    run(queries)
    return time.perf_counter() - start
