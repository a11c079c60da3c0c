"""Groups of records by the value of a field, remembered and carried from one commit to the next.

Rows are permanent and their payloads stay, unless they are replaced in place, which voids what is remembered. So after
a commit only the rows that it appended are read.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.store import Snapshot
from softdb.store.catalog import Catalog
from softdb.store.paths import field_sql, parts_of, spelled

KEPT = 4  # fields whose groups are remembered: 12 bytes a record each, and the values

Codes = NDArray[np.int32]
_KINDS = "CASE {0} WHEN 'integer' THEN 'real' ELSE {0} END"  # 1 and 1.0 are one number; true and "1" are others


class Grouping(NamedTuple):
    """The groups of one generation. Never changed: indexes remember `takes_part` by identity."""

    codes: Codes  # (size,) over positions, the number of a record's group, from 0; -1 = none
    takes_part: NDArray[np.bool_] | None  # (size,) the live records that are in a group; None: all are


@dataclass
class _ByField:
    generation: int = -1
    next_row: int = 0
    names: dict[tuple[str, object], int] = field(default_factory=dict)  # a value, and the number of its group
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    codes: Codes = field(default_factory=lambda: np.empty(0, np.int32))
    grouping: Grouping | None = None  # of this generation


class Groups:
    """The groups by the last fields. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _ByField] = OrderedDict()

    def of(self, name: str, catalog: Catalog, snapshot: Snapshot) -> Grouping:
        """The groups by a field; a record where it is missing, null, or no scalar is in none. Raises BadFilter.

        Cost: one pass over the payloads, some 2 µs a record; after a commit over the rows that it appended.
        """
        name = spelled(parts_of(name))
        known = self._known.pop(name, None)
        if known is None or not catalog.payloads_replaced() <= known.generation <= snapshot.generation:
            known = _ByField()
        if known.grouping is None or known.generation < snapshot.generation:
            _extend(known, name, catalog)
            known.generation, known.next_row = snapshot.generation, catalog.state().next_row
            known.grouping = _placed(known, snapshot)
        self._known[name] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known.grouping


def _placed(known: _ByField, snapshot: Snapshot) -> Grouping:
    positions, codes = snapshot.positions(known.rows), np.full(snapshot.size, -1, np.int32)
    present = positions >= 0
    codes[positions[present]] = known.codes[present]
    takes_part = snapshot.live & (codes >= 0)
    return Grouping(codes, None if np.count_nonzero(takes_part) == snapshot.count else takes_part)


def _extend(known: _ByField, name: str, catalog: Catalog) -> None:
    """Add the rows that were appended since."""
    kind, value = field_sql(parts_of(name))
    rows = "records" if not known.next_row else f"records NOT INDEXED WHERE row >= {known.next_row}"
    every = f"SELECT row AS r, {_KINDS.format(kind)} AS kind, {value} AS v FROM {rows}"
    cells = catalog.all(f"SELECT * FROM ({every}) WHERE kind IN ('real', 'text', 'true', 'false')")
    new = np.fromiter((row for row, _, _ in cells), np.int64, len(cells))
    number = known.names.setdefault
    codes = np.fromiter((number((k, v), len(known.names)) for _, k, v in cells), np.int32, len(cells))
    known.rows, known.codes = np.concatenate([known.rows, new]), np.concatenate([known.codes, codes])
