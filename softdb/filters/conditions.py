"""The tree of a filter, and its compilation to SQL over the table `records`.

A condition on a declared field names the field's type and value by the same SQL expressions as the field's index
(`softdb.store.paths.field_sql`), so that SQLite uses the index. Most conditions are ranges: a `Span` determines the
condition's SQL, the ranges of all other records, and a slice of the field's order (`fieldorder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from softdb.errors import BadFilter
from softdb.store.paths import field_sql, parts_of

_EVERY_TYPE = ("null", "true", "false", "integer", "real", "text", "array", "object")  # results of SQLite's json_type
_OPPOSITE = {"<": (">=",), "<=": (">",), ">": ("<=",), ">=": ("<",), "=": ("<", ">")}
_LIMIT = 32_000  # largest number of conditions, and of SQL parameters, in a filter; SQLite allows 32,766 parameters


class Span(NamedTuple):
    """A range of a field: the records whose field has one of the types and passes every test."""

    types: tuple[str | None, ...]  # results of SQLite's json_type; None: the field is missing
    tests: tuple[tuple[str, Any], ...] = ()  # (comparison, operand), such as (">=", 5)


@dataclass(frozen=True)
class Condition:
    """A condition on one field: SQL that is true for matching records, false or null for others."""

    sql: str
    bindings: tuple[Any, ...]
    field: str  # path of the field, in canonical spelling
    indexed: bool  # True if an index of the field can answer the condition
    span: Span | None = None  # None if the condition is no range
    size: int = 1  # number of conditions in `sql`


@dataclass(frozen=True)
class Not:
    """A negation: matches the records that the node `of` does not match."""

    of: Node


@dataclass(frozen=True)
class All:
    """A conjunction: matches the records that every node in `of` matches."""

    of: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """A disjunction: matches the records that at least one node in `of` matches."""

    of: tuple[Node, ...]


Node = Condition | Not | All | Either


def ranged(field: str, type_sql: str, value_sql: str, span: Span, indexed: bool = True) -> Condition:
    """Return the condition that a field is in a range. The SQL tests the value first, as that excludes most records."""
    kinds = f"IN ({', '.join(map(repr, span.types))})" if span.types != (None,) else "IS NULL"
    sql = " AND ".join([*(f"{value_sql} {comparison} ?" for comparison, _ in span.tests), f"{type_sql} {kinds}"])
    return Condition(sql, tuple(operand for _, operand in span.tests), field, indexed, span)


def others(field: str, span: Span) -> list[Condition]:
    """Return conditions that together match the records outside of a range."""
    spans = [] if None in span.types else [Span((None,))]
    spans.append(Span(tuple(kind for kind in _EVERY_TYPE if kind not in span.types)))
    spans += [Span(span.types, ((less, operand),)) for test, operand in span.tests for less in _OPPOSITE[test]]
    return [ranged(field, *field_sql(parts_of(field)), span) for span in spans]


def statement(node: Node) -> tuple[str, list[Any]]:
    """Return a filter as an SQL condition with its bindings. Raises BadFilter if the filter exceeds SQLite's limits."""
    sql, bindings, count = compiled(node)
    if max(count, len(bindings)) > _LIMIT:
        raise BadFilter(f"where has {count:,} conditions, too many for one filter; $in takes any number of values")
    return sql, bindings


def compiled(node: Node) -> tuple[str, list[Any], int]:
    """Return a filter's SQL, the values for the question marks in it, and the number of conditions in it."""
    bindings: list[Any] = []
    return _sql(node, bindings, certain=False), bindings, sum(leaf.size for leaf in leaves(node))


def leaves(node: Node) -> Iterator[Condition]:
    """Yield the conditions in a filter's tree, from left to right."""
    if isinstance(node, Condition):
        yield node
    else:
        for child in [node.of] if isinstance(node, Not) else node.of:
            yield from leaves(child)


def _sql(
    node: Node,
    bindings: list[Any],  # the values for the question marks are appended to it
    certain: bool,  # True below a NOT: null must become false, because NOT null is not true; SQLite then uses no index
) -> str:
    if isinstance(node, Condition):
        bindings += node.bindings
        return f"(({node.sql}) IS TRUE)" if certain else f"({node.sql})"
    if isinstance(node, Not):
        return f"(NOT {_sql(node.of, bindings, certain=True)})"
    if not node.of:
        return "(TRUE)" if isinstance(node, All) else "(FALSE)"
    operands = [_sql(child, bindings, certain) for child in node.of]
    return _join(operands, "AND" if isinstance(node, All) else "OR")


def _join(operands: list[str], operator: str) -> str:
    """Join SQL terms as a balanced tree: SQLite allows a depth of 1,000, a chain a OR b OR … has one level a term."""
    if len(operands) == 1:
        return operands[0]
    half = len(operands) // 2
    return f"({_join(operands[:half], operator)} {operator} {_join(operands[half:], operator)})"
