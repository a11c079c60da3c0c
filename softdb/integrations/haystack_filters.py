"""Haystack's filters as filters of softdb. Knows nothing of Haystack itself.

{"operator": "AND", "conditions": [{"field": "meta.year", "operator": ">=", "value": 2020}, …]}
{"$and": [{"year": {"$gte": 2020}}, …]}
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter

PARTS = "_haystack"  # the field of a payload that holds what of a Document is neither its text nor its meta
_ORDER = {">": "$gt", ">=": "$gte", "<": "$lt", "<=": "$lte"}
_OPERATORS = ("==", "!=", *_ORDER, "in", "not in")
_OURS = {"$eq": "==", "$ne": "!=", "$in": "in", "$nin": "not in", **{ours: theirs for theirs, ours in _ORDER.items()}}
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([Tt ].+)?")


def where_of(filters: Any, depth: int = 1) -> dict[str, Any]:
    """The filter of softdb. Raises BadFilter for what is none of Haystack's, with the way to write it."""
    if depth > MAX_DEPTH // 2:
        raise BadFilter(f"filters nest deeper than {MAX_DEPTH // 2}; flatten them")
    if not isinstance(filters, dict):
        raise BadFilter(f"filters are {shown(filters)}; expected a dict: {_example({'year': {'$gte': 2020}})}")
    if "field" in filters:
        return _comparison(filters)
    if not {"operator", "conditions"} & set(filters):
        raise BadFilter(f"filters are {shown(filters)}, not in Haystack's dialect; write {_example(filters)}")
    operator, conditions = _part(filters, "operator"), _part(filters, "conditions")
    if not isinstance(conditions, list | tuple):
        raise BadFilter(f"conditions are {shown(conditions)}; expected a list of filters")
    parts = [where_of(condition, depth + 1) for condition in conditions]
    found: dict[str, dict[str, Any]] = {"AND": {"$and": parts}, "OR": {"$or": parts}, "NOT": {"$not": {"$and": parts}}}
    if operator not in list(found):
        raise BadFilter(f"operator is {shown(operator)}; around conditions stand {', '.join(found)}")
    return found[operator]


def _comparison(one: dict[str, Any]) -> dict[str, Any]:
    name, operator, value = _field(_part(one, "field")), _part(one, "operator"), _part(one, "value")
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise BadFilter(f"operator of {shown(one['field'])} is {shown(operator)}; there are {', '.join(_OPERATORS)}")
    if operator in ("in", "not in"):
        found = _among(name, value)
    elif isinstance(value, list | tuple | dict):
        raise BadFilter(f"{one['field']} is compared with {shown(value)}; only 'in' and 'not in' take a list")
    elif operator in _ORDER:
        return _ordered(name, operator, value)
    else:
        found = _equal(name, value)
    return {"$not": found} if operator in ("!=", "not in") else found


def _part(one: dict[str, Any], name: str) -> Any:
    if name not in one:
        raise BadFilter(f"{name!r} is missing in {shown(one)}; a filter looks like {_example({'year': 2020})}")
    return one[name]


def _field(name: object) -> str:
    """The field of a record that one of a Document is."""
    if not isinstance(name, str) or not name:
        raise BadFilter(f'field is {shown(name)}; expected a name such as "meta.year"')
    first, _, rest = name.replace("\\", "\\\\").partition(".")
    if name in ("content", "id"):
        return {"content": "$text", "id": "$id"}[name]
    if name == "score" or (first == "blob" and rest.startswith(("mime_type", "meta."))):
        return f"{PARTS}.{name}"
    if name in ("embedding", "sparse_embedding", "blob", "meta") or first == "blob":
        raise BadFilter(f"field {name!r} holds no value to compare; filter on meta, content, id, score, blob.mime_type")
    return rest if first == "meta" else f"{first}.{rest}" if rest else first


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


def _equal(name: str, value: Any) -> dict[str, Any]:
    return {"$or": [{name: {"$exists": False}}, {name: None}]} if value is None else {name: {"$eq": _plain(value)}}


def _among(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, list):
        raise BadFilter(f"{name} is looked for in {shown(value)}; expected a list")
    kept = {name: {"$in": [_plain(one) for one in value if one is not None]}}
    return {"$or": [kept, _equal(name, None)]} if None in value else kept


def _ordered(name: str, operator: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {"$or": []}  # nothing is more or less than nothing
    if isinstance(value, str) and not _ISO_DATE.fullmatch(value):
        raise BadFilter(f"{name} {operator} {shown(value)}: of texts only dates in ISO form have an order")
    return {name: {_ORDER[operator]: _plain(value)}}


def _example(ours: dict[Any, Any]) -> str:
    """Translate a filter from softdb's dialect, which is MongoDB's and others', into Haystack's."""
    parts = []
    for name, condition in ours.items():
        asked = condition if isinstance(condition, dict) else {"$eq": condition}
        for operator, value in asked.items():
            theirs = _OURS.get(str(operator), "==")
            parts.append({"field": f"meta.{name}", "operator": theirs, "value": value})
    whole = parts[0] if len(parts) == 1 else {"operator": "AND", "conditions": parts}
    return json.dumps(whole, ensure_ascii=False, default=str)
