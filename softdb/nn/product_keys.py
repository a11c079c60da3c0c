"""Product-key memory: m² trained slots, searched exactly in about the time of 2 m comparisons. Uses no database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softdb.check import holds, integer, shown
from softdb.errors import BadInput
from softdb.nn.sparse_rows import SparseRows, sums_of_rows


class ProductKeys(SparseRows):
    """A trained memory of m² keys and values, whose keys are pairs (Lample et al. 2019, arXiv 1907.05242, section 3.1).

    For each head, with q = W x + b its query, q' and q'' the halves of q, c' and c'' the head's two codebooks:

        s_ij = q'·c'_i + q''·c''_j,  I = the k best of the m² pairs,  output = Σ_heads Σ_I softmax_I(s) v_ij

    With the entries of each codebook ranked 0, 1, … from the best, the k best pairs have ranks (i + 1)(j + 1) ≤ k, so
    they are found exactly, without an index. Values are shared by the heads; their gradient is a sparse tensor of the
    rows in I, that of the codebooks dense and small. Cost of q queries and h heads: q h (m d + k v + k log k), d the
    width of a head's query; memory m² v.

    No database is involved: to train keys and values of records, see `Memory`.

        values = SparseAdam([memory.values], lr=1e-3)
        others = Adam([p for name, p in memory.named_parameters() if name != "values"], lr=1e-3)

    Args:
        dim: width of the input, and of each head's query unless `key_dim` says otherwise.
        num_keys: m, entries of each codebook; the memory has m² slots.
        value_dim: v, width of the output.
        num_heads: number of heads, each with a query of its own.
        k: slots pooled for each head.
        key_dim: d, width of a head's query and of a key; even.
        query_norm: True: pass queries through a batch norm, so that more slots are used (section 3.1 there); training
            then takes two inputs or more.
        device, dtype: of the parameters.

    Raises BadInput for sizes below 1, an odd key_dim, or k above m².

    >>> memory = ProductKeys(8, num_keys=16, value_dim=3, num_heads=2, k=4)
    >>> memory(torch.ones(5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        dim: int,
        num_keys: int,
        value_dim: int,
        num_heads: int = 4,
        k: int = 32,
        *,
        key_dim: int | None = None,
        query_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_keys = integer(dim, "dim"), integer(num_keys, "num_keys")
        self.value_dim, self.num_heads = integer(value_dim, "value_dim"), integer(num_heads, "num_heads")
        self.key_dim = integer(dim if key_dim is None else key_dim, "key_dim", 2)
        if self.key_dim % 2:
            raise BadInput(f"key_dim is {self.key_dim}; expected an even width: a key is a pair of halves")
        self.k = integer(k, "k", 1, self.num_keys**2)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = torch.nn.Linear(self.dim, self.num_heads * self.key_dim, **options)
        self.norm = torch.nn.BatchNorm1d(self.num_heads * self.key_dim, **options) if query_norm else None
        keys = torch.nn.Parameter(torch.empty(self.num_heads, 2, self.num_keys, self.key_dim // 2, **options))
        self.learnt = torch.nn.ParameterDict({"codebooks": keys})  # apart from the values, whose gradients are sparse
        self.values = torch.nn.Parameter(torch.empty(self.num_keys**2, self.value_dim, **options))
        self.reset_parameters()

    @property
    def keys(self) -> Tensor:  # (num_heads, 2, m, d / 2)
        """The codebooks."""
        keys: Tensor = self.learnt["codebooks"]
        return keys

    def reset_parameters(self) -> None:
        """Draw codebooks uniformly within ±1/√(d/2), and values normally with standard deviation 1/√v."""
        self.query.reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()
        bound = (self.key_dim // 2) ** -0.5
        torch.nn.init.uniform_(self.keys, -bound, bound)
        torch.nn.init.normal_(self.values, std=self.value_dim**-0.5)

    def extra_repr(self) -> str:
        """Return the number of slots and the widths."""
        names = ("dim", "value_dim", "num_heads", "k", "key_dim")
        return ", ".join([f"{self.num_keys**2} slots", *(f"{name}={getattr(self, name)}" for name in names)])

    __call__: Callable[..., Tensor]

    def forward(self, inputs: Tensor) -> Tensor:  # (…, dim) -> (…, value_dim)
        """Return the memory's values for each input, summed over heads. Raises BadInput for inputs that do not fit."""
        slots, scores = self.find(inputs)
        flat = (-1, self.num_heads * self.k)
        weights = scores.softmax(-1).reshape(flat).to(self.values.dtype)
        output = sums_of_rows(weights, self.values, slots.reshape(flat))
        return output.view(*inputs.shape[:-1], self.value_dim)

    def find(self, inputs: Tensor) -> tuple[Tensor, Tensor]:  # (…, dim) -> (…, heads, k), (…, heads, k)
        """Return the k best slots of each head, best first, and their scores with gradient.

        Slot i m + j is pair (i, j). The result is exact over all m² slots; ties come in any order.
        """
        queries = self._queries(inputs)  # (q, heads, 2, d / 2)
        first, second = torch.einsum("qhcd,hcmd->cqhm", queries, self.keys)
        count = min(self.k, self.num_keys)
        (first_scores, first_entries), (second_scores, second_entries) = first.topk(count), second.topk(count)
        i, j = _pairs(count, self.k, first_scores.device)
        best, pairs = (first_scores[..., i] + second_scores[..., j]).topk(self.k)  # (q, heads, k)
        slots = first_entries.gather(-1, i[pairs]) * self.num_keys + second_entries.gather(-1, j[pairs])
        shape = (*inputs.shape[:-1], self.num_heads, self.k)
        return slots.view(shape), best.view(shape)

    def _queries(self, inputs: Tensor) -> Tensor:  # (…, dim) -> (q, heads, 2, d / 2)
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 1:
            raise BadInput(f"inputs are {shown(inputs)}; expected a floating tensor (…, {self.dim})")
        if inputs.shape[-1] != self.dim:
            raise BadInput(
                f"inputs have shape {tuple(inputs.shape)} but this memory takes (…, {self.dim}); pass that width"
            )
        dtype = self.query.weight.dtype
        double = torch.float64 in (inputs.dtype, dtype)  # autocast does not convert float64
        cast = torch.is_autocast_enabled(inputs.device.type) and not double
        if inputs.dtype is not dtype and not cast:
            raise BadInput(f"inputs are {inputs.dtype} but this memory is {dtype}; convert one with .to()")
        flat = inputs.reshape(-1, self.dim)
        queries: Tensor = self.query(flat)
        if self.norm is not None:
            if self.training and len(flat) < 2:
                raise BadInput(
                    f"a batch norm in training got {len(flat)} inputs; give two or more, call eval(), or make the "
                    "memory with query_norm=False"
                )
            queries = self.norm(queries)
        if not holds(queries.detach().isfinite().all()):
            raise BadInput("queries hold NaN or infinity; repair the inputs, or begin training anew with smaller steps")
        return queries.view(len(flat), self.num_heads, 2, self.key_dim // 2)


def _pairs(
    count: int,  # number of best entries of each codebook, best first
    k: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # (p,), (p,)
    """Return the pairs (i, j) with (i + 1)(j + 1) ≤ k: any other pair has k pairs at least as good as itself."""
    pairs = [(i, j) for i in range(min(count, k)) for j in range(min(count, k // (i + 1)))]
    i, j = torch.tensor(pairs, device=device).unbind(1)
    return i, j
