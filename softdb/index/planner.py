"""The planner: decides by which way a question is answered.

A search asks the index, or compares records where few are left: in blocks, or one by one. An estimate or a count draws
records, or passes over all; the costs of both are counted in bytes read, by fixed rates. A sample is one exact pass.
"""

from __future__ import annotations

from typing import Literal

from softdb.index.contract import Index

FEW = 4096  # matches of a filter that are compared exactly sooner than an index in FAISS is asked
SHARE = 0.125  # of the records, likewise
FEWEST = 2048  # likewise where the index scans the matches alone
PAIRS = 1 << 19  # queries times matches that are compared one by one sooner than in blocks

CALL = 20_000_000  # bytes read in the time that a draw takes whatever it draws
CODE = 0.35  # … to look up a part of a code, where all cores share the work
DRAWN = 6000  # … for a record drawn, which lies anywhere
GATHERED = 6  # … for a number of its key
SPREAD = 5  # … for a number of its value, of which the error takes random sums
PASSED = 0.11  # … for a number of a record and a query, in a pass over all

Way = Literal["index", "blocks", "pairs"]


class Planner:
    """Decides by which way a question to one index is answered. Safe to use from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index

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


def pass_cost(queries: int, records: int, d: int, v: int, record_bytes: int) -> float:
    """Cost of exact answers over every record: bytes read, or as long as they take."""
    return float(records) * (record_bytes + queries * PASSED * (d + v))


def draw_cost(queries: int, slots: int, parts: int, draws: int, d: int, v: int) -> float:
    """Cost of a round of an estimate, in the same measure."""
    each = slots * (parts + 8) * CODE + draws * (DRAWN + GATHERED * d + SPREAD * v)
    return CALL + queries * each
