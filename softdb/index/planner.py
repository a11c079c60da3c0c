"""The planner: the choice of the way in which a query is answered.

A search asks the index or, if few records match a filter, compares them: in blocks or pair by pair. Estimates, counts
and samples draw records or pass over all; costs of both are counted in bytes read, by fixed rates.
"""

from __future__ import annotations

from typing import Literal

from softdb.index.contract import Index

FEW = 4096  # matches of a filter up to which comparing all is preferred to an index in FAISS
SHARE = 0.125  # of the records, likewise
FEWEST = 2048  # likewise for an index that scans matches alone
PAIRS = 1 << 19  # queries times matches up to which pairs are preferred to blocks

CALL = 20_000_000  # fixed cost of a round of draws, in bytes that are read in that time
CODE = 0.35  # … of a part of a code
DRAWN = 6000  # … of a record drawn, at a random address
GATHERED = 6  # … of a number of its key
SPREAD = 5  # … of a number of its value, which the error sums, too
PASSED = 0.11  # … of a number of a record, for each query of a pass

Way = Literal["index", "blocks", "pairs"]


class Planner:
    """Choice of the way in which queries to one index are answered. Safe to use from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def way(self, matches: int, queries: int, k: int, filtered: bool, pairs: bool = False) -> Way:
        """Return the way to search among `matches` records; `pairs`: they may be scored pair by pair."""
        index, few = self.index, 4 * k
        if index.filters_inside:
            few = max(FEWEST, few)
        elif filtered:
            few = max(FEW, few, int(SHARE * index.covered))
        if matches > few and k <= index.covered // 8:
            return "index"
        return "pairs" if pairs and queries * matches <= PAIRS else "blocks"


def pass_cost(queries: int, records: int, d: int, v: int, record_bytes: int) -> float:
    """Cost of a pass over every record, in bytes read: memory traffic and the operations of each query."""
    return float(records) * (record_bytes + queries * PASSED * (d + v))


def draw_cost(queries: int, slots: int, parts: int, draws: int, d: int, v: int) -> float:
    """Cost of a round of draws, in the same unit."""
    each = slots * (parts + 8) * CODE + draws * (DRAWN + GATHERED * d + SPREAD * v)
    return CALL + queries * each
