"""scikit-learn's estimators on a database: soft neighbours, kernel regression and densities, neighbour graphs.

Every estimator keeps its samples in `db_`, a `SoftDB`, which can be searched, attended to and explained as any other.
"""

from softdb.integrations.sklearn.kernels import KernelDensity, NadarayaWatsonRegressor
from softdb.integrations.sklearn.neighbors import (
    KNeighborsTransformer,
    SoftKNeighborsClassifier,
    SoftKNeighborsRegressor,
)

__all__ = [
    "KNeighborsTransformer", "KernelDensity", "NadarayaWatsonRegressor", "SoftKNeighborsClassifier",
    "SoftKNeighborsRegressor",
]  # fmt: skip
