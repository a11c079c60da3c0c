"""`SearchResult`, the matches of a question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from softdb.tools.explore.plane import Plane


@dataclass(frozen=True)
class SearchResult:
    """The part of a reply that does not depend on the temperature."""

    generation: int
    query: Tensor | None  # (1, d); None for a search by words alone, which has no weights
    hits: list[dict[str, Any]]
    scores: list[float | None]  # scores of the hits' keys; None for a hit without a key
    ids: list[str | int]
    query_id: str | int | None  # id of the record whose key is the query
    by_words: bool  # True: the text has no vector, so words find the hits; the first one's key is the query
    plane: Plane
    places: list[list[float] | None]  # coordinates of the hits on the map
    lights: list[float | None]  # scores of the map's records; None if the filter excludes them
    milliseconds: float
    notes: list[str]
