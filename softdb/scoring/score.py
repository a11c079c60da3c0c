"""Protocol of scores, their folds (queries that an index can answer), and checks of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from softdb.check import Metric, attribute
from softdb.errors import BadInput

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A callable that compares queries (q, d) with shared keys (n, d) and returns (q, n); enough for exact soft queries."""


class Fold(NamedTuple):
    """A query that an index can answer in place of a score.

    The records nearest to the folded `queries` by `metric` are the nearest records by the score to the original
    queries. If `scale` is not None, then also s(q, k) = scale · m(folded q, k) + bias, where m is the metric's own
    score (q·k, the cosine, or -‖q - k‖²).
    """

    metric: Metric
    queries: Tensor  # (…, q, d) as wide as the keys, with gradient to the score's queries and parameters
    scale: Tensor | float | None  # () or (…, q), above 0; None: the metric only gives the same order of records
    bias: Tensor | float = 0.0  # (…, q)


class Score(Protocol):
    """A score: a number for each query and key, larger for closer keys.

    Keys of any floating dtype and device are compared in the queries' dtype, on the queries' device. All queries share
    the keys, or each query has its own (one more dimension); leading dimensions are a batch. A score is differentiable
    in queries, keys and parameters, with finite gradients everywhere, and raises BadInput for widths that do not fit.
    """

    def __call__(
        self,
        queries: Tensor,  # (…, q, d)
        keys: Tensor,  # (…, n, d) shared by all queries, or (…, q, k, d) each query's own
    ) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return the scores of the keys."""

    def fold(self, queries: Tensor) -> Fold | None:  # (…, q, d)
        """Return queries that an index can answer in place of this score; None if no index can."""


def fold(score: Score | ScoreFunction, queries: Tensor) -> Fold | None:  # (…, q, d)
    """Return queries that an index can answer in place of a score; None if no index can.

    A plain callable has no fold, unless its attribute `metric` is a softdb.check.Metric: the callable must then rank
    records as that metric does, for unchanged queries.
    """
    own = attribute(score, "fold")
    if callable(own):
        folded = own(queries)
        if not isinstance(folded, Fold | None):
            raise BadInput(f"the fold of the score {score!r} is {folded!r}; return a softdb.scores.Fold or None")
        return folded
    metric = attribute(score, "metric")
    return Fold(metric, queries, None) if isinstance(metric, Metric) else None


def query_width(score: Score | ScoreFunction, key_dim: int) -> int:
    """Return the width that queries must have: the score's `query_dim` if it has one, else the keys' width."""
    return int(attribute(score, "query_dim", key_dim))


def alike(keys: Tensor, queries: Tensor) -> Tensor:  # (…, n, d) or (…, q, k, d), (…, q, d) -> as keys
    """Return the keys in the queries' dtype, on the queries' device."""
    # the device first: the stored dtype may be narrower, so fewer bytes are copied
    return keys.to(queries.device).to(queries.dtype)


def comparable(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d), (…, n, d) or (…, q, k, d) -> as keys
    """Return the keys in the queries' dtype, on the queries' device. Raises BadInput unless shapes and widths fit."""
    require_shapes(queries, keys)
    if queries.shape[-1] != keys.shape[-1]:
        raise BadInput(
            f"queries are {queries.shape[-1]} wide but the keys are {keys.shape[-1]} wide (shapes "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}); encode them alike, or use a score that takes both widths"
        )
    return alike(keys, queries)


def require_shapes(queries: Tensor, keys: Tensor) -> None:  # (…, q, d_q), (…, n, d_k) or (…, q, k, d_k)
    """Raise BadInput unless all queries share the keys or each query has its own."""
    own = keys.ndim - queries.ndim  # 1 for each query's own keys, 0 for shared keys
    fits = queries.ndim > 1 and own in (0, 1) and (not own or keys.shape[-3] in (1, queries.shape[-2]))
    leading = zip(queries.shape[:-2], keys.shape[: -2 - own], strict=True)
    if not (fits and all(a == b or 1 in (a, b) for a, b in leading)):
        raise BadInput(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; expected queries (…, q, d) with "
            "keys (…, n, d) that all of them share, or (…, q, k, d), each query's own"
        )


def require_width(tensor: Tensor, width: int, name: str) -> None:  # (…, d)
    """Raise BadInput unless a tensor has the width that the score was made for."""
    if tensor.shape[-1] != width:
        raise BadInput(
            f"{name} are {tensor.shape[-1]} wide (shape {tuple(tensor.shape)}) but this score was made for {width}; "
            "encode them as it expects, or make a score of their width"
        )
