"""What a filter means, in plain Python. Imports nothing of softdb, so that the two can disagree."""

from __future__ import annotations

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


OPERATORS = {
    "$eq": same,
    "$ne": lambda v, o: not same(v, o),
    "$gt": lambda v, o: kind(v) == kind(o) and v > o,
    "$gte": lambda v, o: kind(v) == kind(o) and v >= o,
    "$lt": lambda v, o: kind(v) == kind(o) and v < o,
    "$lte": lambda v, o: kind(v) == kind(o) and v <= o,
    "$in": lambda v, o: any(same(v, one) for one in o),
    "$nin": lambda v, o: not any(same(v, one) for one in o),
    "$exists": lambda v, o: (v is not MISSING) == o,
    "$contains": contains,
}


def meets(payload: Any, where: dict[str, Any]) -> bool:
    return all(clause(payload, name, condition) for name, condition in where.items())


def clause(payload: Any, name: str, condition: Any) -> bool:
    if name == "$and":
        return all(meets(payload, one) for one in condition)
    if name == "$or":
        return any(meets(payload, one) for one in condition)
    if name == "$not":
        return not meets(payload, condition)
    value = payload.get(name, MISSING) if isinstance(payload, dict) else MISSING
    if not isinstance(condition, dict):
        return same(value, condition)
    return all(
        not clause(payload, name, operand) if operator == "$not" else OPERATORS[operator](value, operand)
        for operator, operand in condition.items()
    )


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
