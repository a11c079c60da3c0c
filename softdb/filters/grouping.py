"""Cache of the groups of `group_by=`: records with an equal value of a field form a group.

A row belongs to one record for ever, and replacing a payload in place invalidates the cache. So after a commit only the
appended rows are read.
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

MAX_FIELDS = 4  # number of fields whose groups are cached; each takes 12 bytes for each record, and the distinct values

Codes = NDArray[np.int32]
_KINDS = "CASE {0} WHEN 'integer' THEN 'real' ELSE {0} END"  # 1 and 1.0 are equal; true and "1" differ from them


class Grouping(NamedTuple):
    """The groups in one generation. Immutable, because indexes use the identity of `takes_part` as a cache key."""

    codes: Codes  # (size,) for each position the number of the record's group, from 0; -1: no group
    takes_part: NDArray[np.bool_] | None  # (size,) mask of the live records in a group; None: all live records


@dataclass
class _ByField:
    generation: int = -1
    next_row: int = 0
    numbers: dict[tuple[str, object], int] = field(default_factory=dict)  # (type, value) -> number of the group
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    codes: Codes = field(default_factory=lambda: np.empty(0, np.int32))
    grouping: Grouping | None = None  # the groups in `generation`


class Groups:
    """Cache of the groups by the fields used last. Call it on the store's thread, in a transaction of the catalogue."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, _ByField] = OrderedDict()

    def of(self, name: str, catalog: Catalog, snapshot: Snapshot) -> Grouping:
        """Group records by a field; a record without the field, or with null, a list or an object there, has no group.

        Raises BadFilter. Cost: one pass over the payloads, about 2 µs a record; after a commit only the appended rows.
        """
        name = spelled(parts_of(name))
        groups = self._cached.pop(name, None)
        if groups is None or not catalog.payloads_replaced() <= groups.generation <= snapshot.generation:
            groups = _ByField()
        if groups.grouping is None or groups.generation < snapshot.generation:
            _extend(groups, name, catalog)
            groups.generation, groups.next_row = snapshot.generation, catalog.state().next_row
            groups.grouping = _place_codes(groups, snapshot)
        self._cached[name] = groups
        if len(self._cached) > MAX_FIELDS:
            self._cached.popitem(last=False)
        return groups.grouping


def _place_codes(groups: _ByField, snapshot: Snapshot) -> Grouping:
    positions, codes = snapshot.positions(groups.rows), np.full(snapshot.size, -1, np.int32)
    present = positions >= 0
    codes[positions[present]] = groups.codes[present]
    takes_part = snapshot.live & (codes >= 0)
    return Grouping(codes, None if np.count_nonzero(takes_part) == snapshot.count else takes_part)


def _extend(groups: _ByField, name: str, catalog: Catalog) -> None:
    """Read the rows from `groups.next_row` on, and add them to their groups."""
    kind, value = field_sql(parts_of(name))
    source = "records" if not groups.next_row else f"records NOT INDEXED WHERE row >= {groups.next_row}"
    every = f"SELECT row AS r, {_KINDS.format(kind)} AS kind, {value} AS v FROM {source}"
    cells = catalog.all(f"SELECT * FROM ({every}) WHERE kind IN ('real', 'text', 'true', 'false')")
    new = np.fromiter((row for row, _, _ in cells), np.int64, len(cells))
    numbers = groups.numbers
    codes = np.fromiter((numbers.setdefault((k, v), len(numbers)) for _, k, v in cells), np.int32, len(cells))
    groups.rows, groups.codes = np.concatenate([groups.rows, new]), np.concatenate([groups.codes, codes])
