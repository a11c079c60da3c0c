"""scikit-learn's own suite for estimators, every check of it."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

from softdb.integrations.sklearn import (
    KernelDensity,
    KNeighborsTransformer,
    NadarayaWatsonRegressor,
    SoftKNeighborsClassifier,
    SoftKNeighborsRegressor,
)

ESTIMATORS = [
    SoftKNeighborsClassifier(), SoftKNeighborsClassifier(n_neighbors=5), SoftKNeighborsRegressor(),
    SoftKNeighborsRegressor(n_neighbors=5), NadarayaWatsonRegressor(), KernelDensity(), KNeighborsTransformer(),
]  # fmt: skip


def expected_failures(estimator: Any) -> dict[str, str]:
    """A weight of 2 is a sample twice, unless a setting is learnt by leaving samples out, or neighbours are counted."""
    if isinstance(estimator, KernelDensity | KNeighborsTransformer):
        return {}
    reason = "a sample is left out with all its weight, and is one neighbour"
    return {"check_sample_weight_equivalence_on_dense_data": reason}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures)
def test_every_check_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize(
    "estimator",
    [
        SoftKNeighborsClassifier(temperature=1.0), SoftKNeighborsRegressor(temperature=1.0),
        NadarayaWatsonRegressor(bandwidth=1.0), NadarayaWatsonRegressor("epanechnikov", bandwidth=3.0),
    ],
)  # fmt: skip
def test_with_given_settings_a_weight_of_2_is_a_sample_twice_and_a_weight_of_0_is_none(estimator: Any) -> None:
    check_sample_weight_equivalence_on_dense_data(type(estimator).__name__, estimator)
