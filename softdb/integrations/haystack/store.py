"""`SoftDBDocumentStore`: a database as a Haystack document store."""

from __future__ import annotations

import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from haystack import Document, default_from_dict, default_to_dict
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError

from softdb import check
from softdb.check import Id, shown
from softdb.cluster import TableCluster
from softdb.cluster import open as open_table
from softdb.database import SoftDB
from softdb.errors import BadFilter, BadInput, Closed, DuplicateId, UnknownId
from softdb.filters import parse
from softdb.integrations.documents import awaited, open_store, own_ids, relevance, retried, retry, search_one, stored
from softdb.integrations.haystack.conversion import document, payload_of, plain_meta, require_documents
from softdb.integrations.haystack_filters import EXTRAS, where_of
from softdb.opening import table_at
from softdb.store.paths import field_names


class DuplicateDocument(DuplicateId, DuplicateDocumentError):
    """A document's id is stored already, or repeated; nothing was written."""


class RefusedFilter(BadFilter, FilterError):
    """A filter is not in Haystack's dialect, or softdb does not support it; nothing was read."""


class _Shared:
    """A database or cluster, and the stores of this process that use it."""

    def __init__(self, db: SoftDB | TableCluster, own: bool = True) -> None:
        self.db, self.own = db, own  # `own`: closing the last store closes the database
        self.users: weakref.WeakSet[SoftDBDocumentStore] = weakref.WeakSet()


_shared: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()  # open for writing, by path
_lock = threading.Lock()  # protects `_shared` and `_Shared.users`


class SoftDBDocumentStore:
    """A database as a Haystack document store.

        store = SoftDBDocumentStore("films", embedding_dim=384)  # creates the directory if it is missing
        store.write_documents([Document(content="In space no one can hear you scream", embedding=vector)])
        store.filter_documents({"field": "meta.year", "operator": ">=", "value": 1979})

    Args:
        path: the directory; None keeps documents in memory. Stores of one process that write to the same path share its
            database. Or a cluster's table, searched by vector alone: its address, or an open handle, which `close`
            leaves open.
        embedding_dim: the width of embeddings, by default 768 for a new database.
        metric: "cosine" (the default of a new database), "dot" or "l2".
        fields: fields of `meta` to index for filters.
        text_index: the text index of a new database, "words" or "trigram", for keyword and hybrid retrieval.
        mode: "r" reads beside a writer in another process, and sees at each call what has been committed.

    A call writes all of its documents or none. Only filters and words find a document without an embedding. The
    attribute `db` is the database, for all other calls. Every method has a form `…_async`, which runs in a thread.

    Raises the errors of `softdb.open`, and BadInput if the path is open with other settings.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | TableCluster | None = None,
        *,
        embedding_dim: int | None = None,
        metric: Literal["cosine", "dot", "l2"] | None = None,
        fields: list[str] | None = None,
        text_index: Literal["words", "trigram"] = "words",
        mode: Literal["rw", "r"] = "rw",
    ) -> None:
        cluster = path if isinstance(path, TableCluster) else None
        expected = "a directory's path, a cluster's table, or None for memory"
        place = cluster.url if cluster is not None else table_at(path) if isinstance(path, str | os.PathLike) else None
        self.path = None if path is None else place or str(check.folder(path, "path", expected))
        declared = field_names(() if fields is None else fields)
        self.embedding_dim, self.metric, self.fields = embedding_dim, metric, fields
        self.text_index, self.mode = text_index, mode if cluster is None else cluster.mode
        with _lock:
            key = self.path if cluster is None and mode != "r" else None
            if key is not None and "://" not in key:
                key = os.path.realpath(key)
            shared = None if key is None else _shared.get(key)
            if cluster is not None:
                cluster.core.require_open()
                shared = _Shared(cluster, own=False)
            if shared is None or shared.db.closed:
                shared = _Shared(self._open())
                if key is not None:
                    _shared[key] = shared
            check.schema(embedding_dim, None, None, None, metric, shared.db.core.schema)
            if missing := set(declared) - set(shared.db.fields):
                if isinstance(shared.db, TableCluster):
                    raise BadInput(f"fields are {shown(fields)}, but a cluster declares none; leave them out")
                shared.db.index_field(*sorted(missing))
            shared.users.add(self)
            self._shared: _Shared | None = shared

    def _open(self) -> SoftDB | TableCluster:
        if self.path is not None and table_at(self.path) is not None:
            mode: Any = self.mode
            return open_table(self.path, mode)
        settings = {"dim": self.embedding_dim, "metric": self.metric, "fields": self.fields, "mode": self.mode}
        settings = {name: value for name, value in settings.items() if value is not None}
        return open_store(self.path, lambda: {"dim": 768, "metric": "cosine"}, self.text_index, **settings)

    @property
    def db(self) -> SoftDB | TableCluster:
        """The open database or cluster; if it is read-only, it is refreshed. Raises Closed."""
        if self._shared is None:
            raise Closed("this document store is closed; make another")
        if self._shared.db.mode == "r":
            self._shared.db.refresh()
        return self._shared.db

    def close(self) -> None:
        """Close the store. Also close its database, unless another store of this process uses the database.

        A cluster's handle that was passed to the store stays open.
        """
        with _lock:
            shared, self._shared = self._shared, None
            if shared is not None:
                shared.users.discard(self)
                if shared.own and not shared.users:
                    shared.db.close()

    def to_dict(self) -> dict[str, Any]:
        """Return the store's arguments, in Haystack's form; documents in memory are not included."""
        settings = {name: getattr(self, name) for name in ("path", "embedding_dim", "metric", "text_index", "mode")}
        fields = None if self.fields is None else list(self.fields)
        return default_to_dict(self, **settings, fields=fields)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SoftDBDocumentStore:
        """Create a store from the result of `to_dict`."""
        return default_from_dict(cls, data)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the store; unpickling opens the database for reading. Raises BadInput for a store in memory."""
        if self.path is None:
            raise BadInput("a document store in memory cannot be pickled; give it a path")
        return functools.partial(type(self), mode="r"), (self.path,)

    @retried
    def count_documents(self) -> int:
        """Return the number of documents."""
        return len(self.db)

    @retried
    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """Return the documents that match, with their embeddings (float32).

        Documents are in the order of writing; a cluster's documents come shard by shard.
        """
        batches = self.db.scan(where=_where(filters))
        return [document(each.id, each.text, each.payload, key=each.key) for batch in batches for each in batch]

    def write_documents(self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE) -> int:
        """Write all of the documents or none, and return how many were written.

        Args:
            policy: for ids that are stored already or repeated. FAIL (and NONE) raise DuplicateDocument, OVERWRITE
                keeps the last document, SKIP the first.

        Raises BadInput for an object that is no Document, an embedding of another width, or meta that is not JSON.
        """
        db = self.db
        documents = require_documents(documents, db.dim)
        if not isinstance(policy, DuplicatePolicy):
            raise BadInput(f"policy is {shown(policy)}; expected a DuplicatePolicy")
        if policy is DuplicatePolicy.OVERWRITE:
            documents = list({doc.id: doc for doc in documents}.values())
        elif policy is DuplicatePolicy.SKIP:
            documents = list({doc.id: doc for doc in reversed(documents)}.values())[::-1]
        while True:
            ids = own_ids(db, [doc.id for doc in documents])
            if policy is DuplicatePolicy.SKIP:
                is_stored = retry(db, lambda: db.core.stored(ids))  # noqa: B023
                new = [i for i, present in enumerate(is_stored) if not present]
                documents, ids = [documents[i] for i in new], [ids[i] for i in new]
            if not documents:
                return 0
            keys, texts = [doc.embedding for doc in documents], [doc.content for doc in documents]
            put = db.upsert if policy is DuplicatePolicy.OVERWRITE else db.insert
            try:
                put(ids, keys, payloads=[payload_of(doc) for doc in documents], texts=texts)
            except DuplicateId as error:
                if policy is DuplicatePolicy.SKIP:  # another thread or handle has inserted one of them since
                    db.refresh()
                    continue
                raise DuplicateDocument(f"{error}; or choose a policy: SKIP, OVERWRITE") from None
            return len(documents)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents; ids that are not stored are ignored."""
        self.db.delete(own_ids(self.db, document_ids))

    @retried
    def delete_all_documents(self, recreate_index: bool = False) -> None:
        """Delete all documents; with `recreate_index` also release their space on disk."""
        self.db.delete(where={})
        if recreate_index:
            self.db.compact()

    @retried
    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        """Delete the documents that match, and return their number."""
        return self.db.delete(where=_where(filters) or {})

    @retried
    def update_by_filter(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        """Set fields in the meta of the documents that match, in one commit, and return the number of documents."""
        meta = plain_meta(meta)
        while True:
            ids: list[Id] = []
            payloads: list[Any] = []
            for batch in self.db.scan(where=_where(filters)):
                ids += batch.ids
                payloads += [{**(old if isinstance(old, dict) else {}), **meta} for old in batch.payloads]
            try:
                if ids:
                    self.db.update(ids, payloads=payloads)
                return len(ids)
            except UnknownId:  # deleted since the scan
                self.db.refresh()

    @retried
    def count_documents_by_filter(self, filters: dict[str, Any]) -> int:
        """Return the number of documents that match."""
        return self.db.count(_where(filters))

    @retried
    def count_unique_metadata_by_filter(self, filters: dict[str, Any], metadata_fields: list[str]) -> dict[str, int]:
        """Return the number of distinct values of each field in the documents that match."""
        values: dict[str, set[str]] = {name.removeprefix("meta."): set() for name in metadata_fields}
        for meta in self._metas(filters):
            for name, distinct in values.items():
                if meta.get(name) is not None:
                    distinct.add(json.dumps(meta[name], sort_keys=True))
        return {name: len(distinct) for name, distinct in values.items()}

    @retried
    def get_metadata_fields_info(self) -> dict[str, dict[str, str]]:
        """Return the type of each field of the documents' meta: "boolean", "int", "float" or "keyword"."""
        types = {bool: "boolean", int: "int", float: "float"}
        fields = {name: value for meta in self._metas() for name, value in meta.items() if value is not None}
        return {name: {"type": types.get(type(value), "keyword")} for name, value in fields.items()}

    @retried
    def get_metadata_field_min_max(self, metadata_field: str) -> dict[str, Any]:
        """Return the least and largest number or text of a field; None without any, and if the field has both kinds."""
        values: list[Any] = [meta.get(metadata_field.removeprefix("meta.")) for meta in self._metas()]
        values = [value for value in values if isinstance(value, int | float | str)]
        if not values or len({isinstance(value, str) for value in values}) > 1:
            return {"min": None, "max": None}
        return {"min": min(values), "max": max(values)}

    @retried
    def get_metadata_field_unique_values(
        self,
        metadata_field: str,
        search_term: str | None = None,
        from_: int = 0,
        size: int = 10,
        filters: dict[str, Any] | None = None,
    ) -> tuple[list[Any], int]:
        """Return a page of the distinct values of a field, in the order of their text, and their total number."""
        values = [meta.get(metadata_field.removeprefix("meta.")) for meta in self._metas(filters)]
        distinct = {json.dumps(value, sort_keys=True): value for value in values if value is not None}
        matches = [value for value in distinct.values() if (search_term or "").lower() in str(value).lower()]
        matches.sort(key=lambda value: (str(value), type(value).__name__))
        first = check.integer(from_, "from_", 0)
        return matches[first : first + check.integer(size, "size", 0)], len(matches)

    def embedding_retrieval(
        self,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        return_embedding: bool = False,
    ) -> list[Document]:
        """Return the documents nearest to an embedding (d,), with their scores, best first.

        scale_score: scale scores to 0 … 1 by `softdb.integrations.documents.relevance`.
        """
        return self._retrieve(None, filters, top_k, scale_score, return_embedding, queries=[query_embedding])

    def bm25_retrieval(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int = 10, scale_score: bool = False
    ) -> list[Document]:
        """Return the documents whose words match a text best (BM25), with their scores."""
        return self._retrieve("text", filters, top_k, scale_score, False, texts=[query])

    def hybrid_retrieval(
        self,
        query: str,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        fusion: Literal["scores", "ranks"] | float = "scores",
    ) -> list[Document]:
        """Return the documents that match best by words and vectors together; see `SoftDB.search` for `fusion`."""
        params = {"queries": [query_embedding], "texts": [query], "fusion": fusion}
        return self._retrieve("hybrid", filters, top_k, scale_score, False, **params)

    def _retrieve(
        self, mode: str | None, filters: Any, top_k: int, scale_score: bool, return_embedding: bool, **params: Any
    ) -> list[Document]:
        db, where = self.db, _where(filters)
        if top_k == 0:
            return []
        hits = search_one(db, k=top_k, where=where, mode=mode, **params)
        records = stored(db, [hit.id for hit in hits]) if return_embedding else []
        keys = {record.id: record.key for record in records}
        scale = relevance(db.metric, mode) if scale_score else float
        return [document(hit.id, hit.text, hit.payload, scale(hit.score), keys.get(hit.id)) for hit in hits]

    def _metas(self, filters: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        for batch in self.db.scan(where=_where(filters)):
            for payload in batch.payloads:
                yield {k: v for k, v in payload.items() if k != EXTRAS} if isinstance(payload, dict) else {}

    close_async = awaited(close)
    count_documents_async = awaited(count_documents)
    filter_documents_async = awaited(filter_documents)
    write_documents_async = awaited(write_documents)
    delete_documents_async = awaited(delete_documents)
    delete_all_documents_async = awaited(delete_all_documents)
    delete_by_filter_async = awaited(delete_by_filter)
    update_by_filter_async = awaited(update_by_filter)
    count_documents_by_filter_async = awaited(count_documents_by_filter)
    count_unique_metadata_by_filter_async = awaited(count_unique_metadata_by_filter)
    get_metadata_fields_info_async = awaited(get_metadata_fields_info)
    get_metadata_field_min_max_async = awaited(get_metadata_field_min_max)
    get_metadata_field_unique_values_async = awaited(get_metadata_field_unique_values)
    embedding_retrieval_async = awaited(embedding_retrieval)
    bm25_retrieval_async = awaited(bm25_retrieval)
    hybrid_retrieval_async = awaited(hybrid_retrieval)


def _where(filters: Any) -> dict[str, Any] | None:
    """Translate a filter to softdb's. Raises RefusedFilter."""
    if filters is None or filters == {}:
        return None
    try:
        where = where_of(filters)
        parse(where)
        return where
    except BadFilter as error:
        raise RefusedFilter(str(error)) from None
