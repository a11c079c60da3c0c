"""Functions that stores of documents share, whose ids are text: LangChain's and Haystack's."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import softdb
from softdb.answers import Hit, Records
from softdb.check import Id, identifiers, shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead, UnknownId

P = ParamSpec("P")
T = TypeVar("T")

_WHOLE = re.compile(r"-?[1-9][0-9]{0,17}|0")
_AGAIN = 100  # times that one question is asked, where writers replace what it finds meanwhile


def opened(
    path: str | os.PathLike[str] | None,
    new: Callable[[], dict[str, Any]],
    text_index: Literal["words", "trigram"] = "words",
    **settings: Any,
) -> SoftDB:
    """The database there; where nothing is, a new one of the settings that `new` gives, with an index of its texts."""
    there = isinstance(path, str | os.PathLike) and os.path.exists(path) and (os.path.isfile(path) or os.listdir(path))
    if there or settings.get("mode") == "r":
        return softdb.open(path, **settings)
    db = softdb.open(path, **{**new(), **settings})
    try:
        db.index_text(text_index)
    except BaseException:
        db.close()
        raise
    return db


def settled(db: SoftDB | TableCluster, ask: Callable[[], T]) -> T:
    """Return the answer of `ask` for one state of the records, asked again if others have changed them meanwhile."""
    for _ in range(_AGAIN):
        try:
            return ask()
        except StaleRead:  # a hit was replaced before its payload was read; or a cluster's shards have gone on
            db.refresh()
    return ask()


def of_one_state(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method, asked again where another thread of a cluster's handle writes meanwhile."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return settled(self.db, lambda: method(self, *args, **kwargs))

    return call


def awaited(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The method, to be awaited: it runs in another thread."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


def own_ids(
    db: SoftDB | TableCluster,
    ids: Sequence[str],  # n
) -> list[Id]:  # n
    """Ids as the records have them: "7" is the number 7 where that is stored and the text is not. Raises BadInput."""
    if isinstance(ids, str):
        raise BadInput(f"ids are {shown(ids)}; expected a list of str")
    names = identifiers(ids, unique=False)
    wholes = [name for name in names if isinstance(name, str) and _WHOLE.fullmatch(name)]
    if not wholes or "integer" not in db.core.id_types:
        return names
    numbers, texts = settled(db, lambda: (db.core.stored([int(one) for one in wholes]), db.core.stored(list(wholes))))
    known = {one for one, number, text in zip(wholes, numbers, texts, strict=True) if number and not text}
    return [int(name) if name in known else name for name in names]


def stored(db: SoftDB | TableCluster, ids: Sequence[Id]) -> Records | list[Any]:
    """The records of those ids that are stored, each once, in the order of the ids."""
    names = list(dict.fromkeys(ids))

    def those_there() -> Records | list[Any]:
        mine = [one for one, there in zip(names, db.core.stored(names), strict=True) if there]
        return db.get(mine) if mine else []

    while True:
        try:
            return settled(db, those_there)
        except UnknownId:  # deleted between the two
            continue


def found(db: SoftDB | TableCluster, **asked: Any) -> list[Hit]:
    """The hits of one query, `asked` as of `SoftDB.search`; a handle that reads sees first what others committed."""
    if db.mode == "r":
        db.refresh()
    return settled(db, lambda: list(db.search(**asked)[0]))


def relevance(metric: str, mode: str | None) -> Callable[[float], float]:
    """From a score to a number from 0 to 1, larger is closer; 1 is the same direction, or the same place.

    "cosine": (1 + s) / 2. "l2": 1 / (1 + the distance). "dot": 1 / (1 + exp(-s)). By words ("text"): s / (1 + s); a
    hybrid score is from 0 to 1 already.
    """
    if mode == "text":
        return lambda score: max(score, 0.0) / (1 + max(score, 0.0))
    if mode == "hybrid":
        return _clamped
    return {
        "cosine": lambda score: _clamped((1 + score) / 2),
        "l2": lambda score: 1 / (1 + math.sqrt(max(-score, 0.0))),
        "dot": lambda score: (1 + math.tanh(score / 2)) / 2,  # the logistic function, which overflows nowhere
    }[metric]


def _clamped(score: float) -> float:
    return min(max(score, 0.0), 1.0)
