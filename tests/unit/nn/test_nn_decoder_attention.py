"""Attention of a decoder over encoder states, against the papers' equations as loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.nn import RecurrentAttention
from softdb.scores import Additive, General

B, Q, N, E, HIDDEN = 3, 2, 5, 4, 6
LENGTHS = [5, 2, 0]
SCORES = ["dot", "general", "additive"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(9)


def module(score: str) -> RecurrentAttention:
    """In float64, with widths that differ where they may."""
    words: dict[str, Any] = {"hidden": HIDDEN} if score == "additive" else {}
    made = RecurrentAttention(E if score == "dot" else 3, E, score, **words).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def inner(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def score_of(made: RecurrentAttention, s: list[float], h: list[float]) -> float:
    """Luong's section 3.1 and Bahdanau's appendix A.1.2."""
    score = made.score
    if isinstance(score, General):
        matrix: list[list[float]] = score.weight.tolist()
        return sum(s[i] * matrix[i][j] * h[j] for i in range(len(s)) for j in range(len(h)))
    if isinstance(score, Additive):
        w: list[float] = score.weight.tolist()
        w_q, w_k = score.query_weight.tolist(), score.key_weight.tolist()
        units = [math.tanh(inner(w_q[i], s) + inner(w_k[i], h)) for i in range(HIDDEN)]
        return inner(w, units)
    return inner(s, h)


def by_loops(made: RecurrentAttention, s: Tensor, states: Tensor) -> tuple[list[float], list[float]]:
    """Context and weights of one query."""
    scores = [math.exp(score_of(made, s.tolist(), h)) for h in states.tolist()]
    weights = [score / sum(scores) for score in scores]
    return [sum(a * h[j] for a, h in zip(weights, states.tolist(), strict=True)) for j in range(E)], weights


@pytest.mark.parametrize("score", SCORES)
def test_contexts_are_those_of_the_papers(score: str) -> None:
    made = module(score)
    query = torch.randn(B, Q, made.query_dim, dtype=torch.float64)
    states = torch.randn(B, N, E, dtype=torch.float64)
    states[0, 1], states[0, 2] = states[0, 0], 0
    context, weights = made(query, states, valid_len=LENGTHS)
    assert (context.shape, weights.shape) == ((B, Q, E), (B, Q, N))
    for i, length in enumerate(LENGTHS):
        for j in range(Q):
            expected, shares = by_loops(made, query[i, j], states[i, :length])
            torch.testing.assert_close(context[i, j], torch.tensor(expected, dtype=torch.float64))
            torch.testing.assert_close(weights[i, j], torch.tensor(shares + [0.0] * (N - length), dtype=torch.float64))


@pytest.mark.parametrize("score", SCORES)
def test_one_step_at_a_time_is_the_same(score: str) -> None:
    made = module(score)
    query, states = torch.randn(B, Q, made.query_dim).double(), torch.randn(B, N, E).double()
    context, weights = made(query, states, valid_len=torch.tensor(LENGTHS))
    for j in range(Q):
        one, its = made(query[:, j], states, valid_len=torch.tensor(LENGTHS))
        assert (one.shape, its.shape) == ((B, E), (B, N))
        torch.testing.assert_close(one, context[:, j])
        torch.testing.assert_close(its, weights[:, j])


@pytest.mark.few(1)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_reach_everything(score: str) -> None:
    made = module(score)
    query = torch.randn(B, Q, made.query_dim, dtype=torch.float64, requires_grad=True)
    states = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    parameters = list(made.parameters())
    assert len(parameters) == {"dot": 0, "general": 1, "additive": 3}[score]

    def ask(query: Tensor, states: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(made(query, states, valid_len=LENGTHS))

    assert torch.autograd.gradcheck(ask, (query, states, *parameters))
    torch.autograd.backward(ask(query, states)[0].square().sum())
    assert states.grad is not None
    assert states.grad[0].abs().sum() > 0
    assert not bool(states.grad[2].any()), "a sequence of nothing pulls"


def test_no_states_give_zeros_and_no_sequences_give_no_rows() -> None:
    made = RecurrentAttention(3, E, "additive")
    context, weights = made(torch.randn(B, 3), torch.zeros(B, 0, E))
    assert torch.equal(context, torch.zeros(B, E))
    assert weights.shape == (B, 0)
    assert made(torch.zeros(0, 3), torch.zeros(0, N, E))[0].shape == (0, E)


def test_the_hidden_layer_has_the_requested_width() -> None:
    for hidden, expected in ((None, 3), (7, 7)):
        score = RecurrentAttention(3, E, "additive", hidden=hidden).score
        assert isinstance(score, Additive)
        assert len(score.weight) == expected


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"score is 'cosine'; expected 'dot', 'general' or 'additive'"):
        RecurrentAttention(3, E, "cosine")
    with pytest.raises(BadInput, match=r"query_dim is 3 and state_dim 4, but the dot product compares equal widths"):
        RecurrentAttention(3, E, "dot")
    with pytest.raises(BadInput, match=r"hidden is 8 but the score 'general' has no hidden layer; omit it"):
        RecurrentAttention(3, E, "general", hidden=8)
    with pytest.raises(BadInput, match=r"query_dim is 0; expected a whole number at least 1"):
        RecurrentAttention(0, E)
    made = RecurrentAttention(3, E)
    with pytest.raises(BadInput, match=r"query has shape \(2, 5\); expected \(b, 3\) or \(b, q, 3\)"):
        made(torch.zeros(2, 5), torch.zeros(2, N, E))
    with pytest.raises(BadInput, match=r"states has shape \(5, 4\); expected \(b, n, 4\)"):
        made(torch.zeros(2, 3), torch.zeros(N, E))
    with pytest.raises(BadInput, match=r"states is None; expected \(b, n, 4\)"):
        made(torch.zeros(2, 3), None)
    with pytest.raises(BadInput, match=r"query and states are of 1 and 2 sequences .*give one query"):
        made(torch.zeros(1, 3), torch.zeros(2, N, E))
