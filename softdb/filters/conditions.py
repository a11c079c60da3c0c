"""The tree of a filter, and its compilation to SQL over the table `records`.

A condition on a declared field consists of the expressions of the field's index, its type and its value
(`softdb.store.paths.field_sql`), to the letter, so that SQLite answers it from the index. Most are ranges: a `Span`
gives their SQL, the ranges that they leave, and their place in the field's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from softdb.errors import BadFilter
from softdb.store.paths import field_sql, parts_of

_EVERY_TYPE = ("null", "true", "false", "integer", "real", "text", "array", "object")  # of SQLite's json_type
_OPPOSITE = {"<": (">=",), "<=": (">",), ">": ("<=",), ">=": ("<",), "=": ("<", ">")}
_LIMIT = 32_000  # conditions of a filter, and values that they bind; SQLite's limit is 32,766


class Span(NamedTuple):
    """A range of a field: records whose field is of one of some types and meets every test."""

    types: tuple[str | None, ...]  # of SQLite's json_type; None: the field is missing
    tests: tuple[tuple[str, Any], ...] = ()  # comparison and operand


@dataclass(frozen=True)
class Condition:
    """A condition on one field: SQL that is true where it holds, else false or null."""

    sql: str
    bindings: tuple[Any, ...]
    field: str  # spelled
    indexed: bool  # an index of the field answers it, if there is one
    span: Span | None = None  # None: it is no range
    size: int = 1  # number of conditions that it consists of


@dataclass(frozen=True)
class Not:
    """The records that a filter does not match."""

    of: Node


@dataclass(frozen=True)
class All:
    """The records that every part matches."""

    of: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """The records that some part matches."""

    of: tuple[Node, ...]


Node = Condition | Not | All | Either


def ranged(field: str, type_sql: str, value_sql: str, span: Span, indexed: bool = True) -> Condition:
    """Condition of a range. The value comes first: where no index helps, it rules out more records than the type."""
    kinds = f"IN ({', '.join(map(repr, span.types))})" if span.types != (None,) else "IS NULL"
    sql = " AND ".join([*(f"{value_sql} {comparison} ?" for comparison, _ in span.tests), f"{type_sql} {kinds}"])
    return Condition(sql, tuple(operand for _, operand in span.tests), field, indexed, span)


def others(field: str, span: Span) -> list[Condition]:
    """Ranges that together hold the records outside of a range."""
    spans = [] if None in span.types else [Span((None,))]
    spans.append(Span(tuple(kind for kind in _EVERY_TYPE if kind not in span.types)))
    spans += [Span(span.types, ((less, operand),)) for test, operand in span.tests for less in _OPPOSITE[test]]
    return [ranged(field, *field_sql(parts_of(field)), span) for span in spans]


def statement(node: Node) -> tuple[str, list[Any]]:
    """SQL condition of a whole filter, and its bindings. Raises BadFilter where SQLite cannot take so many."""
    sql, bindings, count = compiled(node)
    if max(count, len(bindings)) > _LIMIT:
        raise BadFilter(f"where has {count:,} conditions, too many for one filter; $in takes any number of values")
    return sql, bindings


def compiled(node: Node) -> tuple[str, list[Any], int]:
    """SQL, its bindings in the order of the question marks, and the number of conditions."""
    bindings: list[Any] = []
    return _sql(node, bindings, certain=False), bindings, sum(leaf.size for leaf in leaves(node))


def leaves(node: Node) -> Iterator[Condition]:
    """The conditions of a tree, in order."""
    if isinstance(node, Condition):
        yield node
    else:
        for part in [node.of] if isinstance(node, Not) else node.of:
            yield from leaves(part)


def _sql(
    node: Node,
    bindings: list[Any],  # grows
    certain: bool,  # null must not stand for false: NOT null is not true. An index is used only where it may
) -> str:
    if isinstance(node, Condition):
        bindings += node.bindings
        return f"(({node.sql}) IS TRUE)" if certain else f"({node.sql})"
    if isinstance(node, Not):
        return f"(NOT {_sql(node.of, bindings, certain=True)})"
    if not node.of:
        return "(TRUE)" if isinstance(node, All) else "(FALSE)"
    parts = [_sql(part, bindings, certain) for part in node.of]
    return _joined(parts, "AND" if isinstance(node, All) else "OR")


def _joined(parts: list[str], word: str) -> str:
    """Join in halves: SQLite takes expressions that are 1,000 deep, and a OR b OR c is two deep."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return f"({_joined(parts[:half], word)} {word} {_joined(parts[half:], word)})"
