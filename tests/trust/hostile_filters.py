"""What a filter means, in plain Python, and filters and payloads drawn at random to hold against it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

ABSENT = object()

NAMES = [
    "x", "y", "", "a.b", 'quo"te', "back\\slash", "nul\0", "[0]", "é", "e\u0301", "\N{FAMILY}", "__proto__", "$",
    "'; DROP TABLE records; --", "new\nline", "\t", "\u2028", "\x7f", "%s", "n" * 300, "null", "0", "payload", "#-1",
    "\N{ARABIC LETTER ALEF}\u202e", "constructor", "a\u200db", "\ufeff",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "ab", "A", "1999", "2020", "true", "null", "nul\0", "nul", "\0", "é", "e\u0301", "\N{GRINNING FACE}",
    "\uffff", "\N{FAMILY}", "' OR 1=1 --", '"', "\\", "\\u0041", "%", "_", "*", "\u202eabc", "x" * 1000, "[1]", "{}",
]  # fmt: skip
NUMBERS: list[int | float] = [
    0, 1, -1, 2, 2020, 1999, 1.0, 1.5, -0.0, 0.1, 0.30000000000000004, 1e-320, 5e-324, 1.7976931348623157e308, -1e300,
    2**53, 2**53 + 1, float(2**53), 2**63 - 1, -(2**63), 9.223372036854775807e18, 123456789.123456789,
]  # fmt: skip
VAST = [2**63, 2**64, -(2**63) - 1, 10**30, 10**400]  # payloads may hold them; no operand may be one

Draw = random.Random


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    return "number" if isinstance(value, int | float) else type(value).__name__


def _comparable(value: Any) -> Any:
    """An integer beyond 64 bits counts as the float nearest to it."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return value


def _equal(value: Any, operand: Any) -> bool:
    return value is not ABSENT and _kind(value) == _kind(operand) and bool(_comparable(value) == operand)


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda value, operand: (
        value is not ABSENT and _kind(value) == _kind(operand) and test(_comparable(value), operand)
    )


def _contains(value: Any, operand: Any) -> bool:
    if isinstance(value, list):
        return any(_equal(one, operand) for one in value)
    return isinstance(value, str) and isinstance(operand, str) and operand in value


TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": lambda value, operand: not _equal(value, operand),
    "$gt": _ordered(lambda a, b: a > b),
    "$gte": _ordered(lambda a, b: a >= b),
    "$lt": _ordered(lambda a, b: a < b),
    "$lte": _ordered(lambda a, b: a <= b),
    "$in": lambda value, operand: any(_equal(value, one) for one in operand),
    "$nin": lambda value, operand: not any(_equal(value, one) for one in operand),
    "$exists": lambda value, operand: (value is not ABSENT) == operand,
    "$contains": _contains,
    "$not": lambda value, operand: not _holds(value, operand),
}


def _holds(value: Any, condition: Any) -> bool:
    if isinstance(condition, dict):
        return all(TESTS[name](value, operand) for name, operand in condition.items())
    return _equal(value, condition)


def matches(where: dict[str, Any], payload: Any) -> bool:
    """Whether a filter matches a record with that payload."""
    fields = payload if isinstance(payload, dict) else {}
    for name, condition in where.items():
        if name == "$and":
            held = all(matches(one, payload) for one in condition)
        elif name == "$or":
            held = any(matches(one, payload) for one in condition)
        elif name == "$not":
            held = not matches(condition, payload)
        else:
            held = _holds(fields.get(name, ABSENT), condition)
        if not held:
            return False
    return True


# -- at random ---------------------------------------------------------------------------------------------------------


def scalar(draw: Draw) -> Any:
    """A value that may be an operand, too."""
    return draw.choice(
        [None, True, False, draw.choice(TEXTS), draw.choice(TEXTS), *draw.sample(NUMBERS, 3), _number(draw)]
    )


def _number(draw: Draw) -> int | float:
    return draw.choice(
        [draw.randint(-3, 3), draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300), draw.getrandbits(63)]
    )


def value(draw: Draw, depth: int = 0) -> Any:
    """A JSON value."""
    kind = draw.random()
    if depth < 3 and kind < 0.15:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    if depth < 3 and kind < 0.25:
        return {draw.choice(NAMES): value(draw, depth + 1) for _ in range(draw.randint(0, 3))}
    return draw.choice(VAST) if kind < 0.3 else scalar(draw)


def payload(draw: Draw) -> Any:
    """A record's payload, mostly an object."""
    if draw.random() < 0.1:
        return value(draw)
    return {draw.choice(NAMES): value(draw) for _ in range(draw.randint(0, 6))}


def condition(draw: Draw, depth: int = 0) -> Any:
    """What is asked of a field."""
    if draw.random() < 0.25:
        return scalar(draw)
    names = draw.sample(list(TESTS), draw.choice([1, 1, 1, 2]))
    return {name: _operand(draw, name, depth) for name in names}


def _operand(draw: Draw, name: str, depth: int) -> Any:
    if name in ("$in", "$nin"):
        return [scalar(draw) for _ in range(draw.randint(0, 5))]
    if name == "$exists":
        return draw.random() < 0.5
    if name == "$not":
        return condition(draw, depth + 1) if depth < 3 else scalar(draw)
    if name in ("$gt", "$gte", "$lt", "$lte"):
        return draw.choice([draw.choice(TEXTS), draw.choice(NUMBERS), _number(draw)])
    return scalar(draw)


def filter_of(draw: Draw, depth: int = 0) -> dict[str, Any]:
    """A filter of the grammar."""
    where: dict[str, Any] = {}
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        kind = draw.random()
        if depth < 4 and kind < 0.15:
            where["$and"] = [filter_of(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        elif depth < 4 and kind < 0.35:
            where["$or"] = [filter_of(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        elif depth < 4 and kind < 0.45:
            where["$not"] = filter_of(draw, depth + 1)
        else:
            name = draw.choice(NAMES)
            if not name.startswith("$"):
                where[name] = condition(draw)
    return where
