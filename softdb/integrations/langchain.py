"""LangChain's vector store and retriever, on top of a database (`softdb[langchain]`).

A `Document` is stored as a record: its `page_content` is the text, its `metadata` the payload, its `id` the id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from softdb.answers import Hit, Record
from softdb.check import integer, shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.encoders import require_like
from softdb.errors import BadFilter, BadInput, MissingDependency
from softdb.integrations.documents import awaited, diverse, matching, open_store, own_ids, relevance, search_one, stored
from softdb.integrations.haystack_filters import where_of

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.structured_query import Comparator, FilterDirective, Operator, Visitor
    from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
    from pydantic import model_validator
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.langchain: {error}; pip install 'softdb[langchain]'") from None


class SoftDBVectorStore(VectorStore):
    """A database as a LangChain vector store.

        store = SoftDBVectorStore(embedding, "films")  # creates the directory if it is missing
        store.add_texts(["In space no one can hear you scream"], [{"year": 1979}])
        store.similarity_search("alone in space", k=1, filter={"year": {"$lt": 2000}})
        store.as_retriever(k=5, mode="hybrid")

    Args:
        embedding: computes the vectors of texts and queries; it is the encoder of a database that is given by its path,
            which therefore refuses another model later. If None, the database's encoder does (for a new database give
            `encoder=`). Without an encoder (for a new database give `dim=`) documents have no vector, and only their
            words can be searched.
        db: an open database, an open cluster over a table (searched by vector alone), or the path of a database; None
            creates a database in memory.
        relevance_score_fn: maps a score to a relevance from 0 to 1; `softdb.integrations.documents.relevance` if None.
        settings: arguments of `softdb.open`, unless `db` is open. A new database has the metric cosine (unless `metric`
            is given), the width of `embedding`'s vectors, and a text index.

    The attribute `db` is the database, for all other calls. Asynchronous methods run in LangChain's threads.

    Raises the errors of `softdb.open`; DatabaseLocked if another store or process writes to the path: pass one open
    database to both stores, or open the second with mode="r", which sees at each search what has been committed.
    """

    def __init__(
        self,
        embedding: Embeddings | None = None,
        db: SoftDB | TableCluster | str | os.PathLike[str] | None = None,
        *,
        relevance_score_fn: Callable[[float], float] | None = None,
        **settings: Any,
    ) -> None:
        if embedding is not None and not isinstance(embedding, Embeddings):
            expected = "expected LangChain's Embeddings, or None with encoder= for an encoder of softdb"
            raise BadInput(f"embedding is {shown(embedding)}; {expected}")
        self.embedding, self.relevance_score_fn = embedding, relevance_score_fn
        if embedding is not None and isinstance(db, SoftDB):
            require_like(db.core.store.keyed, embedding.embed_documents)
        elif embedding is not None and not isinstance(db, TableCluster):
            settings = {"encoder": embedding.embed_documents, **settings}
        self.db = open_store(db, lambda: _defaults(settings), **settings)

    @property
    def embeddings(self) -> Embeddings | None:
        """The `embedding` that the store was made with, or None."""
        return self.embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
    ) -> list[str]:
        """Add documents, or replace those with the same ids, and return the ids. The call stores all documents or none.

        Args:
            texts: n texts; metadatas: n dicts of JSON values; ids: n ids, None where one is to be generated.
            batch_size: number of documents in a commit; after an error the earlier batches are stored.

        Raises BadInput for invalid arguments and DuplicateId for a repeated id, before it writes anything of the batch.
        """
        texts = texts if isinstance(texts, str) else list(texts)
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise BadInput(f"texts are {shown(texts)}; expected a list of str")
        if isinstance(ids, str):
            raise BadInput(f"ids are {shown(ids)}; expected a list of str, None where one is to be generated")
        names = [name or str(uuid4()) for name in (ids if ids is not None else [None] * len(texts))]
        payloads = metadatas if metadatas is not None else [{} for _ in texts]
        if not len(texts) == len(names) == len(payloads):
            raise BadInput(f"{len(texts)} texts, {len(payloads)} metadatas and {len(names)} ids; give one of each")
        size = max(len(texts), 1) if batch_size is None else integer(batch_size, "batch_size")
        for start in range(0, len(texts), size):
            batch = slice(start, start + size)
            embed = None if self.embedding is None else self.embedding.embed_documents
            keys = None if embed in (None, self.db.core.encoder()) else embed(texts[batch])
            self.db.upsert(own_ids(self.db, names[batch]), keys, payloads=payloads[batch], texts=texts[batch])
        return names

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents as `add_texts` does, with their own ids unless `ids=` is given."""
        if not isinstance(documents, list | tuple) or not all(isinstance(document, Document) for document in documents):
            raise BadInput(f"documents are {shown(documents)}; expected a list of LangChain's Document")
        kwargs = {"ids": [document.id for document in documents], **kwargs}
        texts, metadatas = [each.page_content for each in documents], [each.metadata for each in documents]
        return self.add_texts(texts, metadatas, **kwargs)

    def delete(self, ids: list[str] | None = None, *, filter: dict[str, Any] | None = None) -> bool:
        """Delete documents by id (missing ids are ignored), by filter, by both, or, without arguments, all of them."""
        self.db.delete(where=matching(self.db, ids, {} if filter is None else _where(filter)))
        return True

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        db: SoftDB | TableCluster | str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> SoftDBVectorStore:
        """Return `SoftDBVectorStore(embedding, db, **settings)` with these texts added."""
        store = cls(embedding, db, **settings)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in the order of the ids; skip ids that are not stored."""
        if self.db.mode == "r":
            self.db.refresh()
        return [_document(record) for record in stored(self.db, ids)]

    def similarity_search(self, query: str, k: int = 4, **search: Any) -> list[Document]:
        """Return the k nearest documents; for `search` see `similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **search)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, mode: str | None = None, **search: Any
    ) -> list[tuple[Document, float]]:
        """Return the k nearest documents and their scores, best first; for every metric a larger score is closer.

        Args:
            query: a text; k: at least 1.
            mode: "vector" (the default), "text" (by words) or "hybrid" (by both); see `SoftDB.search`.
            search: `filter`, a dict as in docs/filters.md or a `langchain_core.structured_query` filter, and other
                arguments of `SoftDB.search`: `fusion`, `exact`, `radius` in place of k, `offset`, `exclude_ids`,
                `group_by`.
        """
        if not isinstance(query, str):
            raise BadInput(f"query is {shown(query)}; expected a str; for a vector call similarity_search_by_vector")
        if mode in ("text", "hybrid"):
            search |= {"mode": mode, "texts": [query]}
        elif mode not in (None, "vector"):
            raise BadInput(f"mode is {shown(mode)}; expected 'vector', 'text' or 'hybrid'")
        if mode != "text" and self.embedding is not None:
            return self._scored(self.embedding.embed_query(query), k, **search)
        return self._scored(query if mode in (None, "vector") else None, k, **search)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **search: Any) -> list[Document]:
        """Return the k documents nearest to a vector (d,)."""
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, **search)]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **search: Any
    ) -> list[tuple[Document, float]]:
        """Return the k documents nearest to a vector (d,), and their scores."""
        return self._scored(embedding, k, **search)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **search: Any
    ) -> list[Document]:
        """Choose k of the `fetch_k` nearest documents by MMR; lambda_mult: 1 for the nearest, 0 for most diversity."""
        return self.similarity_search(query, k, **diverse(k, fetch_k, lambda_mult), **search)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **search: Any
    ) -> list[Document]:
        """Choose k of the `fetch_k` documents nearest to a vector (d,) by MMR."""
        return self.similarity_search_by_vector(embedding, k, **diverse(k, fetch_k, lambda_mult), **search)

    def as_retriever(self, **settings: Any) -> SoftDBRetriever:
        """Return a retriever on this store; `settings` are LangChain's for a retriever, or arguments of a search."""
        tags = settings.pop("tags", None) or self._get_retriever_tags()
        return SoftDBRetriever(vectorstore=self, tags=tags, **settings)

    def _select_relevance_score_fn(self, mode: str | None = None) -> Callable[[float], float]:
        return self.relevance_score_fn or relevance(self.db.metric, mode)

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **search: Any
    ) -> list[tuple[Document, float]]:
        scale = self._select_relevance_score_fn(search.get("mode"))
        return [(document, scale(score)) for document, score in self.similarity_search_with_score(query, k, **search)]

    _asimilarity_search_with_relevance_scores = awaited(_similarity_search_with_relevance_scores)

    def _scored(self, query: Any, k: int | None, *, filter: Any = None, **search: Any) -> list[tuple[Document, float]]:
        parts = {"queries": None if query is None else [query], "where": None if filter is None else _where(filter)}
        hits = search_one(self.db, search, ("k", "filter", "mode"), k=k, **parts)
        return [(_document(hit), float(hit.score)) for hit in hits]


class SoftDBRetriever(VectorStoreRetriever):
    """The retriever of a `SoftDBVectorStore`. It takes LangChain's arguments of a retriever, and those of a search.

    SoftDBRetriever(vectorstore=store, k=5, mode="hybrid", filter={"lang": "de"})
    """

    @model_validator(mode="before")
    @classmethod
    def _move_search_arguments(cls, values: dict[str, Any]) -> dict[str, Any]:
        search = {name: value for name, value in values.items() if name not in cls.model_fields}
        fields = {name: value for name, value in values.items() if name in cls.model_fields}
        return {**fields, "search_kwargs": {**(values.get("search_kwargs") or {}), **search}}


class SoftDBTranslator(Visitor):
    """Translates LangChain's structured queries, for `SelfQueryRetriever(structured_query_translator=…)`."""

    def visit_operation(self, operation: Any) -> dict[str, Any]:
        """Translate AND, OR and NOT."""
        filters = [argument.accept(self) for argument in operation.arguments]
        if operation.operator is Operator.NOT:
            return {"$not": {"$and": filters}}
        return {f"${operation.operator.value}": filters}

    def visit_comparison(self, comparison: Any) -> dict[str, Any]:
        """Translate a comparison. Raises BadFilter for LIKE, which softdb does not support."""
        if comparison.comparator is Comparator.LIKE:
            raise BadFilter(f"field {shown(comparison.attribute)} is compared by LIKE; use CONTAIN, or $startswith")
        name = "$contains" if comparison.comparator is Comparator.CONTAIN else f"${comparison.comparator.value}"
        value = comparison.value  # a date comes as {"type": "date", "date": "2024-02-29"}
        return {comparison.attribute: {name: value["date"] if isinstance(value, dict) and "date" in value else value}}

    def visit_structured_query(self, structured_query: Any) -> tuple[str, dict[str, Any]]:
        """Return the text and the arguments of the search."""
        condition = structured_query.filter
        return structured_query.query, {} if condition is None else {"filter": condition.accept(self)}


def _defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return default arguments of `softdb.open` for a new database."""
    if not {"dim", "encoder"} & set(settings):
        raise BadInput("there is no embedding; give one, or encoder=, or, for search by words alone, dim=1")
    return {"metric": "cosine"}


def _where(filter: Any) -> dict[str, Any]:
    """Translate LangChain's filter to softdb's. Raises BadFilter for other libraries' dialects."""
    if isinstance(filter, FilterDirective):
        filter = filter.accept(SoftDBTranslator())
    if callable(filter):
        raise BadFilter('filter is a function; softdb filters within the search: write {"year": {"$gte": 2020}}')
    if isinstance(filter, dict) and set(filter) in ({"operator", "field", "value"}, {"operator", "conditions"}):
        raise BadFilter(f"filter is in Haystack's dialect; write {json.dumps(where_of(filter), default=str)}")
    return filter  # type: ignore[no-any-return]  # the search checks it


def _document(record: Hit | Record) -> Document:
    """Return a record as a document. A payload that is not a JSON object becomes the metadata field "payload"."""
    payload = record.payload
    metadata = {} if payload is None else payload if isinstance(payload, dict) else {"payload": payload}
    return Document(id=str(record.id), page_content=record.text or "", metadata=metadata)
