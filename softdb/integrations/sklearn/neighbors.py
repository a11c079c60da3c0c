"""Nearest samples and their sparse graph; classification and regression by softmax-weighted neighbours."""

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
from softdb.integrations.sklearn.samples import SampleEstimator, TargetEstimator, columns, means, present, rounded
from softdb.scoring import weighting

MAX_LEFT_OUT = 1024  # largest number of samples whose leave-one-out predictions determine the temperature
MAX_MASK = 1 << 26  # largest number of bools in the mask of those predictions
WEIGHTS = ("softmax", "uniform", "sparsemax", "entmax15", "argmax")
METRICS = {"euclidean": "l2", "cosine": "cosine"}
SPAN, STEPS = (-20.0, 4.0), 13  # grid of log(T / mean squared distance): its range, its number of points


class _Neighbors(SampleEstimator):
    """An estimator with a search for the nearest samples."""

    n_neighbors: Any  # int, or None where every sample takes part
    metric: Any

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> Any:
        """Return the nearest samples of each query, nearest first: distances (q, k) and sample numbers (q, k).

        Args:
            X: queries (q, d); None: the samples, each without itself as a neighbour.
            n_neighbors: k; None: the estimator's n_neighbors.
            return_distance: False returns only the sample numbers.

        Distances are float64, from samples rounded to float32. Cost q n d without an index. Raises BadInput for a k
        that is not a whole number above 0, or exceeds the number of samples.
        """
        check_is_fitted(self)
        count = self._count(n_neighbors if n_neighbors is not None else self.n_neighbors, among=int(X is None))
        if X is None:
            snapshot, _ = self.db_.core.view()
            queries = snapshot.keys_at(np.arange(snapshot.size)).double().numpy()
            hits = self.db_.search(queries, count, exclude_ids=[[i] for i in range(len(queries))])
        else:
            hits = self.db_.search(self._queries(X), count)
        rows: NDArray[np.int64] = hits.rows.numpy()  # nothing is deleted, so rows are sample numbers
        if not return_distance:
            return rows
        scores = hits.scores.double().numpy()
        return (1 - scores if self.db_.metric == "cosine" else np.sqrt(-np.minimum(scores, 0))), rows

    def kneighbors_graph(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> csr_matrix:  # (q, n)
        """Return `kneighbors` as a sparse matrix of ones (mode "connectivity") or of distances (mode "distance")."""
        one_of(mode, "mode", ("connectivity", "distance"))
        distances, rows = self.kneighbors(X, n_neighbors)
        data = distances.ravel() if mode == "distance" else np.ones(rows.size)
        starts = np.arange(0, rows.size + 1, rows.shape[1])
        return csr_matrix((data, rows.ravel(), starts), shape=(len(rows), self.n_samples_fit_))

    def _count(self, n_neighbors: object, among: int = 0) -> int:
        """Return k as an int. Raises BadInput if k exceeds the number of samples minus `among`."""
        count = integer(n_neighbors, "n_neighbors")
        if count > self.n_samples_fit_ - among:
            others = f"n_samples = {self.n_samples_fit_} to choose from{', each without itself' if among else ''}"
            raise BadInput(f"n_neighbors is {count} but there are {others}; fit on more, or ask for fewer neighbours")
        return count

    def _metric(self) -> str:
        return METRICS[one_of(self.metric, "metric", METRICS)]


class KNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Neighbors):
    """Transformer from X to a sparse graph of each row's nearest samples, like scikit-learn's KNeighborsTransformer.

    The graph is for estimators with metric="precomputed": KNeighborsClassifier, DBSCAN, TSNE, Isomap. In mode
    "distance" a sample counts as its own neighbour, so each row has n_neighbors + 1 entries.

    Args:
        mode: "distance" or "connectivity".
        n_neighbors: k.
        metric: "euclidean" or "cosine" (1 - cosine).
        recall: None compares every sample; a share such as 0.95 builds an index that finds this share of the true k.
        path: a new directory for the database; None: in memory.

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
        """Insert the samples (n, d) into a new database. Raises BadInput for invalid settings."""
        one_of(self.mode, "mode", ("connectivity", "distance"))
        integer(self.n_neighbors, "n_neighbors")
        self._open(self._validated(X, reset=True), metric=self._metric())
        return self

    def transform(self, X: ArrayLike) -> csr_matrix:  # (q, d) -> (q, n)
        """Return the graph of each query's neighbours. Raises BadInput for fewer samples than neighbours."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)

    @property
    def _n_features_out(self) -> int:
        return self.n_samples_fit_


class _SoftNeighbors(_Neighbors):
    """An estimator that predicts the mean of the samples' values, weighted by softmax(-‖x - x_i‖² / T)."""

    temperature_: float
    _losses: Callable[[NDArray[np.float64], NDArray[Any]], NDArray[np.float64]]  # of predictions (b, v), true values
    _values: Callable[[NDArray[Any], NDArray[np.float64] | None], NDArray[Any]]  # to store, of true values and weights

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

    def _start(self, X: NDArray[Any], true: NDArray[Any], weights: NDArray[np.float64] | None, **schema: Any) -> None:
        """Create the database from the first samples, and set the temperature."""
        k = None if self.n_neighbors is None else integer(self.n_neighbors, "n_neighbors")
        if self.weights == "distance":
            raise BadInput("weights is 'distance'; choose 'softmax', whose weights exp(-d² / T) fall with distance")
        one_of(self.weights, "weights", WEIGHTS if weights is None else WEIGHTS[:2])  # sparse ones are no products
        temperature = None if self.temperature is None else positive(self.temperature, "temperature")
        if k is not None and k > len(X):
            raise BadInput(f"n_neighbors is {k} but n_samples = {len(X)}; fit on more, or ask for fewer neighbours")
        self._open(X, self._values(true, weights), metric=self._metric(), **schema)
        self._weighted = weights is not None
        self._undecided: Any = None if temperature else []  # true values and weights of batches that determine no T
        self.temperature_ = temperature or self._learnt(true, weights)

    def _add(self, X: NDArray[Any], true: NDArray[Any], sample_weight: ArrayLike | None) -> None:
        if not self._weighted and sample_weight is not None:
            raise BadInput("partial_fit: the first call had no sample_weight; leave it out, or begin with ones")
        default = np.ones(len(X)) if self._weighted else None
        weights, X, true = present(default if sample_weight is None else sample_weight, X, true)
        count = self.n_samples_fit_
        self.db_.insert(range(count, count + len(X)), rounded(X), self._values(true, weights))
        if getattr(self, "_undecided", None):
            self.temperature_ = self._learnt(true, weights)

    def _means(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q, v)
        check_is_fitted(self)
        queries = self._queries(X)
        k = None if self.n_neighbors is None else self._count(self.n_neighbors)
        answer = self.db_.attend(queries, temperature=self.temperature_, weights=self.weights, k=k)
        return self._unweighted(answer.output)

    def _unweighted(self, pooled: Tensor) -> NDArray[np.float64]:  # (q, c) -> (q, v)
        answer = pooled.double().numpy()
        return answer if self.db_.num_classes else means(answer, self._weighted)

    def _learnt(self, true: NDArray[Any], weights: NDArray[np.float64] | None) -> float:
        """Return the temperature of the least leave-one-out loss, or 1 as long as the loss does not depend on it."""
        n = self.n_samples_fit_
        if self.weights in ("uniform", "argmax"):
            return 1.0
        self._undecided.append((true, weights))
        true = np.concatenate([batch for batch, _ in self._undecided])
        weights = None if weights is None else np.concatenate([batch for _, batch in self._undecided])
        if len(np.unique(true, axis=0)) < 2:
            return 1.0
        snapshot, _ = self.db_.core.view()
        subset = np.unique(np.linspace(0, n - 1, min(n, MAX_LEFT_OUT, max(1, MAX_MASK // n)), dtype=np.int64))
        keys, shares = snapshot.keys_at(subset), None if weights is None else weights[subset]
        predict = self._leave_one_out(keys, subset)
        spread = 1.0 if self.db_.metric == "cosine" else 2 * float(keys.double().var(dim=0, correction=0).sum())
        if not spread:
            return 1.0
        self._undecided = None

        def loss(log: float) -> float:
            losses = self._losses(self._unweighted(predict(math.exp(log))), true[subset])
            return float(np.average(losses, weights=shares))

        return math.exp(_least(loss, math.log(spread)))

    def _leave_one_out(self, keys: Tensor, positions: NDArray[np.int64]) -> Callable[[float], Tensor]:  # T -> (b, v)
        """Return a function from T to predictions for samples, each from all other samples or from the k nearest."""
        n, weigher = self.n_samples_fit_, weighting(self.weights)
        if self.n_neighbors is None:
            others = torch.ones(len(keys), n, dtype=torch.bool)
            others[torch.arange(len(keys)), torch.from_numpy(positions)] = False
            return lambda T: self.db_.attend(keys, temperature=T, weights=weigher, mask=others).output
        itself = [[i] for i in positions.tolist()]
        hits = self.db_.search(keys.double(), min(self.n_neighbors, n - 1), exclude_ids=itself)
        values = self.db_.core.view()[0].values_at(hits.rows.flatten().numpy())
        if values.ndim == 1:
            values = torch.nn.functional.one_hot(values.long(), self.db_.num_classes or -1)
        near, live = values.reshape(*hits.rows.shape, -1).double(), torch.ones_like(hits.rows, dtype=torch.bool)
        return lambda T: torch.einsum("bk,bkv->bv", weigher.weigh(hits.scores, T, live).weights, near)


class SoftKNeighborsClassifier(ClassifierMixin, _SoftNeighbors):
    """Classifier whose probabilities are the classes' shares of a softmax over the samples.

        p(c | x) = Σ_i w_i [y_i = c],    w = softmax(-‖x - x_i‖² / T)

    The sum is over every sample, or over the `n_neighbors` nearest. Sample weights multiply the w_i, and the products
    are divided by their sum: a weight of 2 is a sample given twice, but with n_neighbors two copies are two neighbours.
    Unless T is given, `fit` learns it by the log loss of leave-one-out predictions, each without the sample's whole
    weight, while of two copies each would predict the other. The results equal those of scikit-learn's
    KNeighborsClassifier with weights=lambda d: np.exp(-d**2 / T), or with weights="uniform", but nothing underflows.

    Args:
        n_neighbors: k; None: every sample takes part, so that no class has probability 0.
        temperature: T, a number above 0; None: learnt by `fit`.
        weights: "softmax", "uniform", or another weighting of `SoftDB.attend`: "sparsemax", "entmax15", "argmax".
        metric: "euclidean" (squared, as above) or "cosine" (w = softmax(cos / T)).
        recall: None compares every sample; a share such as 0.95 builds an index for the k nearest.
        path: a new directory for the database; None: in memory.

    X in float32 is answered in float32, several times as fast as X in another dtype, which is answered in float64.
    Samples are stored in float32: scale data that need more digits.
    Attributes: `classes_`, `temperature_`, `db_`, `n_samples_fit_`, `n_features_in_`.

    >>> import numpy as np
    >>> model = SoftKNeighborsClassifier(temperature=0.5).fit(np.array([[0.0], [1.0], [2.0]]), ["a", "b", "b"])
    >>> model.predict_proba([[0.0]]).round(3).tolist()
    [[0.881, 0.119]]
    """

    classes_: NDArray[Any]

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SoftKNeighborsClassifier:
        """Insert the samples (n, d) and classes (n,) into a new database; learn the temperature. Raises BadInput.

        Sample weights (n,) need `weights` "softmax" or "uniform", and multiply the losses that T minimises. Samples of
        weight 0 are not inserted: classes and sample numbers are those of the others.
        """
        samples, labels = self._samples(X, y, reset=True)
        weights, samples, labels = present(sample_weight, samples, labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        self._start(samples, codes, weights, num_classes=len(self.classes_) if weights is None else None)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: Any = None, sample_weight: ArrayLike | None = None
    ) -> SoftKNeighborsClassifier:
        """Add samples; without `fit` before, the first call must name all `classes`.

        The first call after which there are samples of two classes learns the temperature; until then it is 1.
        Raises BadInput, before it adds anything, for a class that the first call did not name, and for weights if the
        first call had none.
        """
        first = not hasattr(self, "db_")
        samples, labels = self._samples(X, y, reset=first)
        if first and classes is None:
            raise BadInput("partial_fit: the first call has to name all classes; give classes=")
        known = np.unique(np.asarray(classes)) if first else self.classes_
        if unknown := sorted(set(labels.tolist()) - set(known.tolist()), key=str):
            raise BadInput(f"partial_fit: y has {unknown[:5]}, not among the classes of the first call")
        codes = np.searchsorted(known, labels)
        if first:
            self.classes_ = known
            weights, samples, codes = present(sample_weight, samples, codes)
            self._start(samples, codes, weights, num_classes=len(known) if weights is None else None)
        else:
            self._add(samples, codes, sample_weight)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q, classes)
        """Return the probability of each of `classes_`; rows sum to 1."""
        means = self._means(X)
        return means / means.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # (q, d) -> (q,)
        """Return the most probable class; of equally probable classes the first."""
        best = self._means(X).argmax(axis=1)  # before `classes_`: raises NotFittedError without a `fit`
        return self.classes_[best]  # type: ignore[no-any-return]

    def _samples(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        samples, labels = self._validated(X, y, reset=reset)
        check_classification_targets(labels)
        return samples, column_or_1d(labels, warn=True)

    def _values(self, codes: NDArray[Any], weights: NDArray[np.float64] | None) -> NDArray[Any]:
        """Return class numbers as labels or, with weights, as `columns` of one-hot vectors."""
        return codes.astype(np.int64) if weights is None else columns(np.eye(len(self.classes_))[codes], weights)

    def _losses(self, means: NDArray[np.float64], true: NDArray[Any]) -> NDArray[np.float64]:
        """Return the log losses, with probabilities of at least float64's epsilon."""
        return -np.log(means[np.arange(len(true)), true].clip(np.finfo(np.float64).eps))  # type: ignore[no-any-return]


class SoftKNeighborsRegressor(TargetEstimator, _SoftNeighbors):
    """Regressor by the softmax-weighted mean of the samples' targets.

        ŷ(x) = Σ_i w_i y_i,    w = softmax(-‖x - x_i‖² / T)

    Unless T is given, `fit` learns it by the squared error of leave-one-out predictions. Targets of one or several
    outputs are pooled in float64. See `SoftKNeighborsClassifier` for arguments and attributes.

    >>> import numpy as np
    >>> SoftKNeighborsRegressor(2, weights="uniform").fit([[0.0], [1.0], [4.0]], [1.0, 2.0, 7.0]).predict([[0.2]])
    array([1.5])
    """

    _values = staticmethod(columns)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> SoftKNeighborsRegressor:
        """Insert the samples (n, d) and targets (n,) or (n, outputs) into a new database; learn the temperature."""
        weights, samples, targets = present(sample_weight, *self._pairs(X, y, reset=True))
        self._start(samples, targets, weights)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> SoftKNeighborsRegressor:
        """Add samples. The first call after which there are two different targets learns the temperature.

        Raises BadInput for targets of another width, and for weights if the first call had none.
        """
        if not hasattr(self, "db_"):
            return self.fit(X, y, sample_weight)
        self._add(*self._pairs(X, y, reset=False), sample_weight)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q,) or (q, outputs)
        """Return the weighted means of the targets."""
        return self._shaped(self._means(X))

    def _losses(self, means: NDArray[np.float64], true: NDArray[Any]) -> NDArray[np.float64]:
        return np.square(means - true).mean(axis=1)  # type: ignore[no-any-return]


def _least(loss: Callable[[float], float], middle: float) -> float:
    """Return the log T with the least loss: search a grid, then between the neighbours of the best grid point."""
    grid = middle + np.linspace(*SPAN, STEPS)
    losses = [loss(log) for log in grid]
    best = int(np.argmin(losses))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, STEPS - 1)]
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 0.02})
    return float(result.x if result.fun < losses[best] else grid[best])
