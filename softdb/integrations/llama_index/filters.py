"""Translation of LlamaIndex's metadata filters to softdb's, with the meaning that SimpleVectorStore gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter
from softdb.integrations.llama_index.nodes import SOURCE
from softdb.store.paths import spelled

_SOURCES = ("ref_doc_id", "doc_id", "document_id")  # LlamaIndex's names for the id of a node's source document
_DEEPEST = MAX_DEPTH // 4
_OPERANDS = {"in": list, "nin": list, "any": list, "all": list, "text_match": str, "text_match_insensitive": str}


def where_of(filters: Any, depth: int = 1) -> dict[str, Any]:
    """Translate filters to softdb's; None matches every node. Raises BadFilter for other dialects."""
    if filters is None:
        return {}
    if depth > _DEEPEST:
        raise BadFilter(f"filters nest deeper than {_DEEPEST}; flatten them")
    if isinstance(filters, MetadataFilter):
        return _comparison(filters)
    if not isinstance(filters, MetadataFilters):
        example = 'MetadataFilters(filters=[MetadataFilter(key="year", value=1990, operator=">")])'
        raise BadFilter(f"filters are {shown(filters)}; expected {example}; softdb's own filters go to where=")
    nodes = [where_of(each, depth + 1) for each in filters.filters]
    condition = "and" if filters.condition is None or not nodes else filters.condition.value
    either = {"$or": nodes}
    return {"$and": nodes} if condition == "and" else either if condition == "or" else {"$not": either}


def _comparison(filter: MetadataFilter) -> dict[str, Any]:
    """Translate a filter on one field. Names with "$" are softdb's, such as "$text" for the node's text."""
    operator: str = filter.operator.value
    kind: type = _OPERANDS.get(operator, object)
    if not isinstance(filter.value, kind):
        raise BadFilter(f"{filter.key} is compared with {shown(filter.value)}; {operator!r} takes a {kind.__name__}")
    field = SOURCE if filter.key in _SOURCES else filter.key if filter.key.startswith("$") else spelled([filter.key])
    return _TRANSLATED[operator](field, filter.value)


def _alike(value: Any) -> list[Any]:
    """Return a value, and for 0 and 1 also the truth value that equals it: LlamaIndex's filters take no booleans."""
    return [value, bool(value)] if isinstance(value, int | float) and value in (0, 1) else [value]


def _equal(field: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        elements = [_equal(f"{field}.{i}", element) for i, element in enumerate(value)]
        return {"$and": [{field: {"$size": len(value)}}, *elements]}
    return {"$or": [] if value is None else [{field: alike} for alike in _alike(value)]}


def _among(field: str, values: list[Any]) -> dict[str, Any]:
    return {field: {"$in": [alike for value in values for alike in _alike(value)]}}


def _contains(field: str, value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, list):
        raise BadFilter(f"{field} contains {shown(value)}; expected a text or a number, or the operator 'any' or 'all'")
    return {"$or": [{field: {"$contains": alike}} for alike in _alike(value)]}


def _null(field: str) -> dict[str, Any]:
    return {"$or": [{field: {"$exists": False}}, {field: None}]}


_TRANSLATED: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "==": _equal,
    "!=": lambda field, value: {"$not": _equal(field, value)},
    ">": lambda field, value: {field: {"$gt": value}},
    ">=": lambda field, value: {field: {"$gte": value}},
    "<": lambda field, value: {field: {"$lt": value}},
    "<=": lambda field, value: {field: {"$lte": value}},
    "in": _among,
    "nin": lambda field, values: {"$not": _among(field, values)},
    "any": lambda field, values: {"$or": [_contains(field, value) for value in values]},
    "all": lambda field, values: {"$and": [{"$not": _null(field)}, *(_contains(field, value) for value in values)]},
    "contains": _contains,
    "text_match": lambda field, text: {field: {"$contains": text, "$gte": ""}},  # no element of a list
    "text_match_insensitive": lambda field, text: {field: {"$icontains": text}},
    "is_empty": lambda field, _: {"$or": [_null(field), {field: ""}, {field: {"$size": 0}}]},
}
