"""Records as the page shows them, in bounded texts; names of fields, to complete what is typed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from softdb.check import Id
from softdb.store.paths import spelled
from softdb.visible import visible

TITLE, TEXT, FIELD = 120, 2000, 600  # characters that are shown
FIELDS, VALUES = 40, 24  # of a payload; names to complete, values of each
DEPTH, NAMES = 4, 200
_TITLES = ("title", "name", "word", "label", "text")


def named_id(name: Id) -> str:
    """An id as it is typed: 7 is the number, "7" the text, and a text that is no number stands for itself."""
    if isinstance(name, int):
        return str(name)
    bare = name == name.strip() and not name.startswith('"') and not name.lstrip("-").isdigit() and name != "-"
    return name if bare and name == visible(name) and name else json.dumps(name)


def _cut(text: str, most: int) -> str:
    return visible(text if len(text) <= most else text[: most - 1] + "…")


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def title(payload: Any, text: str | None) -> str:
    """One line that says which record it is; "" where nothing does."""
    fields = payload if isinstance(payload, dict) else {}
    named = [fields[name] for name in _TITLES if isinstance(fields.get(name), str)]
    texts = [*named, text, *(field for field in fields.values() if isinstance(field, str)), payload]
    found = next((one for one in texts if one is not None), "")
    return _cut(_line(found), TITLE)


def record(name: Id, payload: Any, text: str | None) -> dict[str, Any]:
    """A record as the page shows it: every part a text."""
    parts = list(payload.items()) if isinstance(payload, dict) else [("", payload)] if payload is not None else []
    return {
        "id": named_id(name) if len(str(name)) <= TEXT else "",  # too long to be asked by
        "shown_id": _cut(str(name), TITLE),
        "title": title(payload, text),
        "text": None if text is None else _cut(text, TEXT),
        "payload": [[_cut(one, TITLE), _cut(_line(value), FIELD)] for one, value in parts[:FIELDS]],
        "more": max(0, len(parts) - FIELDS),
    }


def fields_of(payloads: Iterable[Any], declared: Iterable[str], has_text: bool) -> list[dict[str, Any]]:
    """Names of fields as a filter takes them, what kinds of values each has, and its most frequent ones as JSON."""
    seen: dict[str, tuple[set[str], Counter[str]]] = {}  # kinds and values
    for payload in payloads:
        for parts, value in _walk(payload, ()):
            name = spelled(parts)
            if not all(parts) or len(name) > TITLE or (name not in seen and len(seen) >= NAMES):
                continue
            kinds, values = seen.setdefault(name, (set(), Counter()))
            kinds.add(_kind(value))
            for element in value if isinstance(value, list) else [value]:
                if isinstance(element, str | int | float) and len(shown := json.dumps(element)) <= TITLE:
                    values[shown] += 1
    indexed = set(declared)
    for name in sorted(indexed - seen.keys())[:NAMES]:
        seen[name] = set(), Counter()
    found = [
        {
            "name": name, "kinds": sorted(kinds), "indexed": name in indexed,
            "values": [value for value, _ in values.most_common(VALUES)],
        }
        for name, (kinds, values) in sorted(seen.items())
    ]  # fmt: skip
    return [*found, {"name": "$text", "kinds": ["text"], "indexed": False, "values": []}] if has_text else found


def _walk(value: Any, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and len(parts) < DEPTH:
        for name, inner in value.items():
            yield from _walk(inner, (*parts, name))
    elif parts:
        yield parts, value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    named = {"text": str, "list": list, "object": dict}
    return next((name for name, kind in named.items() if isinstance(value, kind)), "null")
