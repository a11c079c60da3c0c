"""JSON values, payloads and filters drawn at random, with all that upsets a careless store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from reference_filters import MISSING, OPERATORS, at, spelled

NAMES = [
    "x", "y", "", "a.b", 'quo"te', "back\\slash", "nul\0", "[0]", "é", "e\u0301", "\N{FAMILY}", "__proto__", "$",
    "'; DROP TABLE records; --", "new\nline", "\t", "\u2028", "\x7f", "%s", "n" * 300, "null", "0", "payload", "#-1",
    "\N{ARABIC LETTER ALEF}\u202e", "constructor", "a\u200db", "\ufeff", "1", "a", 'a"\n', "\\.", "c\\",
    "\\\\", "4294967296",
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


def scalar(draw: Draw) -> Any:
    """A value that may be an operand, too."""
    return draw.choice(
        [None, True, False, draw.choice(TEXTS), draw.choice(TEXTS), *draw.sample(NUMBERS, 3), _number(draw)]
    )


def _number(draw: Draw) -> int | float:
    return draw.choice(
        [draw.randint(-3, 3), draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300), draw.getrandbits(63)]
    )


def value(draw: Draw, names: Sequence[str] = NAMES, depth: int = 0) -> Any:
    """A JSON value."""
    kind = draw.random()
    if depth < 3 and kind < 0.15:
        return [value(draw, names, depth + 1) for _ in range(draw.randint(0, 4))]
    if depth < 3 and kind < 0.25:
        return {draw.choice(names): value(draw, names, depth + 1) for _ in range(draw.randint(0, 3))}
    return draw.choice(VAST) if kind < 0.3 else scalar(draw)


def payload(draw: Draw, names: Sequence[str] = NAMES) -> Any:
    """A record's payload, mostly an object."""
    if draw.random() < 0.1:
        return value(draw, names)
    return {draw.choice(names): value(draw, names) for _ in range(draw.randint(0, 6))}


def _orderable(operand: Any) -> bool:
    """Return whether a filter may order by the value: text, or a number of 64 bits."""
    return isinstance(operand, str | float) or (type(operand) is int and -(2**63) <= operand < 2**63)


def field(draw: Draw, names: Sequence[str] = NAMES, payloads: Sequence[Any] = ()) -> str:
    """The name of a field, of a payload's or not."""
    parts: list[str] = [draw.choice(names) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    inner = draw.choice(payloads) if payloads and draw.random() < 0.7 else None
    if isinstance(inner, dict) and inner:
        parts = []
    while isinstance(inner, dict | list) and inner and (not parts or draw.random() < 0.7):
        part = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        inner = inner[part]
        parts.append(str(part))
    if parts[0].startswith("$") or not all(parts) or "\0" in "".join(parts[:-1]):  # what a path cannot lead through
        parts = [part for part in parts if not part.startswith("$")][:1] or [""]
    if sum(part.isdigit() for part in parts[1:]) > 4:
        parts = parts[:5]
    return spelled(parts)


def condition(draw: Draw, stored: Sequence[Any] = (), depth: int = 0) -> Any:
    """Draw a condition on a field; its operands are often stored values."""
    stored = [one for one in stored if one is not MISSING]
    if draw.random() < 0.25:
        return _operand(draw, "$eq", stored, depth)
    names = draw.sample([*OPERATORS, "$not", "$elemMatch"], draw.choice([1, 1, 1, 2]))
    return {name: _operand(draw, name, stored, depth) for name in names}


def _operand(draw: Draw, name: str, stored: Sequence[Any], depth: int) -> Any:
    members = [inner for one in stored if isinstance(one, list) for inner in one]
    known = [*stored, *members]
    if name in ("$in", "$nin"):
        return [_operand(draw, "$eq", stored, depth) for _ in range(draw.randint(0, 5))]
    if name == "$exists":
        return draw.random() < 0.5
    if name == "$elemMatch":
        return _element(draw, members, depth)
    if name == "$startswith":
        return draw.choice([one for one in known if isinstance(one, str)] or TEXTS)[: draw.randint(0, 3)]
    if name == "$icontains":
        text = draw.choice([one for one in known if isinstance(one, str)] or TEXTS)
        return draw.choice([str.upper, str.lower, str.swapcase])(text[draw.randint(0, 2) : draw.randint(0, 6)])
    if name == "$size":
        return draw.choice([len(one) for one in known if isinstance(one, list | str)] or [0, 1])
    if name in ("$gt", "$gte", "$lt", "$lte"):
        ordered = [one for one in known if _orderable(one)]
        return draw.choice(ordered or [draw.choice(TEXTS), draw.choice(NUMBERS), _number(draw)])
    if name == "$not" and depth < 3:
        return condition(draw, stored, depth + 1)
    some = [one for one in known if one is None or isinstance(one, bool) or _orderable(one)]
    return draw.choice(some) if some and draw.random() < 0.7 else scalar(draw)


def _element(draw: Draw, members: Sequence[Any], depth: int) -> dict[str, Any]:
    """Draw a condition on a list's elements or on their fields."""
    found: Any = None
    if draw.random() < 0.5:
        found = where(draw, payloads=[member for member in members if isinstance(member, dict)], depth=3)
    elif depth < 3:
        found = condition(draw, members, depth + 1)
    return found if isinstance(found, dict) and found and found.keys() != {"$not"} else {"$eq": scalar(draw)}


def where(draw: Draw, names: Sequence[str] = NAMES, payloads: Sequence[Any] = (), depth: int = 0) -> dict[str, Any]:
    """A filter of the grammar over such payloads."""
    found: dict[str, Any] = {}
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        kind = draw.random()
        if depth < 4 and kind < 0.35:
            parts = [where(draw, names, payloads, depth + 1) for _ in range(draw.randint(0, 3))]
            found["$and" if kind < 0.15 else "$or"] = parts
        elif depth < 4 and kind < 0.45:
            found["$not"] = where(draw, names, payloads, depth + 1)
        else:
            name = field(draw, names, payloads)
            found[name] = condition(draw, [at(one, name) for one in payloads])
    return found
