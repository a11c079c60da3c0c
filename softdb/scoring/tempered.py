"""A score divided by a temperature for each query, which the queries carry as a further coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.check import Metric, attribute
from softdb.scoring.score import Fold, Score, ScoreFunction, fold


class Tempered(torch.nn.Module):
    """The score s(q, k) / T of queries (q, 1 / T), d + 1 wide.

    Code that slices, streams or differentiates queries does so with the temperatures, too.
    """

    def __init__(self, score: Score | ScoreFunction) -> None:
        super().__init__()
        self.score = score

    @property
    def metric(self) -> Metric | None:
        """Metric of s, if it has one."""
        metric: Metric | None = attribute(self.score, "metric")
        return metric

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d + 1) -> (…, q, n) or (…, q, k)
        """Return s(q, k) / T."""
        return divided(self.score(queries[..., :-1], keys), queries)

    def fold(self, queries: Tensor) -> Fold | None:  # (…, q, d + 1)
        """Return the fold of s with a scale and a bias for each query; the order of records is that of s."""
        folded, inverse = fold(self.score, queries[..., :-1]), queries[..., -1]
        if folded is None or folded.scale is None:
            return folded
        return folded._replace(scale=folded.scale * inverse, bias=folded.bias * inverse)


def with_temperature(queries: Tensor, temperature: Tensor) -> Tensor:  # (…, q, d), (…, q) -> (…, q, d + 1)
    """Return queries for `Tempered`."""
    return torch.cat([queries, temperature.to(queries).reciprocal().unsqueeze(-1)], dim=-1)


def divided(scores: Tensor, queries: Tensor) -> Tensor:  # (…, q, n), (…, q, d + 1) -> (…, q, n)
    """Return s / T. A score of -inf stays, and sends no gradient, as 0 · inf would be NaN."""
    nothing = scores == -torch.inf
    return (scores.masked_fill(nothing, 0) * queries[..., -1:]).masked_fill(nothing, -torch.inf)
