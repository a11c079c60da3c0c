"""Kernel densities are those of scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris
from sklearn.neighbors import KernelDensity
from worlds import holding

from softdb.functional import attention
from softdb.nn import KernelClassifier
from softdb.scores import Boxcar, Epanechnikov, Gaussian, Kernel, Laplacian, Triangular

THEIRS: dict[type[Kernel], str] = {
    Gaussian: "gaussian",
    Laplacian: "exponential",
    Boxcar: "tophat",
    Epanechnikov: "epanechnikov",
    Triangular: "linear",
}
every_kernel = pytest.mark.parametrize("kind", THEIRS, ids=THEIRS.values())


@every_kernel
@pytest.mark.parametrize("data", ["diabetes", "iris"])
@pytest.mark.parametrize("d", [1, 3])
def test_kernels_give_its_densities(kind: type[Kernel], data: str, d: int) -> None:
    keys: Any = (load_iris() if data == "iris" else load_diabetes()).data[:, -d:]
    h = 1.5 * float(keys.std())
    # tree queries near the edge are rounded otherwise than ours: sorted data alone never meet it exactly
    queries = keys[::7] + 0.01 * h * np.random.default_rng(0).standard_normal(keys[::7].shape)
    expected = KernelDensity(kernel=THEIRS[kind], bandwidth=h, rtol=0, atol=0).fit(keys).score_samples(queries)
    kernel = kind(h)
    logs = kernel.log(torch.from_numpy(queries), torch.from_numpy(keys)).logsumexp(1)
    actual = logs - math.log(len(keys)) - kernel.log_volume(d)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@every_kernel
def test_the_lse_of_attention_is_its_density(kind: type[Kernel]) -> None:
    keys, values = load_diabetes(return_X_y=True)
    keys, kernel = keys[:, [2, 3, 8]] * 20, kind(0.7)
    expected = KernelDensity(kernel=THEIRS[kind], bandwidth=0.7).fit(keys[50:]).score_samples(keys[:50])
    actual = attention(keys[:50], keys[50:], values[50:, None], score=kernel, details=True)
    density = actual.lse - math.log(len(keys) - 50) - kernel.log_volume(3)
    np.testing.assert_allclose(density.exp(), np.exp(expected), rtol=1e-8)
    assert (density > -math.inf).any()


def test_a_classifier_is_bayes_rule_under_its_densities() -> None:
    torch.manual_seed(4)
    keys, labels = torch.randn(60, 2), torch.randint(3, (60,))  # the last class has no record
    keys[1], keys[2] = keys[0], 0
    db = holding(keys, labels, num_classes=4)
    actual = KernelClassifier(db, bandwidth=0.6)(queries := torch.randn(9, 2))
    joint = np.zeros((9, 4))
    for label in range(3):
        mine = keys[labels == label].double().numpy()
        joint[:, label] = len(mine) * np.exp(KernelDensity(bandwidth=0.6).fit(mine).score_samples(queries.numpy()))
    np.testing.assert_allclose(actual.detach().numpy(), joint / joint.sum(1, keepdims=True), rtol=1e-4, atol=1e-6)
