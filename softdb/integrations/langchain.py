"""LangChain's vector store and retriever on a database (`softdb[langchain]`).

A `Document` is a record: its `page_content` is the text, its `metadata` the payload, its `id` the id.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from softdb.answers import Hit, Record
from softdb.check import shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.errors import BadFilter, BadInput, MissingDependency
from softdb.integrations.documents import found, opened, own_ids, relevance, stored
from softdb.integrations.haystack_filters import where_of

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.runnables.config import run_in_executor
    from langchain_core.structured_query import Comparator, FilterDirective, Operator, Visitor
    from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
    from pydantic import model_validator
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.langchain: {error}; pip install 'softdb[langchain]'") from None

_SEARCH = ("diversity", "exact", "exclude_ids", "fetch_k", "fusion", "group_by", "group_size", "offset", "radius")


class SoftDBVectorStore(VectorStore):
    """A database as a LangChain vector store.

        store = SoftDBVectorStore(embedding, "films")  # made where nothing is there
        store.add_texts(["In space no one can hear you scream"], [{"year": 1979}])
        store.similarity_search("alone in space", k=1, filter={"year": {"$lt": 2000}})
        store.as_retriever(k=5, mode="hybrid")

    Args:
        embedding: makes the vectors of texts and queries. None: the database's own encoder does (a new one's:
            `encoder=`); without one either (a new one takes `dim=`), documents have no vector and are found by words.
        db: an open database, an open cluster over a table (by vector alone), or the path of a database; None keeps a
            new one in memory.
        relevance_score_fn: from a score to a relevance from 0 to 1, in place of `softdb.integrations.documents`'s.
        settings: as of `softdb.open`, where `db` is no open database. A new one is compared by cosine unless `metric`
            says otherwise, as wide as `embedding` makes a vector of it, and has an index of its texts.

    The database is the attribute `db`, with every call of its own. Asynchronous methods run in LangChain's threads.

    Raises what `softdb.open` does: DatabaseLocked where another store or process writes to the path; give both stores
    one open database, or open one with mode="r", which sees what is committed at each search.
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
            expected = "expected LangChain's Embeddings; or None, and encoder= of softdb's"
            raise BadInput(f"embedding is {shown(embedding)}; {expected}")
        self.embedding, self.relevance_score_fn = embedding, relevance_score_fn
        self.db: SoftDB | TableCluster
        if not isinstance(db, SoftDB | TableCluster):
            self.db = opened(db, lambda: self._new(settings), **settings)
        elif settings:
            raise BadInput(f"{', '.join(settings)} given with an open database; give the path, or leave them away")
        else:
            self.db = db

    @property
    def embeddings(self) -> Embeddings | None:
        """Embeddings that make the vectors."""
        return self.embedding

    def _new(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a new database, where none are given."""
        if self.embedding is None and not {"dim", "encoder"} & set(settings):
            raise BadInput("there is no embedding; give one, or encoder=, or, for search by words alone, dim=1")
        if self.embedding is None or "dim" in settings:
            return {"metric": "cosine"}
        return {"metric": "cosine", "dim": len(self.embedding.embed_query("softdb"))}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process opens the database for reading; one in memory cannot travel (BadInput)."""
        make = functools.partial(type(self), relevance_score_fn=self.relevance_score_fn)
        return make, (self.embedding, self.db)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
    ) -> list[str]:
        """Add documents, or replace those of the same ids; their ids. On disk when this returns, all or none.

        Args:
            texts: n of them; metadatas: n dicts of JSON values; ids: n, None where one is to be made.
            batch_size: commit so many at a time instead; what fails leaves those before.

        Raises BadInput, where nothing of the batch was written: DuplicateId for an id that comes twice.
        """
        texts = texts if isinstance(texts, str) else list(texts)
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise BadInput(f"texts are {shown(texts)}; expected a list of str")
        if isinstance(ids, str):
            raise BadInput(f"ids are {shown(ids)}; expected a list of str, None where one is to be made")
        names = [one or str(uuid4()) for one in (ids if ids is not None else [None] * len(texts))]
        payloads = metadatas if metadatas is not None else [{} for _ in texts]
        if not len(texts) == len(names) == len(payloads):
            raise BadInput(f"{len(texts)} texts, {len(payloads)} metadatas and {len(names)} ids; give one of each")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise BadInput(f"batch_size is {shown(batch_size)}; expected a whole number of at least 1")
        size = batch_size or max(len(texts), 1)
        for start in range(0, len(texts), size):
            mine = slice(start, start + size)
            keys = None if self.embedding is None else self.embedding.embed_documents(texts[mine])
            self.db.upsert(own_ids(self.db, names[mine]), keys, payloads=payloads[mine], texts=texts[mine])
        return names

    def add_documents(self, documents: list[Document], **added: Any) -> list[str]:
        """As `add_texts`, of documents; an id of theirs stands where `ids` are not given."""
        if not isinstance(documents, list | tuple) or not all(isinstance(document, Document) for document in documents):
            raise BadInput(f"documents are {shown(documents)}; expected a list of LangChain's Document")
        ids = {"ids": [document.id for document in documents], **added}
        return self.add_texts(
            [document.page_content for document in documents], [document.metadata for document in documents], **ids
        )

    def delete(self, ids: list[str] | None = None, *, filter: dict[str, Any] | None = None) -> bool:
        """Delete documents by id (missing ones are fine), by filter, or, where neither is given, all of them."""
        if ids is None:
            self.db.delete(where={} if filter is None else _where(filter))
        else:
            self.db.delete(own_ids(self.db, ids), None if filter is None else _where(filter))
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
        """A store, opened as `SoftDBVectorStore(embedding, db, **settings)`, with these texts added."""
        store = cls(embedding, db, **settings)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of those ids that are stored, in that order."""
        if self.db.mode == "r":
            self.db.refresh()
        return [_document(one) for one in stored(self.db, own_ids(self.db, ids))]

    def similarity_search(self, query: str, k: int = 4, **search: Any) -> list[Document]:
        """The k nearest documents; `search` as of `similarity_search_with_score`."""
        return [one for one, _ in self.similarity_search_with_score(query, k, **search)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, mode: str | None = None, **search: Any
    ) -> list[tuple[Document, float]]:
        """The k nearest documents and their scores, best first; a larger score is closer, whatever the metric.

        Args:
            query: a text; k: at least 1.
            mode: "vector" (the default); "text", by words; "hybrid", by both; see `SoftDB.search`.
            search: `filter`, a dict as in docs/filters.md or a `langchain_core.structured_query` filter, and what else
                `SoftDB.search` takes: `fusion`, `exact`, `radius` in place of k, `offset`, `exclude_ids`, `group_by`.
        """
        if not isinstance(query, str):
            raise BadInput(f"query is {shown(query)}; expected a str; by vector ask similarity_search_by_vector")
        if mode in ("text", "hybrid"):
            search |= {"mode": mode, "texts": [query]}
        elif mode not in (None, "vector"):
            raise BadInput(f"mode is {shown(mode)}; expected 'vector', 'text' or 'hybrid'")
        if mode != "text" and self.embedding is not None:
            return self._found(self.embedding.embed_query(query), k, **search)
        return self._found(query if mode in (None, "vector") else None, k, **search)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **search: Any) -> list[Document]:
        """The k documents nearest to a vector (d,)."""
        return [one for one, _ in self.similarity_search_with_score_by_vector(embedding, k, **search)]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **search: Any
    ) -> list[tuple[Document, float]]:
        """The k documents nearest to a vector (d,), and their scores."""
        return self._found(embedding, k, **search)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **search: Any
    ) -> list[Document]:
        """k of the `fetch_k` nearest, unlike each other: MMR, with lambda_mult 1 for the nearest, 0 for diversity."""
        return self.similarity_search(query, k, **_diverse(k, fetch_k, lambda_mult), **search)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **search: Any
    ) -> list[Document]:
        """As `max_marginal_relevance_search`, of a vector (d,)."""
        return self.similarity_search_by_vector(embedding, k, **_diverse(k, fetch_k, lambda_mult), **search)

    def as_retriever(self, **settings: Any) -> SoftDBRetriever:
        """A retriever of this store: LangChain's arguments, and those of a search given directly."""
        tags = settings.pop("tags", None) or self._get_retriever_tags()
        return SoftDBRetriever(vectorstore=self, tags=tags, **settings)

    def _select_relevance_score_fn(self, mode: str | None = None) -> Callable[[float], float]:
        return self.relevance_score_fn or relevance(self.db.metric, mode)

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **search: Any
    ) -> list[tuple[Document, float]]:
        scale = self._select_relevance_score_fn(search.get("mode"))
        return [(one, scale(score)) for one, score in self.similarity_search_with_score(query, k, **search)]

    async def _asimilarity_search_with_relevance_scores(self, *asked: Any, **search: Any) -> Any:
        return await run_in_executor(None, self._similarity_search_with_relevance_scores, *asked, **search)

    def _found(self, query: Any, k: int | None, *, filter: Any = None, **search: Any) -> list[tuple[Document, float]]:
        if odd := sorted(set(search) - {"mode", "texts", *_SEARCH}):
            raise BadInput(f"a search takes no {', '.join(odd)}; it takes k, filter, mode, {', '.join(_SEARCH)}")
        if query is not None:
            search["queries"] = [query]
        if "radius" in search:
            k = None
        where = None if filter is None else _where(filter)
        return [(_document(hit), float(hit.score)) for hit in found(self.db, k=k, where=where, **search)]


class SoftDBRetriever(VectorStoreRetriever):
    """The retriever of a `SoftDBVectorStore`; arguments of a search may be given beside LangChain's.

    SoftDBRetriever(vectorstore=store, k=5, mode="hybrid", filter={"lang": "de"})
    """

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, values: dict[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in values.items() if name not in cls.model_fields}
        rest = {name: value for name, value in values.items() if name in cls.model_fields}
        return {**rest, "search_kwargs": {**(values.get("search_kwargs") or {}), **asked}}


class SoftDBTranslator(Visitor):
    """LangChain's structured queries as filters of softdb, for `SelfQueryRetriever(structured_query_translator=…)`."""

    def visit_operation(self, operation: Any) -> dict[str, Any]:
        """AND, OR and NOT."""
        parts = [argument.accept(self) for argument in operation.arguments]
        if operation.operator is Operator.NOT:
            return {"$not": {"$and": parts}}
        return {f"${operation.operator.value}": parts}

    def visit_comparison(self, comparison: Any) -> dict[str, Any]:
        """A comparison. Raises BadFilter for LIKE, which softdb has not."""
        if comparison.comparator is Comparator.LIKE:
            raise BadFilter(f"field {shown(comparison.attribute)} is compared by LIKE; use CONTAIN, or $startswith")
        name = "$contains" if comparison.comparator is Comparator.CONTAIN else f"${comparison.comparator.value}"
        value = comparison.value  # a date comes as {"type": "date", "date": "2024-02-29"}
        return {comparison.attribute: {name: value["date"] if isinstance(value, dict) and "date" in value else value}}

    def visit_structured_query(self, structured_query: Any) -> tuple[str, dict[str, Any]]:
        """The text, and the arguments of the search."""
        asked = structured_query.filter
        return structured_query.query, {} if asked is None else {"filter": asked.accept(self)}


def _diverse(k: int, fetch_k: int, lambda_mult: float) -> dict[str, Any]:
    if not isinstance(lambda_mult, int | float) or not 0 <= lambda_mult <= 1:
        raise BadInput(f"lambda_mult is {shown(lambda_mult)}; expected a number from 0 (diverse) to 1 (the nearest)")
    return {"diversity": 1 - lambda_mult, "fetch_k": max(fetch_k, k)}


def _where(filter: Any) -> dict[str, Any]:
    """LangChain's filter as softdb's. Raises BadFilter for other libraries' dialects."""
    if isinstance(filter, FilterDirective):
        filter = filter.accept(SoftDBTranslator())
    if callable(filter):
        raise BadFilter('filter is a function; softdb filters within the search: write {"year": {"$gte": 2020}}')
    if isinstance(filter, dict) and set(filter) in ({"operator", "field", "value"}, {"operator", "conditions"}):
        raise BadFilter(f"filter is in Haystack's dialect; write {json.dumps(where_of(filter), default=str)}")
    return filter  # type: ignore[no-any-return]  # the search checks it


def _document(record: Hit | Record) -> Document:
    """The document that a record is; a payload that is no object becomes the field "payload"."""
    payload = record.payload
    metadata = {} if payload is None else payload if isinstance(payload, dict) else {"payload": payload}
    return Document(id=str(record.id), page_content=record.text or "", metadata=metadata)
