"""The rows of declared fields in the order of their indexes, remembered: a range of values is a slice of them.

SQLite walks an index record by record; a slice is found by bisection of its ends. SQLite makes the comparisons, too, on
the records themselves, so nothing of its order is repeated here: numbers of any size, texts, and what is neither.
(Columns of values in memory were measured: where the values differ, to read them takes 27 times as long as the order.)

Rows are permanent and their payloads stay, unless they are replaced in place, which voids an order. After a commit the
dead rows leave, and the appended rows are a run of their own.
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

KEPT = 4  # fields whose order is remembered: 4 bytes a record each, 8 from 2^31 rows on
APPENDED = 10_000  # rows after which an order is made anew
RUNS = 8  # of appended rows, before they become one
DUE = 4  # an order is worth remembering when a part of its index was listed, of one in so many records
PIVOTS = 3  # records that are compared at once: each may be a page to read

Rows = NDArray[Any]  # int32, or int64 from 2^31 rows on


@dataclass
class _Order:
    generation: int  # in which all rows are live
    base: int  # the rows before it are in the first run
    next_row: int  # the rows before it are in a run
    runs: list[Rows]  # each in the order of the index: by type, by value


class Orders:
    """The orders of the last fields. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Order] = OrderedDict()
        self._listed: dict[str, int] = {}

    def note(self, field: str, rows: int) -> None:
        """Count rows that SQLite has listed of a field's index."""
        self._listed[field] = self._listed.get(field, 0) + rows

    def is_current(self, field: str, snapshot: Snapshot) -> bool:
        """True where a field's order is remembered as it is in this generation."""
        known = self._known.get(field)
        return known is not None and known.generation == snapshot.generation

    def is_due(self, field: str, records: int) -> bool:
        """True where a field's order is remembered, or so much of its index was listed that this is worth it."""
        return field in self._known or DUE * self._listed.get(field, 0) >= records

    def make(self, fields: tuple[str, ...], catalog: Catalog, snapshot: Snapshot) -> None:
        """Remember the order of fields, as many as are kept. Cost: one pass over each one's index."""
        for field in fields[:KEPT]:
            self._order(field, catalog, snapshot)

    def rows_in(self, field: str, spans: list[Span], catalog: Catalog, snapshot: Snapshot) -> tuple[Rows, bool]:
        """The rows that are in all spans of a field, or, if that is True, all others; whichever are fewer, in no order.

        Cost: some 30 records compared for each end, and the rows; after a commit, all rows looked through once; a pass
        over the field's index where its order is not remembered.
        """
        runs = self._order(field, catalog, snapshot).runs
        tests = [test for span in spans for test in span.tests]
        kinds = [kind for kind in spans[0].types if all(kind in span.types for span in spans)]
        ends = [_ends(field, kind, tests) for kind in kinds]
        within, outside = list[Rows](), list[Rows]()
        for run in runs:
            cuts = sorted(_cut(catalog, run, low, high) for low, high in ends)
            parts = np.split(run, [place for cut in cuts for place in cut])
            outside += parts[::2]
            within += parts[1::2]
        fewer = sum(map(len, outside)) < sum(map(len, within))
        return np.concatenate(outside if fewer else [outside[0][:0], *within]), fewer

    def _order(self, field: str, catalog: Catalog, snapshot: Snapshot) -> _Order:
        """The order in this generation, caught up with the commits since, or made anew."""
        known = self._known.pop(field, None)
        if known is None or not _caught_up(known, field, catalog, snapshot):
            next_row = catalog.state().next_row
            known = _Order(snapshot.generation, next_row, next_row, [_listed(catalog, field, "records", next_row)])
        self._known[field] = known
        if len(self._known) > KEPT:
            self._listed.pop(self._known.popitem(last=False)[0], None)
        return known


def _caught_up(known: _Order, field: str, catalog: Catalog, snapshot: Snapshot) -> bool:
    """Bring an order to the present generation; False where it is void, or better made anew."""
    if known.generation == snapshot.generation:
        return True
    next_row = catalog.state().next_row
    if (
        not catalog.payloads_replaced() <= known.generation < snapshot.generation
        or next_row - known.base > APPENDED
        or next_row > np.iinfo(known.runs[0].dtype).max
    ):
        return False
    known.runs = [_living(run, snapshot) for run in known.runs]
    if next_row > known.next_row:
        if len(known.runs) > RUNS:
            known.runs, known.next_row = known.runs[:1], known.base
        appended = f"records NOT INDEXED WHERE row >= {known.next_row}"
        known.runs.append(_listed(catalog, field, appended, next_row))
    known.generation, known.next_row = snapshot.generation, next_row
    return True


def _listed(catalog: Catalog, field: str, source: str, next_row: int) -> Rows:
    """The rows of a source in the order of a field's index."""
    ordered = f"SELECT row FROM {source} ORDER BY {', '.join(field_sql(parts_of(field)))}, row"
    kind = np.int32 if next_row <= np.iinfo(np.int32).max else np.int64
    try:
        return np.fromstring(catalog.one(f"SELECT group_concat(row) FROM ({ordered})")[0] or "", kind, sep=",")
    except apsw.TooBigError:
        return np.fromiter((row for (row,) in catalog.connection.execute(ordered)), kind)


def _living(rows: Rows, snapshot: Snapshot) -> Rows:
    """Those of rows (m,) that hold a record, with a key or without."""
    positions = snapshot.positions(rows)
    living = positions >= 0
    living[living] = snapshot.live[positions[living]]
    if len(snapshot.keyless):
        living |= np.isin(rows, snapshot.keyless)
    return rows if living.all() else rows[living]


Before = tuple[str, tuple[Any, ...]]  # SQL condition of the records before a place in the order, and its bindings


def _ends(field: str, kind: str | None, tests: list[tuple[str, Any]]) -> tuple[list[Before], list[Before]]:
    """Conditions of the records before a range of one type, and of those before its end; all of several hold."""
    of_type, value = field_sql(parts_of(field))
    if kind is None:  # which come first
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
    """Begin and end of a range in a run."""
    begin = max((_before(catalog, run, *condition) for condition in low), default=0)
    return begin, max(begin, min(_before(catalog, run, *condition) for condition in high))


def _before(catalog: Catalog, rows: Rows, condition: str, bindings: tuple[Any, ...]) -> int:
    """Number of rows (m,) that a condition holds of, which holds of the first up to some row and of none after it."""
    low, high = 0, len(rows)
    places = np.unique([0, high - 1])  # mostly an end is the array's
    while low < high:
        count = len(catalog.matching(f"({condition})", bindings, among=rows[places]))
        if count:
            low = int(places[count - 1]) + 1
        if count < len(places):
            high = int(places[count])
        places = np.unique(np.linspace(low, high, PIVOTS + 2, dtype=np.int64)[1:-1])
    return low
