"""Kernel regression, its bandwidths and Wilson's interval are those of statsmodels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor
from worlds import holding

from softdb.functional import attention
from softdb.index.watch import upper_bound
from softdb.nn import KernelRegressor
from softdb.scores import Gaussian, leave_one_out

DIABETES, PROGRESS = load_diabetes(return_X_y=True)


def local_constant(keys: Any, values: Any, bandwidth: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own random numbers
        from statsmodels.nonparametric.kernel_regression import KernelReg

        keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
        return KernelReg(values, keys, "c" * keys.shape[1], reg_type="lc", bw=bandwidth)


def regressor(keys: Tensor, values: Tensor, **options: Any) -> KernelRegressor:
    db = holding(keys, values)
    return KernelRegressor(db, **options)


@pytest.mark.parametrize("columns", [[2], [2, 3, 8]])
def test_kernels_give_its_means(columns: list[int]) -> None:
    keys = DIABETES[:, columns]
    h = [0.02 * (i + 1) for i in range(len(columns))]
    expected, _ = local_constant(keys, PROGRESS, h).fit(keys[::9])
    weights = Gaussian(h)(torch.from_numpy(keys[::9]), torch.from_numpy(keys))
    actual = weights @ torch.from_numpy(PROGRESS) / weights.sum(1)
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_attention_gives_its_means() -> None:
    keys, bandwidth = DIABETES[:, [2, 3, 8]] * 20, [0.5, 0.7, 0.4]
    expected, _ = local_constant(keys[50:], PROGRESS[50:], bandwidth).fit(keys[:50])
    actual = attention(keys[:50], keys[50:], PROGRESS[50:, None], score=Gaussian(bandwidth))
    np.testing.assert_allclose(actual[:, 0], expected, rtol=1e-9)


def test_a_regressor_gives_its_means() -> None:
    torch.manual_seed(4)
    keys, values, queries = torch.randn(40, 2), torch.randn(40, 1), torch.randn(15, 2)
    expected, _ = local_constant(keys, values, [0.4, 0.9]).fit(queries.double().numpy())
    actual = regressor(keys, values, bandwidth=[0.4, 0.9])(queries)
    np.testing.assert_allclose(actual[:, 0].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column", [2, 3, 8])
def test_leave_one_out_finds_its_bandwidth(column: int) -> None:
    keys = DIABETES[::2, column : column + 1]
    expected = float(local_constant(keys, PROGRESS[::2], "cv_ls").bw[0])
    actual = leave_one_out(torch.from_numpy(keys), torch.from_numpy(PROGRESS[::2]))
    assert actual == pytest.approx(expected, rel=0.03)


def test_a_regressor_learns_its_bandwidth() -> None:
    torch.manual_seed(4)
    x = torch.rand(40, 1) * 5
    y = 2 * x.sin() + x**0.8 + 0.5 * torch.randn(40, 1)
    model = regressor(x, y)
    model.fit()
    assert model.kernel.bandwidth.item() == pytest.approx(float(local_constant(x, y, "cv_ls").bw[0]), rel=0.03)


def test_the_bound_of_a_watched_recall_is_wilsons() -> None:
    from statsmodels.stats.proportion import proportion_confint

    for hits, count in ((0, 5), (3, 20), (470, 500), (500, 500)):
        _, high = proportion_confint(hits, count, 0.0026997960632601866, "wilson")
        assert upper_bound(hits / count, count) == pytest.approx(high, abs=1e-9)
