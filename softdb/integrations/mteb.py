"""A database as the index of mteb's retrieval and reranking tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from softdb.check import share, shown
from softdb.database import SoftDB
from softdb.errors import BadInput, MissingDependency
from softdb.opening import open as open_database

try:
    from mteb.models.model_meta import ScoringFunction
except ImportError as error:
    raise MissingDependency("softdb.integrations.mteb needs mteb; pip install 'softdb[mteb]'") from error

METRICS: dict[Any, Any] = {
    ScoringFunction.COSINE: "cosine", ScoringFunction.DOT_PRODUCT: "dot", ScoringFunction.EUCLIDEAN: "l2",
}  # fmt: skip


class SoftDBSearchIndex:
    """An index backend for `mteb.SearchEncoderWrapper`, in memory, with the scores of mteb's FaissSearchIndex.

    Args:
        model: the evaluated model; its similarity is the score: cosine, dot product, or minus the Euclidean distance.
        recall: None compares every document; a share such as 0.95 builds an index that finds this share of the best.

    Raises BadInput for an object that is no model of mteb, and a similarity of several vectors, such as MaxSim.

        mteb.evaluate(SearchEncoderWrapper(model, index_backend=SoftDBSearchIndex(model)), tasks)
    """

    def __init__(self, model: Any, *, recall: float | None = None) -> None:
        meta = getattr(model, "mteb_model_meta", None)
        if meta is None:
            raise BadInput(f"model is {shown(model)}; expected a model of mteb, such as mteb.get_model returns")
        similarity = meta.similarity_fn_name
        if similarity not in METRICS:
            raise BadInput(
                f"the model compares by {shown(similarity)}; a database compares single vectors by "
                f"{', '.join(str(each.value) for each in METRICS)}"
            )
        self.metric = METRICS[similarity]
        self.recall = None if recall is None else share(recall, "recall")
        self.db: SoftDB | None = None
        self._ids: list[str] = []
        self._indexed = 0  # number of documents when the index was built

    def add_documents(self, embeddings: Any, idxs: Sequence[str]) -> None:
        """Append the vectors (n, d) and ids of documents. Raises BadInput for another width, number of ids, or NaN."""
        vectors, names = _tensor(embeddings), list(idxs)
        if self.db is None:
            self.db = open_database(None, dim=vectors.shape[-1], metric=self.metric)
        self.db.insert(range(len(self._ids), len(self._ids) + len(names)), vectors)
        self._ids += names

    def search(
        self,
        embeddings: Any,  # (q, d)
        top_k: int,
        similarity_fn: Callable[..., Any] | None = None,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        query_idx_to_id: Mapping[int, str] | None = None,
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Return the scores and the numbers of the best documents for each query, best first.

        Documents are numbered from 0 in the order in which they were added; with `top_ranked`, in the query's own list.
        `similarity_fn` is ignored: the metric is the model's similarity. Raises BadInput if no document was added, for
        a list that names an unknown document, and for `top_ranked` without `query_idx_to_id`.
        """
        if self.db is None:
            raise BadInput("search: there are no documents; call add_documents first")
        queries = _tensor(embeddings)
        if top_ranked is not None:
            if query_idx_to_id is None or not set(range(len(queries))) <= set(query_idx_to_id):
                raise BadInput("search: top_ranked names queries by id; give every query's in query_idx_to_id")
            lists = [list(top_ranked.get(query_idx_to_id[i]) or []) for i in range(len(queries))]
            return self._reranked(queries, top_k, lists)
        if self.recall is not None and self._indexed != len(self._ids):
            self.db.build_index(recall=self.recall, k=min(top_k, len(self._ids)))
            self._indexed = len(self._ids)
        hits = self.db.search(queries, min(top_k, len(self._ids)))
        return self._mteb_scores(hits.scores), hits.rows.tolist()  # nothing is deleted, so rows are document numbers

    def clear(self) -> None:
        """Remove every document."""
        if self.db is not None:
            self.db.close()
        self.db, self._ids, self._indexed = None, [], 0

    def _reranked(
        self, queries: torch.Tensor, top_k: int, lists: list[list[str]]
    ) -> tuple[list[list[float]], list[list[int]]]:
        assert self.db is not None
        rows = {name: row for row, name in enumerate(self._ids)}
        scores, places = list[list[float]](), list[list[int]]()
        for query, names in zip(queries, lists, strict=True):
            if unknown := [name for name in names if name not in rows]:
                raise BadInput(f"search: {shown(unknown[0])} of top_ranked is no document that was added")
            place_of = {rows[name]: place for place, name in enumerate(names)}
            scores.append([])
            places.append([])
            if place_of:
                where = {"$id": {"$in": list(place_of)}}
                hits = self.db.search(query[None], min(top_k, len(place_of)), where=where, exact=True)
                scores[-1] = self._mteb_scores(hits.scores)[0]
                places[-1] = [place_of[row] for row in hits.rows[0].tolist()]
        return scores, places

    def _mteb_scores(self, scores: torch.Tensor) -> list[list[float]]:
        """Convert scores to mteb's: for l2, mteb's is minus the distance, softdb's is minus the squared distance."""
        return (-scores.neg().clamp(min=0).sqrt() if self.metric == "l2" else scores).tolist()


def _tensor(embeddings: Any) -> torch.Tensor:  # (n, d) float32
    return torch.as_tensor(embeddings).detach().cpu().float()
