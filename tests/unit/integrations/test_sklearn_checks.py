"""scikit-learn's own suite for estimators, every check of it."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

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


@parametrize_with_checks(ESTIMATORS)
def test_every_check_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)
