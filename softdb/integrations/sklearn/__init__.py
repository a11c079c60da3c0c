"""scikit-learn estimators on a database: soft neighbours, kernel regression and densities, neighbour graphs.

Every estimator stores its samples in `db_`, an ordinary `SoftDB`.
"""

from softdb.errors import MissingDependency

try:
    import sklearn as _  # noqa: F401 - one check for all modules below
except ImportError as error:
    raise MissingDependency("softdb.integrations.sklearn needs scikit-learn; pip install 'softdb[sklearn]'") from error

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
