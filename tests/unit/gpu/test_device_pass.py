"""Soft queries and nearest records over columns on a device, in torch, against the loops; and where they are picked."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from worlds import Array, awkward

from softdb.attend import Columns, Request, stream
from softdb.check import Metric
from softdb.gpu import nearest, pooled
from softdb.scores import Cosine, Dot, Gaussian, Score

EQUATIONS = {Metric.DOT: reference.dot, Metric.COSINE: reference.cosine, Metric.L2: reference.negative_l2}
D, V = 5, 3


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as a device's."""
    monkeypatch.setattr(sys.modules["softdb.gpu.usable"], "PRETENDED", True)


@pytest.fixture
def world(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Queries (6, D), keys (40, D), values (40, V)."""
    shapes = (6, D), (40, V)
    queries, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return queries, awkward(rng, 40, D), values


@pytest.mark.parametrize(("metric", "equation"), EQUATIONS.items())
def test_the_equations(world: tuple[Array, Array, Array], metric: Metric, equation: reference.Score) -> None:
    queries, keys, values = map(torch.from_numpy, world)
    expected = reference.soft_query(equation, *world, 0.5)
    for one, other in zip(pooled(queries, keys, values, metric=metric, scale=2.0), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    scores, positions = nearest(queries, keys, 7, metric=metric)
    table = torch.from_numpy(reference.scores(equation, *world[:2])).float()
    torch.testing.assert_close(scores, table.gather(1, positions))
    torch.testing.assert_close(scores, table.sort(dim=1, descending=True).values[:, :7])


@pytest.mark.parametrize("score", [Dot(), Cosine(), Gaussian(0.7)])
def test_columns_on_a_device_are_asked_there(
    world: tuple[Array, Array, Array], score: Score, request: pytest.FixtureRequest
) -> None:
    def answered() -> tuple[Tensor, ...]:
        queries, keys, values = (torch.from_numpy(one).requires_grad_() for one in world)
        asked = Request.of(queries, score, allowed=np.arange(40) % 3 > 0, mask=torch.ones(6, 40).tril(20).bool())
        found = stream(asked, Columns(keys, values))
        return (*found, *torch.autograd.grad((found[0].sum() + found[1].sum()), (queries, keys, values)))

    expected = answered()
    request.getfixturevalue("pretended")
    assert Columns(torch.from_numpy(world[1]), torch.from_numpy(world[2])).resident
    for one, other in zip(answered(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
