"""Functions for the document stores of LangChain, Haystack and LlamaIndex. Their ids are texts."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import softdb
from softdb.answers import Hit, Record
from softdb.check import Id, identifiers, leading, share, shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead

P = ParamSpec("P")
T = TypeVar("T")

SEARCH_PARAMS = ("diversity", "exact", "exclude_ids", "fetch_k", "fusion", "group_by", "group_size", "offset", "radius")

_INTEGER = re.compile(r"-?[1-9][0-9]{0,17}|0")
_RETRIES = 100  # number of times that a read is repeated if other writers replace its records meanwhile


def open_store(
    path: SoftDB | TableCluster | str | os.PathLike[str] | None,
    defaults: Callable[[], dict[str, Any]],
    text_index: Literal["words", "trigram"] = "words",
    **settings: Any,
) -> SoftDB | TableCluster:
    """Return an open database, or open or create the one at a path; `settings` override the `defaults` of a new one."""
    if isinstance(path, SoftDB | TableCluster):
        if settings:
            raise BadInput(f"{', '.join(settings)} given with an open database; give a path, or no settings")
        return path
    exists = isinstance(path, str | os.PathLike) and os.path.exists(path) and (os.path.isfile(path) or os.listdir(path))
    if exists or settings.get("mode") == "r":
        return softdb.open(path, **settings)
    db = softdb.open(path, **{**defaults(), **settings})
    try:
        db.index_text(text_index)
    except BaseException:
        db.close()
        raise
    return db


def retry(db: SoftDB | TableCluster, read: Callable[[], T]) -> T:
    """Return the result of `read`; call `read` again after StaleRead, when other writers have changed its records."""
    for _ in range(_RETRIES):
        try:
            return read()
        except StaleRead:  # a hit was replaced before its payload was read, or a cluster's shards have a newer version
            db.refresh()
    return read()


def retried(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls `method` by `retry`, as another thread may write to a cluster's handle meanwhile."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return retry(self.db, lambda: method(self, *args, **kwargs))

    return call


def awaited(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return an asynchronous form of a method, which runs the method in another thread."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


def own_ids(db: SoftDB | TableCluster, ids: Sequence[Any]) -> list[Id]:  # (n,) -> n
    """Return the ids as the database has them: "7" becomes 7 if the id 7 is stored and "7" is not. Raises BadInput."""
    if isinstance(ids, str):
        raise BadInput(f"ids are {shown(ids)}; expected a list of str")
    names = identifiers(ids, unique=False)
    numerals = [name for name in names if isinstance(name, str) and _INTEGER.fullmatch(name)]
    if not numerals or "integer" not in db.core.id_types:
        return names
    as_int, as_text = retry(db, lambda: (db.core.stored([int(name) for name in numerals]), db.core.stored([*numerals])))
    integers = {name for name, number, text in zip(numerals, as_int, as_text, strict=True) if number and not text}
    return [int(name) if name in integers else name for name in names]


def matching(db: SoftDB | TableCluster, ids: Sequence[Any] | None, where: dict[str, Any]) -> dict[str, Any]:
    """Return a filter for the records with these ids that `where` matches; None: all that it matches."""
    return where if ids is None else {"$and": [{"$id": {"$in": own_ids(db, ids)}}, where]}


def stored(db: SoftDB | TableCluster, ids: Sequence[Any], where: dict[str, Any] | None = None) -> list[Record]:
    """Return the records with these ids, each once, in the order of the ids; skip ids not stored or not matched."""
    records = retry(db, lambda: {record.id: record for record in db.get(where=matching(db, ids, where or {}))})
    return [records[name] for name in dict.fromkeys(own_ids(db, ids)) if name in records]


def diverse(k: int, fetch_k: int, weight: float, name: str = "lambda_mult") -> dict[str, Any]:
    """Return a search's parameters for MMR; `weight` from 0 (diverse) to 1 (the nearest). Raises BadInput."""
    return {"diversity": 1 - share(weight, name), "fetch_k": max(fetch_k, k)}


def search_one(
    db: SoftDB | TableCluster, search: dict[str, Any] | None = None, takes: Sequence[str] = (), **params: Any
) -> list[Hit]:
    """Return the hits of one query, with `SoftDB.search`'s parameters. A read-only handle is refreshed first.

    Raises BadInput for a name in `search`, the user's parameters, that is not in SEARCH_PARAMS or `takes`.
    """
    if unknown := sorted({*(search or {})} - {*SEARCH_PARAMS, *takes, "texts"}):
        raise BadInput(f"a search takes no {', '.join(unknown)}; it takes {', '.join((*takes, *SEARCH_PARAMS))}")
    params |= search or {}
    if "radius" in params:
        params["k"] = None  # the radius replaces it
    if len(leading(params.get("queries"))) > 1:
        raise BadInput("the embedding of the query is nested; expected one list of numbers")
    if db.mode == "r":
        db.refresh()
    return retry(db, lambda: list(db.search(**params)[0]))


def relevance(metric: str, mode: str | None) -> Callable[[float], float]:
    """Return a function from a score s to a relevance from 0 to 1; larger is closer.

    "cosine": (1 + s) / 2. "l2": 1 / (1 + √-s), where √-s is the distance. "dot": 1 / (1 + exp(-s)). Mode "text":
    s / (1 + s). Mode "hybrid": s, which is from 0 to 1 already.
    """
    if mode == "text":
        return lambda score: max(score, 0.0) / (1 + max(score, 0.0))
    if mode == "hybrid":
        return _clamped
    return {
        "cosine": lambda score: _clamped((1 + score) / 2),
        "l2": lambda score: 1 / (1 + math.sqrt(max(-score, 0.0))),
        "dot": lambda score: (1 + math.tanh(score / 2)) / 2,  # the logistic function, in a form that cannot overflow
    }[metric]


def _clamped(score: float) -> float:
    return min(max(score, 0.0), 1.0)
