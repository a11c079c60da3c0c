"""Translation of Haystack's filters to softdb's, for example the first line to the second. Haystack is not imported.

{"operator": "AND", "conditions": [{"field": "meta.year", "operator": ">=", "value": 2020}, …]}
{"$and": [{"year": {"$gte": 2020}}, …]}
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

from softdb.check import shown
from softdb.errors import BadFilter

EXTRAS = "_haystack"  # the payload's field for a Document's blob, sparse embedding and score
ORDER = {">": "$gt", ">=": "$gte", "<": "$lt", "<=": "$lte"}
_OPERATORS = ("==", "!=", *ORDER, "in", "not in")
_HAYSTACK = {"$eq": "==", "$ne": "!=", "$in": "in", "$nin": "not in", **{ours: name for name, ours in ORDER.items()}}
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([Tt ].+)?")


def where_of(filters: Any) -> dict[str, Any]:
    """Translate a filter of Haystack to softdb's. Raises BadFilter for other dialects, with a translated example."""
    if not isinstance(filters, dict):
        raise BadFilter(f"filters are {shown(filters)}; expected a dict: {_example({'year': {'$gte': 2020}})}")
    if "field" in filters:
        return _comparison(filters)
    if not {"operator", "conditions"} & set(filters):
        raise BadFilter(f"filters are {shown(filters)}, not in Haystack's dialect; write {_example(filters)}")
    operator, conditions = _item(filters, "operator"), _item(filters, "conditions")
    if not isinstance(conditions, list | tuple):
        raise BadFilter(f"conditions are {shown(conditions)}; expected a list of filters")
    nodes = [where_of(condition) for condition in conditions]
    where: dict[str, dict[str, Any]] = {"AND": {"$and": nodes}, "OR": {"$or": nodes}, "NOT": {"$not": {"$and": nodes}}}
    if operator not in list(where):
        raise BadFilter(f"operator is {shown(operator)}; with conditions it is one of {', '.join(where)}")
    return where[operator]


def _comparison(filters: dict[str, Any]) -> dict[str, Any]:
    name, operator, value = _field(_item(filters, "field")), _item(filters, "operator"), _item(filters, "value")
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise BadFilter(f"operator is {shown(operator)}; with a field it is one of {', '.join(_OPERATORS)}")
    if operator in ("in", "not in"):
        where = _among(name, value)
    elif isinstance(value, list | tuple | dict):
        raise BadFilter(f"{filters['field']} is compared with {shown(value)}; only 'in' and 'not in' take a list")
    elif operator in ORDER:
        return _ordered(name, operator, value)
    else:
        where = _among(name, [value])
    return {"$not": where} if operator in ("!=", "not in") else where


def _item(filters: dict[str, Any], name: str) -> Any:
    if name not in filters:
        raise BadFilter(f"{name!r} is missing in {shown(filters)}; a filter looks like {_example({'year': 2020})}")
    return filters[name]


def _field(name: object) -> str:
    """Return softdb's name for a field of a Document, such as "year" for "meta.year". Raises BadFilter."""
    if not isinstance(name, str) or not name:
        raise BadFilter(f'field is {shown(name)}; expected a name such as "meta.year"')
    first, _, below = name.replace("\\", "\\\\").partition(".")
    if name in ("content", "id"):
        return {"content": "$text", "id": "$id"}[name]
    if name == "score" or (first == "blob" and below.startswith(("mime_type", "meta."))):
        return f"{EXTRAS}.{name}"
    if name in ("embedding", "sparse_embedding", "blob", "meta") or first == "blob":
        raise BadFilter(f"field {name!r} holds no value to compare; filter on meta, content, id, score, blob.mime_type")
    return below if first == "meta" else f"{first}.{below}" if below else first


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


def _among(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, list):
        raise BadFilter(f"{name} is compared with {shown(values)}; 'in' and 'not in' take a list")
    members = [_plain(value) for value in values if value is not None]
    where = {name: {"$in": members}}
    return {"$or": [where, {name: {"$exists": False}}, {name: None}]} if len(members) < len(values) else where


def _ordered(name: str, operator: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {"$or": []}  # matches nothing: None has no order
    if isinstance(value, str) and not _ISO_DATE.fullmatch(value):
        raise BadFilter(f"{name} {operator} {shown(value)}: texts cannot be ordered, except ISO dates")
    return {name: {ORDER[operator]: _plain(value)}}


def _example(where: dict[Any, Any]) -> str:
    """Translate a filter of softdb's dialect (MongoDB's) to Haystack's, for messages."""
    conditions = []
    for name, condition in where.items():
        comparisons = condition if isinstance(condition, dict) else {"$eq": condition}
        for operator, value in comparisons.items():
            conditions.append({"field": f"meta.{name}", "operator": _HAYSTACK.get(str(operator), "=="), "value": value})
    filters = conditions[0] if len(conditions) == 1 else {"operator": "AND", "conditions": conditions}
    return json.dumps(filters, ensure_ascii=False, default=str)
