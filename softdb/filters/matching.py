"""The records that a filter matches, remembered and carried from one commit to the next.

What a commit changes is known without reading payloads: appended rows are those from `next_row` on, deleted ones have
their tombstones. So only appended rows are evaluated anew. Payloads replaced in place, or segments rewritten by a
compaction, void what is remembered.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import json_text, shown
from softdb.errors import BadFilter, UnknownField
from softdb.filters.conditions import Node, leaves, statement
from softdb.filters.fieldorder import Orders
from softdb.filters.grammar import parse
from softdb.filters.masks import Evaluation, Live, RecordLine, fields_of
from softdb.store import Snapshot, textindex
from softdb.store.catalog import Catalog
from softdb.store.paths import field_sql, parts_of, spelled

SAMPLED = 1000  # records whose fields a warning knows
FILTERS_KEPT = 16  # filters whose matching rows are remembered: n bytes each
MANY = 10_000  # appended rows from which on a filter over declared fields is quicker asked anew


class Matching(NamedTuple):
    """The records that a filter matches."""

    live: Live  # (size,) over positions; never changed, indexes remember it by identity
    keyless: NDArray[np.int64]  # (m,) ascending, of those without a key


class _Known(NamedTuple):
    generation: int
    next_row: int
    segments: list[tuple[int, int]]  # number and first row: old positions stay while these come first
    matching: Matching


class Matches:
    """The matches of the last filters. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.is_whole = True  # False in a shard of a cluster, which cannot tell that no record has a field
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._last: dict[str, _Known] = {}  # filters as they were given, of one generation
        self._looked_for: set[str] = set()  # fields of filters that matched nothing

    def known(self, where: dict[str, Any], generation: int) -> Live | None:
        """The positions that the filter matches, if it was asked in this generation. In any thread."""
        try:
            known = self._last.get(json.dumps(where))
        except (TypeError, ValueError, RecursionError):  # `parse` says what is wrong with it
            return None
        return known.matching.live if known is not None and known.generation == generation else None

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
        known = self._known.pop(text, None)
        if known is None or known.generation != snapshot.generation:
            known = self._evaluated(node, known, catalog, snapshot)
        self._known[text] = known
        if len(self._known) > FILTERS_KEPT:
            self._known.popitem(last=False)
        self._remember(where, known)
        return known.matching

    def _remember(self, where: dict[str, Any], known: _Known) -> None:
        others = [other for other in self._last.values() if other.generation == known.generation]
        last = self._last.copy() if 0 < len(others) < FILTERS_KEPT else {}
        with contextlib.suppress(TypeError):
            last[json.dumps(where)] = known
        self._last = last

    def _evaluated(self, node: Node, known: _Known | None, catalog: Catalog, snapshot: Snapshot) -> _Known:
        next_row, places = catalog.state().next_row, RecordLine(snapshot)
        mask = None if known is None else _carried(known, next_row, node, catalog, places)
        if mask is None:
            mask = Evaluation(catalog, places, self.orders).of(node)
        if self.is_whole and snapshot.records and not mask.any():
            self._warn_of_unknown(node, catalog)
        matching = Matching(mask[: snapshot.size], snapshot.keyless[mask[snapshot.size :]])
        return _Known(snapshot.generation, next_row, _segments(snapshot), matching)

    def _warn_of_unknown(self, node: Node, catalog: Catalog) -> None:
        """Warn of fields that no record has, each once. Cost: none for a field that was looked for before."""
        for name in sorted({leaf.field for leaf in leaves(node)} - self._looked_for):
            self._looked_for.add(name)
            condition, bindings = statement(parse({name: {"$exists": True}}))
            if catalog.one(f"SELECT 1 FROM records WHERE {condition} LIMIT 1", bindings) is None:
                message = f"no record has the field {shown(name)}{_nearest(name, catalog)}"
                warnings.warn(message, UnknownField, stacklevel=2)


def _segments(snapshot: Snapshot) -> list[tuple[int, int]]:
    return [(segment.number, segment.first_row) for segment in snapshot.segments]


def _carried(known: _Known, next_row: int, node: Node, catalog: Catalog, places: RecordLine) -> Live | None:
    """Matches of an earlier generation, with the commits since; None where they are void, or quicker made anew."""
    snapshot = places.snapshot
    if not catalog.payloads_replaced() <= known.generation <= snapshot.generation:
        return None
    if _segments(snapshot)[: len(known.segments)] != known.segments:
        return None
    if next_row - known.next_row > MANY and fields_of(node) <= set(catalog.fields()):
        return None
    live = known.matching.live
    mask = places.of(known.matching.keyless[np.isin(known.matching.keyless, snapshot.keyless)])
    mask[: len(live)] = live & snapshot.live[: len(live)]
    if next_row > known.next_row:
        mask |= places.of(catalog.matching(*statement(node), first=known.next_row))
    return mask


def _nearest(name: str, catalog: Catalog) -> str:
    """End of a message: the name that was likely meant by one that no record has; empty where nothing is near."""
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
        near = [spelled([*parts[:i], name, *parts[i + 1 :]]) for name in difflib.get_close_matches(part, names, 1)]
        if i and not near and len(names) < len(keys):
            inner = json.dumps({spelled(parts[:i]): {"$elemMatch": {spelled(parts[i:]): "…"}}}, ensure_ascii=False)
            return f"; {shown(spelled(parts[:i]))} is a list, whose elements are asked by {inner}"
        return "".join(f"; did you mean {shown(name)}?" for name in near)
    return ""
