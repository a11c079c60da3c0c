"""Positions, against the equations as loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.nn import LearnedPositions, RotaryPositions, SinusoidalPositions

B, N = 3, 7


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def sinusoids(n: int, dim: int, offset: int = 0) -> Tensor:  # (n, d)
    """Section 3.5, number by number."""
    table = torch.empty(n, dim, dtype=torch.float64)
    for p in range(n):
        for j in range(dim):
            angle = (p + offset) / 10000 ** (2 * (j // 2) / dim)
            table[p, j] = math.cos(angle) if j % 2 else math.sin(angle)
    return table


def turned(x: Tensor, offset: int = 0) -> Tensor:  # (n, d)
    """Equation 15 of Su et al.: the block-diagonal matrix of rotations, times each row."""
    n, dim = x.shape
    rows = []
    for p in range(n):
        matrix = torch.zeros(dim, dim, dtype=torch.float64)
        for i in range(dim // 2):
            angle = (p + offset) * 10000 ** (-2 * i / dim)
            place = slice(2 * i, 2 * i + 2)
            matrix[place, place] = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
            )
        rows.append(matrix @ x[p])
    return torch.stack(rows)


@pytest.mark.parametrize("dim", [1, 2, 5, 8])
@pytest.mark.parametrize("offset", [0, 3])
def test_sinusoids_are_those_of_the_paper(dim: int, offset: int) -> None:
    x = torch.randn(B, N, dim, dtype=torch.float64)
    actual = SinusoidalPositions(dim)(x, offset=offset)
    torch.testing.assert_close(actual, x + sinusoids(N, dim, offset), rtol=1e-12, atol=1e-12)


def test_sinusoids_are_precise_far_out() -> None:
    # float32 angles of a million are off by a sixteenth
    x = torch.zeros(1, 2, 6)
    torch.testing.assert_close(
        SinusoidalPositions(6)(x, offset=10**6)[0].double(), sinusoids(2, 6, 10**6), rtol=0, atol=1e-6
    )


def test_a_step_is_the_same_rotation_everywhere() -> None:
    table = SinusoidalPositions(2)(torch.zeros(9, 2, dtype=torch.float64))
    angle = math.cos(1), math.sin(1)
    rotation = torch.tensor([[angle[0], angle[1]], [-angle[1], angle[0]]], dtype=torch.float64)
    torch.testing.assert_close(table[:-1] @ rotation.mT, table[1:])


def test_dropout_is_of_the_sum_and_in_training_only() -> None:
    positions = SinusoidalPositions(4, dropout=0.5)
    x = torch.ones(50, N, 4)
    trained = positions(x)
    full = x + sinusoids(N, 4).float()
    kept = trained != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(trained[kept], (2 * full)[kept])
    torch.testing.assert_close(positions.eval()(x), full)


def test_learnt_positions_are_added_and_trained() -> None:
    positions = LearnedPositions(10, 4)
    assert 0.01 < positions.weight.std() < 0.03
    x = torch.randn(B, N, 4, requires_grad=True)
    actual = positions(x, offset=2)
    for p in range(N):
        assert torch.equal(actual[:, p], x[:, p] + positions.weight[p + 2])
    actual.sum().backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(10, 4)
    expected[2 : 2 + N] = B
    assert positions.weight.grad is not None
    assert torch.equal(positions.weight.grad, expected)


def test_the_last_position_is_reached_and_the_next_refused() -> None:
    for positions in (LearnedPositions(N, 4), SinusoidalPositions(4, max_len=N)):
        positions(torch.zeros(1, N, 4))
        positions(torch.zeros(1, 2, 4), offset=N - 2)
        with pytest.raises(BadInput, match=r"x is 8 long .* from offset 0 on, but max_len is 7; shorten it"):
            positions(torch.zeros(1, N + 1, 4))
        with pytest.raises(BadInput, match=r"x is 2 long .* from offset 6 on"):
            positions(torch.zeros(1, 2, 4), offset=N - 1)


@pytest.mark.parametrize("dim", [2, 6])
@pytest.mark.parametrize("offset", [0, 4])
def test_rotary_positions_are_rotations(dim: int, offset: int) -> None:
    x = torch.randn(B, N, dim, dtype=torch.float64)
    actual = RotaryPositions(dim)(x, offset=offset)
    for one, before in zip(actual, x, strict=True):
        torch.testing.assert_close(one, turned(before, offset), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.norm(dim=-1), x.norm(dim=-1))


def test_rotary_dot_products_depend_on_the_offset_only() -> None:
    rotary = RotaryPositions(8)
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    queries, keys = rotary(query.expand(1, 30, 8))[0], rotary(key.expand(1, 30, 8))[0]
    scores = queries @ keys.mT  # (30, 30)
    for distance in range(-29, 30):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.1, "positions change nothing"
    far = rotary(query.expand(1, 30, 8), offset=500)[0] @ rotary(key.expand(1, 30, 8), offset=500)[0].mT
    torch.testing.assert_close(far, scores)


@pytest.mark.parametrize("make", [SinusoidalPositions, RotaryPositions, lambda dim: LearnedPositions(9, dim)])
def test_empty_input_gives_empty_output_and_heads_are_a_batch(make: type) -> None:
    positions = make(4)
    assert positions(torch.zeros(2, 0, 4)).shape == (2, 0, 4)
    x = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    actual = positions(x)
    assert actual.dtype is torch.bfloat16
    assert torch.equal(actual[1, 2], positions(x[1, 2]))


@pytest.mark.parametrize("make", [SinusoidalPositions, RotaryPositions, lambda dim: LearnedPositions(9, dim)])
def test_gradients_reach_x(make: type) -> None:
    positions = make(4).double()
    assert torch.autograd.gradcheck(positions, torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("make", [SinusoidalPositions, RotaryPositions, lambda dim: LearnedPositions(9, dim)])
def test_mismatched_shapes_are_refused(make: type) -> None:
    with pytest.raises(BadInput, match=r"dim is 0; expected a whole number at least 1"):
        make(0)
    positions = make(4)
    with pytest.raises(BadInput, match=r"x has shape \(2, 3\) but these positions are made for \(…, n, 4\)"):
        positions(torch.zeros(2, 3))
    with pytest.raises(BadInput, match=r"(?s)x is .*; expected a floating tensor"):
        positions(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(BadInput, match=r"offset is -1; expected a whole number at least 0"):
        positions(torch.zeros(2, 4), offset=-1)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadInput, match=r"dim is 5, but rotary positions turn pairs of coordinates; choose an even"):
        RotaryPositions(5)
    with pytest.raises(BadInput, match=r"dropout is 2; expected a number from 0 to 1"):
        SinusoidalPositions(4, dropout=2)
    with pytest.raises(BadInput, match=r"max_len is 0; expected a whole number"):
        SinusoidalPositions(4, max_len=0)
