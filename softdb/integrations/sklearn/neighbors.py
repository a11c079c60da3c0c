"""Nearest samples, their sparse graph, and classification and regression by softmax-weighted neighbours."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_matrix
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from softdb.check import integer, one_of, positive
from softdb.errors import BadInput
from softdb.integrations.sklearn.samples import SampleEstimator, TargetEstimator, halves, rounded, whole
from softdb.scoring import weighting

LEFT_OUT = 1024  # samples that are told from all others to learn the temperature by
WEIGHTS = ("softmax", "uniform", "sparsemax", "entmax15", "argmax")
MASKED = 1 << 26  # bools that say which those are
METRICS = {"euclidean": "l2", "cosine": "cosine"}
SPAN, STEPS = (-20.0, 4.0), 13  # of log T about the mean squared distance, and how many are tried at first


class _Neighbors(SampleEstimator):
    """An estimator that can be asked for the nearest samples."""

    n_neighbors: Any  # int, or None where every sample takes part
    metric: Any

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> Any:
        """The nearest samples of each query, nearest first: distances (q, k) and sample numbers (q, k).

        Args:
            X: (q, d); None: the samples, none of which is its own neighbour.
            n_neighbors: k; None: as the estimator was made.
            return_distance: else the sample numbers alone.

        Distances are float64, from samples rounded to float32. Cost q n d without an index. Raises BadInput for a k
        that is no whole number above 0, or beyond the number of samples.
        """
        check_is_fitted(self)
        count = self._count(n_neighbors if n_neighbors is not None else self.n_neighbors, among=int(X is None))
        if X is None:
            snapshot, _ = self.db_.core.view()
            queries = snapshot.keys_at(np.arange(snapshot.size)).double().numpy()
            hits = self.db_.search(queries, count, exclude_ids=[[i] for i in range(len(queries))])
        else:
            hits = self.db_.search(self._queries(X), count)
        rows: NDArray[np.int64] = hits.rows.numpy()  # a database that nothing was deleted from numbers them so
        if not return_distance:
            return rows
        scores = hits.scores.double().numpy()
        return (1 - scores if self.db_.metric == "cosine" else np.sqrt(-np.minimum(scores, 0))), rows

    def kneighbors_graph(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> csr_matrix:  # (q, n)
        """`kneighbors` as a sparse matrix: 1 (mode "connectivity") or the distance ("distance") at each neighbour."""
        one_of(mode, "mode", ("connectivity", "distance"))
        distances, rows = self.kneighbors(X, n_neighbors)
        data = distances.ravel() if mode == "distance" else np.ones(rows.size)
        starts = np.arange(0, rows.size + 1, rows.shape[1])
        return csr_matrix((data, rows.ravel(), starts), shape=(len(rows), self.n_samples_fit_))

    def _count(self, n_neighbors: object, among: int = 0) -> int:
        """k, which the database has after `among` samples are left out."""
        count = integer(n_neighbors, "n_neighbors")
        if count > self.n_samples_fit_ - among:
            others = f"n_samples = {self.n_samples_fit_} to choose from{', each without itself' if among else ''}"
            raise BadInput(f"n_neighbors is {count} but there are {others}; fit on more, or ask for fewer neighbours")
        return count

    def _metric(self) -> str:
        """The database's metric by scikit-learn's name."""
        return METRICS[one_of(self.metric, "metric", METRICS)]


class KNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Neighbors):
    """X as the sparse graph of its nearest samples, as scikit-learn's KNeighborsTransformer tells it.

    For estimators that take a precomputed graph: KNeighborsClassifier, DBSCAN, TSNE, Isomap with metric="precomputed".
    With mode "distance" a sample counts as its own neighbour, so each row has n_neighbors + 1 entries.

    Args:
        mode: "distance" or "connectivity".
        n_neighbors: k.
        metric: "euclidean" or "cosine" (1 - cosine).
        recall: None compares with every sample; a share such as 0.95 builds an index that finds so many of the true k.
        path: a new directory for the database; None: memory.

    >>> import numpy as np
    >>> graph = KNeighborsTransformer(n_neighbors=1).fit_transform(np.array([[0.0], [1.0], [3.0]]))
    >>> graph.toarray().tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    """

    def __init__(
        self,
        *,
        mode: str = "distance",
        n_neighbors: int = 5,
        metric: str = "euclidean",
        recall: float | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.mode, self.n_neighbors, self.metric, self.recall, self.path = mode, n_neighbors, metric, recall, path

    def fit(self, X: ArrayLike, y: object = None) -> KNeighborsTransformer:
        """Put the samples (n, d) into the database. Raises BadInput for settings that make no sense."""
        one_of(self.mode, "mode", ("connectivity", "distance"))
        integer(self.n_neighbors, "n_neighbors")
        self._open(self._validated(X, reset=True), metric=self._metric())
        return self

    def transform(self, X: ArrayLike) -> csr_matrix:  # (q, d) -> (q, n)
        """The graph of each query's neighbours. Raises BadInput where there are fewer samples than neighbours."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)

    @property
    def _n_features_out(self) -> int:
        return self.n_samples_fit_


class _SoftNeighbors(_Neighbors):
    """The mean of the samples' values, weighted by softmax(-‖x - x_i‖² / T)."""

    temperature_: float
    _loss: Callable[[NDArray[np.float64], NDArray[Any]], float]  # of the values told and the true ones

    def __init__(
        self,
        n_neighbors: int | None = None,
        *,
        temperature: float | None = None,
        weights: str = "softmax",
        metric: str = "euclidean",
        recall: float | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.n_neighbors, self.temperature, self.weights = n_neighbors, temperature, weights
        self.metric, self.recall, self.path = metric, recall, path

    def _start(self, X: NDArray[Any], values: NDArray[Any], **schema: Any) -> None:
        """A database of the first samples, and the temperature."""
        k = None if self.n_neighbors is None else integer(self.n_neighbors, "n_neighbors")
        one_of(self.weights, "weights", WEIGHTS)
        given = None if self.temperature is None else positive(self.temperature, "temperature")
        if k is not None and k > len(X):
            raise BadInput(f"n_neighbors is {k} but n_samples = {len(X)}; fit on more, or ask for fewer neighbours")
        self._open(X, values, metric=self._metric(), **schema)
        self.temperature_ = self._learnt() if given is None else given

    def _add(self, X: NDArray[Any], values: NDArray[Any]) -> None:
        count = self.n_samples_fit_
        self.db_.insert(range(count, count + len(X)), rounded(X), values)

    def _told(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q, v)
        """The weighted means of the values."""
        check_is_fitted(self)
        queries = self._queries(X)
        k = None if self.n_neighbors is None else self._count(self.n_neighbors)
        found = self.db_.attend(queries, temperature=self.temperature_, weights=self.weights, k=k)
        return found.output.double().numpy()

    def _learnt(self) -> float:
        """Return the temperature under which all others tell some samples best; 1 where that says nothing."""
        n = self.n_samples_fit_
        if n < 2 or self.weights in ("uniform", "argmax"):
            return 1.0
        snapshot, _ = self.db_.core.view()
        chosen = np.unique(np.linspace(0, n - 1, min(n, LEFT_OUT, max(1, MASKED // n)), dtype=np.int64))
        keys, true = snapshot.keys_at(chosen), snapshot.values_at(chosen).numpy()
        told = self._told_by_others(keys, chosen)
        spread = 1.0 if self.db_.metric == "cosine" else 2 * float(keys.double().var(dim=0, correction=0).sum())
        if not spread:
            return 1.0
        return math.exp(_least(lambda log: self._loss(told(math.exp(log)).double().numpy(), true), math.log(spread)))

    def _told_by_others(self, keys: Tensor, places: NDArray[np.int64]) -> Callable[[float], Tensor]:  # T -> (b, v)
        """Predictions for some samples by all others, or by the k nearest of them, at a temperature."""
        n, by = self.n_samples_fit_, weighting(self.weights)
        if self.n_neighbors is None:
            others = torch.ones(len(keys), n, dtype=torch.bool)
            others[torch.arange(len(keys)), torch.from_numpy(places)] = False
            return lambda T: self.db_.attend(keys, temperature=T, weights=by, mask=others).output
        hits = self.db_.search(keys.double(), min(self.n_neighbors, n - 1), exclude_ids=[[i] for i in places.tolist()])
        values = self.db_.core.view()[0].values_at(hits.rows.flatten().numpy())
        if values.ndim == 1:
            values = torch.nn.functional.one_hot(values.long(), self.db_.num_classes or -1)
        near, live = values.reshape(*hits.rows.shape, -1).double(), torch.ones_like(hits.rows, dtype=torch.bool)
        return lambda T: torch.einsum("bk,bkv->bv", by.weigh(hits.scores, T, live).weights, near)


class SoftKNeighborsClassifier(ClassifierMixin, _SoftNeighbors):
    """The classes' shares of a softmax over the samples: calibrated distributions from a database.

        p(c | x) = Σ_i w_i [y_i = c],    w = softmax(-‖x - x_i‖² / T)

    over every sample, or over the `n_neighbors` nearest. T is learnt where it is not given: by the log loss of samples
    that are told from all others. Equal to scikit-learn's KNeighborsClassifier with
    weights=lambda d: np.exp(-d**2 / T), and with weights="uniform"; but nothing underflows.

    Args:
        n_neighbors: k; None: every sample takes part, so that no class has probability 0.
        temperature: T, a number above 0; None: learnt by `fit`.
        weights: "softmax", "uniform", or another of `SoftDB.attend`: "sparsemax", "entmax15", "argmax".
        metric: "euclidean" (squared, as above) or "cosine" (w = softmax(cos / T)).
        recall: None compares with every sample; a share such as 0.95 builds an index for the k nearest.
        path: a new directory for the database, which then is on disk; None: memory.

    X of float32 is answered in float32 by the kernels, several times as fast; else float64. Samples are stored as
    float32: scale what needs more. Attributes: `classes_`, `temperature_`, `db_`, `n_samples_fit_`, `n_features_in_`.

    >>> import numpy as np
    >>> model = SoftKNeighborsClassifier(temperature=0.5).fit(np.array([[0.0], [1.0], [2.0]]), ["a", "b", "b"])
    >>> model.predict_proba([[0.0]]).round(3).tolist()
    [[0.881, 0.119]]
    """

    classes_: NDArray[Any]

    def fit(self, X: ArrayLike, y: ArrayLike) -> SoftKNeighborsClassifier:
        """Put the samples (n, d) and their classes (n,) into a new database, and learn T. Raises BadInput."""
        samples, labels = self._samples(X, y, reset=True)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        self._start(samples, codes.astype(np.int64), num_classes=len(self.classes_))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> SoftKNeighborsClassifier:
        """Add samples; T stays as the first call learnt it. That call names all `classes`, unless `fit` has seen them.

        Raises BadInput for a class that was not named, before anything is added.
        """
        first = not hasattr(self, "db_")
        samples, labels = self._samples(X, y, reset=first)
        if first and classes is None:
            raise BadInput("partial_fit: the first call has to name all classes; give classes=")
        known = np.unique(np.asarray(classes)) if first else self.classes_
        if strange := sorted(set(labels.tolist()) - set(known.tolist()), key=str):
            raise BadInput(f"partial_fit: y has {strange[:5]}, not among the classes of the first call")
        codes = np.searchsorted(known, labels).astype(np.int64)
        if first:
            self.classes_ = known
            self._start(samples, codes, num_classes=len(known))
        else:
            self._add(samples, codes)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q, classes)
        """The probability of each of `classes_`; rows sum to 1."""
        told = self._told(X)
        return told / told.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # (q, d) -> (q,)
        """The most probable class, the first of several."""
        best = self._told(X).argmax(axis=1)  # which says first that nothing was fitted
        return self.classes_[best]  # type: ignore[no-any-return]

    def _samples(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        samples, labels = self._validated(X, y, reset=reset)
        check_classification_targets(labels)
        return samples, column_or_1d(labels, warn=True)

    def _loss(self, told: NDArray[np.float64], true: NDArray[Any]) -> float:
        """The log loss, of no probability below float64's precision."""
        return -float(np.log(told[np.arange(len(true)), true].clip(np.finfo(np.float64).eps)).mean())


class SoftKNeighborsRegressor(TargetEstimator, _SoftNeighbors):
    """The softmax-weighted mean of the samples' targets; arguments and attributes as `SoftKNeighborsClassifier`.

        ŷ(x) = Σ_i w_i y_i,    w = softmax(-‖x - x_i‖² / T)

    T is learnt, where it is not given, by the squared error of samples that are told from all others. Targets of one
    or several outputs are pooled to float64's precision.

    >>> import numpy as np
    >>> SoftKNeighborsRegressor(2, weights="uniform").fit([[0.0], [1.0], [4.0]], [1.0, 2.0, 7.0]).predict([[0.2]])
    array([1.5])
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> SoftKNeighborsRegressor:
        """Put the samples (n, d) and their targets (n,) or (n, outputs) into a new database, and learn T."""
        samples, targets = self._pairs(X, y, reset=True)
        self._start(samples, halves(targets))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> SoftKNeighborsRegressor:
        """Add samples; T stays as the first call learnt it. Raises BadInput for targets of another width."""
        if not hasattr(self, "db_"):
            return self.fit(X, y)
        samples, targets = self._pairs(X, y, reset=False)
        self._add(samples, halves(targets))
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q,) or (q, outputs)
        """The weighted means."""
        return self._as_given(whole(self._told(X)))

    def _loss(self, told: NDArray[np.float64], true: NDArray[Any]) -> float:
        return float(np.square(whole(told - true)).mean())


def _least(loss: Callable[[float], float], middle: float) -> float:
    """Return the log T of the least loss: a grid, then a bounded search between the neighbours of its best."""
    grid = middle + np.linspace(*SPAN, STEPS)
    losses = [loss(log) for log in grid]
    best = int(np.argmin(losses))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, STEPS - 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 0.02})
    return float(found.x if found.fun < losses[best] else grid[best])
