"""mteb's retrieval and reranking tasks, searched by a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mteb.models.model_meta import ScoringFunction

from softdb.check import share, shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.opening import open as open_database

METRICS: dict[Any, Any] = {
    ScoringFunction.COSINE: "cosine", ScoringFunction.DOT_PRODUCT: "dot", ScoringFunction.EUCLIDEAN: "l2",
}  # fmt: skip


class SoftDBSearchIndex:
    """An index backend for `mteb.SearchEncoderWrapper`, in memory; scores are those of mteb's FaissSearchIndex.

    Documents are compared as the model's similarity says: by cosine, dot product, or minus the Euclidean distance.

    Args:
        model: the model that is evaluated; it says how documents are compared.
        recall: None compares with every document; a share such as 0.95 builds an index of that recall.

    Raises BadInput for what is no model of mteb, and a similarity that compares no single vectors, such as MaxSim.

        mteb.evaluate(SearchEncoderWrapper(model, index_backend=SoftDBSearchIndex(model)), tasks)
    """

    def __init__(self, model: Any, *, recall: float | None = None) -> None:
        meta = getattr(model, "mteb_model_meta", None)
        if meta is None:
            raise BadInput(f"model is {shown(model)}; expected a model of mteb, such as mteb.get_model gives")
        asked = meta.similarity_fn_name
        if asked not in METRICS:
            raise BadInput(
                f"the model compares by {shown(asked)}; a database compares single vectors by "
                f"{', '.join(str(one.value) for one in METRICS)}"
            )
        self.metric = METRICS[asked]
        self.recall = None if recall is None else share(recall, "recall")
        self.db: SoftDB | None = None
        self._ids: list[str] = []
        self._indexed = 0  # documents that the index was built of

    def add_documents(self, embeddings: Any, idxs: Sequence[str]) -> None:
        """Add documents (n, d) after those that are there. Raises BadInput for another width, NaN, or another count."""
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
        """Scores and places of the best documents of each query, best first.

        Places are those in which documents were added; with `top_ranked`, those in the query's own list of documents.
        The model's similarity is told by the metric, not by `similarity_fn`. Raises BadInput where nothing was added,
        for a list that names a document which is not there, and a list without `query_idx_to_id`.
        """
        if self.db is None:
            raise BadInput("search: there are no documents; call add_documents first")
        queries = _tensor(embeddings)
        if top_ranked is not None:
            if query_idx_to_id is None or not set(range(len(queries))) <= set(query_idx_to_id):
                raise BadInput("search: top_ranked names queries by id; give query_idx_to_id, with every query's")
            lists = [list(top_ranked.get(query_idx_to_id[i]) or []) for i in range(len(queries))]
            return self._reranked(queries, top_k, lists)
        if self.recall is not None and self._indexed != len(self._ids):
            self.db.build_index(recall=self.recall, k=min(top_k, len(self._ids)))
            self._indexed = len(self._ids)
        hits = self.db.search(queries, min(top_k, len(self._ids)))
        return self._told(hits.scores), hits.rows.tolist()  # a database that is only added to counts rows from 0

    def clear(self) -> None:
        """Forget every document."""
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
            if strange := [name for name in names if name not in rows]:
                raise BadInput(f"search: {shown(strange[0])} of top_ranked is no document that was added")
            wanted = {rows[name]: place for place, name in enumerate(names)}
            scores.append([])
            places.append([])
            if wanted:
                among = {"$id": {"$in": list(wanted)}}
                hits = self.db.search(query[None], min(top_k, len(wanted)), where=among, exact=True)
                scores[-1], places[-1] = self._told(hits.scores)[0], [wanted[row] for row in hits.rows[0].tolist()]
        return scores, places

    def _told(self, scores: torch.Tensor) -> list[list[float]]:
        """As mteb has them: for l2 minus the distance, where softdb has minus its square."""
        told: list[list[float]] = (-scores.neg().clamp(min=0).sqrt() if self.metric == "l2" else scores).tolist()
        return told


def _tensor(embeddings: Any) -> torch.Tensor:  # (n, d) float32
    return torch.as_tensor(embeddings).detach().cpu().float()
