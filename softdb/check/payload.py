"""Check payloads, which must be values that JSON returns unchanged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from softdb.check.ids import encodable
from softdb.check.plain import filled, shown
from softdb.errors import BadInput

__all__ = ["MAX_DEPTH", "JsonText", "is_missing", "json_ready", "json_text", "json_texts", "no_constant", "payloads"]

MAX_DEPTH = 64  # nesting of a payload or a filter: far below the limit of every JSON parser involved

_GROUP = 100  # texts that are parsed at once: the garbage collector runs for several hundred new values
_LEAVES = (str, int, bool, type(None))
_LISTS = (list, tuple)  # a constant, as evaluating `list | tuple` for each payload would double the cost of the check
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False).encode
if (_make_encoder := getattr(json.encoder, "c_make_encoder", None)) is not None:
    # `encode` makes an encoder for every value, which takes longer than to encode a small one
    _chunks = _make_encoder(
        None, json.JSONEncoder().default, json.encoder.encode_basestring, None, ":", ",", False, False, False
    )

    def _encode(o: Any) -> str:
        return "".join(_chunks(o, 0))


class JsonText(str):
    """A payload as JSON text, exactly as `json_text` would return it for its value."""


class JsonTexts(Sequence[JsonText | None]):
    """Payloads as JSON texts. An item becomes a `JsonText` when it is read: many of them slow the garbage collector."""

    def __init__(self, texts: list[str | None]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return JsonTexts(self.texts[i])
        return None if self.texts[i] is None else JsonText(self.texts[i])


def no_constant(name: str) -> None:
    """Refuse NaN and Infinity in JSON; used as `parse_constant`. Raises ValueError."""
    raise ValueError(f"{name} is not a JSON number")


def payloads(value: object, count: int) -> list[str | None]:
    """Return payloads as JSON texts, one for each of `count` ids; None stays None.

    A `JsonText` stays unchanged. NaN, NaT and NA become null, scalars and arrays of NumPy numbers, texts and lists, and
    dates and times texts in ISO 8601. Raises BadInput for any other value that JSON lacks, a key that is no str, or
    nesting beyond 64.
    """
    if value is None:
        return [None] * count
    if isinstance(value, JsonTexts):
        return filled(value, "payloads", count).texts
    if isinstance(value, str | dict) or not isinstance(value, Sequence | np.ndarray):
        if count != 1:
            expected = f"expected a list with one JSON value for each of {count} ids (a frame has .to_dict('records'))"
            raise BadInput(f"payloads are {shown(value)}; {expected}")
        value = [value]
    filled(value, "payloads", count)
    items = enumerate(_items(value))
    return [item if item is None or type(item) is JsonText else _payload(item, f"payload {i}") for i, item in items]


def json_texts(texts: list[Any]) -> JsonTexts | None:
    """Return JSON texts unchanged; return None if one of them is not the text that `json_text` returns for its value.

    Cost: half of parsing each text and encoding its value.
    """
    given = [text for text in texts if text is not None]
    try:
        for low in range(0, len(given), _GROUP):
            group = given[low : low + _GROUP]
            for text, value in zip(group, json.loads(f"[{','.join(group)}]"), strict=True):
                if value is None or _encode(value) != text:
                    return None
                if len(text) > MAX_DEPTH:
                    json_text(value, "payload")
    except (BadInput, ValueError, TypeError, RecursionError):
        return None
    return JsonTexts(texts)


def is_missing(value: object) -> bool:
    """Return True for a cell of a table that has no value: None, NaN, or pandas' NaT or NA."""
    if isinstance(value, float | np.inexact | np.datetime64):
        return bool(value != value)
    return value is None or type(value).__name__ in ("NaTType", "NAType")


def _payload(value: object, name: str) -> str | None:
    try:
        return json_text(value, name)
    except BadInput:  # few payloads need a conversion, and to look for it first would cost all others time
        converted = json_ready(value)
        for key, inner in converted.items() if isinstance(converted, dict) else ():
            json_text(inner, f"field {shown(key)} of {name}")
        return None if converted is None else json_text(converted, name)


def json_ready(value: Any, depth: int = 1) -> Any:
    """Return a payload with the values that `payloads` converts in their JSON form, and all others unchanged."""
    if isinstance(value, np.ndarray):
        value = list(value) if value.ndim else value[()]
    if is_missing(value):
        return None
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {key: json_ready(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, _LISTS):
        return [json_ready(inner, depth + 1) for inner in value]
    if isinstance(value, np.datetime64):
        return re.sub(r"\.0+$", "", str(value))
    value = value.item() if isinstance(value, np.generic) else value
    return value.isoformat() if hasattr(value, "isoformat") else value


def _items(value: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a sequence. Raises BadInput for an OSError, which would look like an error of the database."""
    try:
        yield from value
    except (OSError, MemoryError, UnicodeDecodeError) as error:
        raise BadInput(f"payloads could not be read ({type(error).__name__}: {error}); fix the cause") from error


def json_text(value: object, name: str) -> str:
    """Return a value as JSON text. Raises BadInput unless JSON would give the value back (a tuple as a list)."""
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
            raise BadInput(f"{name} holds {value}, which JSON cannot represent; use null or text")
        return
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise BadInput(f"{name} has the key {shown(key)}, which is no str; JSON keys are text, convert it")
        value = value.values()
    elif not isinstance(value, _LISTS):
        way = next((f" with .{method}()" for method in ("tolist", "isoformat") if hasattr(kind, method)), "")
        raise BadInput(
            f"{name} holds a {kind.__name__}; expected JSON: dict, list, str, number, bool or None; convert it{way}"
        )
    for inner in value:
        if type(inner) not in _LEAVES:
            _json_value(inner, name, depth + 1)
