"""Answers of soft queries, one entry a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from torch import Tensor

from softdb.answers.brief import LINES, SHOWN, json_cell, listed, numbers, part_of, shape, table
from softdb.answers.records import Hits
from softdb.check import Id, integer, precise, shown
from softdb.lazy import cached_property
from softdb.visible import visible

__all__ = ["Estimate", "Explanation", "Pooled", "Samples"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """Explanation of the answer to one query: its heaviest records, heaviest first. Prints as a table."""

    ids: list[Id]
    weights: list[float]  # of all weight, not of what is listed
    payloads: list[Any]
    scores: list[float]
    mass: float  # Σ of the weights listed, from 0 to 1
    effective: float  # exp(entropy): among how many equal records the weight would be as spread out

    def __repr__(self) -> str:
        pairs = zip(self.ids, self.weights, strict=True)
        heaviest = listed((f"{name!r} {weight:.2%}" for name, weight in pairs), len(self.ids))
        return f"<Explanation: {heaviest}; {self.mass:.2%} in {len(self.ids)} records>"

    def __str__(self) -> str:
        lines = [
            f"{weight:7.2%}  {visible(str(name))}  {shown(what)}"
            for name, weight, what in zip(self.ids, self.weights, self.payloads, strict=True)
        ]
        return "\n".join([*lines, f"{self.mass:7.2%}  in {len(self.ids)} records, of effectively {self.effective:.1f}"])

    def _repr_html_(self) -> str:
        columns = zip(self.ids, self.weights, self.scores, self.payloads, strict=True)
        lines = [
            [f"{weight:.2%}", repr(name), f"{score:.4g}", json_cell(payload)]
            for name, weight, score, payload in islice(columns, LINES)
        ]
        records = part_of(len(lines), len(self.ids))
        caption = f"records {records}, {self.mass:.2%} of the weight, spread as over {self.effective:.1f}"
        return table(["weight", "id", "score", "payload"], lines, caption)


@dataclass(frozen=True, repr=False)
class Samples:
    """Records drawn from the soft distribution, with replacement; row -1 where a query has none to draw from."""

    hits: Hits  # the records, (q, n), in the order of drawing
    scanned: Tensor  # (q,) bool: whether all records were looked at to draw
    log_probs: Callable[[], Tensor]

    @cached_property
    def log_prob(self) -> Tensor:  # (q, n)
        """score / temperature - lse of each, -inf for none; differentiable.

        Cost where nothing was scanned: one pass over all records, for lse, when it is first read.
        """
        return self.log_probs()

    def __repr__(self) -> str:
        return f"<Samples {shape(self.hits.scores)}: {self.hits!r}>"


@dataclass(frozen=True, repr=False)
class Estimate:
    """A number for each query, and how far it may be off."""

    value: Tensor  # (q,) differentiable
    bar: Tensor  # (q,) the error that `confidence` of all answers stay below; 0 where exact
    met: Tensor  # (q,) bool: whether the tolerance asked for is met
    exact: Tensor  # (q,) bool
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer

    def __repr__(self) -> str:
        pairs = zip(self.value[:SHOWN].tolist(), self.bar[:SHOWN].tolist(), strict=True)
        return f"<Estimate: {listed((f'{value:.6g} ± {bar:.2g}' for value, bar in pairs), len(self.value))}>"


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
    # what found them: "all", "flat" (exact), "scan" (by score), "stale index" (trained keys), "sketch" (drawn beside
    # another index, or none), or an index; then " on …" or " streamed to …", the device whose columns were read, where
    # it is not the host
    finder: str
    explanation: Callable[[int], list[Explanation]]
    bar: Tensor  # (q,) the error ‖ô - o‖ that `confidence` of all answers stay below; 0 where exact, NaN for `k=`
    stderr: Tensor  # (q,) standard error of the output, √(E ‖ô - o‖²)
    lse_stderr: Tensor  # (q,) standard error of lse
    met: Tensor  # (q,) bool: whether the tolerance asked for is met; for `k=` as `exact`
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer: then met is False and bar infinite

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
        return f"<Pooled: output {shape(self.output)}, {exact}, finder {self.finder!r}{hits}>"

    def _repr_html_(self) -> str:
        lines, heaviest = [], [] if self.hits is None else [repr(mine) for mine in self.hits[:LINES]]
        for i, (output, lse, found) in enumerate(zip_longest(self.output[:LINES], self.lse[:LINES], heaviest)):
            bar, missed = float(self.bar[i]), float(self.missed_mass[i])
            off = "exact" if self.exact[i] else f"{missed:.2%} missed" if bar != bar else f"± {bar:.2g}"
            lines.append([str(i), numbers(output), f"{float(lse):.4g}", off, f"{int(self.n_pooled[i]):,}", found or ""])
        caption = f"queries {part_of(len(lines), len(self.lse))}, output {shape(self.output)}, finder {self.finder!r}"
        return table(["query", "output", "lse", "error", "records", "hits"], lines, caption)
