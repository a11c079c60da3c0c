"""What queries return: records, hits and pooled values; one entry a query, ids and payloads resolved when asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Id, integer, precise, shown
from softdb.errors import CorruptionError, StaleRead
from softdb.lazy import cached_property

__all__ = ["Estimate", "Explanation", "Hits", "Pooled", "Record", "Records", "Samples", "parsed"]

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


@dataclass(frozen=True)
class Record:
    """One stored record, copied out."""

    id: Id
    key: Tensor  # (d,)
    value: Tensor | int | None  # (v,), a class label, or None where the key serves
    payload: Any


@dataclass(frozen=True)
class Records:
    """Stored records, copied out: one column a field, in the order asked for."""

    ids: list[Id]  # n
    keys: Tensor  # (n, d) in the database's dtype
    values: Tensor | None  # (n, v), (n,) int64 labels, or None where the key serves
    payload_texts: list[str | None] = field(repr=False)  # n JSON texts

    @cached_property
    def payloads(self) -> list[Any]:
        """The n payloads."""
        return parsed(self.payload_texts)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Record:
        value: Tensor | int | None = None if self.values is None else self.values[i]
        if isinstance(value, Tensor) and value.ndim == 0:
            value = int(value)
        return Record(self.ids[i], self.keys[i], value, self.payloads[i])


@dataclass(frozen=True)
class Hits:
    """The k best records of each query, best first; where there are fewer, row -1, score -inf, id and payload None.

    Of a search with a radius, k is the most that one of the queries has; with diversity, they stand in the order in
    which they were chosen.
    """

    rows: Tensor  # (q, k) int64 permanent row numbers, -1 = none
    scores: Tensor  # (q, k) larger is closer, with gradient to the queries
    resolve: Resolve = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

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
    def ids(self) -> list[list[Id | None]]:
        """Ids of the hits, (q, k). Raises StaleRead when one was deleted or replaced since the search."""
        found = self._found
        return [[found[row][0] if row >= 0 else None for row in rows] for rows in self.rows.tolist()]

    @cached_property
    def payloads(self) -> list[list[Any]]:
        """Payloads of the hits, (q, k). Raises StaleRead as `ids` does."""
        values = dict(zip(self._found, parsed([text for _, text in self._found.values()]), strict=True))
        return [[values[row] if row >= 0 else None for row in rows] for rows in self.rows.tolist()]


@dataclass(frozen=True)
class Explanation:
    """What carries the answer to one query: its heaviest records, heaviest first. Prints as a table."""

    ids: list[Id]
    weights: list[float]  # of all weight, not of what is listed
    payloads: list[Any]
    scores: list[float]
    mass: float  # Σ of the weights listed, from 0 to 1
    effective: float  # exp(entropy): among how many equal records the weight would be as spread out

    def __str__(self) -> str:
        lines = [
            f"{weight:7.2%}  {name}  {shown(what)}"
            for name, weight, what in zip(self.ids, self.weights, self.payloads, strict=True)
        ]
        return "\n".join([*lines, f"{self.mass:7.2%}  in {len(self.ids)} records, of effectively {self.effective:.1f}"])


@dataclass(frozen=True)
class Samples:
    """Records drawn from the soft distribution, with replacement; row -1 where a query has none to draw from."""

    hits: Hits  # the records, (q, n), in the order of drawing
    log_prob: Tensor  # (q, n) score / temperature - lse, differentiable


@dataclass(frozen=True)
class Estimate:
    """A number for each query, and how far it may be off."""

    value: Tensor  # (q,) differentiable
    bar: Tensor  # (q,) the error that `confidence` of all answers stay below; 0 where exact
    met: Tensor  # (q,) bool: whether the tolerance asked for is met
    exact: Tensor  # (q,) bool


@dataclass(frozen=True)
class Pooled:
    """The answer of a soft query, one entry a query."""

    output: Tensor  # (q, v) weighted mean of the values, or (q, num_classes) distribution; differentiable
    lse: Tensor  # (q,) log-normaliser, the smoothed largest score / temperature; -inf for none; differentiable
    exact: Tensor  # (q,) bool: whether this is the answer over every record that takes part, proven
    missed_mass: Tensor  # (q,) estimated share of the weight of other records; 0 where exact, NaN where unknown
    candidates: Tensor  # (q,) int64: how many records were weighed
    hits: Hits | None  # the records that were weighed, best first; None when all took part in one stream
    weights: Tensor | None  # (q, k) of those hits, differentiable
    finder: str  # what found the candidates: "all", "flat" (exact), "scan" (by score), "shadow" (a view's), or an index
    explanation: Callable[[int], list[Explanation]] = field(repr=False)
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
