"""The planner chooses the method that answers a query.

A search uses the index or, if few records match a filter, compares these records in blocks or pair by pair. Estimates,
counts and samples draw records or read all records; the cost of either is expressed in bytes read, at fixed rates.
"""

from __future__ import annotations

from typing import Any, Literal

from softdb.index.contract import Index

FEW = 4096  # if a filter has at most this number of matches, compare them all and do not use FAISS
SHARE = 0.125  # the same limit on the number of matches, as a share of the records
FEWEST = 2048  # the same limit for an index that scans only the matches of a filter
PAIRS = 1 << 19  # compare pair by pair if queries times matches are at most this number

# between the rates of two cores of a Zen 5 and of a Zen 4, which differ by up to 2.5 times
CALL = 25_000_000  # fixed cost of a round of draws, in bytes read (as all costs below)
CODE = 0.3  # cost to read one part of a code
DRAWN = 4500  # cost to read a drawn record at a random address
GATHERED = 5  # cost of each number of a drawn record's key
SPREAD = 5  # cost of each number of a drawn record's value, error sums included
PASSED = 0.15  # cost of each number of a record for each query, when all records are read

Way = Literal["index", "blocks", "pairs"]


def way(index: Index, matches: int, queries: int, k: int, filtered: bool, pairs: bool = False) -> Way:
    """Return the method to search among `matches` records. `pairs`: scoring them pair by pair is allowed."""
    few = 4 * k
    if index.filters_inside:
        few = max(FEWEST, few)
    elif filtered:
        few = max(FEW, few, int(SHARE * index.covered))
    if matches > few and k <= index.covered // 8:
        return "index"
    return "pairs" if pairs and queries * matches <= PAIRS else "blocks"


def pass_cost(queries: int, records: int, d: int, v: int, record_bytes: int) -> float:
    """Return the cost of comparing queries with every record, in bytes read: memory traffic and arithmetic."""
    return float(records) * (record_bytes + queries * PASSED * (d + v))


def draw_cost(queries: int, slots: float, parts: int, draws: Any, d: int, v: int) -> Any:
    """Return the cost of a round of draws, in bytes read: a number, or an array for an array of draws."""
    each = slots * (parts + 8) * CODE + draws * (DRAWN + GATHERED * d + SPREAD * v)
    return CALL + queries * each
