"""Answers of soft queries: pooled values, explanations, samples, estimates. For queries (…, d) read (…) for (q,)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor

from softdb.answers.brief import LINES, SHOWN, json_cell, listed, numbers, part_of, shape
from softdb.answers.records import Hits
from softdb.answers.shaped import nested, reshaped
from softdb.check import Id, integer, precise, shown
from softdb.lazy import cached_property
from softdb.misnomers import OwnNames
from softdb.visible import table, visible

__all__ = ["Estimate", "Explanation", "Pooled", "Samples"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The records with the largest weights in the answer to one query, heaviest first. Prints as a table."""

    ids: list[Id]
    weights: list[float]  # the weights of all records sum to 1, those in this list to `mass`
    payloads: list[Any]
    scores: list[float]
    mass: float  # Σ weights, from 0 to 1
    effective: float  # exp(entropy of the weights of all records), or its estimate: the effective number of records

    def __repr__(self) -> str:
        pairs = zip(self.ids, self.weights, strict=True)
        heaviest = listed((f"{name!r} {weight:.2%}" for name, weight in pairs), len(self.ids))
        return f"<Explanation: {heaviest}; {self.mass:.2%} in {len(self.ids)} records>"

    def __str__(self) -> str:
        lines = [
            f"{weight:7.2%}  {visible(str(name))}  {shown(payload)}"
            for name, weight, payload in zip(self.ids, self.weights, self.payloads, strict=True)
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
    """Records drawn with replacement, each with probability equal to its weight; row -1 if no record takes part."""

    hits: Hits  # (q, n) records in the order of drawing
    scanned: Tensor  # (q,) bool: True if drawing for this query needed a pass over all records
    log_probs: Callable[[], Tensor]

    @cached_property
    def log_prob(self) -> Tensor:  # (q, n)
        """Log-probabilities of the draws, score / temperature - lse; -inf where the row is -1. Differentiable.

        For queries that were not scanned, the first access costs a pass over all records to compute lse.
        """
        return self.log_probs().reshape(self.hits.rows.shape)

    def __repr__(self) -> str:
        return f"<Samples {shape(self.hits.scores)}: {self.hits!r}>"


@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimated number for each query, with its error bar."""

    value: Tensor  # (q,) differentiable
    bar: Tensor  # (q,) the error stays below it in a share `confidence` of all answers; 0 where exact
    met: Tensor  # (q,) bool: True if the requested tolerance is met
    exact: Tensor  # (q,) bool
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer

    def __repr__(self) -> str:
        pairs = zip(*(column.flatten()[:SHOWN].tolist() for column in (self.value, self.bar)), strict=True)
        return f"<Estimate: {listed((f'{value:.6g} ± {bar:.2g}' for value, bar in pairs), self.value.numel())}>"


@dataclass(frozen=True, repr=False)
class Pooled(OwnNames):
    """The answer of a soft query, with one entry for each query."""

    output: Tensor  # (q, v) weighted mean of the values, or (q, num_classes) distribution; differentiable
    lse: Tensor  # (q,) log-normaliser: log Σ exp(score / temperature) for softmax; -inf without records; differentiable
    exact: Tensor  # (q,) bool: True if this is provably the answer over every record that takes part
    missed_mass: Tensor  # (q,) estimated share of the weight that was not pooled; 0 where exact, NaN where unknown
    n_pooled: Tensor  # (q,) int64: number of records pooled
    hits: Hits | None  # the pooled records, best first; None if all records were streamed
    weights: Tensor | None  # (q, k) weights of `hits`, differentiable
    # how the records were found: "all", "flat" (exact search), "scan" (every record scored), "stale index" (for trained
    # keys), "sketch" (drawn by a sketch's codes), or the name of an index; then, unless the host read the columns,
    # " on …" or " streamed to …" with the device that read them
    finder: str
    explanation: Callable[[int], list[Explanation]]
    bar: Tensor  # (q,) the error ‖ô - o‖ stays below it in a share `confidence` of answers; 0 if exact, NaN for `k=`
    stderr: Tensor  # (q,) standard error √(E ‖ô - o‖²) of the output ô, where o is the exact output
    lse_stderr: Tensor  # (q,) standard error of lse
    met: Tensor  # (q,) bool: True if the requested tolerance is met; for `k=` equal to `exact`
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer: then met is False and bar infinite

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(Tensor, name):
                raise AttributeError(f"'Pooled' object has no attribute {name!r}; its tensor has it: .output.{name}")
            return super().__getattr__(name)

    def explain(self, k: int = 10) -> list[Explanation]:
        """Return for each query the k records with the largest weights, in nested lists for queries (…, d).

        If all records were streamed, this costs a search and another pass over the records. Raises StaleRead if one of
        the k records was deleted since.
        """
        with precise():
            return nested(self.explanation(integer(k, "k")), self.lse.shape)

    def __repr__(self) -> str:
        exact = f"{int(self.exact.sum())} of {self.exact.numel()} exact"
        hits = "" if self.hits is None else f", hits {list(self.hits.flat[:SHOWN])}"
        return f"<Pooled: output {shape(self.output)}, {exact}, finder {self.finder!r}{hits}>"

    def _repr_html_(self) -> str:
        flat = reshaped(self, (self.lse.numel(),), self.lse.ndim)
        hits, lines = [] if flat.hits is None else map(repr, flat.hits[:LINES]), []
        for i, (output, lse, best) in enumerate(zip_longest(flat.output[:LINES], flat.lse[:LINES].tolist(), hits)):
            bar, missed = float(flat.bar[i]), float(flat.missed_mass[i])
            error = "exact" if flat.exact[i] else f"{missed:.2%} missed" if bar != bar else f"± {bar:.2g}"
            lines.append([str(i), numbers(output), f"{lse:.4g}", error, f"{flat.n_pooled[i]:,}", best or ""])
        caption = f"queries {part_of(len(lines), len(flat.lse))}, output {shape(self.output)}, finder {self.finder!r}"
        return table(["query", "output", "lse", "error", "records", "hits"], lines, caption)
