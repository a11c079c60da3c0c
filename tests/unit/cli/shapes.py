"""JSON of a command compared with the table of docs/cli.md."""

from __future__ import annotations

import json
import re
from typing import Any

from typed import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "id": (int, str),
    "int": (int,),
    "null": (type(None),),
    "number": (int, float),
    "text": (str,),
}


def shapes() -> dict[str, Any]:
    """The table: of each command the shape of its output."""
    (block,) = re.findall(r"^```json\n(\{\n  \"demo\".*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = json.loads(block)
    return found


def mismatch(value: Any, shape: Any, place: str = "$") -> list[str]:
    """Path at which a value has another shape."""
    if isinstance(shape, str):
        kinds = shape.split(" or ")
        fits = "any" in kinds or any(
            isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool)) for kind in kinds
        )
        return [] if fits else [f"{place} is {value!r}, not {shape}"]
    if isinstance(shape, list) and isinstance(value, list):
        (each,) = shape
        return [one for i, part in enumerate(value) for one in mismatch(part, each, f"{place}[{i}]")]
    if isinstance(shape, dict) and isinstance(value, dict):
        if value.keys() != shape.keys():
            return [f"{place} has other fields: {sorted(value.keys() ^ shape.keys())}"]
        return [one for name in shape for one in mismatch(value[name], shape[name], f"{place}.{name}")]
    return [f"{place} is {value!r}, not {shape}"]
