"""Softmax against the equation, and where the usual one fails: nothing live, huge scores, tiny temperatures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch

from softdb.weights import softmax

ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_is_the_equation(temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    scores, live = torch.randn(6, 9, dtype=dtype), torch.rand(6, 9) < 0.7
    live[0] = False
    live[1] = True
    weights, lse = softmax(scores, temperature, live)
    assert weights.dtype is dtype
    assert lse.dtype is dtype
    for i in range(6):
        expected, expected_lse = reference.softmax(scores[i].tolist(), temperature, live[i].tolist())
        np.testing.assert_allclose(weights[i], expected, rtol=1e-5, atol=1e-7)
        assert lse[i].item() == pytest.approx(expected_lse, rel=1e-5)
    assert (weights[~live] == 0).all()


def test_gradients_are_the_derivatives() -> None:
    torch.manual_seed(2)
    scores = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    live = torch.rand(4, 5) < 0.6
    live[:, 0] = True
    assert torch.autograd.gradcheck(lambda s: softmax(s, 0.7, live), scores)


@pytest.mark.parametrize("dead_score", [0.0, -math.inf, math.inf, math.nan])
def test_dead_entries_are_ignored_whatever_stands_there(dead_score: float) -> None:
    scores = torch.tensor([[1.0, dead_score, 2.0], [dead_score] * 3], requires_grad=True)
    weights, lse = softmax(scores, 1.0, torch.tensor([[True, False, True], [False] * 3]))
    torch.testing.assert_close(weights[0, ::2], torch.softmax(torch.tensor([1.0, 2.0]), 0))
    assert weights[0, 1] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert lse[1] == -math.inf
    (grad,) = torch.autograd.grad((weights * torch.tensor([1.0, 2.0, 3.0])).sum() + lse.sum(), scores)
    assert torch.isfinite(grad).all()
    assert grad[0, 1] == 0
    assert grad[1].tolist() == [0, 0, 0]
    assert grad[0, 0] != 0


def test_no_candidates_at_all() -> None:
    scores = torch.empty(2, 0, requires_grad=True)
    weights, lse = softmax(scores, 1.0, torch.empty(2, 0, dtype=torch.bool))
    assert weights.shape == (2, 0)
    assert lse.tolist() == [-math.inf, -math.inf]
    assert torch.autograd.grad(lse.sum() + weights.sum(), scores)[0].shape == (2, 0)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_answer(offset: float) -> None:
    near = torch.tensor([[0.0, -0.5, -1.0]])
    weights, lse = softmax(near + offset, 1.0, ALL)
    torch.testing.assert_close(weights, torch.softmax(near, 1))
    assert lse.item() == pytest.approx(offset + near.logsumexp(1).item(), rel=1e-6)
    near = near / 256  # a few of the smallest steps there are at 1e4
    sharp, _ = softmax(near + offset, 0.003, ALL)  # scores over temperature reach 3e6, where steps are 0.25
    torch.testing.assert_close(sharp, torch.softmax(near / 0.003, 1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_gives_the_nearest_and_shares_ties(temperature: float) -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0], [1.0, 2.0, 0.0]], requires_grad=True)
    weights, _ = softmax(scores, temperature, ALL.expand(2, 3))
    assert weights.tolist() == [[0.5, 0, 0.5], [0, 1, 0]]
    assert torch.isfinite(torch.autograd.grad(weights[1, 0], scores)[0]).all()


def test_a_huge_temperature_weighs_all_alike() -> None:
    weights, lse = softmax(torch.tensor([[3.0, -100.0, 8.0]]), 1e9, ALL)
    np.testing.assert_allclose(weights, np.full((1, 3), 1 / 3), rtol=1e-6)
    assert lse.item() == pytest.approx(math.log(3), rel=1e-6)
