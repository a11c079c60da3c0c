"""Check the targets of losses: positives of each query, class labels, tensors; and find hard negatives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.attend import Request, Source
from softdb.check import Id, shown
from softdb.database import SoftDB, Verbs
from softdb.errors import BadInput, StaleRead
from softdb.index.contract import Rows
from softdb.nn.memory import Memory
from softdb.nn.view import View
from softdb.scoring import Score, ScoreFunction
from softdb.typing import Vectors

Records: TypeAlias = Verbs | View | Memory
"""Sources of a loss: a database, a cluster, a View or a Memory."""


class Positives(NamedTuple):
    """A request, its source, and the positions of each query's positives."""

    request: Request
    source: Source
    positions: Rows  # (q, m) positives of each query, without duplicates, -1 = none

    def scored(self, positions: Rows) -> tuple[Rows, Tensor]:  # (q, k), -1 = none -> (q, k), (q, k)
        """Score the records at `positions`; return positions, in an order that the source chooses, and their scores."""
        return self.source.scored(self.request, positions)[:2]

    def wins(self, positions: Rows) -> NDArray[np.bool_]:  # (q, k), -1 = none -> (q, k)
        """Return the mask of the positions that are positives of their query."""
        mask: NDArray[np.bool_] = (positions[:, :, None] == self.positions[:, None, :]).any(2) & (positions >= 0)
        return mask


def positives_of(
    db: Records,
    queries: Vectors,
    positives: Any,
    temperature: float | Tensor | None,
    score: Score | ScoreFunction | None,
    where: dict[str, Any] | None,
    k: int | None = None,
    tolerance: check.Tolerance | None = None,
    generator: torch.Generator | None = None,
) -> Positives:
    """Check the arguments of a loss, and look up the positives' positions, all in one catalogue query.

    Raises UnknownId for a positive that is not stored; BadInput for a query without positives, a positive outside
    `where`, or if positives and queries differ in number; StaleRead for a positive that is replaced during the call.
    """
    verbs = handle(db)
    heat = 1.0 if temperature is None else temperature
    source: Source
    if isinstance(db, Verbs):
        request, source = db.core.request(queries, heat, score, where=where, tolerance=tolerance, generator=generator)
    elif isinstance(db, View):
        request, source = db.request(queries, heat, score, k=k, where=where, tolerance=tolerance, generator=generator)
    else:
        refuse(db, {"rtol": tolerance, "score": score, "where": where})
        request, source = db.request(queries, temperature)
    lists = listed(positives, *check.leading(queries, len(request.queries)))
    names = [name for ids in lists for name in ids]
    source = source.whole()
    located = source.positions(verbs.core.located(names, required=True)) if names else np.zeros(0, np.int64)
    if (gone := located < 0).any():
        advice = "reload() the memory" if isinstance(db, Memory) else "call again"
        raise StaleRead(f"positive {shown(names[int(gone.argmax())])} was replaced during the call; {advice}")
    if where is not None:
        allowed = request.allowed
        outside = verbs.core.located(names, where) < 0 if allowed is None else ~allowed[located]
        if outside.any():
            raise BadInput(
                f"positive {shown(names[int(outside.argmax())])} ({int(outside.sum())} of {len(names)}) is outside the "
                "filter; every positive must match where=, as the loss includes only records that match"
            )
    return Positives(request, source, check.padded(located, list(map(len, lists))))


def refuse(db: Records, options: dict[str, Any]) -> None:
    """Raise BadInput if an option is set that a View or a Memory does not take."""
    names = [name for name, value in options.items() if value is not None]
    if names:
        raise BadInput(f"a {type(db).__name__} takes no {' and no '.join(names)}; leave it out, or pass its database")


def database(db: object) -> SoftDB:
    """Return `db` or, for a View or Memory, its database. Raises BadInput for anything else, such as a cluster."""
    verbs = handle(db)
    if not isinstance(verbs, SoftDB):
        raise BadInput(
            f"db is {shown(db)}; this needs every record in one place: give one database, such as a snapshot()"
        )
    return verbs


def handle(db: object) -> Verbs:
    """Return `db` or, for a View or Memory, its database. Raises BadInput if that is no database or cluster; Closed."""
    verbs = db.db if isinstance(db, View | Memory) else db
    if not isinstance(verbs, Verbs):
        raise BadInput(f"db is {shown(db)}; expected an open softdb database")
    verbs.core.require_open()
    return verbs


def listed(positives: Any, *leading: int) -> list[list[Id]]:
    """Return each query's distinct ids, given as one id or a list, nested as `leading`. Raises BadInput without ids."""
    lists = [_items(query) for query in _unnested(positives, leading)]
    for i, ids in enumerate(lists):
        if not ids:
            raise BadInput(f"query {i} has no positives; give each query at least one id, or leave the query out")
    names = iter(check.identifiers([name for ids in lists for name in ids], unique=False))
    return [list(dict.fromkeys(itertools.islice(names, len(ids)))) for ids in lists]


def _unnested(positives: Any, leading: tuple[int, ...]) -> list[Any]:
    items = _items(positives)
    if len(items) != leading[0]:
        advice = "give one id, or one list of ids, for each query" + ", nested as the queries" * (len(leading) > 1)
        raise BadInput(f"positives are {len(items)} for {leading[0]} queries; {advice}")
    return items if len(leading) == 1 else [query for item in items for query in _unnested(item, leading[1:])]


def _items(value: Any) -> list[Any]:
    """Convert an iterable to a list; put anything else, such as a single id, into a list of one item."""
    if isinstance(value, np.ndarray | Tensor):
        value = (check.dense(value, "positives") if isinstance(value, Tensor) else value).tolist()
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]


def live(positions: Rows, like: Tensor) -> Tensor:
    """Return the mask of the positions that are not -1, on the device of the tensor `like`."""
    return torch.from_numpy(positions >= 0).to(like.device)


def mined(targets: Positives, count: int, skip: int, pool: int, generator: torch.Generator | None) -> Rows:
    """Return hard negatives (q, ≤ count), -1 = none, from the `pool` nearest non-positives after the first `skip`."""
    request, source, positions = targets
    if not count:
        return np.full((len(positions), 0), -1, np.int64)
    width = skip + pool + positions.shape[1]
    nearest = without(source.find(request.top(width)).positions, positions)
    rank = (nearest >= 0).cumsum(1) - 1
    nearest[(rank < skip) | (rank >= skip + pool)] = -1
    order = torch.rand(nearest.shape, generator=generator).numpy() if pool > count else np.zeros(nearest.shape)
    first = np.argsort(np.where(nearest < 0, 2.0, order), 1, kind="stable")[:, :count]
    return np.take_along_axis(nearest, first, 1)


def without(candidates: Rows, positions: Rows) -> Rows:  # (q, k), (q, m) -> (q, k)
    """Replace by -1 each candidate that is also in the query's row of `positions`."""
    return np.where((candidates[:, :, None] == positions[:, None, :]).any(2), -1, candidates)


def class_labels(value: Any, classes: int) -> Tensor:  # (…)
    """Return the labels (…). Raises BadInput unless they are integers from 0 to classes - 1."""
    expected = f"expected (q,) whole numbers, 0 to {classes - 1}"
    try:
        labels = check.dense(value, "labels") if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BadInput(f"labels are {shown(value)}; {expected}") from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool or labels.ndim == 0:
        raise BadInput(f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; {expected}")
    labels = labels.long()
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        i = tuple(outside[0].tolist())
        query = i if len(i) > 1 else i[0]
        raise BadInput(f"label {int(labels[i])} of query {query} is out of range; expected 0 to {classes - 1}")
    return labels


def require_shape(tensor: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise BadInput unless the value is a floating tensor of exactly that shape: another shape would broadcast."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise BadInput(f"{name} are {shown(tensor)}; expected a floating tensor {shape}")
    if tuple(check.dense(tensor, name).shape) != shape:
        raise BadInput(f"{name} have shape {tuple(tensor.shape)}; expected {shape}, the answer's shape")
