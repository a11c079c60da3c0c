"""scikit-learn estimators on a database: soft neighbours, kernel regression and densities, neighbour graphs.

Every estimator stores its samples in `db_`, an ordinary `SoftDB`.
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
