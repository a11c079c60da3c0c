"""Soft queries: answers over all records, wherever these lie."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Estimate, Hits, Pooled, Records, Samples
from softdb.attend import Remote, Request, Stored, counted, estimated, exact, log_partition, nearest, sampled
from softdb.check import Id, Schema
from softdb.database.handle import Face, verb
from softdb.errors import BadInput
from softdb.reports import Stats
from softdb.scoring import Kernel, Score, ScoreFunction, Weighting
from softdb.typing import Ids, Vectors

__all__ = ["SoftVerbs"]

MOST_SAMPLED = 2**31  # records that one call of `sample` may draw


class SoftVerbs(Face):
    """What is asked of all records, and what modules need of whoever answers it: one database, or a cluster of them."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """Widths, dtype and metric, as the database was made."""

    @property
    @abstractmethod
    def keyed(self) -> int:
        """How many records have a key: all that vectors meet."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """d, the width of a key."""

    @property
    @abstractmethod
    def encoder_name(self) -> str | None:
        """The name of the encoder that made the keys; None where none is remembered."""

    @property
    @abstractmethod
    def path(self) -> Path | None:
        """Its directory; None in memory, and for several."""

    @abstractmethod
    def stats(self) -> Stats:
        """What it is, holds and occupies."""

    @abstractmethod
    def get(self, ids: Ids) -> Records:
        """The records of those ids, in that order. Raises UnknownId (a KeyError) naming one that is not stored."""

    @abstractmethod
    def search(
        self,
        queries: Vectors | None = None,
        k: int | None = None,
        *,
        where: dict[str, Any] | None = None,
        exact: bool = False,
    ) -> Hits:
        """The k nearest records of each query, best first."""

    @abstractmethod
    def as_queries(self, queries: Vectors, width: int | None = None) -> Tensor:
        """Queries (q, width) as every verb takes them: checked, encoded where they are text. Raises BadInput."""

    @abstractmethod
    def request(
        self,
        queries: Any,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        *,
        k: int | None = None,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
        need_weights: bool = False,
    ) -> tuple[Request, Stored | Remote]:
        """What a soft verb asks, checked, and the records it asks; arguments as `attend`. Raises BadInput."""

    @abstractmethod
    def located(self, ids: list[Id], where: dict[str, Any] | None = None) -> NDArray[np.int64]:
        """Rows (n,) of ids; -1 for those not stored, without a key, or that the filter does not match."""

    @abstractmethod
    def values_at(self, rows: NDArray[np.int64]) -> Tensor:  # (q, k), -1 = none
        """Values (q, k, v), or labels (q, k), of rows; zeros where there is none. Raises StaleRead for one gone."""

    @abstractmethod
    def sample_keys(self, count: int) -> Tensor:
        """Up to so many of the keys, by which one database is told from another."""

    @verb
    def attend(
        self,
        queries: Any,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        k: int | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        need_weights: bool = False,
    ) -> Pooled:
        """The soft query: the mean of the values, weighted by softmax(score / temperature) or another weighting.

            w_i = exp(s(q, k_i) / T) / Σ_j exp(s(q, k_j) / T),  output = Σ_i w_i v_i,  lse = log Σ_j exp(s(q, k_j) / T)

        Over every record that takes part (exact; cost q n (d + v), memory O(block)); or with `k=` over the k nearest:
        `exact` tells where that is proven to be the same, `missed_mass` estimates the weight of the others. Output and
        lse are differentiable in the queries and in the score's parameters.

        Args:
            queries: (q, d) numbers or a tensor with its graph, or q texts where the database has an encoder. As wide as
                the keys, unless the score compares other widths.
            temperature: towards 0 the nearest record's value, towards infinity the mean of all values.
            score: a `softdb.scores` object or a callable (q, d), (m, d) -> (q, m). None: the database's metric, by
                which its index finds. `softdb.attention` has ScaledDot instead, as torch has: score=scores.ScaledDot()
                gives that here.
            weights: "softmax", "sparsemax", "entmax15", "normalised" (a kernel's plain normalisation), "uniform"
                (average pooling), "argmax" (a lookup); None: normalised for a kernel, else softmax.
            k: truncate to the k nearest. A score that no index can find for is compared with every record.
            rtol, atol: estimate to a tolerance, from records that are drawn through the index: the error ‖ô - o‖ shall
                be at most atol + rtol max(‖o‖, 0.1 rms‖v‖). `bar` tells how large it is, `met` where that fits. Exact
                where that costs less, and where nothing can be drawn: no IVF index, one of another metric than the
                score's, a mask. BadInput for weights other than softmax, and scores without an index form.
            confidence: the share of answers whose error shall be within their `bar`.
            max_draws: pool so many records for a query at most, whether the tolerance is met or not; `bar` is inf
                where nothing can be said of what was not drawn. More may be scored to narrow the bar, unless the
                queries want a gradient.
            generator: draws anew with each call, as training wants; None: the same draw every time.
            where: a filter on the payload.
            mask: (q, n) bool, the n records with a key in row order, True = takes part; (n,) serves every query.
            need_weights: hold the weights of an exact answer: `weights` (q, n) of `hits`, every record that takes part,
                in row order. Memory q n; without it they are never held. With `k` and tolerances they always are.

        An empty set of records gives zeros and lse = -inf, with gradient zero.
        """
        tolerance = check.tolerance(rtol, atol, confidence, max_draws, k)
        count = None if k is None else check.integer(k, "k")
        request, source = self.request(
            queries, temperature, score, weights, where, mask, k=count, tolerance=tolerance, generator=generator,
            need_weights=need_weights,
        )  # fmt: skip
        if tolerance is not None:
            return estimated(request, source)
        if count is None:
            return exact(request, source)
        return nearest(request, source, source.find(request, count))

    @verb
    def log_partition(
        self,
        queries: Any,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """log Z = log Σ exp(score / temperature) over every record, estimated so that |Ẑ / Z - 1| ≤ rtol.

        What normalises a softmax; `log_density` is the same for a kernel. Z itself is estimated without bias, and so is
        its gradient. `bar` is of Ẑ / Z. Arguments as `attend`.
        """
        tolerance = _tolerance(rtol, 0.0, confidence, max_draws)
        return log_partition(
            *self.request(queries, temperature, score, where=where, tolerance=tolerance, generator=generator)
        )

    @verb
    def log_density(
        self,
        queries: Any,
        kernel: Kernel,
        *,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """Kernel density estimate log p(q) = log Σ_i K(q, k_i) - log n - log ∫K (Rosenblatt 1956; Parzen 1962).

        Differentiable in the queries and the bandwidth. -inf where no record takes part, or none within a compact
        kernel. Drawn through the index of an "l2" database for `Gaussian`, else exact; arguments as `log_partition`.

            db.log_density(queries, scores.Gaussian(0.3)).value
        """
        if not isinstance(kernel, Kernel):
            raise BadInput(f"kernel is {check.shown(kernel)}; expected one of softdb.scores, such as Gaussian(0.3)")
        tolerance = _tolerance(rtol, 0.0, confidence, max_draws)
        request, source = self.request(queries, score=kernel, where=where, tolerance=tolerance, generator=generator)
        found = log_partition(request, source)
        volume = kernel.log_volume(request.queries.shape[1])
        shift = request.taking_part(source).clamp(min=1).to(found.value).log() + volume
        return dataclasses.replace(found, value=found.value - shift.to(found.value))

    @verb
    def count_within(
        self,
        queries: Any,
        radius: float,
        *,
        rtol: float = 0.05,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """How many records are near enough, estimated: `value` (q,) float64, its `bar`, `met`, `exact`.

        A count has no gradient. Exact where that costs less, such as for few records or few that are near.

        Args:
            radius: the largest distance for "l2" (not its score, which is -distance²), else the least score.
            rtol, atol: the error shall be at most atol + rtol max(count, 1).
            confidence, max_draws, generator: as in `attend`; at most so many records are drawn.
            queries, where: as in `search`.
        """
        least = check.least_score(radius, self.schema.metric)
        tolerance = _tolerance(rtol, atol, confidence, max_draws)
        request, source = self.request(queries, where=where, tolerance=tolerance, generator=generator)
        return counted(request.detached, source, least)

    @verb
    def sample(
        self,
        queries: Any,
        n: int = 1,
        *,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        generator: torch.Generator | None = None,
    ) -> Samples:
        """n records for each query, drawn with replacement from softmax(score / temperature) over all: exactly.

        `log_prob` carries the gradient, as REINFORCE wants it: -(reward * samples.log_prob).mean(). Cost q n d: one
        pass over the records, two where the queries want a gradient. Other arguments as `attend`; without a generator
        torch's own random numbers.
        """
        request, source = self.request(queries, temperature, score, where=where, mask=mask)
        count = check.integer(n, "n", 1, MOST_SAMPLED // max(1, len(request.queries)))
        generator = check.generator(generator) or torch.default_generator
        return sampled(request, source, count, generator)


def _tolerance(rtol: object, atol: object, confidence: object, max_draws: object) -> check.Tolerance:
    """The tolerance of a verb that always estimates."""
    found = check.tolerance(rtol, atol, confidence, max_draws, None)
    if found is None:
        raise BadInput("rtol is None; expected a number above 0, such as 0.05")
    return found
