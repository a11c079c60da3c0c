"""Bandwidths from data against loops, on scikit-learn's data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from sklearn.datasets import load_diabetes, load_iris

from softdb.errors import BadInput
from softdb.scores import (
    Boxcar,
    Constant,
    Epanechnikov,
    Gaussian,
    Kernel,
    Laplacian,
    NegativeL2,
    Triangular,
    leave_one_out,
    scott,
    silverman,
)
from softdb.scoring import bandwidth

Floats = np.ndarray[Any, np.dtype[np.float64]]
DIABETES: Floats = load_diabetes().data
PROGRESS: Floats = load_diabetes().target
IRIS: Floats = load_iris().data

# -- the equations as loops --------------------------------------------------------------------------------------------


def rule(keys: Floats, factor: str) -> list[float]:
    n, d = keys.shape
    ratio = 1 / n if factor == "scott" else 4 / ((d + 2) * n)
    found = []
    for i in range(d):
        mean = math.fsum(keys[:, i]) / n
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in keys[:, i]) / (n - 1))
        found.append(deviation * math.exp(math.log(ratio) / (d + 4)))
    return found


VOLUMES = {Gaussian: math.sqrt(2 * math.pi), Laplacian: 2.0, Boxcar: 2.0, Epanechnikov: 4 / 3, Triangular: 1.0}


def loss(keys: Floats, values: Floats | None, kind: type[Kernel], h: float) -> float:
    """The leave-one-out error, or minus the log-likelihood of one-dimensional keys."""
    total = 0.0
    for i in range(len(keys)):
        others = [j for j in range(len(keys)) if j != i]
        near = [reference.KERNELS[kind.__name__.lower()](math.dist(keys[i], keys[j]) / h) for j in others]
        if math.fsum(near) == 0:
            return math.inf
        if values is None:
            total -= math.log(math.fsum(near) / (len(others) * VOLUMES[kind] * h))
        else:
            mean = math.fsum(k * values[j] for k, j in zip(near, others, strict=True)) / math.fsum(near)
            total += (values[i] - mean) ** 2
    return total


@pytest.mark.parametrize("keys", [DIABETES[:, 2:3], IRIS], ids=["diabetes", "iris"])
@pytest.mark.parametrize("name", ["silverman", "scott"])
def test_rules_of_thumb_are_the_equation(keys: Floats, name: str) -> None:
    function = {"silverman": silverman, "scott": scott}[name]
    expected, tensor = rule(keys, name), torch.from_numpy(keys)
    np.testing.assert_allclose(function(tensor, per_coordinate=True), expected, rtol=1e-12)
    np.testing.assert_allclose(function(tensor), np.mean(expected), rtol=1e-12)
    assert function(tensor.float()).dtype is torch.float64
    assert not function(tensor.clone().requires_grad_()).requires_grad
    assert NegativeL2(function(tensor, per_coordinate=True)).bandwidth.shape == keys.shape[1:]


def test_silverman_in_one_dimension_is_the_famous_factor() -> None:
    keys = torch.from_numpy(DIABETES[:, 2:3])
    assert float(silverman(keys)) == pytest.approx(1.0592 * float(keys.std()) * len(keys) ** -0.2, rel=1e-4)


@pytest.mark.parametrize("function", [silverman, scott, leave_one_out])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (torch.ones(1, 2), "1 keys determine no bandwidth; give at least 2"),
        (torch.ones(5), r"keys have shape \(5,\); expected \(n, d\); one number a record is keys.unsqueeze\(1\)"),
        (torch.ones(5, 0), r"keys have shape \(5, 0\)"),
        (torch.tensor([[1.0], [math.nan]]), "NaN or infinity, first in row 1"),
        (torch.tensor([[1.0], [math.inf]]), "NaN or infinity, first in row 1"),
        (torch.full((5, 2), 0.1), "all 5 keys are equal"),
        ("keys", "'keys'; expected a tensor of numbers"),
    ],
)
def test_bad_keys_are_refused(function: Any, keys: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        function(keys)


def test_a_coordinate_without_spread_has_no_bandwidth() -> None:
    keys = torch.tensor([[0.1, 1.0], [0.1, 2.0], [0.1, 4.0]])
    with pytest.raises(BadInput, match="coordinate 0 is the same in all 3 keys"):
        silverman(keys, per_coordinate=True)
    assert silverman(keys) > 0


# -- leave one out -----------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", VOLUMES, ids=lambda kind: kind.__name__)


@pytest.mark.few(1)
@KINDS
@pytest.mark.parametrize("task", ["mean", "density"])
def test_no_other_bandwidth_does_better(kind: type[Kernel], task: str) -> None:
    keys, values = DIABETES[:60, 2:3], None if task == "density" else PROGRESS[:60]
    actual = leave_one_out(
        torch.from_numpy(keys), None if values is None else torch.from_numpy(values), kind, bounds=(0.005, 0.5)
    )
    best = loss(keys, values, kind, actual)
    assert math.isfinite(best)
    others = [loss(keys, values, kind, h) for h in np.geomspace(0.005, 0.5, 120)]
    slack = 0.02 if kind is Boxcar else 0.002  # the boxcar's loss is a staircase
    assert best <= min(others) + slack * abs(min(others))
    assert max(other for other in others if math.isfinite(other)) > best + 10 * slack * abs(best)


@pytest.mark.parametrize("task", ["mean", "density"])
def test_weighted_records_have_the_bandwidth_of_the_weighted_loops(task: str) -> None:
    keys, values = DIABETES[:40, 2:3], None if task == "density" else PROGRESS[:40]
    weights = np.random.default_rng(0).uniform(0.1, 3, 40)

    def error(h: float) -> float:
        total = 0.0
        for i in range(len(keys)):
            near = [
                weights[j] * math.exp(-(((keys[i, 0] - keys[j, 0]) / h) ** 2) / 2) if j != i else 0.0
                for j in range(len(keys))
            ]
            if values is None:
                total -= weights[i] * math.log(math.fsum(near) / (h * (weights.sum() - weights[i])))
            else:
                mean = math.fsum(k * v for k, v in zip(near, values, strict=True)) / math.fsum(near)
                total += weights[i] * (values[i] - mean) ** 2
        return total

    tables = torch.from_numpy(keys), None if values is None else torch.from_numpy(values)
    actual = leave_one_out(*tables, bounds=(0.005, 0.5), sample_weight=weights)
    assert error(actual) <= min(error(float(h)) for h in np.geomspace(0.005, 0.5, 80)) * (
        1 + 1e-6 * (values is not None)
    )
    assert abs(actual / leave_one_out(*tables, bounds=(0.005, 0.5)) - 1) > 1e-3
    assert leave_one_out(*tables, bounds=(0.005, 0.5), sample_weight=7 * weights) == pytest.approx(actual, rel=1e-4)


def test_several_values_and_keys_of_several_coordinates() -> None:
    keys, values = torch.from_numpy(IRIS[::3]), torch.eye(3, dtype=torch.float64)[load_iris().target[::3]]
    actual = leave_one_out(keys, values)

    def error(h: float) -> float:
        weights = (NegativeL2(h)(keys, keys) / 2).fill_diagonal_(-math.inf).softmax(1)
        return float((weights @ values - values).square().sum())

    assert error(actual) <= min(error(float(h)) for h in np.geomspace(0.01, 10, 400)) * (1 + 1e-9)
    assert leave_one_out(keys, values[:, :1]) == leave_one_out(keys, values[:, 0])


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = torch.from_numpy(DIABETES[:50, :3]), torch.from_numpy(PROGRESS[:50])
    whole = leave_one_out(keys, values), leave_one_out(keys)
    monkeypatch.setattr(bandwidth, "BLOCK", 7 * 50)
    for kept in (50 * 50, 50 * 50 - 1):
        monkeypatch.setattr(bandwidth, "MAX_STORED", kept)
        assert (leave_one_out(keys, values), leave_one_out(keys)) == pytest.approx(whole, rel=1e-4)


def test_keys_far_from_the_origin_have_the_same_bandwidth() -> None:
    keys, values = torch.from_numpy(DIABETES[:50, :3]), torch.from_numpy(PROGRESS[:50])
    assert leave_one_out(keys + 1e6, values) == pytest.approx(leave_one_out(keys, values), rel=1e-4)


def test_values_that_do_not_depend_on_the_keys_want_a_wide_bandwidth() -> None:
    keys, values = torch.arange(20.0).unsqueeze(1), torch.tensor([0.0, 1.0] * 10)
    assert leave_one_out(keys, values, bounds=(0.1, 1e4)) > 20
    assert leave_one_out(keys[:2], values[:2]) > 100  # the other one tells each, whatever the bandwidth


def test_a_compact_kernel_reaches_the_farthest_record() -> None:
    keys = torch.tensor([[0.0], [0.1], [0.2], [5.2]])
    actual = leave_one_out(keys, kernel=Epanechnikov)
    assert 5 < actual < 8
    with pytest.raises(BadInput, match=r"no bandwidth from 0.1 to 4 reaches from every record to another"):
        leave_one_out(keys, kernel=Epanechnikov, bounds=(0.1, 4.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"values": torch.ones(4)}, r"values have shape \(4, 1\) and keys \(6, 1\)"),
        ({"values": torch.ones(6, 2, 2)}, r"values have shape \(6, 2, 2\); expected \(n,\) or \(n, v\)"),
        ({"values": torch.full((6,), math.nan)}, "values hold NaN or infinity, first in row 0"),
        ({"kernel": Constant}, "expected a class of softdb.scores with a bandwidth"),
        ({"kernel": Gaussian()}, "expected a class of softdb.scores"),
        ({"kernel": "gaussian"}, "kernel is 'gaussian'"),
        ({"bounds": (2.0, 1.0)}, "bounds are 2.0 and 1.0; the lower must come first"),
        ({"bounds": (0.0, 1.0)}, "the lower bound is 0.0"),
        ({"bounds": (1.0, math.inf)}, "the upper bound is inf"),
        ({"bounds": 3.0}, "expected two numbers"),
        ({"sample_weight": [1.0] * 5}, r"sample_weight has shape \(5,\); expected \(6,\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        leave_one_out(torch.arange(6.0).unsqueeze(1), **arguments)


def test_a_density_of_duplicates_has_no_bandwidth() -> None:
    keys = torch.arange(6.0).unsqueeze(1).repeat(2, 1)
    with pytest.raises(BadInput, match="every key has a duplicate"):
        leave_one_out(keys)
    assert leave_one_out(keys, keys) < 0.5  # a mean has: the duplicate tells
    assert math.isfinite(leave_one_out(torch.cat([keys, torch.tensor([[9.0]])])))
