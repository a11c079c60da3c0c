"""Evaluation of a filter over all records: by the indexes of declared fields, and by the payloads for the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from softdb.filters.conditions import All, Condition, Node, Not, leaves, others, statement
from softdb.filters.fieldorder import Orders
from softdb.store import Snapshot
from softdb.store.catalog import Catalog

FEW = 256  # reading payloads beats asking another index about all records when fewer than one in so many are left
LOOKUP = 6  # reading a payload by its row takes that many times as long as passing over it
LARGE, SAMPLED = 1 << 16, 128  # records from which on the share of matches is estimated, from so many
BROAD = 16  # a field's order is made or caught up only for a filter between one record in so many and all but that

Live = NDArray[np.bool_]
Rows = NDArray[np.int64]


def fields_of(node: Node) -> set[str | None]:
    """The fields whose indexes answer a filter without the payloads; None stands for one that cannot have any."""
    return {leaf.field if leaf.indexed else None for leaf in leaves(node)}


class RecordLine:
    """All records of a snapshot in one line: its positions, then the records without a key."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, keyless = snapshot, snapshot.keyless
        self.live = np.concatenate([snapshot.live, np.ones(len(keyless), np.bool_)]) if len(keyless) else snapshot.live

    def of(self, rows: Rows) -> Live:  # (m,) -> (size + keyless,)
        """Mask of the records in some rows."""
        mask, keyless = np.zeros(len(self.live), np.bool_), self.snapshot.keyless
        if not len(keyless):
            mask[self.snapshot.positions(rows)] = True
            return mask
        without = np.isin(rows, keyless)
        mask[self.snapshot.positions(rows[~without])] = True
        mask[self.snapshot.size + keyless.searchsorted(rows[without])] = True
        return mask

    def rows(self, places: Rows) -> Rows:
        """The rows of some places."""
        inside = places < self.snapshot.size
        without = self.snapshot.keyless[places[~inside] - self.snapshot.size]
        return np.concatenate([self.snapshot.rows(places[inside]), without])


class Evaluation:
    """One filter over all records of a generation."""

    def __init__(self, catalog: Catalog, places: RecordLine, orders: Orders) -> None:
        self.catalog, self.places, self.orders = catalog, places, orders
        self.count = places.snapshot.records
        self.declared: set[str | None] = set(catalog.fields())

    def of(self, node: Node) -> Live:
        """Mask of the matches."""
        if fields_of(node) <= self.declared:
            return self.indexed(node)
        if isinstance(node, All):
            quick = [part for part in node.of if fields_of(part) <= self.declared]
            if quick:
                rest = All(tuple(part for part in node.of if part not in quick))
                return self.among(rest, self.indexed(All(tuple(quick))))
        return self.listed(node)

    def indexed(self, node: Node) -> Live:
        """Matches by indexes: each field's conditions by its own; NOT, AND and OR over the masks."""
        if isinstance(node, Not):
            return self.places.live & ~self.indexed(node.of)
        if isinstance(node, Condition):
            return self.of_field(node)
        if isinstance(node, All):
            return self.conjunction(node)
        mask = np.zeros(len(self.places.live), np.bool_)
        for part in node.of:
            mask |= self.indexed(part)
        return mask

    def conjunction(self, node: All) -> Live:
        """Matches of all parts. Once few records are left, their payloads are read."""
        mask: Live | None = None
        parts = _by_field(node)
        for i, part in enumerate(parts):
            if mask is not None and FEW * np.count_nonzero(mask) < self.count:
                return self.among(All(tuple(parts[i:])), mask)
            own = self.of_field(part) if isinstance(part, All) else self.indexed(part)
            mask = own if mask is None else mask & own
        return self.places.live.copy() if mask is None else mask

    def of_field(self, node: Condition | All) -> Live:
        """Matches of the conditions on one field: a slice of its order, or what its index lists, or leaves."""
        conditions = list(leaves(node))
        field, spans = conditions[0].field, [leaf.span for leaf in conditions if leaf.span is not None]
        if self.count < LARGE or len(spans) < len(conditions):
            return self.listed(node, field)
        share = None if self.orders.is_current(field, self.places.snapshot) else self.share(node)
        # to catch up after a commit, all rows are looked through: more than the index lists for a narrow filter
        if share is None or (1 < BROAD * share < BROAD - 1 and self.orders.is_due(field, self.count)):
            rows, outside = self.orders.rows_in(field, spans, self.catalog, self.places.snapshot)
            mask = self.places.of(rows)
            return self.places.live & ~mask if outside else mask
        if share <= 0.5:
            return self.listed(node, field)
        mask = np.zeros(len(self.places.live), np.bool_)
        for condition in dict.fromkeys(other for span in spans for other in others(field, span)):
            mask |= self.listed(condition, field)
        return self.places.live & ~mask

    def share(self, node: Node) -> float:
        """Share of the records that match, estimated from some."""
        live = self.places.live
        places = np.unique(np.random.default_rng(0).integers(0, len(live), SAMPLED))
        rows = self.places.rows(places[live[places]])
        return len(self.catalog.matching(*statement(node), among=rows)) / max(1, len(rows))

    def listed(self, node: Node, field: str | None = None) -> Live:
        """Matches as SQLite lists them, by a field's index or by the payloads."""
        rows = self.catalog.matching(*statement(node))
        if field is not None:
            self.orders.note(field, len(rows))
        return self.places.of(rows)

    def among(self, node: Node, allowed: Live) -> Live:
        """Matches among records that are known to be allowed."""
        places = np.flatnonzero(allowed)
        among = self.places.rows(places) if LOOKUP * len(places) < self.count else None
        return allowed & self.places.of(self.catalog.matching(*statement(node), among=among))


def _flat(node: All) -> list[Node]:
    return [part for inner in node.of for part in (_flat(inner) if isinstance(inner, All) else [inner])]


def _by_field(node: All) -> list[Node]:
    """Parts of a conjunction, the conditions on one field in one `All`: both ends of a range bound one search.

    Those that likely match fewest come first: the parts after them may then be looked up record by record.
    """
    fields: dict[str, list[Node]] = {}
    rest: list[Node] = []
    for part in _flat(node):
        (fields.setdefault(part.field, []) if isinstance(part, Condition) else rest).append(part)
    return sorted([*(All(tuple(same)) for same in fields.values()), *rest], key=_breadth)


def _breadth(node: Node) -> int:
    """Rank of a part by the records that it likely matches: equalities and closed ranges, open ranges, the rest."""
    if not isinstance(node, All):
        return 2
    spans = [leaf.span for leaf in leaves(node)]
    narrow = len(spans) > 1 or any(span is None or len(span.tests) > 1 or "=" in dict(span.tests) for span in spans)
    return 0 if narrow else 1
