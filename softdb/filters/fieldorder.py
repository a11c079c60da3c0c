"""Cache of each declared field's order: the rows sorted by the field's value. A range of values is a slice of them.

SQLite reads its index of the field record by record; a slice needs only a bisection for each end. SQLite does the
comparisons of the bisection, so this module need not know how SQLite orders numbers, texts and other types. (Caching
the values in place of the rows was measured: if most values differ, reading the values takes 27 times as long.)

A row belongs to one record for ever. Replacing a payload in place invalidates an order. After a commit, dead rows are
removed from an order, and appended rows form another sorted array, a run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.filters.conditions import Span
from softdb.store import Snapshot
from softdb.store.catalog import Catalog
from softdb.store.paths import field_sql, parts_of

MAX_FIELDS = 4  # number of fields whose order is cached; an order takes 4 bytes for each record, or 8 from 2^31 rows on
MAX_APPENDED = 10_000  # number of appended rows beyond which an order is rebuilt
MAX_RUNS = 8  # largest number of runs of appended rows; the next commit replaces them by a single run
DUE = 4  # an order is built once filters have listed at least records / DUE rows from the field's SQLite index
PIVOTS = 3  # number of records that one SQL statement compares; each may need a page from disk

Rows = NDArray[Any]  # int32, or int64 from 2^31 rows on


@dataclass
class _Order:
    generation: int  # generation in which all rows of `runs` are live
    base: int  # the first run holds the rows below this number
    next_row: int  # all runs together hold the rows below this number
    runs: list[Rows]  # each sorted as SQLite's index is: by type, then by value


class Orders:
    """Cache of the orders of the fields used last. Call it on the store's thread, in a transaction of the catalogue."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, _Order] = OrderedDict()
        self._listed: dict[str, int] = {}

    def note(self, field: str, rows: int) -> None:
        """Add to the number of rows that filters have listed from a field's SQLite index."""
        self._listed[field] = self._listed.get(field, 0) + rows

    def is_current(self, field: str, snapshot: Snapshot) -> bool:
        """Return True if a field's order is cached and up to date with the snapshot."""
        cached = self._cached.get(field)
        return cached is not None and cached.generation == snapshot.generation

    def is_due(self, field: str, records: int) -> bool:
        """Return True if a field's order is cached, or if filters have listed enough rows to justify building it."""
        return field in self._cached or DUE * self._listed.get(field, 0) >= records

    def make(self, fields: tuple[str, ...], catalog: Catalog, snapshot: Snapshot) -> None:
        """Build and cache the orders of the first MAX_FIELDS of the fields. Cost: one pass over each field's index."""
        for field in fields[:MAX_FIELDS]:
            self._order(field, catalog, snapshot)

    def rows_in(self, field: str, spans: list[Span], catalog: Catalog, snapshot: Snapshot) -> tuple[Rows, bool]:
        """Return the rows that are in all spans of a field, unsorted, and False; or all other rows, if fewer, and True.

        Cost: about 30 comparisons for each end of the range, and a copy of the rows. The first call after a commit also
        reads all cached rows. A call for a field without a cached order reads the field's whole SQLite index.
        """
        runs = self._order(field, catalog, snapshot).runs
        tests = [test for span in spans for test in span.tests]
        kinds = [kind for kind in spans[0].types if all(kind in span.types for span in spans)]
        ends = [_ends(field, kind, tests) for kind in kinds]
        inside, outside = list[Rows](), list[Rows]()
        for run in runs:
            cuts = sorted(_cut(catalog, run, low, high) for low, high in ends)
            slices = np.split(run, [end for cut in cuts for end in cut])
            outside += slices[::2]
            inside += slices[1::2]
        fewer = sum(map(len, outside)) < sum(map(len, inside))
        return np.concatenate(outside if fewer else [outside[0][:0], *inside]), fewer

    def _order(self, field: str, catalog: Catalog, snapshot: Snapshot) -> _Order:
        """Return a field's order as of the snapshot: from the cache, brought up to date if necessary, or rebuilt."""
        order = self._cached.pop(field, None)
        if order is None or not _catch_up(order, field, catalog, snapshot):
            next_row = catalog.state().next_row
            order = _Order(snapshot.generation, next_row, next_row, [_list_rows(catalog, field, "records", next_row)])
        self._cached[field] = order
        if len(self._cached) > MAX_FIELDS:
            self._listed.pop(self._cached.popitem(last=False)[0], None)
        return order


def _catch_up(order: _Order, field: str, catalog: Catalog, snapshot: Snapshot) -> bool:
    """Update an order to the current generation; return False if it is invalid, or rebuilding it is faster."""
    if order.generation == snapshot.generation:
        return True
    next_row = catalog.state().next_row
    if (
        not catalog.payloads_replaced() <= order.generation < snapshot.generation
        or next_row - order.base > MAX_APPENDED
        or next_row > np.iinfo(order.runs[0].dtype).max
    ):
        return False
    order.runs = [_live_rows(run, snapshot) for run in order.runs]
    if next_row > order.next_row:
        if len(order.runs) > MAX_RUNS:
            order.runs, order.next_row = order.runs[:1], order.base
        appended = f"records NOT INDEXED WHERE row >= {order.next_row}"
        order.runs.append(_list_rows(catalog, field, appended, next_row))
    order.generation, order.next_row = snapshot.generation, next_row
    return True


def _list_rows(catalog: Catalog, field: str, source: str, next_row: int) -> Rows:
    """Return the rows of an SQL source (a table, with or without conditions), sorted by a field's value."""
    ordered = f"SELECT row FROM {source} ORDER BY {', '.join(field_sql(parts_of(field)))}, row"
    kind = np.int32 if next_row <= np.iinfo(np.int32).max else np.int64
    return catalog.rows(ordered, kind=kind)


def _live_rows(rows: Rows, snapshot: Snapshot) -> Rows:
    """Return those of the rows (m,) whose record is not deleted, with or without a key."""
    positions = snapshot.positions(rows)
    living = positions >= 0
    living[living] = snapshot.live[positions[living]]
    if len(snapshot.keyless):
        living |= np.isin(rows, snapshot.keyless)
    return rows if living.all() else rows[living]


Before = tuple[str, tuple[Any, ...]]  # SQL condition, true for the records before an end of a range; bindings


def _ends(field: str, kind: str | None, tests: list[tuple[str, Any]]) -> tuple[list[Before], list[Before]]:
    """Return conditions for the records before the start, and for those before the end, of a range within one type."""
    of_type, value = field_sql(parts_of(field))
    if kind is None:  # missing fields come first in the order
        return [], [(f"{of_type} IS NULL", ())]

    def before(comparison: str, operand: object) -> Before:
        return f"{lower} OR {of_type} = '{kind}' AND {value} {comparison} ?", (operand,)

    lower = f"{of_type} IS NULL OR {of_type} < '{kind}'"
    low: list[Before] = [(lower, ())]
    high: list[Before] = [(f"{of_type} IS NULL OR {of_type} <= '{kind}'", ())]
    for comparison, operand in tests:
        if comparison[0] in ">=":
            low.append(before("<=" if comparison == ">" else "<", operand))
        if comparison[0] in "<=":
            high.append(before("<" if comparison == "<" else "<=", operand))
    return low, high


def _cut(catalog: Catalog, run: Rows, low: list[Before], high: list[Before]) -> tuple[int, int]:
    """Return the start and end of a range as indices into a run, from the conditions that `_ends` returns."""
    begin = max((_count_before(catalog, run, *condition) for condition in low), default=0)
    return begin, max(begin, min(_count_before(catalog, run, *condition) for condition in high))


def _count_before(catalog: Catalog, rows: Rows, condition: str, bindings: tuple[Any, ...]) -> int:
    """Return the number of rows (m,) that meet a condition, by bisection: they come before all rows that do not."""
    low, high = 0, len(rows)
    pivots = np.unique([0, high - 1])  # most ranges end at an end of the array
    while low < high:
        count = len(catalog.matching(f"({condition})", bindings, among=rows[pivots]))
        if count:
            low = int(pivots[count - 1]) + 1
        if count < len(pivots):
            high = int(pivots[count])
        pivots = np.unique(np.linspace(low, high, PIVOTS + 2, dtype=np.int64)[1:-1])
    return low
