"""`where` filters: a dict in the document-database grammar, parsed to a tree of conditions and compiled to SQL.

    {"year": {"$gte": 2020, "$lt": 2024}, "lang": "de"}        several fields and operators: all must hold
    {"$or": [{"lang": {"$in": ["de", "fr"]}}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}}

Numbers compare with numbers, strings with strings, booleans with booleans; anything else does not match (SQLite's own
order would call "1999" >= 2020 true). `$ne` and `$nin` match records without the field. Fields are those of a payload
that is an object, by their exact names ("a.b" is one name, not a way into "a").

A field that is declared has an SQLite index over `field_sql(name)`, its type and its value. These are the expressions
of every condition, to the letter, so SQLite answers them from the index; `$contains` alone always reads the payloads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter, BadInput

__all__ = ["All", "Condition", "Either", "Node", "Not", "field_names", "field_sql", "fields_in", "parse", "statement"]

_ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_OPERATORS = "$eq $ne $gt $gte $lt $lte $in $nin $exists $contains $not"
_TYPES = {"number": "('integer', 'real')", "string": "('text')"}
_MOST = 32_000  # conditions of a filter, and values that they bind; SQLite's limit is 32,766
_NO_PATH = '"\\\0'  # a JSON path has no way to write names with these marks


@dataclass(frozen=True)
class Condition:
    """What is asked of one field: SQL over the column `payload`, true where it holds, else false or null."""

    sql: str
    bindings: tuple[Any, ...]
    field: str | None  # whose index answers it, if there is one; None: no index can
    narrow: bool = False  # whether it is an equality, which likely matches less than a comparison


@dataclass(frozen=True)
class Not:
    """The records that a filter leaves."""

    of: Node


@dataclass(frozen=True)
class All:
    """The records that every part matches."""

    of: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """The records that a part matches."""

    of: tuple[Node, ...]


Node = Condition | Not | All | Either


def parse(where: object, depth: int = 1) -> Node:
    """The tree of a whole filter. Raises BadFilter for what is not of the grammar."""
    if depth > MAX_DEPTH:
        raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")
    if not isinstance(where, dict):
        raise BadFilter(f'where is {shown(where)}; expected a dict such as {{"year": {{"$gte": 2020}}}}')
    parts: list[Node] = []
    for name, condition in where.items():
        if name in ("$and", "$or"):
            if not isinstance(condition, list | tuple):
                raise BadFilter(f"{name} is given {shown(condition)}; expected a list of filters")
            inner = tuple(parse(one, depth + 1) for one in condition)
            parts.append(All(inner) if name == "$and" else Either(inner))
        elif name == "$not":
            parts.append(Not(parse(condition, depth + 1)))
        elif not isinstance(name, str):
            raise BadFilter(f"where has the field name {shown(name)}; field names are str")
        elif name.startswith("$"):
            raise BadFilter(f"where has the unknown operator {shown(name)}; around fields stand $and, $or and $not")
        else:
            parts.append(_Field(name).asked(condition, depth + 1))
    return _all(parts)


class _Field:
    """One field, and the conditions that can be asked of it."""

    def __init__(self, name: str) -> None:
        self.name = _text(name)
        self.key: tuple[str, ...]  # what each mention of type or value binds
        if any(mark in name for mark in _NO_PATH):  # a walk over the fields has a way
            self.key, self.field = (name,), None
            self.type, self.value = (
                f"(SELECT {column} FROM json_each(payload) WHERE key = ?)" for column in ("type", "value")
            )
        else:
            self.key, self.field = (), name
            self.type, self.value = field_sql(name)

    def asked(self, condition: object, depth: int) -> Node:
        """Everything asked of the field."""
        if not isinstance(condition, dict):
            return self.equal(condition)
        if not condition:
            raise BadFilter(
                f"field {shown(self.name)} is given an empty dict; expected operators, one or more of {_OPERATORS}"
            )
        return _all([self.operator(one, operand, depth) for one, operand in condition.items()])

    def operator(self, operator: object, operand: object, depth: int) -> Node:
        """One operator."""
        if depth > MAX_DEPTH:
            raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")
        if operator in _ORDER:
            return self.ordered(_ORDER[str(operator)], operand)
        if operator in ("$eq", "$ne"):
            return _unless(operator == "$ne", self.equal(operand))
        if operator in ("$in", "$nin"):
            return _unless(operator == "$nin", self.among(operand))
        if operator == "$exists":
            if not isinstance(operand, bool):
                raise BadFilter(f"$exists is given {shown(operand)}; expected True or False")
            return _unless(operand, Condition(f"{self.type} IS NULL", self.key, self.field))
        if operator == "$contains":
            return self.contains(operand)
        if operator == "$not":
            return Not(self.asked(operand, depth + 1))
        raise BadFilter(
            f"field {shown(self.name)} is given the unknown operator {shown(operator)}; there are {_OPERATORS}"
        )

    def equal(self, operand: object) -> Node:
        """The field is there, of the operand's kind, and equal to it."""
        kind = _kind(operand, self.name)
        return self.is_of(kind) if kind not in _TYPES else self.ordered("=", operand)

    def is_of(self, kind: str) -> Node:
        """The field is true, false or null."""
        return Condition(f"{self.type} = '{kind}'", self.key, self.field)

    def ordered(self, comparison: str, operand: object) -> Node:
        """A comparison within numbers or within strings."""
        kind = _kind(operand, self.name)
        if kind not in _TYPES:
            raise BadFilter(
                f"field {shown(self.name)} is ordered against {shown(operand)}; only numbers and strings have an order"
            )
        return self.compared(f"{comparison} ?", operand, kind)

    def compared(self, test: str, operand: object, kind: str) -> Node:
        """The value first: where no index helps, it sorts out more records than the type."""
        sql = f"{self.value} {test} AND {self.type} IN {_TYPES[kind]}"
        return Condition(
            sql, (*self.key, _plain(operand), *self.key), self.field, narrow=not test.startswith(("<", ">"))
        )

    def among(self, operand: object) -> Node:
        """The field equals one of a list."""
        if not isinstance(operand, list | tuple | set | frozenset):
            raise BadFilter(f"field {shown(self.name)}: $in and $nin take a list; got {shown(operand)}")
        kinds: dict[str, list[object]] = {}
        for one in operand:
            kinds.setdefault(_kind(one, self.name), []).append(one)
        return Either(
            tuple(
                self.compared("IN (SELECT value FROM json_each(?))", json.dumps(members), kind)
                if kind in _TYPES
                else self.is_of(kind)
                for kind, members in kinds.items()
            )
        )

    def contains(self, operand: object) -> Node:
        """The field is a list with that member, or a string with that part."""
        kind = _kind(operand, self.name)
        inner = f"type IS '{kind}'"
        bound: tuple[object, ...] = (*self.key, *self.key)
        if kind in _TYPES:
            inner, bound = f"type IN {_TYPES[kind]} AND atom = ?", (*bound, _plain(operand))
        sql = f"{self.type} = 'array' AND EXISTS (SELECT 1 FROM json_each({self.value}) WHERE {inner})"
        if kind == "string":
            sql = f"{sql} OR {self.type} = 'text' AND instr({self.value}, ?) > 0"
            bound = (*bound, *self.key, *self.key, _plain(operand))
        # IS TRUE keeps SQLite from taking the parts apart: a text that is no list must not reach json_each
        return Condition(f"({sql}) IS TRUE", bound, None)


def field_sql(name: str) -> tuple[str, str]:
    """SQL of a field's JSON type and of its value, for a name that a JSON path can write."""
    path = f"'$.\"{name}\"'".replace("'", "''")[1:-1]
    return f"json_type(payload, {path})", f"json_extract(payload, {path})"


def fields_in(where: dict[str, Any]) -> set[str]:
    """The fields that a filter, which has been parsed, asks about."""
    parts = [([one] if name == "$not" else one) if name[0:1] == "$" else name for name, one in where.items()]
    return set().union(*({part} if isinstance(part, str) else set().union(*map(fields_in, part)) for part in parts))


def field_names(fields: object) -> tuple[str, ...]:
    """Fields to be declared, checked. Raises BadInput."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise BadInput(f'fields are {shown(fields)}; expected a list of field names such as ["year", "lang"]')
    names = tuple(fields)
    for name in names:
        if not isinstance(name, str):
            raise BadInput(f"fields hold {shown(name)}; field names are str")
        _text(name)
        if any(mark in name for mark in _NO_PATH):
            raise BadInput(
                f"field {shown(name)} has a quotation mark, a backslash or NUL in its name and can have no index; "
                "it can be filtered on without, or be stored under another name"
            )
    return names


def statement(node: Node) -> tuple[str, list[Any]]:
    """SQL condition over the column `payload`, and its bindings. Raises BadFilter where SQLite cannot take so many."""
    bindings: list[Any] = []
    sql, count = _sql(node, bindings, certain=False), _conditions(node)
    if max(count, len(bindings)) > _MOST:
        raise BadFilter(f"where has {count:,} conditions, too many for one filter; $in takes any number of values")
    return sql, bindings


def _conditions(node: Node) -> int:
    if isinstance(node, Condition):
        return 1
    return _conditions(node.of) if isinstance(node, Not) else sum(map(_conditions, node.of))


def _sql(
    node: Node,
    bindings: list[Any],  # grows in the order of the question marks
    certain: bool,  # null will not do for false: NOT null is not true. An index is used only where it does
) -> str:
    if isinstance(node, Condition):
        bindings += node.bindings
        return f"(({node.sql}) IS TRUE)" if certain else f"({node.sql})"
    if isinstance(node, Not):
        return f"(NOT {_sql(node.of, bindings, certain=True)})"
    if not node.of:
        return "(TRUE)" if isinstance(node, All) else "(FALSE)"
    parts = [_sql(one, bindings, certain) for one in node.of]
    return _joined(parts, "AND" if isinstance(node, All) else "OR")


def _joined(parts: list[str], word: str) -> str:
    """In halves: SQLite takes expressions that are 1,000 deep, and a OR b OR c is two deep."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return f"({_joined(parts[:half], word)} {word} {_joined(parts[half:], word)})"


def _all(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _unless(negated: bool, node: Node) -> Node:
    return Not(node) if negated else node


def _text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadFilter(f"where holds {text!a}, which is not Unicode text; decode the source rightly") from None
    return text


def _plain(operand: object) -> object:
    """A text or a number without its own class: NumPy's float64 is a float, its str_ a str."""
    return next((kind(operand) for kind in (str, int, float) if isinstance(operand, kind)), operand)


def _kind(operand: object, name: str) -> str:
    """What kind of JSON value an operand is: 'true', 'false', 'null', 'number' or 'string'."""
    if operand is None:
        return "null"
    if isinstance(operand, bool):
        return "true" if operand else "false"
    if isinstance(operand, str):
        _text(operand)
        return "string"
    if isinstance(operand, int) and -(2**63) <= operand < 2**63:
        return "number"
    if isinstance(operand, float) and math.isfinite(operand):
        return "number"
    raise BadFilter(
        f"field {shown(name)} is compared with {shown(operand)} ({type(operand).__name__}); "
        "expected str, bool, None or a number of at most 64 bits (for lists: $in, $contains)"
    )
