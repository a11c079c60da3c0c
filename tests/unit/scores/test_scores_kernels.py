"""Kernels against the equations: values, logs, volumes, gradients and edges of the support."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.scores import Boxcar, Constant, Epanechnikov, Fold, Gaussian, Kernel, Laplacian, Triangular, fold
from softdb.scoring import distance

Floats = np.ndarray[Any, np.dtype[np.float64]]

# -- the equations, of one distance, in float64 ------------------------------------------------------------------------

EQUATIONS: dict[type[Kernel], Callable[[float], float]] = {
    kind: reference.KERNELS[kind.__name__.lower()]
    for kind in (Gaussian, Laplacian, Boxcar, Epanechnikov, Triangular, Constant)
}
NAMES = {
    Gaussian: "gaussian",
    Laplacian: "exponential",
    Boxcar: "tophat",
    Epanechnikov: "epanechnikov",
    Triangular: "linear",
}
every_kernel = pytest.mark.parametrize("kind", NAMES, ids=NAMES.values())
with_constant = pytest.mark.parametrize("kind", EQUATIONS, ids=lambda kind: kind.__name__)
BANDWIDTHS = {"one": 1.3, "each": [0.7, 1.5, 2.0, 1.1]}
every_bandwidth = pytest.mark.parametrize("h", BANDWIDTHS.values(), ids=BANDWIDTHS.keys())


def table(kind: type[Kernel], queries: Floats, keys: Floats, h: Any) -> Floats:
    """K by loops: queries (q, d), keys (n, d), h a number or (d,)."""
    hs = np.broadcast_to(np.asarray(h, np.float64), queries.shape[1:])
    rows = []
    for query in queries.tolist():
        us = [
            math.sqrt(sum(((a - b) / w) ** 2 for a, b, w in zip(query, key, hs, strict=True))) for key in keys.tolist()
        ]
        rows.append([EQUATIONS[kind](u) for u in us])
    return np.array(rows).reshape(len(queries), len(keys))


def make(kind: Any, h: Any = 1.0, learnable: bool = False) -> Any:
    if kind is Constant:
        return Constant()
    return kind(torch.tensor(h, dtype=torch.float64), learnable=learnable)


def world(d: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (6, d) and keys (9, d): some at distance 0, some beyond every support."""
    torch.manual_seed(0)
    queries, keys = torch.randn(6, d, dtype=torch.float64), torch.randn(9, d, dtype=torch.float64)
    keys[0], keys[1], keys[2] = queries[0], queries[0], 0
    keys[3] += 50
    queries[5] = 0
    return queries, keys


def shared_and_own(kernel: Any, queries: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
    return [kernel(queries, keys), kernel(queries, keys.expand(len(queries), *keys.shape))]


# -- values ------------------------------------------------------------------------------------------------------------


@with_constant
@every_bandwidth
def test_kernels_are_the_equation(kind: type[Kernel], h: Any) -> None:
    queries, keys = world()
    kernel, expected = make(kind, h), table(kind, queries.numpy(), keys.numpy(), h)
    with np.errstate(divide="ignore"):
        logs = np.log(expected)
    for actual in shared_and_own(kernel, queries, keys):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
        assert (actual >= 0).all()
    for actual in shared_and_own(kernel.log, queries, keys):
        near = logs > -30
        np.testing.assert_allclose(actual[near], logs[near], rtol=1e-12, atol=1e-12)
        assert (np.isneginf(actual.numpy()) == (np.isneginf(logs) & kernel.compact)).all()
    assert not kernel.compact or (expected == 0).any()  # the world reaches beyond the support


@with_constant
def test_kernels_of_batches_are_those_of_their_parts(kind: type[Kernel]) -> None:
    kernel, (queries, keys) = make(kind, 1.3), world()
    batch, theirs = torch.stack([queries, queries + 1]), torch.stack([keys, keys - 1])
    whole = torch.stack([kernel(a, b) for a, b in zip(batch, theirs, strict=True)])
    torch.testing.assert_close(kernel(batch, theirs), whole, rtol=1e-12, atol=0)
    own = theirs.unsqueeze(1).expand(2, 6, 9, 4)
    torch.testing.assert_close(kernel(batch, own), whole, rtol=1e-12, atol=1e-14)


@with_constant
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_float32_stays_right_far_from_the_origin(kind: type[Kernel], offset: float) -> None:
    """Distances of 1 at coordinates of 1e4: an expansion in float32 loses them, and its root even in float64."""
    queries, keys = ((one[:, :2] + offset).float() for one in world())
    expected = table(kind, queries.double().numpy(), keys.double().numpy(), 1.3)
    for actual in shared_and_own(make(kind, 1.3), queries, keys):
        assert actual.dtype is torch.float32
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)
    for actual in shared_and_own(make(kind, 1.3), queries, queries):
        assert (actual.diagonal() == 1).all()


@with_constant
def test_keys_of_any_dtype_are_compared_in_the_queries(kind: type[Kernel]) -> None:
    queries, keys = world()
    expected = table(kind, queries.numpy(), keys.bfloat16().double().numpy(), 1.3)
    for actual in shared_and_own(make(kind, 1.3), queries, keys.bfloat16()):
        assert actual.dtype is torch.float64
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_many_keys_are_widened_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = world()
    whole = Laplacian()(queries, keys)
    monkeypatch.setattr(distance, "BLOCK", 2)
    torch.testing.assert_close(Laplacian()(queries, keys), whole)


def test_a_record_at_the_bandwidth_is_inside_the_boxcar() -> None:
    """exp(log h) is not always h, and distances are rounded."""
    for h in (0.1, 0.3, 1.0, 5.0, 7.0, 123.0):
        for dtype in (torch.float64, torch.float32):
            queries, keys = (
                torch.zeros(1, 2, dtype=dtype),
                torch.tensor([[h, 0.0], [0, h], [0, 1.001 * h]], dtype=dtype),
            )
            for actual in shared_and_own(Boxcar(h), queries, keys):
                assert actual.tolist() == [[1, 1, 0]]


def test_log_kernels_do_not_vanish_far_out() -> None:
    queries, keys = torch.zeros(1, 1), torch.tensor([[1e4], [2e4]])
    assert Gaussian()(queries, keys).tolist() == [[0, 0]]
    torch.testing.assert_close(Gaussian().log(queries, keys), torch.tensor([[-5e7, -2e8]]))
    torch.testing.assert_close(Laplacian().log(queries, keys), torch.tensor([[-1e4, -2e4]]))


@with_constant
def test_no_keys_give_no_scores(kind: type[Kernel]) -> None:
    kernel, queries = make(kind), torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    for shape in ((0, 4), (3, 0, 4)):
        for function in (kernel, kernel.log):
            actual = function(queries, torch.empty(shape))
            assert actual.shape == (3, 0)
            assert torch.autograd.grad(actual.sum(), queries)[0].tolist() == [[0] * 4] * 3


# -- gradients ---------------------------------------------------------------------------------------------------------


def _smooth(kind: type[Kernel], h: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys on both sides of the kernel's edge, none at distance 0 or on it."""
    torch.manual_seed(3)
    queries, keys = 0.5 * torch.randn(3, 4, dtype=torch.float64), 0.9 * torch.randn(6, 4, dtype=torch.float64)
    us = ((queries[:, None] - keys) / torch.as_tensor(h)).norm(dim=-1)
    assert (us.min() > 1e-2) & ((us - 1).abs().min() > 1e-3) & (us.min() < 1) & (us.max() > 1)
    return queries.requires_grad_(), keys.requires_grad_()


@with_constant
@every_bandwidth
@pytest.mark.parametrize("shape", ["shared", "own", "batched", "batched, own"])
def test_gradients_are_the_derivatives(kind: type[Kernel], h: Any, shape: str) -> None:
    queries, keys = _smooth(kind, h)
    kernel = make(kind, h, learnable=True)
    parameters = list(kernel.parameters())
    views: dict[str, Callable[..., Any]] = {
        "shared": lambda q, k: (q, k),
        "own": lambda q, k: (q, k.expand(3, 6, 4)),
        "batched": lambda q, k: (q.expand(2, 3, 4), k.expand(2, 6, 4)),
        "batched, own": lambda q, k: (q.expand(2, 3, 4), k.expand(2, 3, 6, 4)),
    }
    view = views[shape]
    assert torch.autograd.gradcheck(lambda q, k, *_: kernel(*view(q, k)), (queries, keys, *parameters))

    def inside(q: torch.Tensor, k: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        logs: torch.Tensor = kernel.log(*view(q, k))
        return logs.masked_fill(logs == -math.inf, 0)

    assert torch.autograd.gradcheck(inside, (queries, keys, *parameters))


@with_constant
@every_bandwidth
def test_gradients_are_finite_and_zero_outside(kind: type[Kernel], h: Any) -> None:
    queries, keys = (one.requires_grad_() for one in world())
    kernel = make(kind, h, learnable=True)
    sources = [queries, keys, *kernel.parameters()]
    for function in (kernel, kernel.log):
        for actual in shared_and_own(function, queries, keys):
            for grad in torch.autograd.grad(actual.sum(), sources, retain_graph=True):
                assert torch.isfinite(grad).all()
            if kernel.compact:  # the fourth key is beyond every support
                for grad in torch.autograd.grad(actual[:, 3].sum(), sources):
                    assert (grad == 0).all()


@pytest.mark.parametrize("kind", [Laplacian, Triangular])
def test_corners_pull_nowhere(kind: type[Kernel]) -> None:
    queries = torch.tensor([[3.0, 4.0], [1e4, 0.1]], requires_grad=True)
    keys = queries.detach().clone()
    for function in (make(kind), make(kind).log):
        for actual in shared_and_own(function, queries, keys):
            grads = torch.autograd.grad(actual.diagonal().sum(), queries)
            assert grads[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("kind", [Epanechnikov, Triangular])
def test_the_edge_itself_is_outside_with_a_finite_gradient(kind: type[Kernel]) -> None:
    queries = torch.zeros(1, 1, requires_grad=True)
    keys = torch.tensor([[1.0], [1 - 2**-24]])
    logs = make(kind).log(queries, keys)
    assert logs[0, 0] == -math.inf
    assert logs[0, 1] > -20
    assert torch.isfinite(torch.autograd.grad(logs[0, 1] + logs[0, 0], queries)[0]).all()


# -- volumes -----------------------------------------------------------------------------------------------------------


@every_kernel
def test_volumes_are_the_integrals(kind: type[Kernel]) -> None:
    """By a fine grid: one coordinate, then two of unequal bandwidth."""
    grid = torch.linspace(-60, 60, 120_001, dtype=torch.float64).unsqueeze(1)
    kernel = make(kind, 1.7)
    area = torch.trapezoid(kernel(torch.zeros(1, 1, dtype=torch.float64), grid)[0], grid[:, 0])
    assert float(kernel.log_volume(1)) == pytest.approx(math.log(area), abs=5e-4)
    axis = torch.linspace(-16, 16, 1601, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    kernel = make(kind, [0.8, 0.5])
    area = kernel(torch.zeros(1, 2, dtype=torch.float64), points).sum() * (axis[1] - axis[0]) ** 2
    assert float(kernel.log_volume(2)) == pytest.approx(math.log(area), abs=1e-2)


@every_kernel
def test_a_bandwidth_learns_by_the_density(kind: type[Kernel]) -> None:
    kernel = make(kind, [0.5, 2.0], learnable=True)
    assert torch.autograd.gradcheck(lambda _: kernel.log_volume(2), list(kernel.parameters()))
    one = make(kind, 0.5, learnable=True)
    assert torch.autograd.gradcheck(lambda _: one.log_volume(3), list(one.parameters()))


def test_volumes_that_are_none_are_refused() -> None:
    with pytest.raises(BadInput, match="the constant kernel has no density"):
        Constant().log_volume(2)
    with pytest.raises(BadInput, match="d is 3 but this kernel has 2 bandwidths"):
        Gaussian([1.0, 2.0]).log_volume(3)
    with pytest.raises(BadInput, match="d is 0; expected a whole number"):
        Gaussian().log_volume(0)


# -- folds and errors --------------------------------------------------------------------------------------------------


@every_kernel
def test_an_index_finds_by_distance(kind: type[Kernel]) -> None:
    queries, keys = world()
    kernel = make(kind, 3.0)
    folded = fold(kernel, queries)
    assert folded == Fold(Metric.L2, queries, None, 0.0)
    assert kernel.metric is Metric.L2
    order = (queries.unsqueeze(1) - keys).norm(dim=-1).argsort(dim=1)
    assert (kernel(queries, keys).gather(1, order).diff(dim=1) <= 1e-15).all()
    assert fold(make(kind, [1.0, 2.0, 1.0, 1.0]), queries) is None


def test_every_record_is_nearest_to_the_constant_kernel() -> None:
    queries = torch.randn(2, 3, requires_grad=True)
    folded = fold(Constant(), queries)
    assert folded is not None
    assert folded.queries.tolist() == [[0] * 3] * 2
    assert Constant().metric is Metric.DOT
    assert not Constant().state_dict()
    assert repr(Constant()) == "Constant()"


@with_constant
def test_widths_and_shapes_that_do_not_fit_are_refused(kind: type[Kernel]) -> None:
    with pytest.raises(BadInput, match="queries are 4 wide but the keys are 5 wide"):
        make(kind)(torch.ones(2, 4), torch.ones(3, 5))
    with pytest.raises(BadInput, match=re.escape("queries have shape (2, 4) and keys (3, 5, 4)")):
        make(kind).log(torch.ones(2, 4), torch.ones(3, 5, 4))


def test_a_bandwidth_for_each_coordinate_must_fit() -> None:
    with pytest.raises(BadInput, match=r"queries are 3 wide \(shape \(1, 3\)\) but this score was made for 2"):
        Laplacian([1.0, 2.0])(torch.ones(1, 3), torch.ones(4, 3))


def test_second_derivatives_of_roots_need_own_keys() -> None:
    queries, keys = _smooth(Laplacian, 1.3)
    own = keys.detach().expand(3, 6, 4)
    assert torch.autograd.gradgradcheck(lambda q: Laplacian()(q, own), (queries,))
    (grad,) = torch.autograd.grad(Laplacian()(queries, keys).sum(), queries, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cdist_backward.* not implemented"):
        torch.autograd.grad(grad.sum(), queries)
