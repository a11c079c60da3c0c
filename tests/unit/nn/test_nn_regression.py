"""Kernel regression and classification over a database, against loops."""

from __future__ import annotations

import copy
import math

import pytest
import reference
import torch
from torch import Tensor
from worlds import holding

import softdb
import softdb.nn.regression as regression_module
from softdb.errors import BadInput, Closed
from softdb.nn import KernelClassifier, KernelRegressor
from softdb.scores import Constant, Gaussian, leave_one_out, silverman

N, D, V, CLASSES = 23, 2, 3, 4
KERNELS = ["gaussian", "laplacian", "epanechnikov", "triangular", "boxcar"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(4)


def keys_of(n: int = N, d: int = D) -> Tensor:
    """Keys with a duplicate and a zero vector."""
    keys = torch.randn(n, d)
    keys[1], keys[2] = keys[0], 0
    return keys


def wave(n: int = 60) -> tuple[Tensor, Tensor]:
    """Noisy measurements of a curve, (n, 1) and (n, 1)."""
    x = torch.rand(n, 1) * 5
    return x, 2 * x.sin() + x**0.8 + 0.5 * torch.randn(n, 1)


def by_loops(name: str, h: list[float], x: Tensor, keys: Tensor, values: Tensor, out: int | None = None) -> Tensor:
    """The mean of Nadaraya and Watson at one place, without one record; zeros where there is none."""
    total, mean = 0.0, torch.zeros(values.shape[1], dtype=torch.float64)
    for i in range(len(keys)):
        if i != out:
            u = math.sqrt(sum(((float(a) - float(b)) / c) ** 2 for a, b, c in zip(x, keys[i], h, strict=True)))
            share = reference.KERNELS[name](u)
            total, mean = total + share, mean + share * values[i].double()
    return mean / total if total else mean


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("h", [[0.8, 0.8], [0.5, 1.5]])
def test_means_are_those_of_nadaraya_and_watson(name: str, h: list[float]) -> None:
    keys, values = keys_of(), torch.randn(N, V)
    bandwidth = h[0] if h[0] == h[1] else torch.tensor(h)
    model = KernelRegressor(holding(keys, values), name, bandwidth, learnable=False)
    queries = torch.cat([torch.randn(6, D), keys[:3], torch.full((1, D), 50.0)])
    told = model(queries)
    for x, actual in zip(queries, told, strict=True):
        if name in ("gaussian", "laplacian") and float(x[0]) == 50:
            continue  # the loops underflow, softdb does not
        expected = by_loops(name, h, x, keys, values)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    u = (keys.double() - 50).div(torch.tensor(h)).norm(dim=1)
    logs = {"gaussian": -u.square() / 2, "laplacian": -u}.get(name)
    far = torch.zeros(V).double() if logs is None else logs.softmax(dim=0) @ values.double()
    torch.testing.assert_close(told[-1].double(), far, rtol=1e-3, atol=1e-3)


def test_k_filter_and_mask_narrow_the_participants() -> None:
    keys, values = keys_of(), torch.randn(N, V)
    db = holding(keys, values)
    db.update(list(range(N)), payloads=[{"odd": i % 2 == 1} for i in range(N)])
    model, queries = KernelRegressor(db, bandwidth=0.7, learnable=False), torch.randn(4, D)
    odd = torch.arange(N) % 2 == 1
    expected = torch.stack([by_loops("gaussian", [0.7] * D, x, keys[odd], values[odd]) for x in queries]).float()
    torch.testing.assert_close(model(queries, where={"odd": True}), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(queries, mask=odd), expected, rtol=1e-5, atol=1e-5)
    one = values[torch.cdist(queries, keys).argmin(dim=1)]
    torch.testing.assert_close(model(queries, k=1), one)
    torch.testing.assert_close(model(queries, k=N + 5), model(queries), rtol=1e-5, atol=1e-5)


def test_inserts_and_deletes_count_at_once() -> None:
    keys, values = keys_of(), torch.randn(N, V)
    db = holding(keys, values)
    model, queries = KernelRegressor(db, bandwidth=0.7, learnable=False), torch.randn(4, D)
    before = model(queries)
    db.insert([100], queries[:1], [[9.0] * V])
    assert float((model(queries)[0] - before[0]).abs().max()) > 0.1
    db.delete([100])
    torch.testing.assert_close(model(queries), before)


def test_an_empty_database_predicts_zeros() -> None:
    db = softdb.open(None, dim=D, value_dim=V)
    model = KernelRegressor(db, bandwidth=1.0)
    actual = model(torch.randn(2, D))
    assert torch.equal(actual, torch.zeros(2, V))
    assert [tuple(one.shape) for one in model.leave_one_out()] == [(0, V), (0, V)]
    with pytest.raises(BadInput, match=r"fit: the database has 0 records; insert at least 2"):
        model.fit()
    with pytest.raises(BadInput, match=r"silverman: 0 keys determine no bandwidth; give at least 2"):
        KernelRegressor(db)


# -- the bandwidth -----------------------------------------------------------------------------------------------------


def test_the_bandwidth_starts_at_silvermans_rule() -> None:
    keys = keys_of() * torch.tensor([1.0, 10.0])
    db = holding(torch.cat([keys, torch.full((1, D), 1e6)]), torch.randn(N + 1, V))
    db.delete([N])  # does not count
    torch.testing.assert_close(KernelRegressor(db).kernel.bandwidth, silverman(keys).float())
    each = KernelRegressor(db, per_coordinate=True).kernel.bandwidth
    torch.testing.assert_close(each, silverman(keys, per_coordinate=True).float())
    same = KernelRegressor(db, bandwidth=0.3, per_coordinate=True).kernel.bandwidth
    torch.testing.assert_close(same, torch.full((D,), 0.3))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KERNELS[:-1])
def test_gradients_reach_queries_and_bandwidth(name: str) -> None:
    keys, labels = keys_of().double(), torch.randint(CLASSES, (N,))
    queries = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    for model in (
        KernelRegressor(holding(keys, torch.randn(N, V)), name, torch.tensor([1.3, 2.1], dtype=torch.float64)),
        KernelClassifier(holding(keys, labels, num_classes=CLASSES), name, torch.tensor(1.7, dtype=torch.float64)),
    ):
        parameters = list(model.parameters())
        assert [parameter.dtype for parameter in parameters] == [torch.float64]
        assert torch.autograd.gradcheck(lambda x, _, model=model: model(x), (queries, *parameters))
        assert torch.autograd.gradcheck(lambda _, model=model: model.leave_one_out()[0], (*parameters,))


@pytest.mark.parametrize("name", KERNELS)
def test_leave_one_out_predicts_each_record_from_the_others(name: str) -> None:
    keys, values = keys_of(), torch.randn(N, V)
    db = holding(keys, values)
    db.delete([4, 11])  # positions are among the remaining records
    left = torch.tensor([i for i in range(N) if i not in (4, 11)])
    keys, values = keys[left], values[left]
    model = KernelRegressor(db, name, 0.8, learnable=False)
    actual, true = model.leave_one_out()
    assert torch.equal(true, values)
    for i in range(len(left)):
        expected = by_loops(name, [0.8] * D, keys[i], keys, values, out=i)
        torch.testing.assert_close(actual[i].double(), expected, rtol=1e-5, atol=1e-5)
    some = torch.tensor([7, 0, 7])
    part, its = model.leave_one_out(some)
    torch.testing.assert_close(part, actual[some])
    assert torch.equal(its, values[some])


def test_leave_one_out_predicts_labels_from_the_others() -> None:
    keys, labels = keys_of(), torch.randint(CLASSES, (N,))
    actual, true = KernelClassifier(holding(keys, labels, num_classes=CLASSES), bandwidth=0.8).leave_one_out()
    one_hot = torch.eye(CLASSES)[labels]
    assert torch.equal(true, one_hot)
    for i in range(N):
        expected = by_loops("gaussian", [0.8] * D, keys[i], keys, one_hot, out=i)
        torch.testing.assert_close(actual[i].detach().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_fit_finds_the_bandwidth_that_a_search_finds(kernel: str) -> None:
    x, y = wave()
    model = KernelRegressor(holding(x, y), kernel)
    errors = model.fit()
    searched = leave_one_out(x, y, type(model.kernel))
    assert model.kernel.bandwidth.item() == pytest.approx(searched, rel=0.03)
    assert errors[-1] < 0.8 * errors[0]
    actual, true = model.leave_one_out()
    assert float((actual - true).detach().square().mean()) == pytest.approx(errors[-1], rel=1e-3)


def test_fit_finds_which_coordinate_counts() -> None:
    x, y = wave(100)
    keys = torch.cat([x, torch.rand(100, 1) * 5], dim=1)
    model = KernelRegressor(holding(keys, y), per_coordinate=True)
    model.fit(batch_size=64)
    counts, idle = model.kernel.bandwidth.tolist()
    assert counts < 0.5
    assert idle > 10 * counts


def test_fit_lowers_the_brier_score_of_a_classifier() -> None:
    keys = torch.stack([torch.linspace(0, 8, 80).round() + 0.02 * torch.randn(80), torch.rand(80) * 5], dim=1)
    labels = (keys[:, 0].round() % 2).long()  # stripes, and a coordinate that means nothing
    model = KernelClassifier(holding(keys, labels, num_classes=CLASSES), bandwidth=0.6, per_coordinate=True)
    before = (model.leave_one_out()[0].argmax(1) == labels).float().mean()
    errors = model.fit()
    after = (model.leave_one_out()[0].argmax(1) == labels).float().mean()
    assert errors[-1] < 0.1 * errors[0]
    assert after > 0.98 > before


@pytest.mark.parametrize("per_coordinate", [False, True])
@pytest.mark.parametrize(("h", "rtol"), [(0.3, 1e-5), (0.03, 1e-10)], ids=["float32", "float64"])
def test_the_fast_gaussian_takes_the_steps_of_any_kernel(
    h: float, rtol: float, per_coordinate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = torch.randn(80, D) + 5
    keys[3] = keys[7]  # a duplicate is another record
    values, labels = torch.randn(80, V) + 1e4, torch.randint(CLASSES, (80,))
    start = torch.tensor(h, dtype=torch.float64)
    classes = holding(keys, labels, num_classes=CLASSES)
    for kind, db in ((KernelRegressor, holding(keys, values)), (KernelClassifier, classes)):
        db.delete(range(60, 80))
        results = []
        for kept in (regression_module.MAX_FLOATS, 0):  # 0: through autograd, in float64
            monkeypatch.setattr(regression_module, "MAX_FLOATS", kept)
            monkeypatch.setattr(regression_module, "TILE", 7 * 60)
            model = kind(db, bandwidth=start, per_coordinate=per_coordinate)
            with torch.autocast("cpu", torch.bfloat16):  # which changes nothing
                errors = model.fit(steps=3, batch_size=20) + model.fit(steps=1)
            results.append([*errors, *model.kernel.bandwidth.reshape(-1).tolist()])
        monkeypatch.undo()
        assert results[0] == pytest.approx(results[1], rel=rtol)


def test_fit_is_the_same_each_time_by_its_seed() -> None:
    x, y = wave()
    results = []
    for seed in (1, 1, 2):
        model = KernelRegressor(holding(x, y))
        results.append(model.fit(steps=5, batch_size=16, seed=seed))
    assert results[0] == results[1] != results[2]
    assert len(results[0]) == 5


def test_fit_trains_where_gradients_are_off_and_changes_no_record() -> None:
    x, y = wave()
    db = holding(x, y)
    model, generation = KernelRegressor(db), db.stats().generation
    before = model.kernel.bandwidth.item()
    with torch.no_grad():
        model.fit(steps=3)
    assert model.kernel.bandwidth.item() != before
    assert db.stats().generation == generation


def test_a_half_precision_database_predicts_in_float32() -> None:
    keys, values = keys_of(), torch.randn(N, V)
    model = KernelRegressor(holding(keys, values, dtype="float16"), bandwidth=0.8)
    actual, true = model.leave_one_out()
    assert (actual.dtype, true.dtype) == (torch.float32, torch.float32)
    expected = by_loops("gaussian", [0.8] * D, keys[5].half(), keys.half(), values.half(), out=5)
    torch.testing.assert_close(actual[5].detach().double(), expected, rtol=1e-4, atol=1e-4)


# -- the module --------------------------------------------------------------------------------------------------------


def test_copies_share_the_database_and_the_state_is_the_bandwidth() -> None:
    db = holding(keys_of(), torch.randn(N, V))
    model = KernelRegressor(db, bandwidth=0.5)
    twin = copy.deepcopy(model)
    assert twin.db is db
    assert list(model.state_dict()) == ["kernel.log_bandwidth"]
    other = KernelRegressor(db, bandwidth=3.0)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(torch.ones(1, D)), model(torch.ones(1, D)))
    assert list(KernelRegressor(db, learnable=False).parameters()) == []
    assert isinstance(KernelRegressor(db, Gaussian).kernel, Gaussian)


def test_a_tensor_argument_is_copied() -> None:
    h = torch.tensor([0.5, 0.5])
    model = KernelRegressor(holding(keys_of(), torch.randn(N, V)), bandwidth=h)
    h[0] = 7
    torch.testing.assert_close(model.kernel.bandwidth, torch.tensor([0.5, 0.5]))


def test_mismatched_shapes_are_refused() -> None:
    keys = keys_of()
    numbers, labels = holding(keys, torch.randn(N, V)), holding(keys, torch.zeros(N).long(), num_classes=CLASSES)
    bare = softdb.open(None, dim=D)
    for db in (labels, bare):
        with pytest.raises(BadInput, match=r"the database has no vectors as values.*use KernelClassifier for labels"):
            KernelRegressor(db)
    for db in (numbers, bare):
        with pytest.raises(BadInput, match=r"the database has no labels as values.*use KernelRegressor for vectors"):
            KernelClassifier(db)
    with pytest.raises(BadInput, match=r"db is 3; expected an open softdb database"):
        KernelRegressor(3)  # type: ignore[arg-type]
    for kernel in ("cosine", Constant, 3):
        with pytest.raises(BadInput, match=r"kernel is .*; choose one of 'gaussian', 'laplacian', 'epanechnikov'"):
            KernelRegressor(numbers, kernel)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"the boxcar kernel has no gradient to its bandwidth; pass learnable=False"):
        KernelRegressor(numbers, "boxcar")
    with pytest.raises(BadInput, match=r"bandwidth is -1; expected finite numbers above 0"):
        KernelRegressor(numbers, bandwidth=-1)
    with pytest.raises(BadInput, match=r"bandwidth has 3 numbers but keys are 2 wide; give 1 or 2 numbers"):
        KernelRegressor(numbers, bandwidth=[1, 1, 1])


def test_places_and_settings_that_make_no_sense_are_refused() -> None:
    db = holding(keys_of(), torch.randn(N, V))
    model = KernelRegressor(db)
    with pytest.raises(BadInput, match=r"places reach from 0 to 23 but there are 23 records; expected 0 to 22"):
        model.leave_one_out(torch.tensor([0, N]))
    with pytest.raises(BadInput, match=r"places reach from -1 to -1 but"):
        model.leave_one_out(torch.tensor([-1]))
    for bad in (torch.tensor([0.5]), torch.ones(N, dtype=torch.bool), torch.tensor([[1]]), [0, 1], "all"):
        with pytest.raises(
            BadInput, match=r"(?s)places are .*; expected a tensor of whole numbers \(b,\) from 0 to 22"
        ):
            model.leave_one_out(bad)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"steps is 0; expected a whole number at least 1"):
        model.fit(steps=0)
    with pytest.raises(BadInput, match=r"batch_size is 0; expected a whole number at least 1"):
        model.fit(batch_size=0)
    with pytest.raises(BadInput, match=r"lr is 0; expected a finite number above 0"):
        model.fit(lr=0)
    with pytest.raises(BadInput, match=r"fit: the bandwidth is not learnt; make the module with learnable=True"):
        KernelRegressor(db, learnable=False).fit()
    db.close()
    with pytest.raises(Closed, match=r"closed"):
        model(torch.ones(1, D))
    with pytest.raises(Closed, match=r"closed"):
        model.fit()
