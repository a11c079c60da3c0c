"""Cache of the rows of declared fields, in the order of their indexes: a range of values is a slice of such an order.

SQLite walks an index record by record, but a slice needs only a bisection for each end. SQLite compares the records
itself, so its order of numbers, texts and other types is not implemented again. (A cache of the values was measured:
if they are mostly different, reading them takes 27 times as long as reading the order.)

Rows are permanent, and so are their payloads unless they are replaced in place, which invalidates an order. After a
commit dead rows are removed, and appended rows form a run of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.filters.conditions import Span
from softdb.store import Snapshot
from softdb.store.catalog import Catalog
from softdb.store.paths import field_sql, parts_of

MAX_FIELDS = 4  # fields whose order is cached: 4 bytes a record each, 8 from 2^31 rows on
MAX_APPENDED = 10_000  # appended rows beyond which an order is rebuilt
MAX_RUNS = 8  # runs of appended rows, which are then merged
DUE = 4  # an order is built once SQLite has listed index entries of 1 / DUE of the records
PIVOTS = 3  # records that are compared at once: each may be a page to read

Rows = NDArray[Any]  # int32, or int64 from 2^31 rows on


@dataclass
class _Order:
    generation: int  # all rows are live in it
    base: int  # the first run holds the rows below
    next_row: int  # all runs together hold the rows below
    runs: list[Rows]  # each in the order of the index: by type, then by value


class Orders:
    """Orders of the fields used last. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, _Order] = OrderedDict()
        self._listed: dict[str, int] = {}

    def note(self, field: str, rows: int) -> None:
        """Count rows that SQLite has listed from a field's index."""
        self._listed[field] = self._listed.get(field, 0) + rows

    def is_current(self, field: str, snapshot: Snapshot) -> bool:
        """Return True if the cached order of a field is that of this generation."""
        cached = self._cached.get(field)
        return cached is not None and cached.generation == snapshot.generation

    def is_due(self, field: str, records: int) -> bool:
        """Return True if a field's order is cached, or SQLite has listed so many rows that building it pays."""
        return field in self._cached or DUE * self._listed.get(field, 0) >= records

    def make(self, fields: tuple[str, ...], catalog: Catalog, snapshot: Snapshot) -> None:
        """Build the orders of the first MAX_FIELDS fields. Cost: one pass over each field's index."""
        for field in fields[:MAX_FIELDS]:
            self._order(field, catalog, snapshot)

    def rows_in(self, field: str, spans: list[Span], catalog: Catalog, snapshot: Snapshot) -> tuple[Rows, bool]:
        """Return the rows in all spans of a field, and False; or, if fewer, all other rows, and True. In no order.

        Cost: some 30 records compared for each end, and the rows; after a commit, one pass over all cached rows; one
        over the field's index if its order is not cached.
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
        """Return the order in this generation, updated by the commits since, or rebuilt."""
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
    """Return the rows of an SQL source in the order of a field's index."""
    ordered = f"SELECT row FROM {source} ORDER BY {', '.join(field_sql(parts_of(field)))}, row"
    kind = np.int32 if next_row <= np.iinfo(np.int32).max else np.int64
    try:
        return np.fromstring(catalog.one(f"SELECT group_concat(row) FROM ({ordered})")[0] or "", kind, sep=",")
    except apsw.TooBigError:
        return np.fromiter((row for (row,) in catalog.connection.execute(ordered)), kind)


def _live_rows(rows: Rows, snapshot: Snapshot) -> Rows:
    """Return those of rows (m,) that hold a record, with a key or without."""
    positions = snapshot.positions(rows)
    living = positions >= 0
    living[living] = snapshot.live[positions[living]]
    if len(snapshot.keyless):
        living |= np.isin(rows, snapshot.keyless)
    return rows if living.all() else rows[living]


Before = tuple[str, tuple[Any, ...]]  # SQL condition of the records before one end of a range, and its bindings


def _ends(field: str, kind: str | None, tests: list[tuple[str, Any]]) -> tuple[list[Before], list[Before]]:
    """Return conditions of the records before a range of one type, and of those before its end, for `_cut`."""
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
    """Return start and end of a range in a run."""
    begin = max((_count_before(catalog, run, *condition) for condition in low), default=0)
    return begin, max(begin, min(_count_before(catalog, run, *condition) for condition in high))


def _count_before(catalog: Catalog, rows: Rows, condition: str, bindings: tuple[Any, ...]) -> int:
    """Return by bisection the number of rows (m,) that meet a condition, which all others come after."""
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
