"""Attention-based pooling of bags, against equations 7 to 9 as loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.nn import MILPooling

DIM, HIDDEN, N = 4, 6, 5
LENGTHS = [5, 2, 0, 1]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(2)


def pooling(gated: bool) -> MILPooling:
    """In float64, with scores that differ."""
    made = MILPooling(DIM, hidden=HIDDEN, gated=gated).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=3)
    return made


def by_loops(
    module: MILPooling,
    bag: Tensor,  # (n, d)
) -> tuple[list[float], list[float]]:  # d, n
    """Equations 7, 8 and 9, number by number."""
    v, w = module.content.weight.tolist(), module.score.weight[0].tolist()
    u = None if module.gate is None else module.gate.weight.tolist()
    scores = []
    for h in bag.tolist():
        score = 0.0
        for row in range(HIDDEN):
            unit = math.tanh(sum(v[row][i] * h[i] for i in range(DIM)))
            if u is not None:
                unit *= 1 / (1 + math.exp(-sum(u[row][i] * h[i] for i in range(DIM))))
            score += w[row] * unit
        scores.append(math.exp(score))
    weights = [score / sum(scores) for score in scores]
    return [sum(a * h[i] for a, h in zip(weights, bag.tolist(), strict=True)) for i in range(DIM)], weights


@pytest.mark.parametrize("gated", [False, True])
def test_bags_are_pooled_by_the_equations_of_the_paper(gated: bool) -> None:
    module, bags = pooling(gated), torch.randn(4, N, DIM, dtype=torch.float64)
    bags[0, 1] = bags[0, 0]  # a duplicate
    bags[0, 2] = 0
    pooled, weights = module(bags, valid_len=torch.tensor(LENGTHS))
    for i, length in enumerate(LENGTHS):
        expected, shares = by_loops(module, bags[i, :length])
        torch.testing.assert_close(pooled[i], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(weights[i], torch.tensor(shares + [0.0] * (N - length), dtype=torch.float64))
    assert weights[0].max() > 2 * weights[0].min(), "all weights are alike: nothing is compared"


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_reach_instances_and_parameters(gated: bool) -> None:
    module = pooling(gated)
    bags = torch.randn(4, N, DIM, dtype=torch.float64, requires_grad=True)
    parameters = list(module.parameters())
    assert len(parameters) == (3 if gated else 2)

    def ask(given: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(given, valid_len=LENGTHS))

    assert torch.autograd.gradcheck(ask, (bags, *parameters))
    torch.autograd.backward(ask(bags)[0].square().sum())
    assert bags.grad is not None
    assert bags.grad[0].abs().sum() > 0
    assert not bool(bags.grad[2].any()), "an empty bag pulls"
    assert not bool(bags.grad[1, 2:].any()), "padding pulls"


def test_the_order_of_a_bag_does_not_matter() -> None:
    module, bags = pooling(True), torch.randn(2, N, DIM, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    pooled, weights = module(bags)
    mixed, moved = module(bags[:, order])
    torch.testing.assert_close(mixed, pooled)
    torch.testing.assert_close(moved, weights[:, order])
    assert not torch.allclose(moved, weights)


def test_padding_has_no_weight() -> None:
    module, bags = pooling(False), torch.randn(2, N, DIM, dtype=torch.float64)
    other = bags.clone()
    other[:, 3:] = 1e6
    for one, two in zip(module(bags, valid_len=[3, 3]), module(other, valid_len=[3, 3]), strict=True):
        assert torch.equal(one, two)
    torch.testing.assert_close(module(bags, valid_len=[3, 3])[0], module(bags[:, :3])[0])


def test_empty_bags_give_zeros_and_no_bags_give_no_rows() -> None:
    module = pooling(True)
    pooled, weights = module(torch.zeros(3, 0, DIM, dtype=torch.float64))
    assert torch.equal(pooled, torch.zeros(3, DIM, dtype=torch.float64))
    assert weights.shape == (3, 0)
    assert [tuple(one.shape) for one in module(torch.zeros(0, N, DIM, dtype=torch.float64))] == [(0, DIM), (0, N)]


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"hidden is 0; expected a whole number at least 1"):
        MILPooling(DIM, hidden=0)
    module = MILPooling(DIM)
    with pytest.raises(BadInput, match=r"bags have shape \(5, 4\); expected \(b, n, 4\); pad short bags"):
        module(torch.zeros(N, DIM))
    with pytest.raises(BadInput, match=r"bags have shape \(1, 5, 3\)"):
        module(torch.zeros(1, N, 3))
    with pytest.raises(BadInput, match=r"bags are \[\]; expected a floating tensor"):
        module([])
    with pytest.raises(BadInput, match=r"valid_len has shape \(3,\); expected \(2,\)"):
        module(torch.zeros(2, N, DIM), valid_len=[1, 2, 3])
