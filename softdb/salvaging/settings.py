"""Schema of a damaged database, from its settings, the caller's arguments, or the headers of column files."""

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


def schema_of(remains: Remains, path: Path, arguments: dict[str, Any], notes: list[str]) -> Schema:
    """Return the schema from the settings; if some are lost, also from arguments and file headers. Add to `notes`."""
    settings = {name: value for name, value in remains.settings().items() if name in _SETTINGS}
    stored = None
    with contextlib.suppress(KeyError, BadInput):
        stored = check.schema(**{name: settings[name] for name in _SETTINGS}, stored=None)
    if stored is not None:
        return check.schema(**arguments, stored=stored)
    known = {name: value for source in (settings, arguments) for name, value in source.items() if value is not None}
    return _combine({**_headers(path), **known}, sorted(set(_SETTINGS) - set(settings)), notes)


def _combine(known: dict[str, Any], lost: list[str], notes: list[str]) -> Schema:
    """Return the schema of the settings `known`, with a note on those `lost`. Raises BadInput if one is not known."""
    labels, hidden = known.pop("labels", False), known.pop("hidden", False) and "num_classes" not in known
    needed = ["dim", "metric", *(["num_classes"] if labels else []), *(["value_dim"] if hidden else [])]
    missing = [name for name in needed if name not in known]
    if missing:
        raise BadInput(f"{' and '.join(missing)} cannot be read from the database any more; give {missing[0]}=")
    notes.append(
        f"the settings are damaged ({', '.join(lost) or 'they contradict each other'}); the records are read with "
        + ", ".join(f"{name}={known[name]}" for name in _SETTINGS if name in known)
    )
    return check.schema(**{name: known.get(name) for name in _SETTINGS}, stored=None)


def _headers(path: Path) -> dict[str, Any]:
    """Return settings from the most common header of key files and of value files.

    "labels": True for labels; "hidden": True if all headers of value files are damaged.
    """
    kinds: dict[str, Counter[tuple[bytes, bytes | None]]] = {"keys": Counter(), "values": Counter()}
    for file in path.glob("*-*.npy"):
        with contextlib.suppress(OSError), files.open_regular(file) as opened:
            match = _HEAD.search(opened.read(128))
            if match and (kind := file.name.split("-")[0]) in kinds:
                kinds[kind][match[1], match[2]] += 1
    settings: dict[str, Any] = {}
    if kinds["keys"]:
        descr, width = kinds["keys"].most_common(1)[0][0]
        settings = {"dtype": {b"<f4": "float32", b"<f2": "float16"}.get(descr, "float32")}
        settings |= {} if width is None else {"dim": int(width)}
    if kinds["values"]:
        descr, width = kinds["values"].most_common(1)[0][0]
        settings |= {"labels": True} if width is None else {"value_dim": int(width)}
    elif any(path.glob("values-*.npy")):
        settings["hidden"] = True
    return settings
