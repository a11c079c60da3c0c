"""The page's questions as they stand in a URL: checked once, and hashable, so that answers can be cached."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softdb import check
from softdb.errors import BadInput

MOST = 50  # records that are shown
RANKINGS, WAYS = ("vector", "hybrid", "text"), ("exact", "nearest", "estimate")
_ASKED = {"text", "id", "vector", "where", "ranking", "words", "shown"}
_WEIGHED = {"temperature", "way", "k", "rtol"}


@dataclass(frozen=True)
class Question:
    """A question about the nearest records, by one of text, id and vector."""

    text: str | None
    id: str | None  # as typed: 7 is the number, "7" the text
    vector: tuple[float, ...] | None
    where: str  # a filter, as JSON; "" is none
    ranking: str
    words: str  # of a search by text and vector, where they are not the text itself
    shown: int

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Question:
        """From the parameters of a URL. Raises BadInput."""
        unknown = sorted(given.keys() - _ASKED - _WEIGHED)
        if unknown:
            raise BadInput(f"there is no parameter {check.shown(unknown[0])}; expected {sorted(_ASKED | _WEIGHED)}")
        kinds = [name for name in ("text", "id", "vector") if given.get(name, "").strip()]
        if len(kinds) != 1:
            raise BadInput("ask by a text, by the id of a record or by a vector: one of them, and not an empty one")
        numbers = _numbers(given["vector"]) if kinds == ["vector"] else None
        where = given.get("where", "").strip()
        if where:
            _json(where, "the filter")
        return cls(
            given["text"] if kinds == ["text"] else None, given["id"].strip() if kinds == ["id"] else None, numbers,
            where, check.one_of(given.get("ranking", "vector"), "ranking", RANKINGS), given.get("words", "").strip(),
            _whole(given, "shown", 10, MOST),
        )  # fmt: skip

    @property
    def filter(self) -> Any:
        """The filter as calls take it."""
        return json.loads(self.where) if self.where else None

    @property
    def asked_words(self) -> str:
        """The words of a search by words. Raises BadInput where there are none."""
        words = self.words or self.text or ""
        if not words:
            raise BadInput("a ranking by words needs words; type some, or rank by vector")
        return words


@dataclass(frozen=True)
class Weighing:
    """The settings of a soft query."""

    temperature: float
    way: str  # exact: all of them; nearest: k; estimate: all, to a tolerance
    k: int
    rtol: float

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Weighing:
        """From the parameters of a URL. Raises BadInput."""
        way = check.one_of(given.get("way", "exact"), "way", WAYS)
        return cls(
            _number(given, "temperature", 1.0), way, _whole(given, "k", 100, 10**6), _number(given, "rtol", 0.05)
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `attend` that stand for the way."""
        options: dict[str, dict[str, Any]] = {"exact": {}, "nearest": {"k": self.k}, "estimate": {"rtol": self.rtol}}
        return options[self.way]


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f'{what} is not JSON ({error}); expected such as {{"year": {{"$gte": 2000}}}}') from None


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers, as a JSON list or with blanks or commas between them."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        return tuple(float(word) for word in words)
    except ValueError as error:
        raise BadInput(f"a vector is numbers such as [0.1, -0.2], but here is one that is none: {error}") from None


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(given.get(name, default))
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf):
        raise BadInput(f"{name} is {check.shown(given[name])}; expected a number above 0")
    return number


def _whole(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    number = _number(given, name, default)
    if number != int(number) or number > most:
        raise BadInput(f"{name} is {check.shown(given[name])}; expected a whole number from 1 to {most:,}")
    return int(number)
