"""Prepare records for the page, with long texts cut; list field names and values to complete a typed filter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from softdb.check import Id
from softdb.store.paths import spelled
from softdb.visible import visible

TITLE, TEXT, FIELD = 120, 2000, 600  # largest numbers of characters of a title, a text and a field that the page shows
FIELDS, VALUES = 40, 24  # largest numbers of payload fields shown, and of values suggested for a field
DEPTH, NAMES = 4, 200  # deepest nesting, and largest number, of field names suggested
_TITLES = ("title", "name", "word", "label", "text")


def named_id(name: Id) -> str:
    """Return an id as users type it: 7 is the integer, "7" the text, and a text that is no number needs no quotes."""
    if isinstance(name, int):
        return str(name)
    bare = name == name.strip() and not name.startswith('"') and not name.lstrip("-").isdigit() and name != "-"
    return name if bare and name == visible(name) and name else json.dumps(name)


def _cut(text: str, length: int) -> str:
    return visible(text if len(text) <= length else text[: length - 1] + "…")


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Return the value with six digits of each float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def title(payload: Any, text: str | None) -> str:
    """Return a one-line title of a record: a field such as "title", its text, or another text; "" without these."""
    fields = payload if isinstance(payload, dict) else {"": payload}
    titles = [fields.get(name) for name in _TITLES]
    texts = [candidate for candidate in (*titles, text, *fields.values()) if isinstance(candidate, str)]
    return _cut(next(iter(texts), ""), TITLE)


def record(name: Id, payload: Any, text: str | None) -> dict[str, Any]:
    """Return a record as JSON for the page, with every field as text."""
    fields = list(payload.items()) if isinstance(payload, dict) else [("", payload)] if payload is not None else []
    return {
        "id": named_id(name) if len(str(name)) <= TEXT else "",  # a longer id cannot be a query
        "shown_id": _cut(str(name), TITLE),
        "title": title(payload, text),
        "text": None if text is None else _cut(text, TEXT),
        "payload": [[_cut(field, TITLE), _cut(_line(value), FIELD)] for field, value in fields[:FIELDS]],
        "more": max(0, len(fields) - FIELDS),
    }


def fields_of(payloads: Iterable[Any], declared: Iterable[str], has_text: bool) -> list[dict[str, Any]]:
    """Return each field's name as a filter spells it, the kinds of its values, and its most frequent values in JSON."""
    seen: dict[str, tuple[set[str], Counter[str]]] = {}  # for each field, kinds and counts of values
    for payload in payloads:
        for path, value in _walk(payload, ()):
            name = spelled(path)
            if not all(path) or len(name) > TITLE or (name not in seen and len(seen) >= NAMES):
                continue
            kinds, values = seen.setdefault(name, (set(), Counter()))
            kinds.add(_kind(value))
            for element in value if isinstance(value, list) else [value]:
                if isinstance(element, str | int | float) and len(shown := json.dumps(element)) <= TITLE:
                    values[shown] += 1
    indexed = set(declared)
    for name in sorted(indexed - seen.keys())[:NAMES]:
        seen[name] = set(), Counter()
    fields = [
        {
            "name": name, "kinds": sorted(kinds), "indexed": name in indexed,
            "values": [value for value, _ in values.most_common(VALUES)],
            "repeated": "number" in kinds or 1 < len(values) <= values.total() // 2,
        }
        for name, (kinds, values) in sorted(seen.items())
    ]  # fmt: skip
    own_text = {"name": "$text", "kinds": ["text"], "indexed": False, "values": [], "repeated": False}
    return [*fields, own_text] if has_text else fields


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and len(path) < DEPTH:
        for name, inner in value.items():
            yield from _walk(inner, (*path, name))
    elif path:
        yield path, value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    kinds = {"text": str, "list": list, "object": dict}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "null")
