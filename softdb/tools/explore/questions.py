"""Parse the page's queries from URL parameters to hashable objects, by which answers are cached."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from softdb import check
from softdb.errors import BadInput
from softdb.tools.explore.training import STEPS

MAX_SHOWN = 50  # largest number of records in an answer
MOVES = 40  # largest number of steps of gradient descent on a query
RANKINGS, WAYS = ("vector", "hybrid", "text"), ("exact", "nearest", "estimate")
_OF_QUESTION = {"text", "id", "vector", "where", "ranking", "words", "shown", "moves", "trained", "right"}
_OF_WEIGHING = {"temperature", "way", "k", "rtol"}


@dataclass(frozen=True)
class Question:
    """A search for the nearest records, by a text, an id or a vector."""

    text: str | None
    id: str | None  # as typed: 7 is the integer, "7" the text
    vector: tuple[float, ...] | None
    where: str  # a filter as JSON; "" for none
    ranking: str
    words: str  # words to search for, if they differ from `text`
    shown: int  # number of records in the answer
    moves: tuple[tuple[str, float], ...] = ()  # steps of gradient descent: a right record's id as typed, a temperature
    trained: int = 0  # number of training steps of the projection that a text goes through

    @classmethod
    def of(cls, params: Mapping[str, str]) -> Question:
        """Parse the parameters of a URL. Raises BadInput."""
        unknown = sorted(params.keys() - _OF_QUESTION - _OF_WEIGHING)
        if unknown:
            expected = sorted(_OF_QUESTION | _OF_WEIGHING)
            raise BadInput(f"there is no parameter {check.shown(unknown[0])}; expected {expected}")
        kinds = [name for name in ("text", "id", "vector") if params.get(name, "").strip()]
        if len(kinds) != 1:
            raise BadInput("the query is empty or given twice; give one of a text, the id of a record or a vector")
        numbers = _numbers(params["vector"]) if kinds == ["vector"] else None
        where = params.get("where", "").strip()
        if where:
            try:
                json.loads(where)
            except (ValueError, RecursionError) as error:
                example = '{"year": {"$gte": 2000}}'
                raise BadInput(f"the filter is not JSON ({error}); write it like {example}") from None
        return cls(
            params["text"] if kinds == ["text"] else None, params["id"].strip() if kinds == ["id"] else None, numbers,
            where, check.one_of(params.get("ranking", "vector"), "ranking", RANKINGS), params.get("words", "").strip(),
            _integer(params, "shown", 10, MAX_SHOWN), _moves(params.get("moves", "")),
            _integer(params, "trained", 1, STEPS) if "trained" in params else 0,
        )  # fmt: skip

    @property
    def filter(self) -> Any:
        """The filter as parsed JSON; None without a filter."""
        return json.loads(self.where) if self.where else None

    @property
    def search_words(self) -> str:
        """The words to search texts for. Raises BadInput if there are none."""
        words = self.words or self.text or ""
        if not words:
            raise BadInput("a ranking by words needs words; type some, or rank by vector")
        return words


@dataclass(frozen=True)
class Weighing:
    """The settings of a soft query."""

    temperature: float
    way: str  # "exact": all records; "nearest": the k nearest; "estimate": all, to the tolerance rtol
    k: int
    rtol: float

    @classmethod
    def of(cls, params: Mapping[str, str]) -> Weighing:
        """Parse the parameters of a URL. Raises BadInput."""
        way = check.one_of(params.get("way", "exact"), "way", WAYS)
        temperature, rtol = _number(params, "temperature", 1.0), _number(params, "rtol", 0.05)
        return cls(temperature, way, _integer(params, "k", 100, 10**6), rtol)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `attend` that `way` stands for."""
        options: dict[str, dict[str, Any]] = {"exact": {}, "nearest": {"k": self.k}, "estimate": {"rtol": self.rtol}}
        return options[self.way]


def _numbers(text: str) -> tuple[float, ...]:
    """Parse a JSON list of numbers, or numbers with blanks or commas between them."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        return tuple(float(word) for word in words)
    except ValueError as error:
        raise BadInput(f"a vector is numbers like [0.1, -0.2]; {error}") from None


def _number(params: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(params.get(name, default))
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf):
        raise BadInput(f"{name} is {check.shown(params[name])}; expected a number above 0")
    return number


def _integer(params: Mapping[str, str], name: str, default: int, most: int) -> int:
    number = _number(params, name, default)
    if number != int(number) or number > most:
        raise BadInput(f"{name} is {check.shown(params[name])}; expected a whole number from 1 to {most:,}")
    return int(number)


def _moves(text: str) -> tuple[tuple[str, float], ...]:
    """Parse a JSON list of [id, temperature]."""
    try:
        moves = tuple((str(right), float(t)) for right, t in json.loads(text or "[]"))
    except (ValueError, TypeError, RecursionError):
        moves = (("", 0.0),)
    if len(moves) > MOVES or not all(right and 0 < t < math.inf for right, t in moves):
        expected = f"at most {MOVES} of [id, temperature above 0]"
        raise BadInput(f"moves is {check.shown(text)}; expected a JSON list of {expected}")
    return moves
