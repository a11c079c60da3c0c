"""What queries return: records, hits and pooled values; one entry a query, ids and payloads read when asked.

Arrays are rectangular, padded with row -1 and score -inf; lists, `len`, iteration and `[i]` give what is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Id, integer, precise, shown
from softdb.errors import CorruptionError, StaleRead
from softdb.lazy import cached_property

__all__ = ["Estimate", "Explanation", "Hit", "Hits", "Pooled", "QueryHits", "Record", "Records", "Samples", "parsed"]

SHOWN = 3  # queries, hits or records that a repr shows

Resolve = Callable[[NDArray[np.int64]], dict[int, tuple[Id, str | None]]]


def parsed(texts: list[str | None]) -> list[Any]:
    """JSON values of payload texts, each read alone: one that is damaged must not shift the others.

    Raises CorruptionError where a text is not JSON.
    """
    try:
        return [None if text is None else _decode(text) for text in texts]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptionError(f"a stored payload is not JSON ({error}); verify() names its row") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is none of its values")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


@dataclass(frozen=True, repr=False)
class Record:
    """One stored record, copied out."""

    id: Id
    key: Tensor  # (d,)
    value: Tensor | int | None  # (v,), a class label, or None where the key serves
    payload: Any

    def __repr__(self) -> str:
        value = _shape(self.value) if isinstance(self.value, Tensor) else self.value
        return f"Record({self.id!r}, key {_shape(self.key)}, value {value}, payload {shown(self.payload)})"


@dataclass(frozen=True, repr=False)
class Records(Sequence[Record]):
    """Stored records, copied out, in the order asked for: a sequence of `Record`, and one column a field."""

    ids: list[Id]  # n
    keys: Tensor  # (n, d) in the database's dtype
    values: Tensor | None  # (n, v), (n,) int64 labels, or None where the key serves
    payload_texts: list[str | None]  # n JSON texts

    @cached_property
    def payloads(self) -> list[Any]:
        """The n payloads."""
        return parsed(self.payload_texts)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, i: int) -> Record: ...
    @overload
    def __getitem__(self, i: slice) -> Records: ...
    def __getitem__(self, i: int | slice) -> Record | Records:
        value: Any = None if self.values is None else self.values[i]
        if isinstance(i, slice):
            return Records(self.ids[i], self.keys[i], value, self.payload_texts[i])
        if isinstance(value, Tensor) and value.ndim == 0:
            value = int(value)
        return Record(self.ids[i], self.keys[i], value, self.payloads[i])

    def __repr__(self) -> str:
        values = "none" if self.values is None else _shape(self.values)
        ids = _listed(map(repr, self.ids), len(self))
        return f"<{len(self)} Records: {ids}; keys {_shape(self.keys)}, values {values}>"


class Hit(NamedTuple):
    """One record that a query found."""

    id: Id
    score: float
    row: int
    payload: Any

    def __repr__(self) -> str:
        return f"Hit(id={self.id!r}, score={self.score:.6g}, row={self.row}, payload={shown(self.payload)})"


@dataclass(frozen=True, repr=False)
class Hits(Sequence["QueryHits"]):
    """The k best records of each query, best first: q sequences of `Hit`, and arrays.

    Arrays have row -1 and score -inf at the end where there are fewer than k records; lists and `hits[i]` end there. Of
    a search with a radius, k is the most that one of the queries has; with diversity, hits stand in the order in which
    they were chosen.

        for id, score, row, payload in hits[0]: ...
    """

    rows: Tensor  # (q, k) int64 permanent row numbers, -1 = none
    scores: Tensor  # (q, k) larger is closer, with gradient to the queries
    resolve: Resolve

    def __len__(self) -> int:
        """q, the number of queries."""
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> QueryHits: ...
    @overload
    def __getitem__(self, i: slice) -> Hits: ...
    def __getitem__(self, i: int | slice) -> QueryHits | Hits:
        if isinstance(i, slice):
            return Hits(self.rows[i], self.scores[i], self.resolve)
        return QueryHits(self, range(len(self))[i])

    @property
    def live(self) -> Tensor:
        """Where there is a hit, (q, k) bool."""
        return self.rows >= 0

    @cached_property
    def _found(self) -> dict[int, tuple[Id, str | None]]:
        wanted = np.unique(self.rows[self.rows >= 0].cpu().numpy())
        found = self.resolve(wanted)
        if len(found) < len(wanted):
            raise StaleRead(
                f"{len(wanted) - len(found)} of {len(wanted)} hits are gone or replaced since the search; search again"
            )
        return found

    @cached_property
    def _payload_of(self) -> dict[int, Any]:
        return dict(zip(self._found, parsed([text for _, text in self._found.values()]), strict=True))

    @cached_property
    def ids(self) -> list[list[Id]]:
        """For each query the ids of its hits. Raises StaleRead when one was deleted or replaced since the search."""
        return [[self._found[row][0] for row in rows if row >= 0] for rows in self.rows.tolist()]

    @cached_property
    def payloads(self) -> list[list[Any]]:
        """For each query the payloads of its hits. Raises StaleRead as `ids` does."""
        return [[self._payload_of[row] for row in rows if row >= 0] for rows in self.rows.tolist()]

    def __repr__(self) -> str:
        return (
            f"<Hits of {len(self)} {'query' if len(self) == 1 else 'queries'}: {_listed(map(repr, self), len(self))}>"
        )


class QueryHits(Sequence[Hit]):
    """The hits of one query, best first; ids and payloads are read with those of the other queries, when asked."""

    def __init__(self, hits: Hits, query: int) -> None:
        self._hits = hits
        self._places = hits.live[query].nonzero()[:, 0].tolist()
        self._rows: list[int] = hits.rows[query, self._places].tolist()
        self._scores: list[float] = hits.scores[query, self._places].tolist()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, i: int) -> Hit: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hit]: ...
    def __getitem__(self, i: int | slice) -> Hit | list[Hit]:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row = self._rows[i]
        return Hit(self._hits._found[row][0], self._scores[i], row, self._hits._payload_of[row])

    def __repr__(self) -> str:
        try:
            names = self._hits.resolve(np.unique(np.array(self._rows[:SHOWN], np.int64)))
        except Exception:  # the database is closed or damaged: rows say which records these were
            names = {}
        hits = zip(self._rows, self._scores, strict=True)
        each = (f"{names[row][0]!r} {score:.4g}" if row in names else f"row {row} {score:.4g}" for row, score in hits)
        return f"[{_listed(each, len(self))}]"


def _listed(each: Iterator[str], count: int) -> str:
    """The first of some texts."""
    return ", ".join([*islice(each, SHOWN), *(["…"] if count > SHOWN else [])])


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """What carries the answer to one query: its heaviest records, heaviest first. Prints as a table."""

    ids: list[Id]
    weights: list[float]  # of all weight, not of what is listed
    payloads: list[Any]
    scores: list[float]
    mass: float  # Σ of the weights listed, from 0 to 1
    effective: float  # exp(entropy): among how many equal records the weight would be as spread out

    def __repr__(self) -> str:
        pairs = zip(self.ids, self.weights, strict=True)
        heaviest = _listed((f"{name!r} {weight:.2%}" for name, weight in pairs), len(self.ids))
        return f"<Explanation: {heaviest}; {self.mass:.2%} in {len(self.ids)} records>"

    def __str__(self) -> str:
        lines = [
            f"{weight:7.2%}  {name}  {shown(what)}"
            for name, weight, what in zip(self.ids, self.weights, self.payloads, strict=True)
        ]
        return "\n".join([*lines, f"{self.mass:7.2%}  in {len(self.ids)} records, of effectively {self.effective:.1f}"])


@dataclass(frozen=True, repr=False)
class Samples:
    """Records drawn from the soft distribution, with replacement; row -1 where a query has none to draw from."""

    hits: Hits  # the records, (q, n), in the order of drawing
    log_prob: Tensor  # (q, n) score / temperature - lse, differentiable

    def __repr__(self) -> str:
        return f"<Samples {_shape(self.log_prob)}: {self.hits!r}>"


@dataclass(frozen=True, repr=False)
class Estimate:
    """A number for each query, and how far it may be off."""

    value: Tensor  # (q,) differentiable
    bar: Tensor  # (q,) the error that `confidence` of all answers stay below; 0 where exact
    met: Tensor  # (q,) bool: whether the tolerance asked for is met
    exact: Tensor  # (q,) bool

    def __repr__(self) -> str:
        pairs = zip(self.value[:SHOWN].tolist(), self.bar[:SHOWN].tolist(), strict=True)
        return f"<Estimate: {_listed((f'{value:.6g} ± {bar:.2g}' for value, bar in pairs), len(self.value))}>"


@dataclass(frozen=True, repr=False)
class Pooled:
    """The answer of a soft query, one entry a query."""

    output: Tensor  # (q, v) weighted mean of the values, or (q, num_classes) distribution; differentiable
    lse: Tensor  # (q,) log-normaliser, the smoothed largest score / temperature; -inf for none; differentiable
    exact: Tensor  # (q,) bool: whether this is the answer over every record that takes part, proven
    missed_mass: Tensor  # (q,) estimated share of the weight of other records; 0 where exact, NaN where unknown
    n_pooled: Tensor  # (q,) int64: how many records were weighed
    hits: Hits | None  # the records that were weighed, best first; None when all took part in one stream
    weights: Tensor | None  # (q, k) of those hits, differentiable
    finder: str  # what found them: "all", "flat" (exact), "scan" (by score), "stale index" (trained keys), or an index
    explanation: Callable[[int], list[Explanation]]
    bar: Tensor  # (q,) the error ‖ô - o‖ that `confidence` of all answers stay below; 0 where exact, NaN for `k=`
    stderr: Tensor  # (q,) standard error of the output, √(E ‖ô - o‖²)
    lse_stderr: Tensor  # (q,) standard error of lse
    met: Tensor  # (q,) bool: whether the tolerance asked for is met; for `k=` as `exact`

    def explain(self, k: int = 10) -> list[Explanation]:
        """For each query the k records that carry most of its answer.

        Costs a search and one pass over the records where they were all weighed in a stream. Raises StaleRead when one
        of them was deleted since.
        """
        with precise():
            return self.explanation(integer(k, "k"))

    def __repr__(self) -> str:
        exact = f"{int(self.exact.sum())} of {len(self.exact)} exact"
        hits = "" if self.hits is None else f", hits {list(self.hits[:SHOWN])}"
        return f"<Pooled: output {_shape(self.output)}, {exact}, finder {self.finder!r}{hits}>"
