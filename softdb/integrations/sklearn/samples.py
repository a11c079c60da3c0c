"""Base classes of the estimators, whose samples are stored in a database."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import validate_data

from softdb.check import Schema, sample_weights
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.opening import open as open_database

FLOATS = [np.float64, np.float32]  # allowed dtypes of X; any other dtype is converted to the first
MAX_FLOAT32 = float(np.finfo(np.float32).max)


class _Pickled(NamedTuple):
    """The data of a database in memory, for a pickle."""

    schema: Schema
    keys: NDArray[np.float32]  # (n, d)
    values: NDArray[Any] | None  # (n, v), or (n,) labels


class SampleEstimator(BaseEstimator):
    """An estimator whose samples are the records 0, 1, 2 … of `db_`, in the order of `fit` and `partial_fit`."""

    db_: SoftDB

    @property
    def n_samples_fit_(self) -> int:
        """Number of samples in the database."""
        return self.db_.core.keyed

    def _validated(self, X: ArrayLike, y: Any = "no_validation", *, reset: bool, **kwargs: Any) -> Any:
        """Return X in float32 or float64, and y if given. Raises scikit-learn's ValueError."""
        return validate_data(self, X, y, reset=reset, dtype=FLOATS, **kwargs)

    def _queries(self, X: ArrayLike) -> NDArray[Any]:  # (q, d)
        return rounded(self._validated(X, reset=False))

    def _open(self, X: NDArray[Any], values: NDArray[Any] | None = None, **schema: Any) -> None:
        """Create `db_` from the samples, with its index."""
        path: str | os.PathLike[str] | None = getattr(self, "path", None)
        if path is not None and os.path.isdir(path) and os.listdir(path):
            raise BadInput(
                f"fit: {path} is not empty, but fit creates a new database; give another path, remove it, or add "
                "samples with partial_fit"
            )
        value_dim = None if values is None or values.ndim == 1 else values.shape[1]
        db = open_database(path, dim=X.shape[1], value_dim=value_dim, **schema)
        db.insert(range(len(X)), rounded(X), values)
        self.db_ = db
        self._index()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle: a database in memory is pickled as its data, another database as its path."""
        state: dict[str, Any] = super().__getstate__()
        db = state.get("db_")
        if db is None or db.path is not None:
            return state
        snapshot, _ = db.core.view()
        positions = np.arange(snapshot.size)
        values = snapshot.values_at(positions).numpy() if db.core.schema.has_values else None
        return {**state, "db_": _Pickled(db.core.schema, snapshot.keys_at(positions).numpy(), values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the estimator; a database in memory is built from its data."""
        super().__setstate__(state)
        data = state.get("db_")
        if isinstance(data, _Pickled):
            self.db_ = open_database(None, **data.schema.described)
            self.db_.insert(range(len(data.keys)), data.keys, data.values)
            self._index()

    def _index(self) -> None:
        """Build the index for `recall`, if it is set."""
        recall = getattr(self, "recall", None)
        if recall is not None:
            self.db_.build_index(recall=recall)


class TargetEstimator(RegressorMixin, SampleEstimator):
    """A regressor for one output or several; the records' values are the targets, as `columns` represents them."""

    def _pairs(
        self, X: ArrayLike, y: ArrayLike, *, reset: bool, **kwargs: Any
    ) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return validated samples (n, d) and targets (n, outputs)."""
        samples, targets = self._validated(X, y, reset=reset, multi_output=True, y_numeric=True, **kwargs)
        if reset:
            self._flat = targets.ndim == 1
        return samples, targets.astype(np.float64).reshape(len(targets), -1)

    def _shaped(self, targets: NDArray[np.float64]) -> NDArray[np.float64]:  # (q, outputs) -> (q,) or (q, outputs)
        return targets[:, 0] if self._flat else targets

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def rounded(X: NDArray[Any]) -> NDArray[Any]:  # (n, d)
    """Return X rounded to float32, but in its own dtype, so that a sample equals its stored copy. Raises BadInput."""
    if X.size and np.abs(X).max() > MAX_FLOAT32:
        raise BadInput(f"X reaches {np.abs(X).max():.3g}, and keys are float32, at most {MAX_FLOAT32:.3g}; scale it")
    return X if X.dtype == np.float32 else X.astype(np.float32).astype(X.dtype)


def present(sample_weight: ArrayLike | None, *arrays: NDArray[Any]) -> tuple[Any, ...]:
    """Return the weights (n,), or None, and the arrays, all without the samples of weight 0 in float32."""
    if sample_weight is None:
        return None, *arrays
    weights = sample_weights(sample_weight, len(arrays[0]))
    if weights.max() < (least := np.finfo(np.float32).tiny):
        raise BadInput(f"sample_weight is at most {weights.max():.3g}, and values are float32; scale it")
    return weights[weights >= least], *(array[weights >= least] for array in arrays)


def columns(y: NDArray[Any], weights: NDArray[np.float64] | None) -> NDArray[np.float32]:  # (n, v) -> (n, 2 v + 2)
    """Return y or, with weights w, w y and w in float32: rounded values, then rounding errors. Raises BadInput."""
    y = y if weights is None else weights[:, None] * np.column_stack([y, np.ones(len(y))])
    if y.size and np.abs(y).max() > MAX_FLOAT32:
        raise BadInput(f"y reaches {np.abs(y).max():.3g}, and values are float32, at most {MAX_FLOAT32:.3g}; scale it")
    high = y.astype(np.float32)
    return np.concatenate([high, (y - high).astype(np.float32)], axis=1)


@np.errstate(invalid="ignore")  # 0 / 0 is NaN where a kernel reaches no sample
def means(pooled: NDArray[Any], weighted: bool) -> NDArray[np.float64]:  # (q, 2 v + 2) -> (q, v)
    """Undo `columns`: return the pooled y or, with weights, the pooled w y over the pooled w."""
    high, low = np.split(pooled.astype(np.float64), 2, axis=1)
    sums = high + low
    return sums[:, :-1] / sums[:, -1:] if weighted else sums
