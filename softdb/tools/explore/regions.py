"""Names for regions of the map: in each, the word that is frequent there and rare elsewhere."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from softdb.store.paths import parts_of
from softdb.tools.explore.plane import Floats

HALVINGS = (3, 5)  # numbers of halvings of the map: 8 large regions, and 32 small ones for a closer view
KINDS = 7  # largest number of colours
FEW = 3  # smallest number of records that share a name
LIFT = 2  # a name is so many times as frequent in its region as on the whole map
_WORD = re.compile(r"[^\W\d_]{4,30}")


def region_names(
    places: Floats,  # (m, 2)
    titles: Sequence[str],  # m
    payloads: Sequence[Any],
    texts: Sequence[str | None],
) -> list[list[Any]]:
    """Return [name, x, y, level] for regions of the map, larger regions first. Cost of some passes over the words.

    The name of a region is the word out of any title, or else the number of a field, with the largest n log(p / p_all):
    n of its records, a share p of them, have it, and p_all of all records. It stands at the mean place of those.
    """
    known = {word for line in titles for word in _WORD.findall(line.lower())}
    words = [
        known.intersection(_WORD.findall(f"{line} {text or ''}".lower()))
        | {f"{name} {value}" for name, value in (payload.items() if isinstance(payload, dict) else ())
           if isinstance(value, int) and abs(value) < 10**9}
        for line, payload, text in zip(titles, payloads, texts, strict=True)
    ]  # fmt: skip
    all_counts, names, used = Counter(word for own in words for word in own), [], set[str]()
    for level, halvings in enumerate(HALVINGS):
        for members in _halves(places, np.arange(len(places)), halvings):
            counts = Counter(word for i in members.tolist() for word in words[i] if word not in used)
            lifts = {word: n / len(members) / (all_counts[word] / len(words)) for word, n in counts.items() if n >= FEW}
            common = [
                (" " not in word, counts[word] * math.log(lift), word) for word, lift in lifts.items() if lift > LIFT
            ]
            if not common:
                continue
            name = max(common)[2]
            used.add(name)
            x, y = places[[i for i in members.tolist() if name in words[i]]].mean(0).tolist()
            names.append([name, x, y, level])
    return names


def _halves(places: Floats, members: np.ndarray, halvings: int) -> list[np.ndarray]:
    """Halve the records at the median of their wider axis, again and again."""
    if not halvings or len(members) < 2 * FEW:
        return [members]
    axis = int(np.ptp(places[members], axis=0).argmax())
    order = members[places[members, axis].argsort(kind="stable")]
    return [cell for half in np.array_split(order, 2) for cell in _halves(places, half, halvings - 1)]


def value_at(payload: Any, field: str) -> Any:
    """Return the value of a field, named as in a filter; None if there is none."""
    for name in parts_of(field):
        payload = payload.get(name) if isinstance(payload, dict) else None
    return payload


def colours(values: Sequence[Any]) -> dict[str, Any]:
    """Return a field's values for the map: numbers, or the KINDS most frequent ones by their number, -1 for others."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == sum(value is not None for value in values) and len(set(numbers)) > KINDS:
        return {
            "numbers": [value if isinstance(value, int | float) and math.isfinite(value) else None for value in values]
        }
    shown = [
        None if value is None else str(value[0] if isinstance(value, list) and value else value) for value in values
    ]
    names = [name for name, _ in Counter(name for name in shown if name is not None).most_common(KINDS)]
    place = {name: i for i, name in enumerate(names)}
    return {"names": names, "classes": [-1 if name is None else place.get(name, -1) for name in shown]}
