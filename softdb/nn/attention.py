"""Multi-head attention whose keys and values are the records of a database, or plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from softdb import check
from softdb.answers import Pooled
from softdb.check import Metric, shown
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.functional import attention
from softdb.nn.handle import SharedHandle
from softdb.nn.inputs import Masks, batch_of, masks_of, records_blocked, widths_of
from softdb.pool import State, merge, pool
from softdb.scoring import Dot, Fold, softmax


class Attention(torch.nn.MultiheadAttention):
    """Multi-head attention over the records of a database; parameters and state_dict of torch.nn.MultiheadAttention.

    For each head, with x a query, (k_i, v_i) the records, d = embed_dim / num_heads and T the temperature:

        q = W_q x + b_q,  s_i = q·(W_k k_i + b_k) / √d,  head = Σ_i softmax(s / T)_i (W_v v_i + b_v)

    and the output is W_o [head_1 … head_h] + b_o (Vaswani et al. 2017, section 3.2.2). Only queries and outputs are
    projected: s_i is (W_kᵀ q / √d)·k_i plus a term that all records share, and the head is W_v Σ_i w_i v_i + b_v. So
    one request over the stored keys answers all heads, and training the projections never invalidates an index.
    Outputs and gradients are those of torch.nn.MultiheadAttention with the records as keys and values. Cost:
    q h n (d_k + d_v) for q queries and h heads; with `k=`, h searches for each query.

    The records get no gradient. The handle is not in the state_dict, and copies of the module share it.

    Args:
        db: the database; None: keys and values come with each call, as with torch's module.
        embed_dim: E, width of queries and output.
        num_heads: number of heads; divides embed_dim.
        dropout: share of the weights dropped in training; with a database it needs `k=`.
        bias: True: the four projections have biases.
        add_bias_kv: add a learnt key and value to each head.
        add_zero_attn: add a key and value of zeros to each head.
        kdim: width of keys; default: the database's `dim`, which it must equal.
        vdim: width of values; default, and with a database the only valid width: its `value_dim`, or `num_classes`
            (labels count as one-hot vectors), or `dim` if the database has no values, so that keys serve as values.
        batch_first: True: batches are (N, L, E); False: (L, N, E).
        device, dtype: of the parameters.

    Raises BadInput for widths that do not fit the database or each other.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, value_dim=2)
    >>> ids = db.insert([1, 2], [[1, 0, 0], [0, 1, 0]], [[1, 0], [0, 1]])
    >>> output, _ = Attention(db, embed_dim=8, num_heads=2, batch_first=True)(torch.ones(5, 4, 8))
    >>> output.shape
    torch.Size([5, 4, 8])
    """

    def __init__(
        self,
        db: Verbs | None,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        embed_dim, num_heads = check.integer(embed_dim, "embed_dim"), check.integer(num_heads, "num_heads")
        if embed_dim % num_heads:
            raise BadInput(f"embed_dim is {embed_dim} and num_heads {num_heads}; choose num_heads dividing embed_dim")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise BadInput(f"dropout is {shown(dropout)}; expected a share of the weights, from 0 to 1")
        widths = widths_of(db, kdim, vdim)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, *widths, batch_first, device, dtype
        )
        self._handle = None if db is None else SharedHandle(db)

    @property
    def db(self) -> Verbs | None:
        """Database that the module attends to; None if keys and values come with each call."""
        return None if self._handle is None else self._handle.db

    def extra_repr(self) -> str:
        """Return the database and the widths."""
        return f"{self.db!r}, embed_dim={self.embed_dim}, num_heads={self.num_heads}"

    def fold(self, query: Tensor) -> Fold:  # query (L, N, E), or (N, L, E) if batch_first, or (L, E)
        """Return the queries that `forward` sends to the database: (N·L·num_heads, kdim), for the dot product.

        `db.attend(attention.fold(query).queries, score=Dot())` repeats that request, to call `explain()` or read hits.
        `bias` (N·L·num_heads,) holds the amounts that b_k adds to the scores. Differentiable. Cost q E (E + h kdim).
        """
        return self._fold(self._heads(self._batch(query, self.embed_dim, "query")))

    __call__: Callable[..., tuple[Tensor, Tensor | None]]

    def forward(
        self,
        query: Tensor,  # (L, N, E), or (N, L, E) if batch_first, or (L, E)
        key: Tensor | None = None,  # without a database: (S, N, kdim), or (N, S, kdim), or (S, kdim)
        value: Tensor | None = None,  # without a database: (S, N, vdim), or (N, S, vdim), or (S, vdim)
        key_padding_mask: Tensor | None = None,  # (n,); without a database (N, S), or (S,) for one query sequence
        need_weights: bool = False,
        attn_mask: Tensor | None = None,  # (L, n) or (N·num_heads, L, n)
        average_attn_weights: bool | None = None,
        is_causal: bool = False,
        *,
        where: dict[str, Any] | None = None,
        k: int | None = None,
        rtol: float | None = None,
        generator: torch.Generator | None = None,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor | None]:  # as query; weights or None
        """Attend to the records, and return the output; with need_weights also the weights, else None.

        Arguments in torch's order. Masks have torch's polarity: True = may NOT attend (the opposite of `db.attend`).
        Float masks are added to the scores; with a database they may hold only 0 and -inf. If a mask blocks every
        record, the head is zeros before the last projection (torch gives zeros or NaN), with zero gradients.

        With a database, every batch entry attends to the same n records: those that have a key, in row order. Without
        a database, dropout and float masks with finite numbers keep all scores in memory; other calls do not.

        Args:
            query: queries of all heads.
            key, value: only without a database.
            key_padding_mask: records that no query may attend to.
            need_weights: with a database it needs `k=`, and gives ([N,] L, num_heads, candidates): each head's own
                nearest records, best first, then the learnt key and the zero key, if any.
            attn_mask: records that each query may not attend to, for all heads or by head.
            average_attn_weights: return the mean over heads (N, L, S), not (N, num_heads, L, S); None is True. Not with
                a database, where each head has its own candidates.
            is_causal: torch's hint that attn_mask is causal; accepted without a database, and ignored.
            where: a filter on the payload.
            k: attend only to the k records nearest to each head.
            rtol: estimate each head's Σ w v with a relative error of at most rtol; see `db.attend`.
            generator: random numbers for rtol, new with each call; pass one in training.
            temperature: divides the scores, after √d. With a database also a floating tensor that broadcasts to
                (N, L, num_heads), such as (num_heads,), which gets a gradient.

        Raises BadInput for shapes that do not fit, and arguments not for this use; Closed for a closed database.
        """
        if self.db is None:
            unused = all(argument is None for argument in (where, k, rtol, generator))
            if not unused or isinstance(temperature, Tensor) or temperature != 1:
                raise BadInput(
                    "where, k, rtol, generator or temperature are given without a database; omit them or pass db"
                )
            if key is None or value is None:
                raise BadInput("key or value is missing; give both, or make the module with a database")
            if is_causal and attn_mask is None:
                raise BadInput("is_causal is a hint about attn_mask, which is missing; pass the causal mask too")
            inputs = self._inputs(query, key, value)
            length, batched = inputs[1].shape[1], query.ndim == 3
            masks = masks_of(inputs[0], length, key_padding_mask, attn_mask, self.num_heads, batched)
            heads, weights = self._over_tensors(*inputs, masks, need_weights)
            if weights is not None and average_attn_weights is not False:
                weights = weights.mean(dim=1)
        else:
            if key is not None or value is not None:
                raise BadInput("key or value is given, but the database holds keys and values; leave both out")
            if is_causal or average_attn_weights:
                raise BadInput(
                    "is_causal and average_attn_weights mean nothing for a database: records have no order, and each "
                    "head has its own candidates; leave them out"
                )
            self._needs_candidates(k, need_weights)
            x = self._batch(query, self.embed_dim, "query")
            temperature = check.temperature(temperature, (*x.shape[:2], self.num_heads))
            blocked = records_blocked(x, self.db.core.keyed, key_padding_mask, attn_mask, self.num_heads)
            options: dict[str, Any] = {"where": where, "k": k, "rtol": rtol, "generator": generator}
            options["mask"] = None if blocked is None else ~blocked
            heads, weights = self._over_records(self.db, x, temperature, need_weights, options)
        output = self.out_proj(heads.to(query.dtype))  # (N, L, E)
        if query.ndim == 2:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    # -- the records of a database -------------------------------------------------------------------------------------

    def _over_records(
        self,
        db: Verbs,
        query: Tensor,  # (N, L, E)
        temperature: float | Tensor,  # or (q·h,)
        need_weights: bool,
        options: dict[str, Any],  # further arguments of `db.attend`
    ) -> tuple[Tensor, Tensor | None]:  # (N, L, E), (N, L, heads, candidates)
        q = self._heads(query)
        folded = self._fold(q)
        pooled = db.attend(folded.queries, score=Dot(), temperature=temperature, **options)
        lse = pooled.lse + folded.bias / temperature
        # `merge` gives a partial result without records (lse -inf) no weight, so its bias has no effect
        states = [State(self._projected(pooled.output, torch.ones_like(lse)), lse), *self._learnt(q, temperature)]
        if pooled.weights is None or not (need_weights or self._drops):
            output, weights = merge(states).output, None
        else:
            weights = F.dropout(_columns(pooled.weights, states), self.dropout, self.training)
            output = self._reweighed(db, pooled, weights, states) if self._drops else merge(states).output
            weights = weights.view(*query.shape[:2], self.num_heads, weights.shape[1]) if need_weights else None
        return output.reshape(query.shape), weights

    def _reweighed(
        self,
        db: Verbs,
        pooled: Pooled,
        weights: Tensor,  # (q·h, k + number of learnt keys), whose sums may differ from 1 after dropout
        states: Sequence[State],
    ) -> Tensor:  # (q·h, head_dim)
        """Return W_v Σ w v + (Σ w) b_v of each head over candidates and learnt keys, with the weights after dropout."""
        assert pooled.hits is not None  # dropout requires k=
        count = pooled.hits.rows.shape[1]
        record_weights = weights[:, :count]
        values = db.core.values_at(pooled.hits.rows.cpu().numpy())
        output = self._projected(pool(record_weights, values, db.core.schema.num_classes), record_weights.sum(1))
        for share, state in zip(weights[:, count:].unbind(1), states[1:], strict=True):
            output = output + share.unsqueeze(1) * state.output
        return output

    def _fold(self, q: Tensor) -> Fold:  # q (q, h, head_dim)
        weight, bias = self._projections()[1]
        by_head = weight.to(q.dtype).reshape(*q.shape[1:], self.kdim)
        folded = torch.einsum("qhe,hed->qhd", q, by_head).flatten(0, 1)
        if bias is None:
            return Fold(Metric.DOT, folded, 1.0, folded.new_zeros(len(folded)))
        return Fold(Metric.DOT, folded, 1.0, (q * bias.to(q.dtype).view(q.shape[1:])).sum(-1).flatten())

    def _projected(self, output: Tensor, mass: Tensor) -> Tensor:  # (q·h, vdim), (q·h,) -> (q·h, head_dim)
        """Return W_v Σ w v + (Σ w) b_v of each head, from the output Σ w v and the mass Σ w."""
        weight, bias = self._projections()[2]
        shape = (self.num_heads, self.head_dim)
        by_head = weight.to(output.dtype).reshape(*shape, self.vdim)
        heads = torch.einsum("qhv,hev->qhe", output.view(-1, self.num_heads, self.vdim), by_head)
        if bias is not None:
            heads = heads + mass.view(-1, self.num_heads, 1) * bias.to(output.dtype).view(shape)
        return heads.flatten(0, 1)

    def _learnt(self, q: Tensor, temperature: float | Tensor) -> list[State]:  # (q, h, head_dim), () or (q·h,)
        """Return partial results (output, lse): of the learnt key and value (bias_k, bias_v), and of the zero ones."""
        states = []
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (bias.to(q.dtype).view(self.num_heads, self.head_dim) for bias in (self.bias_k, self.bias_v))
            score = (q * key).sum(-1).flatten()
            states.append(State(value.expand_as(q).flatten(0, 1), score / temperature))
        if self.add_zero_attn:
            zeros = torch.zeros_like(q).flatten(0, 1)
            states.append(State(zeros, zeros[:, 0]))
        return states

    def _needs_candidates(self, k: int | None, need_weights: bool) -> None:
        if k is not None:
            check.integer(k, "k")
        elif need_weights:
            raise BadInput(
                "need_weights without k: the weights of all records are never held at once; pass k=, or call "
                "db.attend(attention.fold(query).queries, score=Dot()).explain()"
            )
        elif self._drops:
            raise BadInput(
                f"dropout is {self.dropout} in training without k: the weights of all records are never held at once; "
                "pass k= to drop weights of the k nearest, or make the module with dropout=0"
            )

    # -- plain tensors -------------------------------------------------------------------------------------------------

    def _over_tensors(
        self,
        query: Tensor,  # (N, L, E)
        key: Tensor,  # (N, S, kdim)
        value: Tensor,  # (N, S, vdim)
        masks: Masks,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:  # (N, L, E), (N, heads, L, S + learnt)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x, (weight, bias) in zip((query, key, value), self._projections(), strict=True)
        )  # (N, heads, ·, head_dim)
        before = k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (_with_bias(column, bias) for column, bias in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(column, (0, 0, 0, 1)) for column in (k, v))
        blocked, added = (None if mask is None else F.pad(mask, (0, k.shape[2] - before)) for mask in masks)
        live = None if blocked is None else ~blocked
        if added is None and not self._drops:
            if not need_weights:
                heads, weights = attention(q, k, v, mask=live), None
            else:
                heads, _, weights = attention(q, k, v, mask=live, details=True)
        else:
            scores = q * self.head_dim**-0.5 @ k.mT
            scores = scores if added is None else scores + added
            live = scores.new_ones((), dtype=torch.bool) if live is None else live
            weights = F.dropout(softmax(scores, 1.0, live)[0], self.dropout, self.training)
            heads = weights @ v
        return heads.transpose(1, 2).flatten(2), weights if need_weights else None

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Check the inputs and return them with the batch first: (N, L, E), (N, S, kdim) and (N, S, vdim)."""
        inputs = ((query, self.embed_dim, "query"), (key, self.kdim, "key"), (value, self.vdim, "value"))
        q, k, v = (self._batch(*arguments) for arguments in inputs)
        if not query.ndim == key.ndim == value.ndim or len(q) != len(k) or k.shape[:2] != v.shape[:2]:
            raise BadInput(
                f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
                "expected one batch size for all, and one value for each key"
            )
        return q, k, v

    # -- both ----------------------------------------------------------------------------------------------------------

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:  # weight (E, width) and bias (E,)
        """Return the projections of query, key and value, which torch stores as one tensor or as three."""
        weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))

    def _heads(self, query: Tensor) -> Tensor:  # (N, L, E) -> (N·L, heads, head_dim) / √head_dim, at least float32
        q: Tensor = F.linear(query.flatten(0, 1), *self._projections()[0])
        q = q.to(torch.promote_types(q.dtype, torch.float32)) * self.head_dim**-0.5
        return q.view(-1, self.num_heads, self.head_dim)

    def _batch(self, tensor: Tensor, width: int, name: str) -> Tensor:  # (N, L, width)
        return batch_of(tensor, width, name, self.batch_first, self.out_proj.weight.dtype)


def _with_bias(column: Tensor, bias: Tensor) -> Tensor:  # (N, heads, S, ·), (1, 1, E) -> (N, heads, S + 1, ·)
    batch, heads, _, width = column.shape
    return torch.cat([column, bias.to(column.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1)], dim=2)


def _columns(weights: Tensor, states: Sequence[State]) -> Tensor:  # (q, k) -> (q, k + number of learnt keys)
    """Return the weights of candidates and learnt keys, in that order, that sum to 1 over both together."""
    lses = torch.stack([state.lse for state in states], dim=1)
    shares, _ = softmax(lses, 1.0, lses > -torch.inf)
    return torch.cat([weights * shares[:, :1], shares[:, 1:]], dim=1)
