"""`where` filters: a dict in the document-database grammar, compiled to parameterised SQL over the payload.

    {"year": {"$gte": 2020, "$lt": 2024}, "lang": "de"}        several fields and operators: all must hold
    {"$or": [{"lang": {"$in": ["de", "fr"]}}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}}

Numbers compare with numbers, strings with strings, booleans with booleans; anything else does not match (SQLite's own
order would call "1999" >= 2020 true). `$ne` and `$nin` match records without the field. Fields are those of a payload
that is an object, by their exact names.
"""

from __future__ import annotations

import json
import math
from typing import Any

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter

__all__ = ["compile_filter"]

_ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_OPERATORS = "$eq $ne $gt $gte $lt $lte $in $nin $exists $contains $not"
_TYPES = {"number": "('integer', 'real')", "string": "('text')"}


class _Compiler:
    """Collects the bindings in the order in which their question marks appear."""

    def __init__(self) -> None:
        self.bindings: list[Any] = []

    def where(self, clause: object, depth: int = 1) -> str:
        """SQL of a whole filter, true or false, never null."""
        if depth > MAX_DEPTH:
            raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")
        if not isinstance(clause, dict):
            raise BadFilter(f'where is {shown(clause)}; expected a dict such as {{"year": {{"$gte": 2020}}}}')
        parts = []
        for name, condition in clause.items():
            if name in ("$and", "$or"):
                if not isinstance(condition, list | tuple):
                    raise BadFilter(f"{name} is given {shown(condition)}; expected a list of filters")
                inner = [self.where(one, depth + 1) for one in condition]
                parts.append(_joined(inner, "AND" if name == "$and" else "OR"))
            elif name == "$not":
                parts.append(f"NOT {self.where(condition, depth + 1)}")
            elif not isinstance(name, str):
                raise BadFilter(f"where has the field name {shown(name)}; field names are str")
            elif name.startswith("$"):
                raise BadFilter(f"where has the unknown operator {shown(name)}; around fields stand $and, $or and $not")
            else:
                parts.append(self.field(name, condition, depth + 1))
        return _joined(parts, "AND")

    def field(self, name: str, condition: object, depth: int) -> str:
        """SQL of everything asked of one field."""
        if not isinstance(condition, dict):
            return self.equal(name, condition)
        if not condition:
            raise BadFilter(
                f"field {shown(name)} is given an empty dict; expected operators, one or more of {_OPERATORS}"
            )
        return _joined([self.operator(name, one, operand, depth) for one, operand in condition.items()], "AND")

    def operator(self, name: str, operator: object, operand: object, depth: int) -> str:
        """SQL of one operator on one field."""
        if depth > MAX_DEPTH:
            raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")
        if operator == "$eq":
            return self.equal(name, operand)
        if operator == "$ne":
            return f"NOT {self.equal(name, operand)}"
        if operator in _ORDER:
            return self.ordered(name, _ORDER[str(operator)], operand)
        if operator in ("$in", "$nin"):
            return ("NOT " if operator == "$nin" else "") + self.among(name, operand)
        if operator == "$exists":
            if not isinstance(operand, bool):
                raise BadFilter(f"$exists is given {shown(operand)}; expected True or False")
            return f"({self.type_of(name)} IS {'NOT ' if operand else ''}NULL)"
        if operator == "$contains":
            return self.contains(name, operand)
        if operator == "$not":
            return f"NOT {self.field(name, operand, depth + 1)}"
        raise BadFilter(f"field {shown(name)} is given the unknown operator {shown(operator)}; there are {_OPERATORS}")

    def equal(self, name: str, operand: object) -> str:
        """The field is there, of the operand's kind, and equal to it."""
        kind = _kind(operand, name)
        if kind in ("true", "false", "null"):
            return f"({self.type_of(name)} IS '{kind}')"
        return self.ordered(name, "=", operand)

    def ordered(self, name: str, comparison: str, operand: object) -> str:
        """A comparison within numbers or within strings."""
        kind = _kind(operand, name)
        if kind not in _TYPES:
            raise BadFilter(
                f"field {shown(name)} is ordered against {shown(operand)}; only numbers and strings have an order"
            )
        typed = f"{self.type_of(name)} IN {_TYPES[kind]}"
        value = self.value_of(name)
        self.bindings.append(operand)
        return f"(({typed} AND {value} {comparison} ?) IS TRUE)"

    def among(self, name: str, operand: object) -> str:
        """The field equals one of a list."""
        if not isinstance(operand, list | tuple | set | frozenset):
            raise BadFilter(f"field {shown(name)}: $in and $nin take a list; got {shown(operand)}")
        kinds: dict[str, list[object]] = {}
        for one in operand:
            kinds.setdefault(_kind(one, name), []).append(one)
        parts = []
        for kind, members in kinds.items():
            typed = self.type_of(name)
            if kind in _TYPES:
                value = self.value_of(name)
                self.bindings.append(json.dumps(members))
                test = f"{typed} IN {_TYPES[kind]} AND {value} IN (SELECT value FROM json_each(?))"
                parts.append(f"(({test}) IS TRUE)")
            else:
                parts.append(f"({typed} IS '{kind}')")
        return _joined(parts, "OR")

    def contains(self, name: str, operand: object) -> str:
        """The field is a list with that member, or a string with that part."""
        kind = _kind(operand, name)
        inner = f"type IS '{kind}'"
        if kind in _TYPES:
            inner = f"type IN {_TYPES[kind]} AND atom = ?"
        typed, value = self.type_of(name), self.value_of(name)
        if kind in _TYPES:
            self.bindings.append(operand)
        member = f"{typed} = 'array' AND EXISTS (SELECT 1 FROM json_each({value}) WHERE {inner})"
        if kind != "string":
            return f"(({member}) IS TRUE)"
        typed, value = self.type_of(name), self.value_of(name)
        self.bindings.append(operand)
        return f"(({member} OR {typed} = 'text' AND instr({value}, ?) > 0) IS TRUE)"

    def type_of(self, name: str) -> str:
        return self._expression(name, "json_type(payload, ?)", "type")

    def value_of(self, name: str) -> str:
        return self._expression(name, "json_extract(payload, ?)", "value")

    def _expression(self, name: str, fast: str, column: str) -> str:
        if any(
            mark in name for mark in '"\\\0'
        ):  # a JSON path has no way to write these names; a walk over the fields does
            self.bindings.append(_text(name))
            return f"(SELECT {column} FROM json_each(payload) WHERE key = ?)"
        self.bindings.append(f'$."{_text(name)}"')
        return fast


def compile_filter(where: dict[str, Any]) -> tuple[str, list[Any]]:
    """SQL condition over the column `payload`, and its bindings. Raises BadFilter for what is not of the grammar."""
    compiler = _Compiler()
    return compiler.where(where), compiler.bindings


def _joined(parts: list[str], word: str) -> str:
    if not parts:
        return "(TRUE)" if word == "AND" else "(FALSE)"
    return f"({f' {word} '.join(parts)})"


def _text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadFilter(f"where holds {text!a}, which is not Unicode text; decode the source rightly") from None
    return text


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
