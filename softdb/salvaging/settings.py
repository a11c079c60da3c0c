"""Schema of a damaged database: by its settings, or by what else says so."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from softdb import check
from softdb.check import Schema
from softdb.errors import BadInput
from softdb.salvaging.remains import Remains
from softdb.store import files

_HEAD = re.compile(rb"'descr': '(<f[24]|<i4)'.*'shape': \(\d+,(?: (\d+))?\)")
_SETTINGS = ("dim", "value_dim", "num_classes", "dtype", "metric")


def schema_of(remains: Remains, path: Path, words: dict[str, Any], notes: list[str]) -> Schema:
    """Schema of the records by the settings, else by the words, else by the headers of column files."""
    settings = {name: value for name, value in remains.settings().items() if name in _SETTINGS}
    given = {name: one for name, one in words.items() if one is not None}
    headers, known = _headers(path), {name: one for name, one in settings.items() if one is not None}
    stored = None
    with contextlib.suppress(KeyError, BadInput):
        stored = check.schema(**{name: settings[name] for name in _SETTINGS}, stored=None)
    if stored is not None:
        return check.schema(**words, stored=stored)
    return _guessed({**headers, **known, **given}, sorted(set(_SETTINGS) - set(settings)), notes)


def _guessed(said: dict[str, Any], lost: list[str], notes: list[str]) -> Schema:
    labels = said.pop("labels", False)
    needed = ["dim", "metric", *(["num_classes"] if labels else [])]
    missing = [name for name in needed if name not in said]
    if missing:
        raise BadInput(f"{' and '.join(missing)} cannot be read from the database any more; give {missing[0]}=")
    notes.append(
        f"the settings are damaged ({', '.join(lost) or 'they contradict each other'}); the records are read with "
        + ", ".join(f"{name}={said[name]}" for name in _SETTINGS if name in said)
    )
    return check.schema(**{name: said.get(name) for name in _SETTINGS}, stored=None)


def _headers(path: Path) -> dict[str, Any]:
    """Header that most column files of a kind have."""
    kinds: dict[str, Counter[tuple[bytes, bytes | None]]] = {"keys": Counter(), "values": Counter()}
    for file in path.glob("*-*.npy"):
        with contextlib.suppress(OSError), files.open_regular(file) as opened:
            match = _HEAD.search(opened.read(128))
            if match and (kind := file.name.split("-")[0]) in kinds:
                kinds[kind][match[1], match[2]] += 1
    found: dict[str, Any] = {}
    if kinds["keys"]:
        descr, width = kinds["keys"].most_common(1)[0][0]
        found = {"dtype": {b"<f4": "float32", b"<f2": "float16"}.get(descr, "float32")}
        found |= {} if width is None else {"dim": int(width)}
    if kinds["values"]:
        descr, width = kinds["values"].most_common(1)[0][0]
        found |= {"labels": True} if width is None else {"value_dim": int(width)}
    return found
