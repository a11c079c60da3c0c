"""The softmax over trainable rows against loops and autograd in float64: exact, truncated and drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import close
from torch import Tensor
from torch.nn import functional as F

import softdb
from softdb import BadInput, cross_entropy, linear_cross_entropy

N, D = 700, 20


def world(q: int, dtype: torch.dtype = torch.float32, n: int = N, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, rows and targets; two rows are equal, one is zero, and one is the target of two queries."""
    random = torch.Generator().manual_seed(q)
    queries = torch.randn(q, d, generator=random, dtype=torch.float64)
    weight = torch.randn(n, d, generator=random, dtype=torch.float64)
    weight[3], weight[5] = weight[4], 0
    targets = torch.randint(n, (q,), generator=random)
    targets[: min(q, 2)] = 4
    return queries.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def looped(queries: Tensor, weight: Tensor, targets: Tensor, temperature: float, k: int = N) -> Tensor:
    """The losses from the equation, over the k largest scores and the target."""
    losses = []
    for query, target in zip(queries.tolist(), targets.tolist(), strict=True):
        scores = [sum(x * y for x, y in zip(query, row, strict=True)) / temperature for row in weight.tolist()]
        largest = {*sorted(range(len(scores)), key=scores.__getitem__)[-k:], target}
        highest = max(scores)
        total = math.fsum(math.exp(scores[j] - highest) for j in largest)
        losses.append(math.log(total) + highest - scores[target])
    return torch.tensor(losses, dtype=torch.float64)


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense().double()


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    """Gradients agree to a share of their largest entry."""
    for mine, right in zip(found, expected, strict=True):
        close(dense(mine), dense(right), tolerance * max(1e-3, float(dense(right).abs().max())))


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_the_equation(dtype: torch.dtype, temperature: float) -> None:
    queries, weight, targets = world(6, dtype)
    losses = linear_cross_entropy(queries, weight, targets, temperature=temperature, reduction="none")
    assert losses.dtype is dtype
    precision = 1e-10 if dtype is torch.float64 else 1e-5 / temperature
    close(losses, looped(queries, weight, targets, temperature), precision)


@pytest.mark.parametrize("temperature", [1.0, 0.02])  # at .02 most blocks of rows have no weight and are left out
@pytest.mark.parametrize("d", [16, 19])
@pytest.mark.parametrize("q", [1, 4, 5, 33, 1030])
def test_gradients_are_those_of_float64(q: int, d: int, temperature: float) -> None:
    queries, weight, targets = world(q, d=d, n=N if q > 1 else 5000)
    heat = torch.tensor(temperature, requires_grad=True)
    losses = linear_cross_entropy(queries, weight, targets, temperature=heat, reduction="none")
    upstream = torch.rand(q, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(losses, (queries, weight, heat), upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in (queries, weight, heat)]
    right = F.cross_entropy(wide[0] / wide[2] @ wide[1].mT, targets, reduction="none")
    agree(found, torch.autograd.grad(right, wide, upstream.double()), 2e-6 / temperature**0.5)


def test_kernels_and_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, weight, targets = world(40)
    ours = torch.autograd.grad(linear_cross_entropy(queries, weight, targets), (queries, weight))
    monkeypatch.setattr("softdb.attend.fused.available", lambda: False)
    agree(ours, torch.autograd.grad(linear_cross_entropy(queries, weight, targets), (queries, weight)), 1e-5)


def test_any_leading_shape_ignored_targets_and_reductions() -> None:
    queries, weight, targets = world(12, torch.float64)
    targets[5] = targets[7] = -1
    given: dict[str, Any] = {"ignore_index": -1, "temperature": torch.linspace(0.5, 2, 4).double()}
    heat = given["temperature"].repeat(3).unsqueeze(1)
    for reduction in ("none", "sum", "mean"):
        loss = linear_cross_entropy(queries.view(3, 4, D), weight, targets.view(3, 4), reduction=reduction, **given)
        right = F.cross_entropy(queries / heat @ weight.mT, targets, reduction=reduction, ignore_index=-1)
        close(loss, right.view(3, 4) if reduction == "none" else right, 1e-10)
        found, expected = (torch.autograd.grad(x.sum(), (queries, weight)) for x in (loss, right))
        agree(found, expected, 1e-10)
    nothing = linear_cross_entropy(queries, weight, torch.full((12,), -1), ignore_index=-1)
    assert bool(nothing.isnan())  # as in torch
    assert linear_cross_entropy(queries[0], weight, targets[0]).shape == ()
    assert linear_cross_entropy(queries[:0], weight, targets[:0], k=3, max_draws=9, reduction="none").shape == (0,)


def test_gradcheck() -> None:
    queries, weight, targets = world(5, torch.float64, n=40, d=6)
    heat = torch.rand(5, dtype=torch.float64).add(0.5).requires_grad_()
    for options in ({}, {"k": 6, "sparse": False}, {"max_draws": 8, "sparse": False}):

        def loss(q: Tensor, w: Tensor, t: Tensor, options: dict[str, Any] = options) -> Tensor:
            draws = torch.Generator().manual_seed(1)
            return linear_cross_entropy(q, w, targets, temperature=t, generator=draws, reduction="none", **options)

        assert torch.autograd.gradcheck(loss, (queries, weight, heat))


def test_autocast_and_half_precision_are_computed_in_float32() -> None:
    queries, weight, targets = world(40)
    right = linear_cross_entropy(queries.bfloat16().float(), weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = F.linear(queries, torch.eye(D))
        loss = linear_cross_entropy(encoded, weight, targets)
        drawn = linear_cross_entropy(encoded, weight, targets, max_draws=100)
    assert loss.dtype is drawn.dtype is torch.float32
    close(loss, right, 1e-5)
    narrow = weight.detach().bfloat16().requires_grad_()
    several: list[dict[str, Any]] = [{}, {"k": 5}, {"max_draws": 30}]
    for options in several:
        (grad,) = torch.autograd.grad(linear_cross_entropy(queries, narrow, targets, **options), narrow)
        assert grad.dtype is torch.bfloat16


def test_a_second_derivative_of_the_exact_loss_is_refused() -> None:
    queries, weight, targets = world(40)
    (grad,) = torch.autograd.grad(linear_cross_entropy(queries, weight, targets), queries, create_graph=True)
    with pytest.raises(BadInput, match="no second derivative"):
        grad.sum().backward()  # type: ignore[no-untyped-call]
    loss = linear_cross_entropy(queries, weight, targets, k=N, sparse=False)  # the way round
    right = F.cross_entropy(queries @ weight.mT, targets)
    seconds = []
    for each in (loss, right):
        (grad,) = torch.autograd.grad(each, queries, create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), (queries, weight)))
    agree(seconds[0], seconds[1], 1e-4)


# -- truncated ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 300])
def test_the_k_largest_and_the_target_count(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, weight, targets = world(6, torch.float64)
    targets[2] = int((queries[2] @ weight.mT).argmax())  # a target among the k
    monkeypatch.setattr(cross_entropy, "SCORED", 2 * N)  # several searches
    losses = linear_cross_entropy(queries, weight, targets, k=k, reduction="none")
    close(losses, looped(queries, weight, targets, 1.0, k), 1e-10)
    assert bool((losses <= linear_cross_entropy(queries, weight, targets, reduction="none") + 1e-12).all())


def test_all_rows_as_candidates_are_exact() -> None:
    queries, weight, targets = world(9, torch.float64)
    both = [linear_cross_entropy(queries, weight, targets, k=k) for k in (None, 10 * N)]
    close(both[0], both[1], 1e-12)
    found, expected = (torch.autograd.grad(loss, (queries, weight)) for loss in both)
    agree(found, expected, 1e-12)


@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_rows_of_any_number_are_searched(n: int) -> None:
    queries, weight, _ = world(3, torch.float64, n=max(n, 6))
    weight = weight[:n]
    for k in {1, min(5, n), n}:
        expected = (queries @ weight.mT).topk(k).values
        found = cross_entropy._nearest(queries, weight, k)
        close((queries @ weight.mT).gather(1, found).sort(1, descending=True).values, expected, 1e-12)


# -- drawn -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 12])
def test_drawn_sums_and_their_gradients_are_unbiased(k: int | None) -> None:
    queries, weight, targets = world(3, torch.float64, n=60, d=4)
    draws, targets[2] = torch.Generator().manual_seed(5), 17
    positive = (queries * weight[targets]).sum(1)
    right = (queries @ weight.mT).exp().sum(1)
    expected = torch.autograd.grad(right.sum(), (queries, weight), retain_graph=True)
    sums, grads = [], []
    for _ in range(800):
        losses = linear_cross_entropy(
            queries, weight, targets, k=k, max_draws=13, reduction="none", generator=draws, sparse=False
        )
        total = (losses + positive).exp()
        sums.append(total.detach())
        query_grad, weight_grad = torch.autograd.grad(total.sum(), (queries, weight), retain_graph=True)
        grads.append(torch.cat([query_grad, weight_grad]))
    for samples, truth in ((torch.stack(sums), right.detach()), (torch.stack(grads), torch.cat(expected))):
        error = samples.std(0) / len(samples) ** 0.5
        assert bool(((samples.mean(0) - truth).abs() < 5 * error + 1e-9).all())
        assert float(error.max()) < 0.2 * float(truth.abs().max())  # else the test could not fail


def test_a_drawn_row_that_is_summed_already_does_not_count_twice() -> None:
    queries, weight, targets = world(4, torch.float64, n=50)
    # k of all rows leaves nothing to draw
    loss = linear_cross_entropy(queries, weight, targets, k=50, max_draws=20)
    close(loss, F.cross_entropy(queries @ weight.mT, targets), 1e-12)


def test_draws_are_exact_where_they_would_cost_more() -> None:
    queries, weight, targets = world(6)
    loss = linear_cross_entropy(queries, weight, targets, max_draws=3 * N // 4)
    assert loss.item() == linear_cross_entropy(queries, weight, targets).item()
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.is_sparse  # the optimiser stays SparseAdam
    (right,) = torch.autograd.grad(linear_cross_entropy(queries, weight, targets), weight)
    close(grad.to_dense(), right, 1e-6)


def test_draws_follow_the_generator() -> None:
    queries, weight, targets = world(6)

    def loss(seed: int | None) -> float:
        draws = None if seed is None else torch.Generator().manual_seed(seed)
        return linear_cross_entropy(queries, weight, targets, max_draws=20, generator=draws).item()

    assert loss(1) == loss(1) != loss(2)
    torch.manual_seed(3)
    first, second = loss(None), loss(None)
    torch.manual_seed(3)
    assert loss(None) == first != second


# -- sparse gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"k": 5}, {"max_draws": 30}, {"k": 5, "max_draws": 30}, {"sparse": True}])
def test_sparse_gradients_equal_dense_ones_and_train(options: dict[str, Any]) -> None:
    queries, weight, targets = world(8)
    grads = []
    for sparse in (options.get("sparse"), False):
        draws = torch.Generator().manual_seed(0)
        loss = linear_cross_entropy(queries, weight, targets, **options | {"sparse": sparse}, generator=draws)
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert [grad.is_sparse for grad in grads] == [True, False]
    assert grads[0].coalesce().indices().shape[1] <= (8 + 8 * 5 + 30 if "sparse" not in options else N)
    close(grads[0].to_dense(), grads[1], 1e-6)
    rows = torch.nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.SparseAdam([rows], lr=0.05)
    before = linear_cross_entropy(queries, rows, targets).item()
    for _ in range(20):
        optimizer.zero_grad()
        linear_cross_entropy(queries.detach(), rows, targets, **options).backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # type: ignore[no-untyped-call]
    assert linear_cross_entropy(queries, rows, targets).item() < before / 2


def test_rows_that_also_encode_the_queries_get_both_gradients() -> None:
    _, weight, targets = world(8, torch.float64)
    inputs = torch.arange(8)
    right = torch.autograd.grad(F.cross_entropy(weight[inputs] @ weight.mT, targets), weight)
    found = torch.autograd.grad(linear_cross_entropy(weight[inputs], weight, targets), weight)
    agree(found, right, 1e-12)


# -- refusals ----------------------------------------------------------------------------------------------------------

Q, W, T = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"weight": torch.ones(4, 2)},
            r"queries \(2, 3\), weight \(4, 2\).*expected queries \(…, d\) and weight \(n, d\)",
        ),
        ({"weight": torch.ones(0, 3)}, "with n and d at least 1"),
        ({"targets": T[:1]}, "a row number for each query"),
        ({"targets": T + 1}, "targets hold 4; expected row numbers from 0 to 3"),
        ({"targets": T.float()}, "targets are of type torch.float32"),
        ({"queries": Q.long()}, "queries is of type torch.int64; expected floating-point"),
        ({"queries": Q * math.nan}, "a loss is NaN or infinite"),
        ({"weight": W * math.inf}, "a loss is NaN or infinite"),
        ({"weight": W * math.inf, "k": 2}, "a loss is NaN or infinite"),
        ({"k": 0}, "k is 0; expected a whole number"),
        ({"max_draws": 0}, "max_draws is 0; expected a whole number"),
        ({"reduction": "average"}, "reduction is 'average'"),
        ({"sparse": "yes"}, "sparse is 'yes'; expected True, False or None"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \(3,\)"),
        ({"generator": 7}, "generator is 7; expected a torch.Generator"),
        ({"weight": W.to("meta")}, "meta"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        linear_cross_entropy(**{"queries": Q, "weight": W, "targets": T} | changed)


def test_the_name_is_public() -> None:
    assert softdb.linear_cross_entropy is linear_cross_entropy
