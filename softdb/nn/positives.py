"""The records that each query shall find: parsed, checked and located in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.attend import Request, Stored
from softdb.check import Id, shown
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.scores import Score, ScoreFunction

__all__ = ["Positives", "asked"]

Rows = NDArray[np.int64]


class Positives(NamedTuple):
    """A request, the records that it may see, and which of them each query shall find."""

    request: Request
    source: Stored
    positions: Rows  # (q, m) each query's own, no two the same, -1 = none


def asked(
    db: SoftDB,
    queries: Any,
    positives: Any,
    temperature: float,
    score: Score | ScoreFunction | None,
    where: dict[str, Any] | None,
    tolerance: check.Tolerance | None = None,
    generator: torch.Generator | None = None,
) -> Positives:
    """What a loss over positives asks, checked; one look into the catalogue for all ids.

    Raises UnknownId for a positive that is not stored; BadInput for a query without one, one outside `where`, or
    another number of them than of queries; StaleRead for one that is being replaced at this moment.
    """
    handle(db)
    request, source = db.request(queries, temperature, score, where=where, tolerance=tolerance, generator=generator)
    snapshot = source.columns
    lists = _lists(positives, len(request.queries))
    names = [one for mine in lists for one in mine]
    found = snapshot.positions(db.locate(names, required=True)[1]) if names else np.zeros(0, np.int64)
    if (gone := ~snapshot.live[found] | (found < 0)).any():
        raise StaleRead(f"positive {shown(names[int(gone.argmax())])} was replaced during the call; call again")
    if request.allowed is not None and (outside := ~request.allowed[found]).any():
        raise BadInput(
            f"positive {shown(names[int(outside.argmax())])} ({int(outside.sum())} of {len(names)}) is outside the "
            "filter; every positive must match where=, or the loss compares with records that cannot win"
        )
    return Positives(request, source, check.padded(found, [len(mine) for mine in lists]))


def handle(db: object) -> SoftDB:
    """An open database. Raises BadInput for something else, Closed for a closed one."""
    if not isinstance(db, SoftDB):
        raise BadInput(f"db is {shown(db)}; expected an open softdb database")
    db.require_open()
    return db


def _lists(value: Any, queries: int) -> list[list[Id]]:
    """Ids of each query, each once."""
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, str | int) or not isinstance(value, Iterable) or isinstance(value, bytes):
        value = [value]
    entries: list[Any] = list(value)
    if len(entries) != queries:
        raise BadInput(
            f"positives are {len(entries)} for {queries} queries; give one id, or one list of ids, for each query"
        )
    flat: list[Any] = []
    ends: list[int] = []
    for i, one in enumerate(entries):
        mine = [one] if isinstance(one, str | int) else one.tolist() if isinstance(one, np.ndarray | Tensor) else one
        if not isinstance(mine, list | tuple | set | frozenset):
            mine = [mine]
        if not mine:
            raise BadInput(f"query {i} has no positives; give each query at least one id, or leave the query out")
        flat += mine
        ends.append(len(flat))
    names = check.identifiers(flat, unique=False)
    return [list(dict.fromkeys(names[low:high])) for low, high in zip([0, *ends], ends, strict=False)]


def live(positions: Rows, like: Tensor) -> Tensor:
    """Where there is a record, on the device of another tensor."""
    return torch.from_numpy(positions >= 0).to(like.device)
