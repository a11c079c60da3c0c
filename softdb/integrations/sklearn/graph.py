"""Neighbours as scikit-learn tells them: distances, sample numbers, sparse graphs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_matrix
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from softdb.check import integer, one_of
from softdb.errors import BadInput
from softdb.integrations.sklearn.samples import SampleEstimator

__all__ = ["KNeighborsTransformer", "NeighborEstimator", "metric_of"]

METRICS = {"euclidean": "l2", "cosine": "cosine"}


class NeighborEstimator(SampleEstimator):
    """An estimator that can be asked for the nearest samples."""

    n_neighbors: Any  # int, or None where every sample takes part

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
            raise BadInput(
                f"n_neighbors is {count} but there are n_samples = {self.n_samples_fit_} to choose from"
                + (", each without itself" if among else "")
                + "; fit on more, or ask for fewer neighbours"
            )
        return count


class KNeighborsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, NeighborEstimator):
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
        self.mode = mode
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.recall = recall
        self.path = path

    def fit(self, X: ArrayLike, y: object = None) -> KNeighborsTransformer:
        """Put the samples (n, d) into the database. Raises BadInput for settings that make no sense."""
        one_of(self.mode, "mode", ("connectivity", "distance"))
        integer(self.n_neighbors, "n_neighbors")
        samples = self._validated(X, reset=True)
        self.db_ = self._open(samples, metric=metric_of(self.metric))
        self._index()
        return self

    def transform(self, X: ArrayLike) -> csr_matrix:  # (q, d) -> (q, n)
        """The graph of each query's neighbours. Raises BadInput where there are fewer samples than neighbours."""
        check_is_fitted(self)
        return self.kneighbors_graph(X, self.n_neighbors + (self.mode == "distance"), self.mode)

    @property
    def _n_features_out(self) -> int:
        return self.n_samples_fit_


def metric_of(name: object) -> str:
    """A database's metric by scikit-learn's name."""
    return METRICS[one_of(name, "metric", METRICS)]
