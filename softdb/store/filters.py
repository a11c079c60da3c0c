"""`where` filters: a dict in the document-database grammar, parsed to a tree of conditions and compiled to SQL.

    {"year": {"$gte": 2020, "$lt": 2024}, "lang": "de"}        several fields and operators: all must hold
    {"$or": [{"lang": {"$in": ["de", "fr"]}}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}}
    {"author.name": {"$startswith": "Sch"}, "reviews": {"$elemMatch": {"by": "Ann", "stars": {"$gt": 3}}}}

Numbers compare with numbers, strings with strings, booleans with booleans; anything else does not match (SQLite's own
order would call "1999" >= 2020 true). `$ne` and `$nin` match records without the field. What a field's name means, is
in `softdb.store.paths`; a payload that is no object has no fields. `$id` and `$text` in a field's place are the
record's id and text.

A field that is declared has an SQLite index over `field_sql`, its type and its value. These are the expressions of
every condition, to the letter, so SQLite answers them from the index; `$contains` and `$elemMatch` always read the
payloads.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter
from softdb.store.paths import field_sql, parts_of, spelled, utf8
from softdb.store.textindex import MATCHING, phrases

__all__ = ["All", "Condition", "Either", "Node", "Not", "Span", "parse", "statement"]

_ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_OPERATORS = ["$eq", "$ne", *_ORDER, "$in", "$nin", "$exists", "$startswith", "$contains", "$elemMatch", "$not"]
_AROUND = ["$and", "$or", "$not", "$id", "$text"]
_TYPES = {"number": ("integer", "real"), "string": ("text",)}
_EVERY_TYPE = ("null", "true", "false", "integer", "real", "text", "array", "object")  # of SQLite's json_type
_BEYOND = {"<": (">=",), "<=": (">",), ">": ("<=",), ">=": ("<",), "=": ("<", ">")}  # what each comparison leaves
_MOST = 32_000  # conditions of a filter, and values that they bind; SQLite's limit is 32,766


class Span(NamedTuple):
    """What is asked of a field as its index has it: for each type the values between two bounds, or all of them."""

    types: tuple[str | None, ...]  # None: the field is not there
    tests: tuple[tuple[str, Any], ...] = ()  # a comparison, and what with; all hold


@dataclass(frozen=True)
class Condition:
    """What is asked of one field: SQL over the column `payload`, true where it holds, else false or null."""

    sql: str
    bindings: tuple[Any, ...]
    field: str | None  # spelled; None: it is of a list's element
    indexed: bool = True  # whether an index of the field answers it, if there is one
    narrow: bool = False  # whether it is an equality, which likely matches less than a comparison
    size: int = 1  # the conditions it consists of
    span: Span | None = None  # None: it is no range
    # what it leaves, as conditions on the same field, where an index answers those; made when asked for
    left: Callable[[], tuple[Condition, ...]] | None = dataclasses.field(default=None, compare=False)


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


def parse(where: object, depth: int = 1, of: str = "payload") -> Node:
    """The tree of a whole filter, over the JSON that the SQL `of` gives. Raises BadFilter for what is no filter."""
    if depth > MAX_DEPTH:
        raise BadFilter(f"where nests deeper than {MAX_DEPTH}; flatten it")
    if not isinstance(where, dict):
        raise BadFilter(f'where is {shown(where)}; expected a dict such as {{"year": {{"$gte": 2020}}}}')
    parts: list[Node] = []
    for name, condition in where.items():
        if name in ("$and", "$or"):
            if not isinstance(condition, list | tuple):
                raise BadFilter(f"{name} is given {shown(condition)}; expected a list of filters")
            inner = tuple(parse(one, depth + 1, of) for one in condition)
            parts.append(All(inner) if name == "$and" else Either(inner))
        elif name == "$not":
            parts.append(Not(parse(condition, depth + 1, of)))
        else:
            parts.append(_field(name, of).asked(condition, depth + 1))
    return _all(parts)


@dataclass(frozen=True)
class _Field:
    """One field, or one element of a list, and the conditions that can be asked of it."""

    name: str  # spelled
    type: str  # SQL
    value: str
    indexed: bool

    def asked(self, condition: object, depth: int) -> Node:
        """Everything asked of the field."""
        if not isinstance(condition, dict):
            return self.equal(condition)
        if not condition:
            raise BadFilter(
                f"field {shown(self.name)} is given an empty dict; expected operators, one or more of "
                f"{' '.join(_OPERATORS)}"
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
        if operator == "$not":
            return Not(self.asked(operand, depth + 1))
        if operator == "$elemMatch":
            return self.element(operand, depth + 1)
        if operator == "$match" and self.name == "$text":
            return self.matches(operand)
        found = {"$exists": self.exists, "$startswith": self.starts, "$contains": self.contains}.get(str(operator))
        if found is None:
            raise BadFilter(self.unknown(operator))
        return found(operand)

    def unknown(self, operator: object) -> str:
        """What is wrong with what is no operator."""
        if isinstance(operator, str) and not operator.startswith("$"):
            inner = shown(f"{self.name}.{operator}")
            return (
                f"field {shown(self.name)} is given {shown(operator)}, which is no operator; a field in it is {inner}"
            )
        return (
            f"field {shown(self.name)} is given the unknown operator {shown(operator)}{_meant(operator, _OPERATORS)}; "
            f"there are {' '.join(_OPERATORS)}"
        )

    def exists(self, operand: object) -> Node:
        """The field is there, whatever it holds; or is not."""
        if not isinstance(operand, bool):
            raise BadFilter(f"$exists is given {shown(operand)}; expected True or False")
        return _unless(operand, self.is_missing())

    def is_missing(self) -> Condition:
        """The field is not there."""
        return self.condition(f"{self.type} IS NULL", span=Span((None,)))

    def condition(
        self,
        sql: str,
        *bindings: object,
        narrow: bool = False,
        span: Span | None = None,
        left: Callable[[], tuple[Condition, ...]] | None = None,
    ) -> Condition:
        """One that the field's index answers, if it has one."""
        left = left if self.indexed else None
        return Condition(sql, bindings, self.name, self.indexed, narrow, span=span, left=left)

    def equal(self, operand: object) -> Node:
        """The field is there, of the operand's kind, and equal to it."""
        kind = _kind(operand, self.name)
        return self.is_of(kind) if kind not in _TYPES else self.ordered("=", operand)

    def is_of(self, kind: str) -> Node:
        """The field is true, false or null."""
        return self.condition(f"{self.type} = '{kind}'", span=Span((kind,)), left=partial(self.others, (kind,)))

    def others(self, types: tuple[str, ...]) -> tuple[Condition, ...]:
        """The field is of none of these types, or is not there."""
        rest = tuple(one for one in _EVERY_TYPE if one not in types)
        return self.condition(self.among_types(rest), span=Span(rest)), self.is_missing()

    def among_types(self, types: tuple[str, ...]) -> str:
        """SQL of the field being of one of some types."""
        return f"{self.type} IN ({', '.join(map(repr, types))})"

    def ordered(self, comparison: str, operand: object) -> Node:
        """A comparison within numbers or within strings."""
        kind = _kind(operand, self.name)
        if kind not in _TYPES:
            raise BadFilter(
                f"field {shown(self.name)} is ordered against {shown(operand)}; only numbers and strings have an order"
            )
        return self.compared(f"{comparison} ?", operand, kind, partial(self.beyond, comparison, operand, kind))

    def beyond(self, comparison: str, operand: object, kind: str) -> tuple[Condition, ...]:
        """What a comparison leaves: what the opposite ones match, and what is of another kind."""
        opposite = [self.compared(f"{one} ?", operand, kind) for one in _BEYOND[comparison]]
        return *opposite, *self.others(_TYPES[kind])

    def compared(
        self, test: str, operand: object, kind: str, left: Callable[[], tuple[Condition, ...]] | None = None
    ) -> Condition:
        """The value first: where no index helps, it sorts out more records than the type."""
        sql, bound = f"{self.value} {test} AND {self.among_types(_TYPES[kind])}", _plain(operand)
        comparison, _, rest = test.partition(" ")
        span = Span(_TYPES[kind], ((comparison, bound),)) if rest == "?" else None
        return self.condition(sql, bound, narrow=comparison[0] not in "<>", span=span, left=left)

    def starts(self, operand: object) -> Node:
        """The field is a text that begins so: those from that text on, up to the next that does not."""
        if not isinstance(operand, str):
            raise BadFilter(f"field {shown(self.name)}: $startswith takes a text; got {shown(operand)}")
        first = str(utf8(operand))
        kept = first.rstrip(chr(0x10FFFF))  # nothing is above that
        if not kept:
            return self.ordered(">=", first)
        above = chr(0xE000 if kept[-1] == "\ud7ff" else ord(kept[-1]) + 1)  # between them are no characters
        stop, types = kept[:-1] + above, _TYPES["string"]
        sql = f"{self.value} >= ? AND {self.value} < ? AND {self.among_types(types)}"
        return self.condition(sql, first, stop, narrow=True, span=Span(types, ((">=", first), ("<", stop))))

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
        inner, bound = f"type IS '{kind}'", list[object]()
        if kind in _TYPES:
            inner, bound = f"type IN ({', '.join(map(repr, _TYPES[kind]))}) AND atom = ?", [_plain(operand)]
        sql = f"{self.type} = 'array' AND EXISTS (SELECT 1 FROM json_each({self.value}) WHERE {inner})"
        if kind == "string":
            sql = f"{sql} OR {self.type} = 'text' AND instr({self.value}, ?) > 0"
            bound *= 2
        # IS TRUE keeps SQLite from taking the parts apart: a text that is no list must not reach json_each
        return Condition(f"({sql}) IS TRUE", tuple(bound), self.name, indexed=False)

    def matches(self, operand: object) -> Node:
        """Every word of a text is in the record's text, as the text index cuts words."""
        if not isinstance(operand, str) or not (words := phrases(str(utf8(operand)))):
            raise BadFilter(f"$match is given {shown(operand)}; expected words to be found in the record's text")
        return Condition(MATCHING, (" ".join(words),), self.name, indexed=False)

    def element(self, operand: object, depth: int) -> Node:
        """The field is a list, and one element of it meets all that is asked: operators, or a filter over objects."""
        if not isinstance(operand, dict) or not operand:
            raise BadFilter(
                f"field {shown(self.name)}: $elemMatch takes a filter over a list's elements, or operators; got "
                f"{shown(operand)}"
            )
        each = f"e{depth}"  # elements within elements are of other tables
        if _of_itself(operand):
            node = _Field(f"{self.name}[]", f"{each}.type", f"{each}.value", indexed=False).asked(operand, depth)
            bindings = list[Any]()
            inner = _sql(node, bindings, certain=False)
        else:
            node, bindings = parse(operand, depth, f"{each}.value"), []
            # CASE: what is no object must not be read as one
            inner = f"CASE {each}.type WHEN 'object' THEN {_sql(node, bindings, certain=False)} END"
        sql = f"{self.type} = 'array' AND EXISTS (SELECT 1 FROM json_each({self.value}) {each} WHERE {inner})"
        return Condition(f"({sql}) IS TRUE", tuple(bindings), self.name, indexed=False, size=_conditions(node))


def _field(name: object, of: str) -> _Field:
    """What a name in a filter over the JSON `of` stands for."""
    if not isinstance(name, str):
        raise BadFilter(f"where has the field name {shown(name)}; field names are str")
    if name == "$text" and of == "payload":
        return _Field(name, "CASE WHEN text IS NOT NULL THEN 'text' END", "text", indexed=False)
    if name == "$id" and of == "payload":
        return _Field(name, "typeof(id)", "id", indexed=False)
    if name in _OPERATORS:
        raise BadFilter(f'where has {name} without a field; write {{"field": {{"{name}": …}}}}')
    if name.startswith("$"):
        raise BadFilter(
            f"where has the unknown operator {shown(name)}{_meant(name, _AROUND)}; around fields stand $and, $or and "
            "$not, and $id and $text are the record's id and text"
        )
    parts = parts_of(name)
    return _Field(spelled(parts), *field_sql(parts, of), indexed=of == "payload" and "\0" not in name)


def _of_itself(operand: dict[Any, Any]) -> bool:
    """Whether operators ask about an element as it is, not about its fields."""
    while "$not" in operand and isinstance(operand["$not"], dict) and len(operand) == 1:
        operand = operand["$not"]
    return any(one in _OPERATORS and one != "$not" for one in operand)


def _meant(operator: object, known: list[str]) -> str:
    near = difflib.get_close_matches(operator, known, 1) if isinstance(operator, str) else []
    return "".join(f" (did you mean {one}?)" for one in near)


def statement(node: Node) -> tuple[str, list[Any]]:
    """SQL condition over the column `payload`, and its bindings. Raises BadFilter where SQLite cannot take so many."""
    bindings: list[Any] = []
    sql, count = _sql(node, bindings, certain=False), _conditions(node)
    if max(count, len(bindings)) > _MOST:
        raise BadFilter(f"where has {count:,} conditions, too many for one filter; $in takes any number of values")
    return sql, bindings


def _conditions(node: Node) -> int:
    if isinstance(node, Condition):
        return node.size
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
        utf8(operand)
        return "string"
    if isinstance(operand, int) and -(2**63) <= operand < 2**63:
        return "number"
    if isinstance(operand, float) and math.isfinite(operand):
        return "number"
    if isinstance(operand, date):
        raise BadFilter(
            f"field {shown(name)} is compared with {shown(operand)}, which JSON cannot hold; "
            "store and compare dates as ISO text: .isoformat()"
        )
    raise BadFilter(
        f"field {shown(name)} is compared with {shown(operand)} ({type(operand).__name__}); "
        "expected str, bool, None or a number of at most 64 bits (for lists: $in, $contains)"
    )
