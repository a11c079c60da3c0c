"""Attention of a decoder over the states of an encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.errors import BadInput
from softdb.functional import attention
from softdb.scoring import Additive, Dot, General


class RecurrentAttention(torch.nn.Module):
    """The context c = Σ_i a_i h_i of a decoder's state s, over an encoder's states h, a = softmax_i(score(s, h_i)).

        "dot"       sᵀ h                      no parameters; s and h equally wide (Luong et al. 2015, section 3.1)
        "general"   sᵀ W h                    (Luong et al. 2015, section 3.1)
        "additive"  wᵀ tanh(W_q s + W_k h)    (Bahdanau et al. 2015, appendix A.1.2)

    Takes one step of a decoder, or all steps at once if its states do not depend on the contexts. Each call of
    "additive" computes W_k h again. Cost b q n hidden for "additive", else b q n state_dim.

    Args:
        query_dim: width of the decoder's states.
        state_dim: width of the encoder's states, and of the context.
        score: "dot", "general" or "additive".
        hidden: rows of W_q and W_k; None: query_dim. For "additive" only.

    Raises BadInput for an unknown score, widths that do not fit it, and states of other widths.

    >>> attend = RecurrentAttention(query_dim=4, state_dim=6, score="additive")
    >>> context, weights = attend(torch.randn(2, 4), torch.randn(2, 5, 6), valid_len=[5, 3])
    >>> context.shape, weights.shape
    (torch.Size([2, 6]), torch.Size([2, 5]))
    """

    def __init__(self, query_dim: int, state_dim: int, score: str = "additive", hidden: int | None = None) -> None:
        super().__init__()
        self.query_dim = check.integer(query_dim, "query_dim")
        self.state_dim = check.integer(state_dim, "state_dim")
        if hidden is not None and score != "additive":
            raise BadInput(f"hidden is {shown(hidden)} but the score {shown(score)} has no hidden layer; omit it")
        self.score: Dot | General | Additive
        if score == "dot":
            if self.query_dim != self.state_dim:
                raise BadInput(
                    f"query_dim is {self.query_dim} and state_dim {self.state_dim}, but the dot product compares equal "
                    "widths; use score='general' or 'additive'"
                )
            self.score = Dot()
        elif score == "general":
            self.score = General(self.query_dim, self.state_dim)
        elif score == "additive":
            self.score = Additive(self.query_dim, self.state_dim, self.query_dim if hidden is None else hidden)
        else:
            raise BadInput(f"score is {shown(score)}; expected 'dot', 'general' or 'additive'")

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def forward(
        self,
        query: Tensor,  # (b, query_dim), or (b, q, query_dim)
        states: Tensor,  # (b, n, state_dim), padded
        valid_len: Tensor | list[int] | None = None,  # (b,)
    ) -> tuple[Tensor, Tensor]:  # (b, state_dim) and (b, n), or (b, q, state_dim) and (b, q, n)
        """Return the contexts, and their weights: the alignment.

        `valid_len` is the number of states in each sequence, the rest being padding; None: all n. With 0 states the
        context is zeros, with zero gradients.
        """
        _shaped(query, "query", self.query_dim, {2: "b", 3: "b, q"})
        _shaped(states, "states", self.state_dim, {3: "b, n"})
        if len(query) != len(states):
            raise BadInput(
                f"query and states are of {len(query)} and {len(states)} sequences (shapes {tuple(query.shape)} and "
                f"{tuple(states.shape)}); give one query, or one row of queries, for each sequence"
            )
        single = query.ndim == 2
        queries = query.unsqueeze(1) if single else query
        pooled = attention(queries, states, states, score=self.score, valid_len=valid_len, details=True)
        return (pooled.output.squeeze(1), pooled.weights.squeeze(1)) if single else (pooled.output, pooled.weights)


def _shaped(
    tensor: Tensor,  # (b, width) or (b, q, width)
    name: str,
    width: int,
    leads: dict[int, str],  # number of dimensions -> names of the leading ones
) -> None:
    if isinstance(tensor, Tensor) and tensor.ndim in leads and tensor.shape[-1] == width:
        return
    came = f"has shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"is {shown(tensor)}"
    expected = " or ".join(f"({lead}, {width})" for lead in leads.values())
    raise BadInput(f"{name} {came}; expected {expected}")
