"""scikit-learn estimators on a database: soft neighbours, kernel regression and densities, neighbour graphs.

Every estimator stores its samples in `db_`, an ordinary `SoftDB`.
"""

from softdb.errors import MissingDependency

try:
    from softdb.integrations.sklearn.kernels import KernelDensity, NadarayaWatsonRegressor
    from softdb.integrations.sklearn.neighbors import (
        KNeighborsTransformer,
        SoftKNeighborsClassifier,
        SoftKNeighborsRegressor,
    )
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.sklearn: {error}; pip install 'softdb[sklearn]'") from error

__all__ = [
    "KNeighborsTransformer", "KernelDensity", "NadarayaWatsonRegressor", "SoftKNeighborsClassifier",
    "SoftKNeighborsRegressor",
]  # fmt: skip
