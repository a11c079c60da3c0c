"""Cache of the records that filters match, which is updated after each commit.

The changes of a commit are known without reading payloads: appended rows are those from `next_row` on, deleted rows
have tombstones. So a filter is evaluated only for appended rows. Payloads that are replaced in place, and segments that
compaction replaces, invalidate the cache.
"""

from __future__ import annotations

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
from softdb.filters.masks import Evaluation, RecordLine, fields_of
from softdb.store import Snapshot, textindex
from softdb.store.catalog import Catalog
from softdb.store.paths import field_sql, parts_of, spelled
from softdb.store.snapshot import Live

SAMPLED = 1000  # number of records in which a warning of an unknown field looks for a similar name
MAX_FILTERS = 16  # number of filters whose matches are cached; each takes a byte for each record
MAX_APPENDED = 10_000  # number of appended rows beyond which evaluating a filter over declared fields anew is faster


class Matching(NamedTuple):
    """The records that a filter matches."""

    live: Live  # (size,) mask of positions; immutable, because indexes use its identity as a cache key
    keyless: NDArray[np.int64]  # (m,) ascending rows of matches without a key


class _Cached(NamedTuple):
    generation: int
    next_row: int
    segments: list[tuple[int, int]]  # (number, first row); positions stay valid while a snapshot begins with these
    matching: Matching


class Matches:
    """Cache of the matches of the filters used last. Call it on the store's thread, in a catalogue's transaction."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.is_whole = True  # False in a shard of a cluster, which cannot tell that no record has a field
        self._cached: OrderedDict[str, _Cached] = OrderedDict()  # keys: see `key_of`
        self._looked_for: set[str] = set()  # fields that `_warn_of_unknown` has checked

    def cached(self, where: dict[str, Any], generation: int) -> Live | None:
        """Return the mask of a filter that was evaluated in this generation, else None. Call it in any thread."""
        entry = self._cached.get(key_of(where))
        return entry.matching.live if entry is not None and entry.generation == generation else None

    def of(self, where: dict[str, Any], catalog: Catalog, snapshot: Snapshot) -> Matching:
        """Return the records that a filter matches. Raises BadFilter.

        Cost: one pass over the payloads, or over the matches if all fields are declared; after a commit only over the
        appended rows; n bytes copied.
        """
        node = parse(where)
        if textindex.MATCHING in statement(node)[0] and textindex.tokenizer(catalog.connection) is None:
            raise BadFilter(f"where has $match, but {textindex.NONE}")
        key = key_of(where)
        entry = self._cached.pop(key, None)
        if entry is None or entry.generation != snapshot.generation:
            entry = self._evaluate(node, entry, catalog, snapshot)
        self._cached[key] = entry
        if len(self._cached) > MAX_FILTERS:
            self._cached.popitem(last=False)
        return entry.matching

    def _evaluate(self, node: Node, old: _Cached | None, catalog: Catalog, snapshot: Snapshot) -> _Cached:
        next_row, line = catalog.state().next_row, RecordLine(snapshot)
        mask = None if old is None else _update(old, next_row, node, catalog, line)
        if mask is None:
            mask = Evaluation(catalog, line, self.orders).of(node)
        if self.is_whole and snapshot.records and not mask.any():
            self._warn_of_unknown(node, catalog)
        matching = Matching(mask[: snapshot.size], snapshot.keyless[mask[snapshot.size :]])
        return _Cached(snapshot.generation, next_row, _segments(snapshot), matching)

    def _warn_of_unknown(self, node: Node, catalog: Catalog) -> None:
        """Warn of each field in a filter that no record has; each field is checked only once."""
        for name in sorted({leaf.field for leaf in leaves(node)} - self._looked_for):
            self._looked_for.add(name)
            condition, bindings = statement(parse({name: {"$exists": True}}))
            if catalog.one(f"SELECT 1 FROM records WHERE {condition} LIMIT 1", bindings) is None:
                own = {"id": "; the record's id is $id", "text": "; the record's text is $text"}.get(name)
                message = f"no record has the field {shown(name)}{own or _suggest(name, catalog)}"
                warnings.warn(message, UnknownField, stacklevel=2)


def key_of(where: dict[str, Any]) -> str:
    """Return a key for caches of filters: the JSON of `where`, or of its SQL if it has arrays. Raises BadFilter."""
    try:
        return json.dumps(where)
    except (TypeError, ValueError, RecursionError):
        return json_text(statement(parse(where)), "where")


def _segments(snapshot: Snapshot) -> list[tuple[int, int]]:
    return [(segment.number, segment.first_row) for segment in snapshot.segments]


def _update(old: _Cached, next_row: int, node: Node, catalog: Catalog, line: RecordLine) -> Live | None:
    """Update the matches of an earlier generation; return None if they are invalid, or evaluating again is faster."""
    snapshot = line.snapshot
    if not catalog.payloads_replaced() <= old.generation <= snapshot.generation:
        return None
    if _segments(snapshot)[: len(old.segments)] != old.segments:
        return None
    if next_row - old.next_row > MAX_APPENDED and fields_of(node) <= set(catalog.fields()):
        return None
    live = old.matching.live
    mask = line.of(old.matching.keyless[np.isin(old.matching.keyless, snapshot.keyless)])
    mask[: len(live)] = live & snapshot.live[: len(live)]
    if next_row > old.next_row:
        mask |= line.of(catalog.matching(*statement(node), first=old.next_row))
    return mask


def _suggest(name: str, catalog: Catalog) -> str:
    """Return the end of a warning that suggests a similar name for an unknown one; empty if none is similar."""
    parts = parts_of(name)
    for i, key_name in enumerate(parts):
        of_type, value = field_sql(parts[:i]) if i else ("json_type(payload)", "payload")
        sample = f"FROM (SELECT {of_type} AS kind, {value} AS held FROM (SELECT payload FROM records LIMIT {SAMPLED}))"
        nested = f"SELECT DISTINCT j.key {sample}, json_each(CASE WHEN kind IN ('object', 'array') THEN held END) j"
        keys = [key for (key,) in catalog.all(nested)]
        if key_name in map(str, keys):
            continue
        names = [key for key in keys if isinstance(key, str)]  # the keys of a list are numbers
        if (plain := ".".join(parts[i:])) in names:
            return f"; a dot in a name is written {shown(spelled([*parts[:i], plain]))}"
        near = [spelled([*parts[:i], name, *parts[i + 1 :]]) for name in difflib.get_close_matches(key_name, names, 1)]
        if i and not near and len(names) < len(keys):
            inner = json.dumps({spelled(parts[:i]): {"$elemMatch": {spelled(parts[i:]): "…"}}}, ensure_ascii=False)
            return f"; {shown(spelled(parts[:i]))} is a list; to filter on its elements write {inner}"
        return "".join(f"; did you mean {shown(name)}?" for name in near)
    return ""
