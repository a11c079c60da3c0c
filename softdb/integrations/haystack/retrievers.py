"""Haystack's retrievers on a `SoftDBDocumentStore`: by embedding, by words, by both."""

from __future__ import annotations

from typing import Any, Literal

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.document_stores.types import FilterPolicy, apply_filter_policy

from softdb.check import integer, one_of, shown
from softdb.errors import BadInput
from softdb.integrations.documents import awaited
from softdb.integrations.haystack.store import SoftDBDocumentStore


class _Retriever:
    """Base of the three retrievers. It holds the settings; arguments of `run` override them."""

    def __init__(
        self,
        document_store: SoftDBDocumentStore,
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        filter_policy: FilterPolicy | str = FilterPolicy.REPLACE,
    ) -> None:
        if not isinstance(document_store, SoftDBDocumentStore):
            raise BadInput(f"document_store is {shown(document_store)}; expected a SoftDBDocumentStore")
        policy = getattr(filter_policy, "value", filter_policy)
        self.filter_policy = FilterPolicy(one_of(policy, "filter_policy", [policy.value for policy in FilterPolicy]))
        self.document_store, self.filters, self.scale_score = document_store, filters, scale_score
        self.top_k = integer(top_k, "top_k")

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the retriever and of its store, in Haystack's form."""
        settings = {**vars(self), "filter_policy": self.filter_policy.value}
        return default_to_dict(self, **{k: v for k, v in settings.items() if not k.startswith("_")})  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Create a retriever from the result of `to_dict`."""
        return default_from_dict(cls, data)

    def close(self) -> None:
        """Close the document store; a pipeline's `close()` calls this."""
        self.document_store.close()

    close_async = awaited(close)

    def _settings(self, filters: Any, top_k: int | None, scale_score: bool | None) -> dict[str, Any]:
        return {
            "filters": apply_filter_policy(self.filter_policy, self.filters, filters),
            "top_k": self.top_k if top_k is None else top_k,
            "scale_score": self.scale_score if scale_score is None else scale_score,
        }


@component
class SoftDBEmbeddingRetriever(_Retriever):
    """Retriever of the documents whose embeddings are nearest to a query's embedding."""

    @component.output_types(documents=list[Document])
    def run(
        self,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        scale_score: bool | None = None,
        return_embedding: bool = False,
    ) -> dict[str, list[Document]]:
        """Return the documents; an argument other than None overrides the setting of the retriever."""
        settings = {**self._settings(filters, top_k, scale_score), "return_embedding": return_embedding}
        return {"documents": self.document_store.embedding_retrieval(query_embedding, **settings)}

    run_async = awaited(run)


@component
class SoftDBKeywordRetriever(_Retriever):
    """Retriever of the documents whose words match a query best, by BM25."""

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        scale_score: bool | None = None,
    ) -> dict[str, list[Document]]:
        """Return the documents; an argument other than None overrides the setting of the retriever."""
        return {"documents": self.document_store.bm25_retrieval(query, **self._settings(filters, top_k, scale_score))}

    run_async = awaited(run)


@component
class SoftDBHybridRetriever(_Retriever):
    """Retriever of the documents that match best by words and vectors together; see `SoftDB.search` for `fusion`."""

    def __init__(
        self,
        document_store: SoftDBDocumentStore,
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        filter_policy: FilterPolicy | str = FilterPolicy.REPLACE,
        fusion: Literal["scores", "ranks"] | float = "scores",
    ) -> None:
        _Retriever.__init__(self, document_store, filters, top_k, scale_score, filter_policy)
        self.fusion = fusion

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        scale_score: bool | None = None,
    ) -> dict[str, list[Document]]:
        """Return the documents; an argument other than None overrides the setting of the retriever."""
        settings = {**self._settings(filters, top_k, scale_score), "fusion": self.fusion}
        return {"documents": self.document_store.hybrid_retrieval(query, query_embedding, **settings)}

    run_async = awaited(run)
