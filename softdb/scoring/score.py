"""Protocol of scores, their folding into a form that an index can find, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from softdb.check import Metric, attribute
from softdb.errors import BadInput

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Anything that compares queries (q, d) with shared keys (n, d) and returns (q, n); enough for an exact soft query."""


class Fold(NamedTuple):
    """A score as an index must see it.

    The records nearest to `queries` by `metric` are the score's nearest records to the queries it was made of. Where
    `scale` is not None, more is true: s(q, k) = scale · m(folded q, k) + bias with scale > 0, and m the metric's own
    score (q·k, the cosine, or -‖q - k‖²).
    """

    metric: Metric
    queries: Tensor  # (…, q, d) as wide as the keys, with gradient to the score's queries and parameters
    scale: Tensor | float | None  # above 0; None: the order is the same and nothing more is promised
    bias: Tensor | float = 0.0  # (…, q)


class Score(Protocol):
    """A score: how close keys are to queries.

    Keys come in any floating dtype, on any device, and are compared in the queries' dtype, on the queries' device.
    They are shared by all queries, or each query has its own (one dimension more); leading dimensions are a batch.
    Differentiable in queries, keys and parameters, with finite gradients everywhere. Raises BadInput for widths that
    do not fit.
    """

    def __call__(
        self,
        queries: Tensor,  # (…, q, d)
        keys: Tensor,  # (…, n, d) shared by all queries, or (…, q, k, d) each query's own
    ) -> Tensor:  # (…, q, n) or (…, q, k)
        """Scores of keys; larger is closer."""

    def fold(self, queries: Tensor) -> Fold | None:  # (…, q, d)
        """Return the form in which an index must see this score; None where no index can find its nearest records."""


def fold(score: Score | ScoreFunction, queries: Tensor) -> Fold | None:  # (…, q, d)
    """Return the form in which an index must see a score; None where no index can find its nearest records.

    A plain callable has no fold, unless it carries an attribute `metric`, a softdb.check.Metric: that says that it
    ranks records as the metric does, for the queries as they are.
    """
    own = attribute(score, "fold")
    if callable(own):
        folded = own(queries)
        if not isinstance(folded, Fold | None):
            raise BadInput(f"the fold of the score {score!r} is {folded!r}; return a softdb.scores.Fold or None")
        return folded
    metric = attribute(score, "metric")
    return Fold(metric, queries, None) if isinstance(metric, Metric) else None


def metric_of(score: Score | ScoreFunction) -> Metric:
    """The metric that ranks records as a score does, for the queries as they are.

    Raises BadInput for a score that names none: a plain callable, one that moves the queries first (`fold` tells
    where to), or one with a bandwidth for each coordinate.
    """
    metric = attribute(score, "metric")
    if not isinstance(metric, Metric):
        raise BadInput(
            f"the score {score!r} names no metric, so no index can find its nearest records; give it an attribute "
            "`metric`, a softdb.check.Metric that ranks records as it does"
        )
    return metric


def query_width(score: Score | ScoreFunction, key_dim: int) -> int:
    """Width that queries must have: a score's own `query_dim`, where it has one, else as wide as the keys."""
    return int(attribute(score, "query_dim", key_dim))


def alike(keys: Tensor, queries: Tensor) -> Tensor:  # (…, n, d) or (…, q, k, d), (…, q, d) -> as keys
    """Keys in the queries' dtype, on their device."""
    # two steps: the narrow column is what travels between devices
    return keys.to(queries.device).to(queries.dtype)


def comparable(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) or (…, q, k, d) -> as keys
    """Keys as `alike` makes them. Raises BadInput where they are not as wide as the queries or do not meet them."""
    meet(queries, keys)
    if queries.shape[-1] != keys.shape[-1]:
        raise BadInput(
            f"queries are {queries.shape[-1]} wide but the keys are {keys.shape[-1]} wide (shapes "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}); encode them alike, or use a score that takes both widths"
        )
    return alike(keys, queries)


def meet(queries: Tensor, keys: Tensor) -> None:  # (…, q, d_q), (…, n, d_k) or (…, q, k, d_k)
    """Raises BadInput where keys are neither shared by all queries nor each query's own."""
    more = keys.ndim - queries.ndim
    fits = queries.ndim > 1 and more in (0, 1) and (not more or keys.shape[-3] in (1, queries.shape[-2]))
    leading = zip(queries.shape[:-2], keys.shape[: -2 - more], strict=True)
    if not (fits and all(a == b or 1 in (a, b) for a, b in leading)):
        raise BadInput(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; expected queries (…, q, d) with "
            "keys (…, n, d) that all of them share, or (…, q, k, d), each query's own"
        )


def wide(tensor: Tensor, width: int, name: str) -> None:  # (…, d)
    """Raises BadInput where a tensor is not as wide as the score was made for."""
    if tensor.shape[-1] != width:
        raise BadInput(
            f"{name} are {tensor.shape[-1]} wide (shape {tuple(tensor.shape)}) but this score was made for {width}; "
            "encode them as it expects, or make a score of their width"
        )
