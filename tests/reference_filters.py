"""What a filter means, in plain Python. Imports nothing of softdb, so that the two can disagree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

MISSING = object()


def kind(value: Any) -> str:
    if value is MISSING:
        return "missing"
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else type(value).__name__


def same(value: Any, operand: Any) -> bool:
    return kind(value) == kind(operand) and bool(value == operand)


def contains(value: Any, operand: Any) -> bool:
    if isinstance(value, str):
        return isinstance(operand, str) and operand in value
    return isinstance(value, list) and any(same(one, operand) for one in value)


OPERATORS: dict[str, Any] = {
    "$eq": same,
    "$ne": lambda v, o: not same(v, o),
    "$gt": lambda v, o: kind(v) == kind(o) and v > o,
    "$gte": lambda v, o: kind(v) == kind(o) and v >= o,
    "$lt": lambda v, o: kind(v) == kind(o) and v < o,
    "$lte": lambda v, o: kind(v) == kind(o) and v <= o,
    "$in": lambda v, o: any(same(v, one) for one in o),
    "$nin": lambda v, o: not any(same(v, one) for one in o),
    "$exists": lambda v, o: (v is not MISSING) == o,
    "$startswith": lambda v, o: isinstance(v, str) and v.startswith(o),
    "$contains": contains,
    "$icontains": lambda v, o: isinstance(v, str) and o.casefold() in v.casefold(),
    "$size": lambda v, o: isinstance(v, list) and len(v) == o,
}


def spelled(parts: Sequence[str]) -> str:
    """A field's name as a filter writes it."""
    return ".".join(part.replace("\\", "\\\\").replace(".", "\\.") for part in parts)


@cache
def parts_of(name: str) -> list[str]:
    """The names on the way, letter by letter."""
    parts, i = [""], 0
    while i < len(name):
        if name[i] == "\\" and name[i + 1 : i + 2] in ("\\", "."):
            i += 1
            parts[-1] += name[i]
        elif name[i] == ".":
            parts.append("")
        else:
            parts[-1] += name[i]
        i += 1
    return parts


def at(payload: Any, name: str) -> Any:
    """Values of a payload at a path."""
    first, *rest = parts_of(name)
    found = payload.get(first, MISSING) if isinstance(payload, dict) else MISSING
    for part in rest:
        if isinstance(found, dict):
            found = found.get(part, MISSING)
        elif isinstance(found, list) and len(part) < 10 and part in map(str, range(len(found))):
            found = found[int(part)]
        else:
            return MISSING
    return found


def meets(payload: Any, where: dict[str, Any], text: Any = MISSING) -> bool:
    return all(clause(payload, name, condition, text) for name, condition in where.items())


def clause(payload: Any, name: str, condition: Any, text: Any) -> bool:
    if name == "$and":
        return all(meets(payload, one, text) for one in condition)
    if name == "$or":
        return any(meets(payload, one, text) for one in condition)
    if name == "$not":
        return not meets(payload, condition, text)
    if name == "$text":
        return holds(text, condition)
    return holds(at(payload, name), condition)


def holds(value: Any, condition: Any) -> bool:
    """Return whether a value meets a condition."""
    if not isinstance(condition, dict):
        return same(value, condition)
    return all(
        not holds(value, operand)
        if operator == "$not"
        else matches_element(value, operand)
        if operator == "$elemMatch"
        else OPERATORS[operator](value, operand)
        for operator, operand in condition.items()
    )


def matches_element(value: Any, operand: dict[str, Any]) -> bool:
    of_itself = operand
    while list(of_itself) == ["$not"]:
        of_itself = of_itself["$not"]
    if any(name in OPERATORS or name == "$elemMatch" for name in of_itself):
        return isinstance(value, list) and any(holds(one, operand) for one in value)
    return isinstance(value, list) and any(isinstance(one, dict) and meets(one, operand) for one in value)


def as_filtered(payload: Any) -> Any:
    """A payload as filters see it: whole numbers beyond 64 bits are compared as floats."""
    if isinstance(payload, dict):
        return {name: as_filtered(one) for name, one in payload.items()}
    if isinstance(payload, list):
        return [as_filtered(one) for one in payload]
    if type(payload) is int and not -(2**63) <= payload < 2**63:
        try:
            return float(payload)
        except OverflowError:
            return float("inf") if payload > 0 else float("-inf")
    return payload
