"""Parse `where`, a dict in the style of document databases, to a tree of conditions.

    {"year": {"$gte": 2020, "$lt": 2024}, "lang": "de"}        several fields and operators: all must match
    {"$or": [{"lang": {"$in": ["de", "fr"]}}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}}
    {"author.name": {"$startswith": "Sch"}, "reviews": {"$elemMatch": {"by": "Ann", "stars": {"$gt": 3}}}}

Numbers are compared with numbers, strings with strings, booleans with booleans; values of different types never match
(in plain SQLite "1999" >= 2020 is true). `$ne` and `$nin` match records without the field. `softdb.store.paths` defines
the names of fields; a payload that is not an object has no fields. `$id` and `$text` mean the record's id and text.
`$contains`, `$icontains`, `$size` and `$elemMatch` read the payloads; a field's index can answer the other operators.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from softdb.check import MAX_DEPTH, encodable, is_missing, json_ready, shown
from softdb.errors import BadFilter
from softdb.filters.conditions import All, Condition, Either, Node, Not, Span, compiled, ranged
from softdb.store.paths import field_sql, parts_of, spelled
from softdb.store.textindex import MATCHING, phrases

_ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_SYMBOLS = {symbol: name for name, symbol in _ORDER.items()} | {"=": "$eq", "==": "$eq", "!=": "$ne"}
_NEGATED = {"$ne": "$eq", "$nin": "$in"}
_OPERATORS = ["$eq", "$ne", *_ORDER, "$in", "$nin", "$exists", "$startswith", "$contains"]
_OPERATORS += ["$icontains", "$size", "$elemMatch", "$not"]
_AROUND = ["$and", "$or", "$not", "$id", "$text"]
_TYPES = {"number": ("integer", "real"), "string": ("text",)}


def parse(where: object, depth: int = 1, document: str = "payload") -> Node:
    """Parse a filter to a tree. `document` is an SQL expression for the JSON to filter. Raises BadFilter."""
    _require_depth(depth)
    if not isinstance(where, dict):
        raise BadFilter(f'where is {shown(where)}; expected a dict such as {{"year": {{"$gte": 2020}}}}')
    nodes: list[Node] = []
    for name, condition in where.items():
        if name in ("$and", "$or"):
            if not isinstance(condition, list | tuple):
                raise BadFilter(f"{name} is given {shown(condition)}; expected a list of filters")
            inner = tuple(parse(item, depth + 1, document) for item in condition)
            nodes.append(All(inner) if name == "$and" else Either(inner))
        elif name == "$not":
            nodes.append(Not(parse(condition, depth + 1, document)))
        else:
            nodes.append(_field(name, document).operators(condition, depth + 1))
    return _all(nodes)


@dataclass(frozen=True)
class _Field:
    """A field of the payload, or an element of a list; the methods return conditions on it."""

    name: str  # path of the field, in canonical spelling
    type: str  # SQL expression for the field's JSON type
    value: str  # SQL expression for the field's value
    indexed: bool  # True if the field may have an index

    def operators(self, condition: object, depth: int) -> Node:
        """Parse the condition on this field: a dict of operators, or a value that the field must equal."""
        if not isinstance(condition, dict):
            return self.equal(_plain(condition))
        if not condition:
            known = " ".join(_OPERATORS)
            raise BadFilter(f"field {shown(self.name)} is given an empty dict; expected one or more of {known}")
        return _all([self.operator(name, operand, depth) for name, operand in condition.items()])

    def operator(self, operator: object, operand: object, depth: int) -> Node:
        """Parse one operator and its operand."""
        _require_depth(depth)
        name, operand = str(operator), _plain(operand)
        if operator in _ORDER:
            return self.ordered(_ORDER[name], operand)
        if operator in _NEGATED:
            return Not(self.operator(_NEGATED[name], operand, depth))
        if operator == "$not":
            return Not(self.operators(operand, depth + 1))
        if operator == "$elemMatch":
            return self.element(operand, depth + 1)
        if operator == "$match" and self.name == "$text":
            return self.matches(operand)
        plain = {"$eq": self.equal, "$in": self.among, "$exists": self.exists, "$size": self.sized}
        plain |= {"$startswith": self.starts, "$contains": self.contains, "$icontains": self.contains_folded}
        if operator not in plain:
            raise BadFilter(self.unknown(operator))
        return plain[name](operand)

    def unknown(self, operator: object) -> str:
        """Return the message for an unknown operator."""
        if isinstance(operator, str) and not operator.startswith("$"):
            inner, near = shown(f"{self.name}.{operator}"), _SYMBOLS.get(operator, f"${operator}")
            advice = f"write {near}" if near in _OPERATORS else f"write a nested field as {inner}"
            return f"field {shown(self.name)} has {shown(operator)}, which is no operator; {advice}"
        return (
            f"field {shown(self.name)} is given the unknown operator {shown(operator)}{_hint(operator, _OPERATORS)}; "
            f"there are {' '.join(_OPERATORS)}"
        )

    def range(self, types: tuple[str | None, ...], *tests: tuple[str, Any]) -> Condition:
        """Return the condition that the field has one of the types and passes every test."""
        return ranged(self.name, self.type, self.value, Span(types, tests), self.indexed)

    def exists(self, operand: object) -> Node:
        """Match records that have the field, with any value; if the operand is False, records without the field."""
        if not isinstance(operand, bool):
            raise BadFilter(f"$exists is given {shown(operand)}; expected True or False")
        missing = self.range((None,))
        return Not(missing) if operand else missing

    def equal(self, operand: object) -> Node:
        """Match a field whose value has the operand's type and equals the operand."""
        kind = _kind(operand, self.name)
        return self.ordered("=", operand) if kind in _TYPES else self.range((kind,))

    def ordered(self, comparison: str, operand: object) -> Condition:
        """Match a field that is less, greater or equal, as `comparison` says; the operand is a number or a string."""
        kind = _kind(operand, self.name)
        if kind not in _TYPES:
            raise BadFilter(
                f"field {shown(self.name)} is compared with {shown(operand)}; only numbers and strings have an order"
            )
        return self.range(_TYPES[kind], (comparison, operand))

    def starts(self, operand: object) -> Node:
        """Match a string that begins with the operand: a range from this prefix to the next string without it."""
        if not isinstance(operand, str):
            raise BadFilter(f"field {shown(self.name)}: $startswith takes a text; got {shown(operand)}")
        prefix = encodable(operand, f"the operand of {self.name}", BadFilter)
        stem = prefix.rstrip(chr(0x10FFFF))  # the largest character has no successor
        if not stem:
            return self.ordered(">=", prefix)
        successor = chr(0xE000 if stem[-1] == "\ud7ff" else ord(stem[-1]) + 1)  # surrogates are no characters
        return self.range(_TYPES["string"], (">=", prefix), ("<", stem[:-1] + successor))

    def among(self, operand: object) -> Node:
        """Match a field that equals a member of a list."""
        if not isinstance(operand, list | tuple | set | frozenset):
            raise BadFilter(f"field {shown(self.name)}: $in and $nin take a list; got {shown(operand)}")
        kinds: dict[str, list[object]] = {}
        for member in map(_plain, operand):
            kinds.setdefault(_kind(member, self.name), []).append(member)
        alternatives = []
        for kind, members in kinds.items():
            if kind in _TYPES:
                sql = f"{self.value} IN (SELECT value FROM json_each(?)) AND {self.range(_TYPES[kind]).sql}"
                alternatives.append(Condition(sql, (json.dumps(members),), self.name, self.indexed))
            else:
                alternatives.append(self.range((kind,)))
        return Either(tuple(alternatives))

    def contains(self, operand: object) -> Node:
        """Match a list that contains the operand, or a string with the operand as a substring."""
        kind = _kind(operand, self.name)
        inner, bound = f"type IS '{kind}'", list[object]()
        if kind in _TYPES:
            inner, bound = f"type IN ({', '.join(map(repr, _TYPES[kind]))}) AND atom = ?", [operand]
        sql = f"{self.type} = 'array' AND EXISTS (SELECT 1 FROM json_each({self.value}) WHERE {inner})"
        if kind == "string":
            sql = f"{sql} OR {self.type} = 'text' AND instr({self.value}, ?) > 0"
            bound *= 2
        # IS TRUE keeps SQLite from splitting the conjunction: a text that is no list must not reach json_each
        return Condition(f"({sql}) IS TRUE", tuple(bound), self.name, indexed=False)

    def contains_folded(self, operand: object) -> Node:
        """Match a string with the operand as a substring, regardless of case (Unicode's case folding)."""
        if not isinstance(operand, str):
            raise BadFilter(f"field {shown(self.name)}: $icontains takes a text; got {shown(operand)}")
        sql = f"({self.type} = 'text' AND instr(casefold({self.value}), ?) > 0) IS TRUE"
        folded = encodable(operand, f"the operand of {self.name}", BadFilter).casefold()
        return Condition(sql, (folded,), self.name, indexed=False)

    def sized(self, operand: object) -> Node:
        """Match a list of this length."""
        if not isinstance(operand, int) or isinstance(operand, bool) or not 0 <= operand < 2**63:
            raise BadFilter(f"field {shown(self.name)}: $size takes a list's length; got {shown(operand)}")
        sql = f"CASE {self.type} WHEN 'array' THEN json_array_length({self.value}) = ? END"  # texts must not reach it
        return Condition(f"({sql}) IS TRUE", (int(operand),), self.name, indexed=False)

    def matches(self, operand: object) -> Node:
        """Match records whose text contains every word of the operand; the text index's tokenizer finds the words."""
        if not isinstance(operand, str) or not (words := phrases(encodable(operand, "$match", BadFilter))):
            raise BadFilter(f"$match is given {shown(operand)}; expected words to be found in the record's text")
        return Condition(MATCHING, (" ".join(words),), self.name, indexed=False)

    def element(self, operand: object, depth: int) -> Node:
        """Match a list with an element that fulfils the operand: operators on the element or a filter on its fields."""
        if not isinstance(operand, dict) or not operand:
            expected = "$elemMatch takes a filter over a list's elements, or operators"
            raise BadFilter(f"field {shown(self.name)}: {expected}; got {shown(operand)}")
        table = f"e{depth}"  # nested $elemMatch need tables of different names
        if _applies_to_element(operand):
            element = _Field(f"{self.name}[]", f"{table}.type", f"{table}.value", indexed=False)
            inner, bindings, size = compiled(element.operators(operand, depth))
        else:
            inner, bindings, size = compiled(parse(operand, depth, f"{table}.value"))
            inner = f"CASE {table}.type WHEN 'object' THEN {inner} END"  # only objects have fields
        sql = f"{self.type} = 'array' AND EXISTS (SELECT 1 FROM json_each({self.value}) {table} WHERE {inner})"
        return Condition(f"({sql}) IS TRUE", tuple(bindings), self.name, indexed=False, size=size)


def _field(name: object, document: str) -> _Field:
    """Return the field that a name in a filter means. Raises BadFilter."""
    if not isinstance(name, str):
        raise BadFilter(f"where has the field name {shown(name)}; field names are str")
    if name == "$text" and document == "payload":
        return _Field(name, "CASE WHEN text IS NOT NULL THEN 'text' END", "text", indexed=False)
    if name == "$id" and document == "payload":
        return _Field(name, "typeof(id)", "id", indexed=False)
    if name in _OPERATORS:
        raise BadFilter(f'where has {name} without a field; write {{"field": {{"{name}": …}}}}')
    if name.startswith("$"):
        raise BadFilter(
            f"where has the unknown operator {shown(name)}{_hint(name, _AROUND)}; expected $and, $or or $not around "
            "fields, or $id or $text for the record's id or text"
        )
    parts = parts_of(name)
    return _Field(spelled(parts), *field_sql(parts, document), indexed=document == "payload" and "\0" not in name)


def _require_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")


def _applies_to_element(operand: dict[Any, Any]) -> bool:
    """Return True if the operand holds operators on the element itself, False if it is a filter on its fields."""
    while "$not" in operand and isinstance(operand["$not"], dict) and len(operand) == 1:
        operand = operand["$not"]
    return any(name in _OPERATORS and name != "$not" for name in operand)


def _hint(operator: object, known: list[str]) -> str:
    if str(operator).startswith("$not"):
        return ' (to negate an operator, write {"$not": {"$contains": …}})'
    near = difflib.get_close_matches(operator, known, 1, cutoff=0.7) if isinstance(operator, str) else []
    return "".join(f" (did you mean {name}?)" for name in near)


def _all(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else All(tuple(nodes))


def _plain(operand: Any) -> object:
    """Return an operand as payloads store it, an array or column as a list; NaN and members stay as they are."""
    if type(operand) is str or type(operand) is int:  # quick, as `$in` may hold many
        return operand
    if hasattr(operand, "dtype") and np.ndim(operand):
        return list(operand)
    operand = operand[()] if isinstance(operand, np.ndarray) else operand
    unchanged = is_missing(operand) or isinstance(operand, dict | list | tuple | set | frozenset)
    operand = operand if unchanged else json_ready(operand)
    return next((kind(operand) for kind in (bool, str, int, float) if isinstance(operand, kind)), operand)


def _kind(operand: object, name: str) -> str:
    """Return the kind of an operand's JSON value: 'true', 'false', 'null', 'number' or 'string'. Raises BadFilter."""
    if operand is None:
        return "null"
    if isinstance(operand, bool):
        return "true" if operand else "false"
    if isinstance(operand, str):
        encodable(operand, f"the operand of {name}", BadFilter)
        return "string"
    if isinstance(operand, int) and -(2**63) <= operand < 2**63:
        return "number"
    if isinstance(operand, float) and math.isfinite(operand):
        return "number"
    raise BadFilter(
        f"field {shown(name)} is compared with {shown(operand)} ({type(operand).__name__}); "
        "expected str, bool, None or a number of at most 64 bits (for lists: $in, $contains)"
    )
