"""Which records a filter matches, remembered and carried from one commit to the next.

What a commit changes is known without reading payloads: appended rows are those from `next_row` on, deleted ones have
their tombstones. So only appended rows are evaluated anew. Payloads replaced in place, or segments rewritten by a
compaction, void what is remembered.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import json_text, shown
from softdb.errors import BadFilter, UnknownField
from softdb.store import textindex
from softdb.store.catalog import Catalog
from softdb.store.filters import All, Condition, Node, Not, Span, parse, statement
from softdb.store.order import KEPT, Orders
from softdb.store.paths import field_sql, parts_of, spelled
from softdb.store.snapshot import Snapshot

__all__ = ["ALL_HERE", "Matches", "Matching"]

SAMPLED = 1000  # records whose fields a warning knows
FILTERS_KEPT = 16  # filters whose matching rows are remembered: n bytes each
FEW = 256  # reading payloads beats asking another index about all records when fewer than one in so many are left
LOOKUP = 6  # reading a payload by its row takes that many times as long as passing over it
LARGE, ASKED = 1 << 16, 128  # records from which on so many are asked whether an index has less to list of the others
MUCH = 16  # an index is listed whole only for a filter that would have it list more than one record in so many
MANY = 10_000  # appended rows from which on a filter over declared fields is quicker asked anew

ALL_HERE = ContextVar("ALL_HERE", default=True)  # whether no others have records: a part cannot tell a field unknown

Live = NDArray[np.bool_]
Rows = NDArray[np.int64]
Layout = tuple[tuple[int, int, bool, int], ...]  # number, first row, whether its rows are consecutive, length


class Matching(NamedTuple):
    """The records that a filter matches."""

    live: Live  # (size,) over positions; never changed, indexes remember it by identity
    keyless: Rows  # (m,) ascending, of those without a key


class _Known(NamedTuple):
    generation: int
    next_row: int
    layout: Layout
    matching: Matching


class Matches:
    """The matches of the last filters. The caller holds the store's lock and one generation of the catalogue."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._orders = Orders()
        self._looked_for: set[str] = set()  # fields that a filter which matched nothing asked about

    def of(self, where: dict[str, Any], catalog: Catalog, snapshot: Snapshot) -> Matching:
        """The records that the filter matches. Raises BadFilter.

        Cost: one pass over the payloads, or the matches alone where all fields are declared; after a commit the rows
        it appended; n bytes copied.
        """
        node = parse(where)
        condition, bindings = statement(node)
        if textindex.MATCHING in condition and textindex.tokenizer(catalog.connection) is None:
            raise BadFilter(f"where has $match, but {textindex.NONE}")
        text = json_text([condition, bindings], "where")
        known = self._known.get(text)
        if known is None or known.generation != snapshot.generation:
            next_row = catalog.state().next_row
            matching = None
            if known is not None:
                matching = _carried(known, next_row, node, catalog, snapshot)
            if matching is None:
                matching = _matching(_Evaluation(catalog, snapshot, self._orders).of(node), snapshot)
            known = self._known[text] = _Known(snapshot.generation, next_row, _layout(snapshot), matching)
            if len(self._known) > FILTERS_KEPT:
                self._known.popitem(last=False)
            if ALL_HERE.get() and snapshot.records and not (matching.live.any() or len(matching.keyless)):
                self._warn_of_unknown(_named(node), catalog)
        self._known.move_to_end(text)
        return known.matching

    def order_fields(self, catalog: Catalog, snapshot: Snapshot) -> None:
        """Remember the order of declared fields, as many as are kept. Cost: one pass over each one's index."""
        for name in catalog.fields()[:KEPT] if snapshot.records >= LARGE else ():
            self._orders.make(name, catalog, snapshot)

    def _warn_of_unknown(self, fields: set[str], catalog: Catalog) -> None:
        """Warn of fields that no record has, each once. Cost: none for a field that was looked for before."""
        for name in sorted(fields - self._looked_for):
            self._looked_for.add(name)
            condition, bindings = statement(parse({name: {"$exists": True}}))
            if catalog.one(f"SELECT 1 FROM records WHERE {condition} LIMIT 1", bindings) is None:
                message = f"no record has the field {shown(name)}{_nearest(name, catalog)}"
                warnings.warn(message, UnknownField, stacklevel=2)


def _named(node: Node) -> set[str]:
    """The fields that a filter asks about."""
    if isinstance(node, Condition):
        return set() if node.field is None else {node.field}
    return _named(node.of) if isinstance(node, Not) else set().union(*map(_named, node.of))


def _nearest(name: str, catalog: Catalog) -> str:
    """What was likely meant by a name that no record has, for a message; empty where nothing is near."""
    parts = parts_of(name)
    for i, part in enumerate(parts):
        of_type, value = field_sql(parts[:i]) if i else ("json_type(payload)", "payload")
        some = f"FROM (SELECT {of_type} AS kind, {value} AS held FROM (SELECT payload FROM records LIMIT {SAMPLED}))"
        within = f"SELECT DISTINCT j.key {some}, json_each(CASE WHEN kind IN ('object', 'array') THEN held END) j"
        keys = [key for (key,) in catalog.all(within)]
        if part in map(str, keys):
            continue
        names = [key for key in keys if isinstance(key, str)]  # of a list they are numbers
        if (plain := ".".join(parts[i:])) in names:
            return f"; a dot in a name is written {shown(spelled([*parts[:i], plain]))}"
        near = [spelled([*parts[:i], one, *parts[i + 1 :]]) for one in difflib.get_close_matches(part, names, 1)]
        if i and not near and len(names) < len(keys):
            inner = json.dumps({spelled(parts[:i]): {"$elemMatch": {spelled(parts[i:]): "…"}}}, ensure_ascii=False)
            return f"; {shown(spelled(parts[:i]))} is a list, whose elements are asked by {inner}"
        return "".join(f"; did you mean {shown(one)}?" for one in near)
    return ""


def _layout(snapshot: Snapshot) -> Layout:
    return tuple((s.number, s.first_row, s.rows is None, len(s)) for s in snapshot.segments)


def _carried(known: _Known, next_row: int, node: Node, catalog: Catalog, snapshot: Snapshot) -> Matching | None:
    """What was known, with the commits since; None where it is void, or not worth it."""
    if known.generation > snapshot.generation or catalog.payloads_replaced() > known.generation:
        return None
    if not _extends(_layout(snapshot), known.layout):
        return None
    if next_row - known.next_row > MANY and _fields(node) <= set(catalog.fields()):
        return None
    carried, places = known.matching.live, _AllRecords(snapshot)
    matching = places.of(known.matching.keyless[np.isin(known.matching.keyless, snapshot.keyless)])
    matching[: len(carried)] = carried & snapshot.live[: len(carried)]
    if next_row > known.next_row:
        matching |= places.of(catalog.matching(*statement(node), first=known.next_row))
    return _matching(matching, snapshot)


class _AllRecords:
    """All records of a snapshot in one line: its positions, then the records without a key."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, keyless = snapshot, snapshot.keyless
        self.live = np.concatenate([snapshot.live, np.ones(len(keyless), np.bool_)]) if len(keyless) else snapshot.live

    def of(self, rows: Rows) -> Live:  # (m,) -> (size + keyless,)
        """Rows of records as a mask."""
        mask, keyless = np.zeros(len(self.live), np.bool_), self.snapshot.keyless
        if not len(keyless):
            mask[self.snapshot.positions(rows)] = True
            return mask
        own = np.isin(rows, keyless)
        mask[self.snapshot.positions(rows[~own])] = True
        mask[self.snapshot.size + keyless.searchsorted(rows[own])] = True
        return mask

    def rows(self, places: Rows) -> Rows:
        """The rows of some places."""
        inside = places < self.snapshot.size
        own = self.snapshot.keyless[places[~inside] - self.snapshot.size]
        return np.concatenate([self.snapshot.rows(places[inside]), own])


def _matching(mask: Live, snapshot: Snapshot) -> Matching:
    """A mask over all places."""
    return Matching(mask[: snapshot.size], snapshot.keyless[mask[snapshot.size :]])


def _extends(layout: Layout, old: Layout) -> bool:
    """Whether every old position is where it was: the same segments, the last perhaps longer, then new ones."""
    if not old:
        return True
    end = len(old) - 1
    return (
        len(layout) > end
        and layout[:end] == old[:end]
        and layout[end][:3] == old[end][:3]
        and layout[end][3] >= old[end][3]
    )


def _fields(node: Node) -> set[str | None]:
    """The fields whose indexes answer a filter without the payloads; None stands for one that cannot have any."""
    if isinstance(node, Condition):
        return {node.field if node.indexed else None}
    return _fields(node.of) if isinstance(node, Not) else set().union(*map(_fields, node.of))


def _flat(node: All) -> list[Node]:
    """The parts of a conjunction, and of those within it."""
    return [part for one in node.of for part in (_flat(one) if isinstance(one, All) else [one])]


def _by_field(node: All) -> list[Node]:
    """The parts, with the conditions on one field in one All: both ends of a range bound one search."""
    fields: dict[str | None, list[Node]] = {}
    others: list[Node] = []
    for one in _flat(node):
        (fields.setdefault(one.field, []) if isinstance(one, Condition) else others).append(one)
    # what likely matches fewest first: the parts after it may then be looked up record by record
    return sorted([*(All(tuple(same)) for same in fields.values()), *others], key=_breadth)


def _breadth(node: Node) -> int:
    """A guess at which part matches fewer records, before any is asked."""
    if not isinstance(node, All):
        return 2
    return 0 if len(node.of) > 1 or any(isinstance(one, Condition) and one.narrow for one in node.of) else 1


class _Evaluation:
    """One filter over all records: by indexes what they can answer, by reading payloads the rest."""

    def __init__(self, catalog: Catalog, snapshot: Snapshot, orders: Orders) -> None:
        self.catalog, self.snapshot, self.orders = catalog, snapshot, orders
        self.places, self.count = _AllRecords(snapshot), snapshot.records
        self.declared: set[str | None] = set(catalog.fields())

    def of(self, node: Node) -> Live:
        """Where the filter matches."""
        if _fields(node) <= self.declared:
            return self.indexed(node)
        if isinstance(node, All):
            quick = [one for one in node.of if _fields(one) <= self.declared]
            if quick:
                rest = All(tuple(one for one in node.of if one not in quick))
                return self.among(rest, self.indexed(All(tuple(quick))))
        return self.asked(node)

    def indexed(self, node: Node) -> Live:
        """Each field's conditions from its index; NOT, AND and OR over the records."""
        if isinstance(node, Condition):
            return self.of_field(node)
        if isinstance(node, Not):
            return self.places.live & ~self.indexed(node.of)
        if isinstance(node, All):
            return self.conjunction(_by_field(node))
        found = np.zeros(len(self.places.live), np.bool_)
        for one in node.of:
            found |= self.indexed(one)
        return found

    def conjunction(self, parts: list[Node]) -> Live:
        """Where every part matches. The last few are read."""
        found: Live | None = None
        for i, one in enumerate(parts):
            if found is not None and FEW * np.count_nonzero(found) < self.count:
                return self.among(All(tuple(parts[i:])), found)
            mask = self.of_field(one) if isinstance(one, All) else self.indexed(one)  # an All here is of one field
            found = mask if found is None else found & mask
        return self.places.live.copy() if found is None else found

    def of_field(self, node: Condition | All) -> Live:
        """Where the conditions on one field hold: a range of its order, or what its index lists, or leaves."""
        parts = [one for one in ([node] if isinstance(node, Condition) else node.of) if isinstance(one, Condition)]
        field = parts[0].field
        if self.count < LARGE or field is None:
            return self.asked(node)
        spans = [one.span for one in parts if one.span is not None]
        found = self.ordered(field, node, spans) if len(spans) == len(parts) else None
        if found is not None:
            return found
        left = [one.left() for one in parts if one.left]
        if not left or len(left) < len(parts) or self.share(node) <= 0.5:
            return self.listed(field, node)
        others = dict.fromkeys(one for conditions in left for one in conditions)  # each once
        found = np.zeros(len(self.places.live), np.bool_)
        for one in others:
            found |= self.listed(field, one)
        return self.places.live & ~found

    def ordered(self, field: str, node: Node, spans: list[Span]) -> Live | None:
        """Where all spans hold, by the field's order; None where it is not remembered, nor worth it."""
        due = self.orders.is_due(field, self.count)
        if not self.orders.is_current(field, self.snapshot) and not (due and 1 < MUCH * self.share(node) < MUCH - 1):
            return None  # to catch up after a commit, all rows are looked through: more than the index would list
        found = self.orders.rows_in(field, spans, self.catalog, self.snapshot)
        if found is None and self.orders.is_due(field, self.count):
            self.orders.make(field, self.catalog, self.snapshot)
            found = self.orders.rows_in(field, spans, self.catalog, self.snapshot)
        if found is None:
            return None
        rows, others = found
        return self.places.live & ~self.places.of(rows) if others else self.places.of(rows)

    def listed(self, field: str, node: Node) -> Live:
        """Where a condition holds that a field's index lists."""
        rows = self.catalog.matching(*statement(node))
        self.orders.note(field, len(rows))
        return self.places.of(rows)

    def share(self, node: Node) -> float:
        """How many of the records match, by the look of some."""
        live = self.places.live
        some = np.unique(np.random.default_rng(0).integers(0, len(live), ASKED))
        rows = self.places.rows(some[live[some]])
        return len(self.catalog.matching(*statement(node), among=rows)) / max(1, len(rows))

    def asked(self, node: Node) -> Live:
        """Where SQLite says that the filter matches."""
        return self.places.of(self.catalog.matching(*statement(node)))

    def among(self, node: Node, allowed: Live) -> Live:
        """Where the filter matches among records that are known to be allowed."""
        positions = np.flatnonzero(allowed)
        among = self.places.rows(positions) if LOOKUP * len(positions) < self.count else None
        return allowed & self.places.of(self.catalog.matching(*statement(node), among=among))
