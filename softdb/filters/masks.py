"""Evaluation of a filter over all records: by indexes for declared fields, by the payloads for other fields."""

from __future__ import annotations

import numpy as np

from softdb.filters.conditions import All, Condition, Node, Not, leaves, others, statement
from softdb.filters.fieldorder import Orders
from softdb.store import Snapshot
from softdb.store.catalog import Catalog
from softdb.store.snapshot import Live, Rows

FEW = 256  # once at most 1 / FEW of the records remain, reading their payloads is faster than another index
LOOKUP = 6  # time to look up a payload by its row, divided by the time to read it in a scan
LARGE, SAMPLED = 1 << 16, 128  # from LARGE records on, the share of matches is estimated by a sample of SAMPLED records
BROAD = 16  # a field's order is built or updated only if the share of matches is from 1 / BROAD to 1 - 1 / BROAD


def fields_of(node: Node) -> set[str | None]:
    """Return the fields in a filter; None stands for each condition that no index of a field can answer."""
    return {leaf.field if leaf.indexed else None for leaf in leaves(node)}


class RecordLine:
    """All records of a snapshot as one sequence: the snapshot's positions, then the records without a key."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, keyless = snapshot, snapshot.keyless
        self.live = np.concatenate([snapshot.live, np.ones(len(keyless), np.bool_)]) if len(keyless) else snapshot.live

    def of(self, rows: Rows) -> Live:  # (m,) -> (size + keyless,)
        """Return a mask over the sequence, True at the records in these rows."""
        mask, keyless = np.zeros(len(self.live), np.bool_), self.snapshot.keyless
        if not len(keyless):
            mask[self.snapshot.positions(rows)] = True
            return mask
        without = np.isin(rows, keyless)
        mask[self.snapshot.positions(rows[~without])] = True
        mask[self.snapshot.size + keyless.searchsorted(rows[without])] = True
        return mask

    def rows(self, places: Rows) -> Rows:
        """Return the rows of the records at these indices of the sequence."""
        inside = places < self.snapshot.size
        without = self.snapshot.keyless[places[~inside] - self.snapshot.size]
        return np.concatenate([self.snapshot.rows(places[inside]), without])


class Evaluation:
    """Evaluation of filters in one generation; each mask has an entry for each record of the sequence `line`."""

    def __init__(self, catalog: Catalog, line: RecordLine, orders: Orders) -> None:
        self.catalog, self.line, self.orders = catalog, line, orders
        self.count = line.snapshot.records
        self.declared: set[str | None] = set(catalog.fields())

    def of(self, node: Node) -> Live:
        """Return the mask of the records that a filter matches."""
        if fields_of(node) <= self.declared:
            return self.indexed(node)
        if isinstance(node, All):
            indexed = [child for child in node.of if fields_of(child) <= self.declared]
            if indexed:
                unindexed = All(tuple(child for child in node.of if child not in indexed))
                return self.among(unindexed, self.indexed(All(tuple(indexed))))
        return self.listed(node)

    def indexed(self, node: Node) -> Live:
        """Find matches by the indexes of the fields, a mask for each field; combine the masks by NOT, AND and OR."""
        if isinstance(node, Not):
            return self.line.live & ~self.indexed(node.of)
        if isinstance(node, Condition):
            return self.of_field(node)
        if isinstance(node, All):
            return self.conjunction(node)
        mask = np.zeros(len(self.line.live), np.bool_)
        for child in node.of:
            mask |= self.indexed(child)
        return mask

    def conjunction(self, node: All) -> Live:
        """Find the records that all children match. Once few records remain, read the payloads of these records."""
        mask: Live | None = None
        children = _by_field(node)
        for i, child in enumerate(children):
            if mask is not None and FEW * np.count_nonzero(mask) < self.count:
                return self.among(All(tuple(children[i:])), mask)
            matches = self.of_field(child) if isinstance(child, All) else self.indexed(child)
            mask = matches if mask is None else mask & matches
        return self.line.live.copy() if mask is None else mask

    def of_field(self, node: Condition | All) -> Live:
        """Match conditions on one field: by a slice of its order, or by listing the matches or all other records."""
        conditions = list(leaves(node))
        field, spans = conditions[0].field, [leaf.span for leaf in conditions if leaf.span is not None]
        if self.count < LARGE or len(spans) < len(conditions):
            return self.listed(node, field)
        share = None if self.orders.is_current(field, self.line.snapshot) else self.share(node)
        # bringing an order up to date after a commit reads all its rows: more work than listing few matches
        if share is None or (1 < BROAD * share < BROAD - 1 and self.orders.is_due(field, self.count)):
            rows, outside = self.orders.rows_in(field, spans, self.catalog, self.line.snapshot)
            mask = self.line.of(rows)
            return self.line.live & ~mask if outside else mask
        if share <= 0.5:
            return self.listed(node, field)
        mask = np.zeros(len(self.line.live), np.bool_)
        for condition in dict.fromkeys(other for span in spans for other in others(field, span)):
            mask |= self.listed(condition, field)
        return self.line.live & ~mask

    def share(self, node: Node) -> float:
        """Estimate the share of the records that match, from a sample."""
        live = self.line.live
        places = np.unique(np.random.default_rng(0).integers(0, len(live), SAMPLED))
        rows = self.line.rows(places[live[places]])
        return len(self.catalog.matching(*statement(node), among=rows)) / max(1, len(rows))

    def listed(self, node: Node, field: str | None = None) -> Live:
        """Have SQLite list the matches. If `field` is given, report their number to `Orders.note` for that field."""
        rows = self.catalog.matching(*statement(node))
        if field is not None:
            self.orders.note(field, len(rows))
        return self.line.of(rows)

    def among(self, node: Node, allowed: Live) -> Live:
        """Find matches among the allowed records."""
        places = np.flatnonzero(allowed)
        among = self.line.rows(places) if LOOKUP * len(places) < self.count else None
        return allowed & self.line.of(self.catalog.matching(*statement(node), among=among))


def _flatten(node: All) -> list[Node]:
    return [leaf for child in node.of for leaf in (_flatten(child) if isinstance(child, All) else [child])]


def _by_field(node: All) -> list[Node]:
    """Return the children of a conjunction, with all conditions on one field in one `All`, to search that field once.

    Children that likely match the fewest records come first, so that the other children read the fewest payloads.
    """
    fields: dict[str, list[Node]] = {}
    remaining: list[Node] = []
    for child in _flatten(node):
        (fields.setdefault(child.field, []) if isinstance(child, Condition) else remaining).append(child)
    return sorted([*(All(tuple(conditions)) for conditions in fields.values()), *remaining], key=_breadth)


def _breadth(node: Node) -> int:
    """Rank a node by its likely number of matches: 0 equalities and closed ranges, 1 open ranges, 2 all other nodes."""
    if not isinstance(node, All):
        return 2
    spans = [leaf.span for leaf in leaves(node)]
    narrow = len(spans) > 1 or any(span is None or len(span.tests) > 1 or "=" in dict(span.tests) for span in spans)
    return 0 if narrow else 1
