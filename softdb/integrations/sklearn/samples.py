"""Base of the estimators: their samples lie in a database, which is pickled by its data."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import validate_data

from softdb.check import Schema
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.opening import open as open_database

FLOATS = [np.float64, np.float32]  # what X may be; anything else becomes the first
MOST = float(np.finfo(np.float32).max)


class _Pickled(NamedTuple):
    """A database in memory as it is pickled."""

    schema: Schema
    keys: NDArray[np.float32]  # (n, d)
    values: NDArray[Any] | None  # (n, v), or (n,) labels


class SampleEstimator(BaseEstimator):
    """An estimator whose samples are the records 0, 1, 2 … of `db_`, in the order in which they were given."""

    db_: SoftDB

    @property
    def n_samples_fit_(self) -> int:
        """Number of samples in the database."""
        return self.db_.core.keyed

    def _validated(self, X: ArrayLike, y: Any = "no_validation", *, reset: bool, **how: Any) -> Any:
        """X as float64, or as float32 where it is; y likewise, where given. Raises ValueError as scikit-learn does."""
        return validate_data(self, X, y, reset=reset, dtype=FLOATS, **how)

    def _queries(self, X: ArrayLike) -> NDArray[Any]:  # (q, d)
        return rounded(self._validated(X, reset=False))

    def _open(self, X: NDArray[Any], values: NDArray[Any] | None = None, **schema: Any) -> None:
        """Make `db_` anew of the samples, with its index."""
        path: str | os.PathLike[str] | None = getattr(self, "path", None)
        if path is not None and os.path.isdir(path) and os.listdir(path):
            raise BadInput(
                f"fit: {path} is not empty, and fit makes its database anew; give another path, or remove it; "
                "partial_fit adds samples to those that are there"
            )
        value_dim = None if values is None or values.ndim == 1 else values.shape[1]
        db = open_database(path, dim=X.shape[1], value_dim=value_dim, **schema)
        db.insert(range(len(X)), rounded(X), values)
        self.db_ = db
        self._index()

    def __getstate__(self) -> dict[str, Any]:
        """A database in memory is told by its data; one on disk by its path, and is opened there for reading."""
        state: dict[str, Any] = super().__getstate__()
        db = state.get("db_")
        if db is None or db.path is not None:
            return state
        snapshot, _ = db.core.view()
        every = np.arange(snapshot.size)
        values = snapshot.values_at(every).numpy() if db.core.schema.has_values else None
        return {**state, "db_": _Pickled(db.core.schema, snapshot.keys_at(every).numpy(), values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As `__getstate__` tells it."""
        super().__setstate__(state)
        kept = state.get("db_")
        if isinstance(kept, _Pickled):
            self.db_ = open_database(None, **kept.schema.described)
            self.db_.insert(range(len(kept.keys)), kept.keys, kept.values)
            self._index()

    def _index(self) -> None:
        """Build the index that `recall` asks for."""
        recall = getattr(self, "recall", None)
        if recall is not None:
            self.db_.build_index(recall=recall)


class TargetEstimator(RegressorMixin, SampleEstimator):
    """A regressor for one output or several, whose targets are the values of the records, as `halves`."""

    def _pairs(
        self, X: ArrayLike, y: ArrayLike, *, reset: bool, **how: Any
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Samples (n, d) and targets (n, outputs)."""
        samples, targets = self._validated(X, y, reset=reset, multi_output=True, y_numeric=True, **how)
        if reset:
            self._flat = targets.ndim == 1
        return samples, targets.astype(np.float64).reshape(len(targets), -1)

    def _as_given(self, targets: NDArray[np.float64]) -> NDArray[np.float64]:  # (q, outputs) -> (q,) or (q, outputs)
        return targets[:, 0] if self._flat else targets

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def rounded(X: NDArray[Any]) -> NDArray[Any]:  # (n, d)
    """Round X as a database does, in its own dtype: a sample is at distance 0 from itself. Raises BadInput."""
    if X.size and np.abs(X).max() > MOST:
        raise BadInput(f"X reaches {np.abs(X).max():.3g}, and keys are float32, at most {MOST:.3g}; scale it")
    return X if X.dtype == np.float32 else X.astype(np.float32).astype(X.dtype)


def halves(y: NDArray[Any]) -> NDArray[np.float32]:  # (n, v) -> (n, 2 v)
    """Return numbers as float32 and what that leaves of them, to pool in float64's precision. Raises BadInput."""
    if y.size and np.abs(y).max() > MOST:
        raise BadInput(f"y reaches {np.abs(y).max():.3g}, and values are float32, at most {MOST:.3g}; scale it")
    high = y.astype(np.float32)
    return np.concatenate([high, (y - high).astype(np.float32)], axis=1)


def whole(pooled: NDArray[Any]) -> NDArray[np.float64]:  # (q, 2 v) -> (q, v)
    """The sums of both halves."""
    high, low = np.split(pooled.astype(np.float64), 2, axis=1)
    return high + low
