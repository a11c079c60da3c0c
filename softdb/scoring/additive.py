"""Additive scores of a query and a key: by a small neural network, and by a linear function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from softdb.check import Metric, integer
from softdb.errors import BadInput
from softdb.scoring.score import Fold, alike, require_shapes, require_width

BLOCK = 1 << 22  # largest number of values of the hidden layer in memory at once: 16 MB in float32


class Additive(torch.nn.Module):
    """The additive score s = wᵀ tanh(W_q q + W_k k) (Bahdanau et al. 2015, appendix A.1.2). Cost q n hidden.

    Queries and keys may differ in width. The hidden layer is computed for a block of keys at a time, and again in
    backward (Chen et al. 2016), so memory beyond the answer does not grow with n. No index can find the nearest
    records by this score: softdb compares every record.

    `weights` are initial W_q (hidden, query_dim), W_k (hidden, key_dim) and w (hidden,), given in place of the widths
    and copied. Raises BadInput without widths and weights, and for shapes that do not fit.

    >>> score = Additive(query_dim=2, key_dim=3, hidden=8)
    >>> score(torch.ones(4, 2), torch.ones(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(
        self,
        query_dim: int | None = None,
        key_dim: int | None = None,
        hidden: int | None = None,
        *,
        weights: Sequence[Tensor] | None = None,  # (hidden, query_dim), (hidden, key_dim), (hidden,)
    ) -> None:
        super().__init__()
        if weights is None:
            if query_dim is None or key_dim is None or hidden is None:
                raise BadInput(
                    "the additive score has no weights; give query_dim=, key_dim= and hidden= for new ones, or "
                    "weights=(W_q (hidden, query_dim), W_k (hidden, key_dim), w (hidden,))"
                )
            units, q, k = integer(hidden, "hidden"), integer(query_dim, "query_dim"), integer(key_dim, "key_dim")
            weights = torch.empty(units, q), torch.empty(units, k), torch.empty(units)
            for matrix in weights[:2]:
                torch.nn.init.xavier_uniform_(matrix, gain=5 / 3)  # the gain of tanh
            torch.nn.init.uniform_(weights[2], -(units**-0.5), units**-0.5)
        else:
            _refuse_widths(query_dim, key_dim, hidden)
        query_weight, key_weight, weight = _copies(weights, (2, 2, 1), "W_q (hidden, query_dim), W_k (hidden, key_dim)")
        if not len(query_weight) == len(key_weight) == len(weight):
            raise BadInput(
                f"the additive score's weights have shapes {tuple(query_weight.shape)}, {tuple(key_weight.shape)} and "
                f"{tuple(weight.shape)}; expected (hidden, query_dim), (hidden, key_dim) and (hidden,)"
            )
        self.query_weight, self.key_weight, self.weight = query_weight, key_weight, weight

    @property
    def query_dim(self) -> int:
        """Width of queries."""
        return self.query_weight.shape[1]

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = wᵀ tanh(W_q q + W_k k)."""
        require_shapes(queries, keys)
        require_width(queries, self.query_weight.shape[1], "queries")
        require_width(keys, self.key_weight.shape[1], "keys")
        own = keys.ndim > queries.ndim
        projected = (queries @ self.query_weight.to(queries).mT).unsqueeze(-2)  # (…, q, 1, hidden)
        inner, outer = self.key_weight.to(queries), self.weight.to(queries)
        batch = max(queries.shape[:-2].numel(), keys.shape[: -3 if own else -2].numel())
        rows = max(1, BLOCK // max(1, batch * queries.shape[-2] * len(outer)))
        blocks = torch.split(keys, rows, dim=-2)
        if len(blocks) > 1 and torch.is_grad_enabled():
            # without checkpoints autograd would keep the hidden layer of every block
            scores = [
                checkpoint(_scores, projected, block, inner, outer, own, use_reentrant=False, preserve_rng_state=False)
                for block in blocks
            ]
        else:
            scores = [_scores(projected, block, inner, outer, own) for block in blocks]
        return torch.cat(scores, dim=-1)

    def fold(self, queries: Tensor) -> None:
        """Return None: no metric ranks records as this score does."""
        return None

    def extra_repr(self) -> str:
        """Return the widths, for `repr`."""
        (hidden, query_dim), key_dim = self.query_weight.shape, self.key_weight.shape[1]
        return f"{query_dim}, {key_dim}, hidden={hidden}"


class LinearAdditive(torch.nn.Module):
    """The linear additive score s = w_q·q + w_k·k. Cost (q + n) d, and q n to write the scores.

    The query's term w_q·q is the same for all records, so it cancels in the softmax: the weights do not depend on the
    query, which only shifts the log-normaliser. Weights that are normalised as s / Σ s do depend on the query.

    An index can find the nearest records: they have the largest dot product w_k·k. `weights` are initial
    w_q (query_dim,) and w_k (key_dim,), given in place of the widths and copied. Raises BadInput without both.

    >>> score = LinearAdditive(query_dim=2, key_dim=3)
    >>> score(torch.ones(4, 2), torch.ones(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(
        self,
        query_dim: int | None = None,
        key_dim: int | None = None,
        *,
        weights: Sequence[Tensor] | None = None,  # (query_dim,), (key_dim,)
    ) -> None:
        super().__init__()
        if weights is None:
            if query_dim is None or key_dim is None:
                raise BadInput(
                    "the linear additive score has no weights; give query_dim= and key_dim= for new ones, or "
                    "weights=(w_q (query_dim,), w_k (key_dim,))"
                )
            weights = [torch.empty(integer(query_dim, "query_dim")), torch.empty(integer(key_dim, "key_dim"))]
            for vector in weights:
                torch.nn.init.uniform_(vector, -(len(vector) ** -0.5), len(vector) ** -0.5)
        else:
            _refuse_widths(query_dim, key_dim)
        self.query_weight, self.key_weight = _copies(weights, (1, 1), "w_q (query_dim,), w_k (key_dim,)")

    @property
    def query_dim(self) -> int:
        """Width of queries."""
        return len(self.query_weight)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, n) or (…, q, k)
        """Return s = w_q·q + w_k·k."""
        require_shapes(queries, keys)
        require_width(keys, len(self.key_weight), "keys")
        key_terms = alike(keys, queries) @ self.key_weight.to(queries)  # (…, n) or (…, q, k)
        if keys.ndim == queries.ndim:
            key_terms = key_terms.unsqueeze(-2)
        return self._query_terms(queries).unsqueeze(-1) + key_terms

    def fold(self, queries: Tensor) -> Fold:
        """Return the `Fold` for an index: every query becomes w_k, compared by dot product, with the bias w_q·q."""
        folded = self.key_weight.to(queries).expand(*queries.shape[:-1], len(self.key_weight))
        return Fold(Metric.DOT, folded, 1.0, self._query_terms(queries))

    def extra_repr(self) -> str:
        """Return the widths, for `repr`."""
        return f"{len(self.query_weight)}, {len(self.key_weight)}"

    def _query_terms(self, queries: Tensor) -> Tensor:  # (…, q, query_dim) -> (…, q)
        require_width(queries, len(self.query_weight), "queries")
        return queries @ self.query_weight.to(queries)


def _scores(
    projected: Tensor,  # (…, q, 1, hidden): W_q q
    keys: Tensor,  # (…, m, key_dim) or (…, q, m, key_dim)
    inner: Tensor,  # (hidden, key_dim)
    outer: Tensor,  # (hidden,)
    own: bool,  # each query has its own keys
) -> Tensor:  # (…, q, m)
    projected_keys = alike(keys, projected) @ inner.mT  # (…, m, hidden) or (…, q, m, hidden)
    return (projected + (projected_keys if own else projected_keys.unsqueeze(-3))).tanh() @ outer


def _refuse_widths(*widths: int | None) -> None:
    if any(width is not None for width in widths):
        raise BadInput("an additive score got both widths and weights=; give only weights=, which have the widths")


def _copies(weights: Sequence[Tensor], ndims: Sequence[int], names: str) -> list[torch.nn.Parameter]:
    """Return copies of the weights as parameters. Raises BadInput if their number or dimensions are wrong."""
    shapes = [tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__ for weight in weights]
    if [len(shape) if isinstance(shape, tuple) else -1 for shape in shapes] != list(ndims):
        raise BadInput(f"the additive score's weights are {shapes}; expected {len(ndims)} tensors: {names}")
    return [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
