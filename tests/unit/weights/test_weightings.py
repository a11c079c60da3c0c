"""Every weighting against loops of its equation, its gradient, and the degenerate cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import entmax
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.weights import Argmax, Entmax15, Normalised, Softmax, Sparse, Sparsemax, Uniform, Weighed, Weighting

Floats = NDArray[np.float64]

# -- the equations as loops, of live scores (k,) -----------------------------------------------------------------------


def _entmax(z: list[float], alpha: float) -> list[float]:
    """p = [(α-1) z - τ]₊^(1/(α-1)), τ by bisection of Σ p = 1."""

    def at(tau: float) -> list[float]:
        return [max((alpha - 1) * one - tau, 0.0) ** (1 / (alpha - 1)) for one in z]

    high = (alpha - 1) * max(z)
    low = high - 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(at(middle)) >= 1 else (low, middle)
    return at(low)


def _entropy(p: list[float], alpha: float) -> float:
    if alpha == 1:
        return -math.fsum(one * math.log(one) for one in p if one > 0)
    return math.fsum(one - one**alpha for one in p) / (alpha * (alpha - 1))


def _weights(name: str, scores: list[float], temperature: float) -> list[float]:
    z = [score / temperature for score in scores]
    if name == "softmax":
        parts = [math.exp(one - max(z)) for one in z]
    elif name == "normalised":
        parts = scores
    elif name == "uniform":
        parts = [1.0 for _ in z]
    elif name == "argmax":
        parts = [float(place == z.index(max(z))) for place in range(len(z))]
    else:
        parts = _entmax(z, {"sparsemax": 2.0, "entmax15": 1.5}[name])
    return [part / math.fsum(parts) for part in parts]


def _lse(name: str, scores: list[float], temperature: float) -> float:
    if name == "normalised":
        return math.log(math.fsum(scores))
    if name == "uniform":
        return math.log(len(scores))
    p = _weights(name, scores, temperature)
    gain = math.fsum(a * b / temperature for a, b in zip(p, scores, strict=True))
    return gain if name == "argmax" else gain + _entropy(p, {"softmax": 1.0, "sparsemax": 2.0, "entmax15": 1.5}[name])


def reference(
    name: str,
    scores: Sequence[float],  # (k,)
    temperature: float,
    live: Sequence[bool],  # (k,)
) -> tuple[Floats, float]:  # (k,), lse
    weights, places = np.zeros(len(scores)), [place for place, alive in enumerate(live) if alive]
    if not places:
        return weights, -math.inf
    alive = [float(scores[place]) for place in places]
    weights[places] = _weights(name, alive, temperature)
    return weights, _lse(name, alive, temperature)


# -- worlds ------------------------------------------------------------------------------------------------------------

ALL: list[Weighting] = [Softmax(), Sparsemax(), Entmax15(), Normalised(), Uniform(), Argmax()]
SPARSE: list[Sparse] = [Sparsemax(), Entmax15()]
SMOOTHED = [one for one in ALL if one.name not in ("normalised", "uniform")]  # lse = max <p, z> + H(p)
every = pytest.mark.parametrize("by", ALL, ids=lambda one: one.name)
every_sparse = pytest.mark.parametrize("by", SPARSE, ids=lambda one: one.name)
every_smoothed = pytest.mark.parametrize("by", SMOOTHED, ids=lambda one: one.name)


def _scores(by: Weighting, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    scores = torch.randn(shape, dtype=dtype)
    return scores.square() if isinstance(by, Normalised) else scores


def _weigh(by: Weighting, scores: Tensor, temperature: float = 1.0, live: Tensor | None = None) -> Weighed:
    live = torch.ones(scores.shape, dtype=torch.bool) if live is None else live
    return by.weigh(scores, 1.0 if isinstance(by, Normalised) else temperature, live)


def _grads(found: Weighed, scores: Tensor, along: Tensor) -> Tensor:
    """The gradient of a sum of the weights and of lse."""
    loss = found.lse.sum()
    if found.weights.requires_grad:
        loss = loss + (found.weights * along).sum()
    (grad,) = torch.autograd.grad(loss, scores)
    return grad


# -- values ------------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_the_equation(by: Weighting, temperature: float, dtype: torch.dtype) -> None:
    scores = _scores(by, 2, 4, 9, dtype=dtype)
    temperature = 1.0 if isinstance(by, Normalised) else temperature
    live = torch.rand(2, 4, 9) < 0.7
    live[0, 0], live[0, 1] = False, True
    scores[0, 1, 3] = scores[0, 1, 5] = scores[0, 1].max()
    actual = _weigh(by, scores, temperature, live)
    assert actual.weights.dtype is actual.lse.dtype is actual.threshold.dtype is dtype
    assert actual.weights.shape == scores.shape
    assert actual.lse.shape == actual.threshold.shape == (2, 4)
    assert not actual.threshold.requires_grad
    digits = 1e-5 if dtype is torch.float32 else 1e-12
    for place in np.ndindex(2, 4):
        weights, lse = reference(by.name, scores[place].tolist(), temperature, live[place].tolist())
        np.testing.assert_allclose(actual.weights[place], weights, rtol=digits, atol=digits / 10)
        assert actual.lse[place].item() == pytest.approx(lse, rel=digits, abs=digits / 10)
    assert (actual.weights[~live] == 0).all()
    assert (actual.weights >= 0).all()
    np.testing.assert_allclose(actual.weights.sum(-1), live.any(-1), rtol=digits)


@every
@pytest.mark.parametrize("size", [1, 7, 300])
def test_the_order_of_the_candidates_does_not_matter(by: Weighting, size: int) -> None:
    scores = _scores(by, 3, size)
    order = torch.randperm(size)
    whole, shuffled = _weigh(by, scores, 0.5), _weigh(by, scores[:, order], 0.5)
    torch.testing.assert_close(shuffled.weights, whole.weights[:, order], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(shuffled.lse, whole.lse, rtol=1e-12, atol=1e-13)


@every_smoothed
def test_lse_is_the_largest_value_on_the_simplex(by: Weighting) -> None:
    scores, temperature = _scores(by, 1, 6), 0.8
    lse = _weigh(by, scores, temperature).lse.item()
    alpha = {"softmax": 1.0, "sparsemax": 2.0, "entmax15": 1.5}.get(by.name)
    for p in np.random.default_rng(0).dirichlet(np.full(6, 0.4), 200):
        value = float(p @ scores[0].numpy()) / temperature + (_entropy(p.tolist(), alpha) if alpha else 0)
        assert value <= lse + 1e-12
    assert lse >= scores.max().item() / temperature


@every_sparse
@pytest.mark.parametrize("count", [10_000, 300_000])
def test_float32_sums_to_one_where_many_share_little(by: Sparse, count: int) -> None:
    """One far ahead of very many: the package's own float32 is off in the third digit here."""
    scores = torch.full((1, count + 1), -0.98)
    scores[0, 0] = 0
    weights = _weigh(by, scores, 0.5 if by.alpha == 1.5 else 1.0).weights.double()
    assert weights.sum().item() == pytest.approx(1, abs=1e-5)
    expected, _ = reference(by.name, [0.0, *[float(np.float32(-0.98))] * 9], 0.5, [True] * 10)
    np.testing.assert_allclose(_weigh(by, scores[:, :10], 0.5).weights[0], expected, rtol=1e-6, atol=1e-7)


# -- gradients ---------------------------------------------------------------------------------------------------------


@every
def test_gradients_are_the_derivatives(by: Weighting) -> None:
    scores = (_scores(by, 2, 3, 5, seed=1) + (0.1 if isinstance(by, Normalised) else 0)).requires_grad_()
    live = torch.rand(2, 3, 5) < 0.7
    live[0, 0], live[0, 1] = False, True

    def finite(s: Tensor) -> tuple[Tensor, ...]:
        actual = _weigh(by, s, 0.7, live)
        lse = actual.lse.masked_fill(~live.any(-1), 0)
        return (actual.weights, lse) if actual.weights.requires_grad else (lse,)

    assert torch.autograd.gradcheck(finite, scores)


@every_smoothed
def test_the_gradient_of_lse_is_the_weights(by: Weighting) -> None:
    scores = _scores(by, 4, 30).requires_grad_()
    actual = _weigh(by, scores, 0.7)
    (grad,) = torch.autograd.grad(actual.lse.sum(), scores)
    torch.testing.assert_close(grad * 0.7, actual.weights, rtol=1e-12, atol=1e-14)


def test_the_gradient_of_lse_in_the_log_of_a_kernel_is_the_weights() -> None:
    logs = _scores(Softmax(), 4, 30).requires_grad_()
    actual = _weigh(Normalised(), logs.exp())
    torch.testing.assert_close(torch.autograd.grad(actual.lse.sum(), logs)[0], actual.weights.detach())


@every
def test_second_derivatives_of_lse_are_right(by: Weighting) -> None:
    scores = (_scores(by, 3, 5, seed=4) + (0.1 if isinstance(by, Normalised) else 0)).requires_grad_()
    if isinstance(by, Argmax | Uniform):  # their first derivatives are constants
        (grad,) = torch.autograd.grad(_weigh(by, scores).lse.sum(), scores, create_graph=True)
        assert set(grad.flatten().tolist()) == ({0.0} if isinstance(by, Uniform) else {0.0, 1.0})
        return
    assert torch.autograd.gradgradcheck(lambda s: _weigh(by, s, 0.7).lse, scores)


@pytest.mark.parametrize("by", [Softmax(), *SPARSE], ids=lambda one: one.name)
def test_second_derivatives_of_the_weights_are_right(by: Weighting) -> None:
    scores = _scores(by, 3, 5, seed=4).requires_grad_()
    live = torch.tensor([True, True, True, False, True]).expand(3, 5)
    assert (_weigh(by, scores, 0.7, live).weights[live] == 0).any() == by.sparse
    assert torch.autograd.gradgradcheck(lambda s: _weigh(by, s, 0.7, live).weights, scores)


@every_sparse
def test_weights_and_gradients_are_those_of_the_package(by: Sparse) -> None:
    scores = _scores(by, 30, 40).requires_grad_()
    along = torch.randn(30, 40, dtype=torch.float64)
    ours, theirs = _weigh(by, scores).weights, getattr(entmax, by.name)(scores, dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    grads = [torch.autograd.grad((weights * along).sum(), scores)[0] for weights in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)  # a root of a weight near 0 loses digits


# -- degenerate cases --------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dead_score", [0.0, -3.0, -math.inf, math.inf, math.nan])
def test_dead_entries_are_ignored_whatever_their_score(by: Weighting, dead_score: float) -> None:
    scores = torch.tensor([[1.0, dead_score, 1.5], [dead_score] * 3], requires_grad=True)
    actual = _weigh(by, scores, 1.0, torch.tensor([[True, False, True], [False] * 3]))
    alone = _weigh(by, scores[:1, ::2], 1.0)
    torch.testing.assert_close(actual.weights[0, ::2], alone.weights[0])
    torch.testing.assert_close(actual.threshold[0], alone.threshold[0])
    assert actual.weights[0, 1] == 0
    assert actual.weights[1].tolist() == [0, 0, 0]
    assert actual.lse[1] == -math.inf
    grad = _grads(actual, scores, torch.tensor([1.0, 2.0, 4.0]))
    assert grad[0, 1] == 0
    assert grad[1].tolist() == [0, 0, 0]
    assert torch.isfinite(grad).all()
    assert isinstance(by, Uniform) or grad[0, 2] != 0


@every
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0), (2, 3, 0)])
def test_no_candidates_at_all(by: Weighting, shape: tuple[int, ...]) -> None:
    scores = torch.empty(shape, requires_grad=True)
    actual = _weigh(by, scores)
    assert actual.weights.shape == shape
    assert actual.lse.shape == actual.threshold.shape == shape[:-1]
    assert (actual.lse == -math.inf).all()
    assert _grads(actual, scores, torch.ones(shape)).shape == shape


@every
@pytest.mark.parametrize("temperature", [1e-300, 1.0, 1e300])
def test_one_live_entry_weighs_one(by: Weighting, temperature: float) -> None:
    scores = torch.tensor([[5.0, 3.0, 7.0]], requires_grad=True)
    actual = _weigh(by, scores, temperature, torch.tensor([[False, True, False]]))
    assert actual.weights.tolist() == [[0, 1, 0]]
    if actual.weights.requires_grad:
        assert torch.autograd.grad(actual.weights[0, 1], scores)[0].tolist() == [[0, 0, 0]]


@every
def test_ties_share_alike_but_argmax_takes_the_first(by: Weighting) -> None:
    weights = _weigh(by, torch.tensor([[2.0] * 4]), 1e-3).weights
    assert weights.tolist() == [[1.0, 0, 0, 0] if isinstance(by, Argmax) else [0.25] * 4]
    tied = torch.zeros(1, 1000)
    tied[0, 17::50] = 3
    assert _weigh(Argmax(), tied).weights.argmax() == 17
    assert _weigh(Argmax(), tied, 1.0, torch.arange(1000)[None] > 100).weights.argmax() == 117


@pytest.mark.parametrize("by", [Softmax(), *SPARSE, Argmax()], ids=lambda one: one.name)
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_gives_the_nearest(by: Weighting, temperature: float, dtype: torch.dtype) -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0], [1.0, 2.0, 0.0]], dtype=dtype, requires_grad=True)
    actual = _weigh(by, scores, temperature)
    expected = [[1, 0, 0] if isinstance(by, Argmax) else [0.5, 0, 0.5], [0, 1, 0]]
    np.testing.assert_allclose(actual.weights.detach(), expected, rtol=1e-15)
    assert not torch.isnan(actual.lse).any()
    assert (actual.threshold <= torch.tensor([3.0, 2.0])).all()
    if actual.weights.requires_grad:
        assert torch.isfinite(torch.autograd.grad(actual.weights[1, 0], scores)[0]).all()


@every
@pytest.mark.parametrize("temperature", [1e9, 1e300])
def test_a_huge_temperature_weighs_all_live_alike(by: Weighting, temperature: float) -> None:
    if isinstance(by, Normalised):
        return  # has no temperature
    live = torch.tensor([[True, True, True, False]])
    actual = _weigh(by, torch.tensor([[3.0, -100.0, 8.0, 9.0]]), temperature, live)
    expected = [0, 0, 1, 0] if isinstance(by, Argmax) else [1 / 3, 1 / 3, 1 / 3, 0]
    np.testing.assert_allclose(actual.weights[0], expected, rtol=1e-6)
    assert isinstance(by, Uniform | Softmax) == (actual.threshold == -math.inf).item() or temperature == 1e300
    assert math.isfinite(actual.lse.item())


@every_smoothed
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_answer(by: Weighting, offset: float) -> None:
    near = torch.tensor([[0.0, -0.5, -1.0]]) / 256  # a few of the smallest steps there are at 1e4
    for temperature in (1.0, 0.003):
        low, high = _weigh(by, near, temperature), _weigh(by, near + offset, temperature)
        torch.testing.assert_close(high.weights, low.weights)
        assert high.lse.item() == pytest.approx(low.lse.item() + offset / temperature, rel=1e-6)


@pytest.mark.parametrize("by", SMOOTHED, ids=lambda one: one.name)
def test_live_scores_that_are_not_finite(by: Weighting) -> None:
    rows = [[1.0, -math.inf, 2.0], [-math.inf] * 3, [1.0, math.nan, 2.0]]
    scores = torch.tensor(rows, requires_grad=True)
    actual = _weigh(by, scores)
    assert actual.weights[0, 1] == 0
    assert actual.weights[1].tolist() == [0, 0, 0]
    assert actual.lse[1] == -math.inf
    assert actual.threshold[1:].tolist() == [-math.inf, -math.inf]
    grad = _grads(Weighed(actual.weights[:2], actual.lse[:2], actual.threshold), scores, torch.tensor([1.0, 2.0, 4.0]))
    assert torch.isfinite(grad[:2]).all()
    assert grad[0, 1] == 0
    assert grad[1].tolist() == [0, 0, 0]
    assert torch.isnan(actual.weights[2]).all()  # not a number that looks like an answer
    assert torch.isnan(actual.lse[2])


# -- thresholds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [*SPARSE, Argmax(), Normalised()], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_scores_up_to_the_threshold_change_no_weight(
    by: Weighting, dtype: torch.dtype, temperature: float, offset: float
) -> None:
    scores = _scores(by, 50, 12, dtype=dtype) * temperature
    scores = scores if isinstance(by, Normalised) else scores + offset
    whole = _weigh(by, scores, temperature)
    seen = torch.cat([scores, whole.threshold.unsqueeze(1).expand(-1, 30)], dim=1)
    more = _weigh(by, seen, temperature)
    assert (more.weights[:, 12:] == 0).all()
    digits = 1e-6 if dtype is torch.float32 else 1e-13
    torch.testing.assert_close(more.weights[:, :12], whole.weights, rtol=digits, atol=digits)
    torch.testing.assert_close(more.lse, whole.lse, rtol=digits, atol=digits)


@pytest.mark.parametrize("by", [*SPARSE, Argmax(), Normalised()], ids=lambda one: one.name)
def test_scores_just_above_the_threshold_count(by: Weighting) -> None:
    scores = _scores(by, 50, 12)
    above = (_weigh(by, scores).threshold + 1e-4).unsqueeze(1)
    assert (_weigh(by, torch.cat([scores, above], dim=1)).weights[:, 12] > 0).all()


def test_dense_weightings_give_no_certificate() -> None:
    for by in ALL[::4]:  # softmax, uniform
        assert (_weigh(by, _scores(by, 3, 4)).threshold == -math.inf).all()
        assert not by.sparse
    assert all(by.sparse for by in ALL if by not in ALL[::4])


# -- over blocks -------------------------------------------------------------------------------------------------------

WORLDS = {
    "one": torch.zeros(1),
    "two": torch.tensor([0.0, -0.3]),
    "flat": torch.linspace(0, 1e-3, 5000),
    "spread": torch.linspace(-6, 6, 5000),
    "normal": torch.randn(5000, generator=torch.Generator().manual_seed(0)),
    "peaked": torch.cat([torch.tensor([50.0]), torch.linspace(0, 1, 999)]),
    "tied": torch.zeros(5000),
    "tied at the top": torch.cat([torch.full((7,), 3.0), torch.linspace(-9, 2.9, 3000)]),
    "one ahead of many": torch.cat([torch.tensor([0.0]), torch.full((4999,), -0.98)]),
    "dead": torch.cat([torch.tensor([0.3, 0.0]), torch.full((50,), -math.inf)]),
}


def _newton(by: Sparse, blocks: Sequence[Tensor]) -> tuple[Tensor, int]:
    """τ (1, 1) of scores below their largest, as the docstring of Sparse tells it, and how many steps it took."""
    tau = torch.full((1, 1), -1.0, dtype=torch.float64)
    for steps in range(100):
        found = [by.root_step(block, tau) for block in blocks]
        mass, slope = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
        new = tau + ((1 - mass) / slope).unsqueeze(-1)
        if (mass <= 1) or (new == tau):
            return tau, steps
        assert new > tau  # from below, always
        tau = new
    raise AssertionError(f"no root in 100 steps, mass {float(mass)}")


@every_sparse
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("temperature", [1.0, 0.1, 40.0])
def test_newton_over_blocks_reaches_the_weights_of_the_whole(by: Sparse, world: str, temperature: float) -> None:
    scores = WORLDS[world].double()[None]
    z = (scores - scores.max()) / temperature
    blocks = torch.split(z, 700, dim=1)
    tau, steps = _newton(by, blocks)
    assert steps <= 30
    whole = _weigh(by, scores, temperature, scores > -math.inf)
    top = whole.weights.max().item()
    assert tau.item() == pytest.approx(-(top ** (by.alpha - 1)), abs=1e-12)
    parts = [by.of(block, tau)[0] for block in blocks]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.weights, rtol=0, atol=1e-12)
    gains = [(p * block.clamp(min=-1e3)).sum(1) + by.entropy(p) for p, block in zip(parts, blocks, strict=True)]
    theirs = getattr(entmax, by.name)(z.clamp(min=-99), dim=-1)
    torch.testing.assert_close(torch.cat(parts, dim=1), theirs, rtol=0, atol=3e-12)
    lse = torch.stack(gains).sum(0) + scores.max() / temperature
    torch.testing.assert_close(lse, whole.lse, rtol=1e-12, atol=1e-12)


@every_sparse
def test_pulls_give_the_gradient(by: Sparse) -> None:
    z = _scores(by, 4, 20).requires_grad_()
    along = torch.randn(4, 20, dtype=torch.float64)
    weights = _weigh(by, z).weights
    assert (weights == 0).any()
    (expected,) = torch.autograd.grad((weights * along).sum(), z)
    tops = z.detach().amax(1, keepdim=True)
    tau = -(weights.detach().amax(1, keepdim=True) ** (by.alpha - 1))
    p, u = by.of(z.detach() - tops, tau)
    torch.testing.assert_close(p, weights.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(u, torch.where(p > 0, p ** (2 - by.alpha), 0.0), rtol=1e-6, atol=1e-12)
    pulled = u * (along - (u * along).sum(1, keepdim=True) / u.sum(1, keepdim=True))
    torch.testing.assert_close(pulled, expected, rtol=1e-9, atol=1e-11)


@every_sparse
def test_the_slope_is_the_derivative_of_the_mass(by: Sparse) -> None:
    z, tau = _scores(by, 3, 20), torch.full((3, 1), -0.4, dtype=torch.float64, requires_grad=True)
    mass, slope = by.root_step(z, tau)
    torch.testing.assert_close(torch.autograd.grad(mass.sum(), tau)[0].squeeze(1), slope.detach())
