"""A database as an algorithm of ann-benchmarks. docs/integrations/benchmarks.md has the Dockerfile and the config."""

from __future__ import annotations

from typing import Any

import numpy as np
from ann_benchmarks.algorithms.base.module import BaseANN
from numpy.typing import NDArray

from softdb.check import one_of, share
from softdb.opening import open as open_database

METRICS: dict[str, Any] = {"angular": "cosine", "euclidean": "l2"}
REPORTED = ("kind", "codes", "records_per_match", "ef_search", "fetch_k", "recall")
FIRST_RECALL = 0.5  # recall for which the index is built; `set_query_arguments` tunes the search effort again


class SoftDBAlgorithm(BaseANN):
    """An algorithm of ann-benchmarks: a database in memory, with an index. The query argument is the recall to reach.

    softdb does not take ef or nprobe: `tune` raises the search effort until it measures the requested recall, on
    held-out stored keys, never on the benchmark's queries. `get_additional` reports the tuned effort.

    Args:
        metric: "angular" or "euclidean".
        kind: the kind of index, as in `SoftDB.build_index`: "auto", "ivf", "hnsw", or "flat" for exact search.

    Raises BadInput for another metric.
    """

    def __init__(self, metric: str, kind: str = "auto") -> None:
        self.metric, self.kind = METRICS[one_of(metric, "metric", METRICS)], kind
        self.name = f"softdb ({kind})"
        self._results: NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def fit(self, X: NDArray[Any]) -> None:
        """Insert the vectors (n, d) and build the index."""
        self.db = open_database(None, dim=X.shape[1], metric=self.metric)
        self.db.insert(range(len(X)), X)
        if self.kind != "flat":
            self.db.build_index(self.kind, recall=FIRST_RECALL)

    def set_query_arguments(self, recall: float) -> None:
        """Tune the index to reach this recall of the 10 nearest."""
        if self.db.stats().index is not None:
            self.db.tune(share(recall, "recall"))
        self.name = f"softdb ({self.kind}, recall {recall})"

    def query(self, q: NDArray[Any], n: int) -> NDArray[np.int64]:  # (d,) -> (n,)
        """Return the numbers of the nearest vectors, nearest first."""
        return self.db.search(q, n).rows[0].numpy()  # rows count from 0, in the order of insertion

    def batch_query(self, X: NDArray[Any], n: int) -> None:
        """Search for all queries (q, d) in one call."""
        self._results = self.db.search(X, n).rows.numpy()

    def get_batch_results(self) -> NDArray[np.int64]:  # (q, n)
        """Return the results of `batch_query`."""
        return self._results

    def get_additional(self) -> dict[str, Any]:
        """Return the index's kind, its search effort, and its recall measured on held-out keys."""
        index = self.db.stats().index
        return {} if index is None else {f"index_{name}": getattr(index, name) for name in REPORTED}

    def done(self) -> None:
        """Close the database."""
        self.db.close()
