"""Payloads: values that JSON can represent and give back unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from softdb.check.ids import encodable
from softdb.check.plain import filled, shown
from softdb.errors import BadInput

__all__ = ["MAX_DEPTH", "json_text", "payloads"]

MAX_DEPTH = 64  # nesting of a payload or a filter: far below where any JSON parser in the line gives up

_LEAVES = (str, int, bool, type(None))
_LISTS = (list, tuple)  # a union made anew for each payload would cost as much as the check
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False).encode
if (_made := getattr(json.encoder, "c_make_encoder", None)) is not None:
    # `encode` makes one of these for every value, which takes longer than a small value itself
    _chunks = _made(
        None, json.JSONEncoder().default, json.encoder.encode_basestring, None, ":", ",", False, False, False
    )

    def _encode(o: Any) -> str:
        return "".join(_chunks(o, 0))


def payloads(value: object, count: int) -> list[str | None]:
    """Payloads as JSON texts, one an id; None stays None.

    Raises BadInput for what JSON cannot say (another type, NaN, a key that is no str) or nesting beyond 64.
    """
    if value is None:
        return [None] * count
    if isinstance(value, str | dict) or not isinstance(value, Sequence | np.ndarray):
        if count != 1:
            raise BadInput(f"payloads are {shown(value)}; expected a list with one JSON value for each of {count} ids")
        value = [value]
    filled(value, "payloads", count)
    return [None if one is None else json_text(one, f"payload {i}") for i, one in enumerate(_drawn(value))]


def _drawn(value: Iterable[Any]) -> Iterator[Any]:
    """Its items. What reads files to make them may fail, which is not the database's disk."""
    try:
        yield from value
    except (OSError, MemoryError, UnicodeDecodeError) as error:
        raise BadInput(f"payloads could not be drawn ({type(error).__name__}: {error}); mend the cause") from error


def json_text(value: object, name: str) -> str:
    """The JSON text of a value that JSON can say and give back unchanged (a tuple comes back as a list)."""
    if type(value) not in _LEAVES:
        _json_value(value, name, 1)
    try:
        text = _encode(value)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{name} is not JSON: {error}") from None
    if not text.isascii():
        encodable(text, name)
    return text


def _json_value(value: object, name: str, depth: int) -> None:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise BadInput(f"{name} nests deeper than {MAX_DEPTH}; flatten it")
    if kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]
            raise BadInput(f"{name} holds {value}, which JSON has no word for; use null or text")
        return
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise BadInput(f"{name} has the key {shown(key)}, which is no str; JSON keys are text, convert it")
        value = value.values()
    elif not isinstance(value, _LISTS):
        way = next((f" with .{one}()" for one in ("tolist", "isoformat") if hasattr(kind, one)), "")
        raise BadInput(
            f"{name} holds a {kind.__name__}; expected JSON: dict, list, str, number, bool or None; convert it{way}"
        )
    for inner in value:
        if type(inner) not in _LEAVES:
            _json_value(inner, name, depth + 1)
