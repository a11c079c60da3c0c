"""Softmax against the equation and beyond its usual range; kernel values; arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.weights import (
    Argmax,
    Entmax15,
    Normalised,
    Softmax,
    Sparsemax,
    Uniform,
    Weighed,
    Weighting,
    softmax,
    valid_mask,
    weighting,
)

ALL = torch.ones(1, 3, dtype=torch.bool)
WEIGHTINGS: list[Weighting] = [Softmax(), Sparsemax(), Entmax15(), Normalised(), Uniform(), Argmax()]


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
def test_dead_entries_are_ignored_whatever_their_score(dead_score: float) -> None:
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


def test_any_leading_dimensions_are_rows() -> None:
    torch.manual_seed(3)
    scores, live = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5) < 0.6
    weights, lse = softmax(scores, 0.7, live)
    flat_weights, flat_lse = softmax(scores.reshape(-1, 5), 0.7, live.reshape(-1, 5))
    assert torch.equal(weights, flat_weights.reshape(2, 3, 4, 5))
    assert torch.equal(lse, flat_lse.reshape(2, 3, 4))
    assert torch.equal(softmax(scores[0, 0, 0], 0.7, live[0, 0, 0])[0], weights[0, 0, 0])


def test_a_live_score_of_minus_infinity_weighs_nothing_and_is_never_nan() -> None:
    scores = torch.tensor([[1.0, -math.inf, 2.0], [-math.inf] * 3], requires_grad=True)
    weights, lse = softmax(scores, 1.0, ALL.expand(2, 3))
    assert weights[0, 1] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert lse[1] == -math.inf
    (grad,) = torch.autograd.grad((weights * torch.tensor([1.0, 2.0, 3.0])).sum() + lse.sum(), scores)
    assert torch.isfinite(grad).all()
    assert grad[0, 1] == 0
    assert grad[0, 0] != 0
    assert grad[1].tolist() == [0, 0, 0]


def test_a_temperature_beyond_the_dtype_still_weighs_all_live_alike() -> None:
    weights, _ = softmax(torch.tensor([[3.0, 9.0, 8.0]]), 1e300, torch.tensor([[True, False, True]]))
    assert weights.tolist() == [[0.5, 0, 0.5]]


def _normalised(scores: Tensor) -> Weighed:
    return Normalised().weigh(scores, 1.0, torch.ones(scores.shape, dtype=torch.bool))


def test_all_zero_kernel_values_give_zero_weights() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 6.0]], requires_grad=True)
    actual = _normalised(scores)
    assert actual.weights.tolist() == [[0, 0, 0], [0, 0.25, 0.75]]
    assert actual.lse.tolist() == pytest.approx([-math.inf, math.log(8)])
    (grad,) = torch.autograd.grad((actual.weights * torch.tensor([1.0, 2.0, 4.0])).sum() + actual.lse.sum(), scores)
    assert grad[0].tolist() == [0, 0, 0]
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("size", [1e-37, 1e37])
def test_kernel_values_of_any_size_neither_vanish_nor_overflow(size: float) -> None:
    actual = _normalised(torch.tensor([[1.0, 3.0] * 100]) * size)
    torch.testing.assert_close(actual.weights[0, :2], torch.tensor([0.0025, 0.0075]))
    assert actual.lse.item() == pytest.approx(math.log(400) + math.log(size), rel=1e-5)


@pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf, -math.inf])
def test_scores_that_are_no_kernel_values_are_refused(bad: float) -> None:
    with pytest.raises(BadInput, match=rf"a live score is {bad}; .*use softmax, or a score that is a kernel"):
        _normalised(torch.tensor([[1.0, bad]]))


def test_normalised_weights_have_no_temperature() -> None:
    with pytest.raises(BadInput, match=r"temperature is 0\.5 but normalised weights have none.*bandwidth.*softmax"):
        Normalised().weigh(torch.ones(1, 2), 0.5, torch.ones(1, 2, dtype=torch.bool))


def test_logs_of_kernel_values_serve_far_from_all_records() -> None:
    live = torch.tensor([[True, True, True, False]] * 2)
    logs = torch.tensor([[-4000.0, -4001.0, -math.inf, 5.0], [-math.inf] * 4], requires_grad=True)
    weights, lse = softmax(logs, 1.0, live)
    near, near_lse = Normalised().weigh(torch.tensor([[1.0, math.exp(-1), 0.0]]), 1.0, live[:1, :3])[:2]
    torch.testing.assert_close(weights[0, :3].detach(), near[0])
    assert lse[0].item() == pytest.approx(near_lse.item() - 4000)
    assert weights[1].tolist() == [0, 0, 0, 0]
    assert lse[1] == -math.inf
    (grad,) = torch.autograd.grad((weights * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum() + lse.sum(), logs)
    assert torch.isfinite(grad).all()
    assert grad[1].tolist() == [0, 0, 0, 0]


def test_weightings_have_names() -> None:
    assert [weighting(one.name) for one in WEIGHTINGS] == WEIGHTINGS
    assert weighting("normalized") == Normalised()
    own = Entmax15()
    assert weighting(own) is own


@pytest.mark.parametrize("bad", ["sparsmax", "Softmax", None, 3, Softmax, ["softmax"]])
def test_a_weighting_of_another_name_is_refused(bad: object) -> None:
    listed = "'softmax', 'sparsemax', 'entmax15', 'normalised', 'uniform', 'argmax'"
    with pytest.raises(BadInput, match=rf"weights is .*; choose one of {listed}, or give a softdb\.weights\.Weighting"):
        weighting(bad)


def test_a_weighting_of_ones_own_serves() -> None:
    class Tempered:
        name, sparse = "tempered", False

        def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
            return Softmax().weigh(scores, temperature * 2, live)

    own = Tempered()
    assert weighting(own) is own


def test_valid_mask_keeps_the_first_of_each_row() -> None:
    for lengths in ([2, 0, 3], np.array([2, 0, 3]), torch.tensor([2, 0, 3], dtype=torch.uint8)):
        mask = valid_mask(lengths, 2, 3)
        assert mask.dtype is torch.bool
        assert mask.tolist() == [[[True, True, False]] * 2, [[False] * 3] * 2, [[True] * 3] * 2]
    assert valid_mask(torch.tensor([[1, 3]]), 2, 3).tolist() == [[[True, False, False], [True] * 3]]
    assert valid_mask(torch.empty(0, dtype=torch.int64), 2, 3).shape == (0, 2, 3)
    assert valid_mask(torch.empty(0, 2, dtype=torch.int64), 2, 3).shape == (0, 2, 3)
    weights, lse = softmax(torch.zeros(3, 2, 3), 1.0, valid_mask([2, 0, 3], 2, 3))
    assert weights[:, 0].tolist() == [[0.5, 0.5, 0], [0, 0, 0], pytest.approx([1 / 3] * 3)]
    assert lse[1].tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, -1], r"valid_len holds -1; expected 0 to 3"),
        ([4, 1], r"valid_len holds 4; expected 0 to 3"),
        ([1.0, 2.0], r"valid_len has dtype torch\.float32; expected whole numbers"),
        ([True, False], r"valid_len has dtype torch\.bool; expected whole numbers"),
        (2, r"valid_len has shape \(\); expected \(b,\) or \(b, 2\)"),
        ([[1, 2, 3]], r"valid_len has shape \(1, 3\); expected \(b,\) or \(b, 2\)"),
        ([[[1]]], r"valid_len has shape \(1, 1, 1\); expected \(b,\) or \(b, 2\)"),
        ([[1, 2], [3]], r"valid_len is \[\[1, 2\], \[3\]\]; expected whole numbers of shape"),
        ("three", r"valid_len is 'three'; expected whole numbers of shape"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        valid_mask(lengths, 2, 3)
