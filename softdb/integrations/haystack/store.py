"""`SoftDBDocumentStore`: a database as a Haystack document store."""

from __future__ import annotations

import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from softdb import check
from softdb.check import Id, shown
from softdb.cluster import TableCluster
from softdb.cluster import open as open_table
from softdb.database import SoftDB
from softdb.errors import BadFilter, BadInput, Closed, DuplicateId, MissingDependency, UnknownId
from softdb.filters import parse
from softdb.integrations.documents import awaited, found, of_one_state, opened, own_ids, relevance, settled, stored
from softdb.integrations.haystack.conversion import document, payload_of, plain_meta, require_documents
from softdb.integrations.haystack_filters import PARTS, where_of
from softdb.opening import table_at
from softdb.store.paths import field_names

try:
    from haystack import Document, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy
    from haystack.errors import FilterError
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.haystack: {error}; pip install 'softdb[haystack]'") from None


class DuplicateDocument(DuplicateId, DuplicateDocumentError):
    """A document of that id is stored already, or comes twice; nothing was written."""


class RefusedFilter(BadFilter, FilterError):
    """A filter is not in Haystack's dialect, or asks what softdb cannot answer; nothing was read."""


class _Shared:
    """One database, or cluster, that writes, and the stores of this process that use it."""

    def __init__(self, db: SoftDB | TableCluster, own: bool = True) -> None:
        self.db, self.own = db, own  # `own`: it is closed with the last of them
        self.users: weakref.WeakSet[SoftDBDocumentStore] = weakref.WeakSet()


_shared: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()  # by path
_sharing = threading.Lock()


class SoftDBDocumentStore:
    """A database as a Haystack document store.

        store = SoftDBDocumentStore("films", embedding_dim=384)  # made where nothing is there
        store.write_documents([Document(content="In space no one can hear you scream", embedding=vector)])
        store.filter_documents({"field": "meta.year", "operator": ">=", "value": 1979})

    Args:
        path: the directory; None keeps documents in memory. Stores of one process that write to one path share it. Or a
            cluster's table: its address, or an open handle, which `close` leaves open. It is searched by vector alone.
        embedding_dim: the width of embeddings, 768 for a new database; an existing one says it itself.
        metric: "cosine" (a new one's), "dot" or "l2".
        fields: of `meta`, to be indexed for filters.
        text_index: of a new database, "words" or "trigram"; what keyword and hybrid retrieval search.
        mode: "r" reads beside a writer in another process, and sees at each call what has been committed.

    Documents are written all or none; one without an embedding is found by filters and words alone. The database is
    the attribute `db`, with every call of its own. Every method has its twin `…_async`, which runs in a thread.

    Raises what `softdb.open` does, and BadInput where a path is open with other settings.
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
        given = path if isinstance(path, TableCluster) else None
        self.path = _place(path) if given is None else given.url
        declared = field_names(() if fields is None else fields)
        self.embedding_dim, self.metric, self.fields = embedding_dim, metric, fields
        self.text_index, self.mode = text_index, mode if given is None else given.mode
        with _sharing:
            place = self.path if given is None and mode != "r" else None
            if place is not None and "://" not in place:
                place = os.path.realpath(place)
            held = None if place is None else _shared.get(place)
            if given is not None:
                given.core.require_open()
                held = _Shared(given, own=False)
            if held is None or held.db.closed:
                held = _Shared(self._opened())
                if place is not None:
                    _shared[place] = held
            check.schema(embedding_dim, None, None, None, metric, held.db.core.schema)
            if missing := set(declared) - set(held.db.fields):
                if isinstance(held.db, TableCluster):
                    raise BadInput(f"fields are {shown(fields)}, but a cluster declares none; leave them away")
                held.db.index_field(*sorted(missing))
            held.users.add(self)
            self._held: _Shared | None = held

    def _opened(self) -> SoftDB | TableCluster:
        if self.path is not None and table_at(self.path) is not None:
            mode: Any = self.mode
            return open_table(self.path, mode)
        given = {"dim": self.embedding_dim, "metric": self.metric, "fields": self.fields, "mode": self.mode}
        settings = {name: value for name, value in given.items() if value is not None}
        return opened(self.path, lambda: {"dim": 768, "metric": "cosine"}, self.text_index, **settings)

    @property
    def db(self) -> SoftDB | TableCluster:
        """The database, or the cluster. Raises Closed."""
        if self._held is None:
            raise Closed("this document store is closed; make another")
        if self._held.db.mode == "r":
            self._held.db.refresh()
        return self._held.db

    def close(self) -> None:
        """End the use of the database; with the last store of this process that shares it, it is closed.

        A cluster's handle that was given stays open.
        """
        with _sharing:
            held, self._held = self._held, None
            if held is not None:
                held.users.discard(self)
                if held.own and not held.users:
                    held.db.close()

    def to_dict(self) -> dict[str, Any]:
        """Return the store's arguments; one in memory comes back empty."""
        settings = {name: getattr(self, name) for name in ("path", "embedding_dim", "metric", "text_index", "mode")}
        fields = None if self.fields is None else list(self.fields)
        return default_to_dict(self, **settings, fields=fields)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SoftDBDocumentStore:
        """A store made so."""
        return default_from_dict(cls, data)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Another process opens the database for reading; one in memory cannot travel (BadInput)."""
        if self.path is None:
            raise BadInput("a document store in memory cannot be pickled; give it a path")
        return functools.partial(type(self), mode="r"), (self.path,)

    @of_one_state
    def count_documents(self) -> int:
        """Return the number of documents."""
        return len(self.db)

    @of_one_state
    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """The documents that match, with their embeddings (float32), in the order of writing; a cluster's by shards."""
        return [
            document(one.id, one.text, one.payload, key=one.key)
            for batch in self.db.scan(where=_where(filters))
            for one in batch
        ]

    def write_documents(self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE) -> int:
        """Write all of the documents or none; how many were written.

        Args:
            policy: for ids that are stored already, or come twice. FAIL (and NONE) raise DuplicateDocument, OVERWRITE
                keeps the last, SKIP the first.

        Raises BadInput for what is no Document, an embedding of another width, or meta that is no JSON.
        """
        db = self.db
        documents = require_documents(documents, db.dim)
        if not isinstance(policy, DuplicatePolicy):
            raise BadInput(f"policy is {shown(policy)}; expected a DuplicatePolicy")
        if policy is DuplicatePolicy.OVERWRITE:
            documents = list({one.id: one for one in documents}.values())
        elif policy is DuplicatePolicy.SKIP:
            documents = list({one.id: one for one in reversed(documents)}.values())[::-1]
        while True:
            ids = own_ids(db, [one.id for one in documents])
            if policy is DuplicatePolicy.SKIP:
                there = settled(db, lambda: db.core.stored(ids))  # noqa: B023
                new = [i for i, one in enumerate(there) if not one]
                documents, ids = [documents[i] for i in new], [ids[i] for i in new]
            if not documents:
                return 0
            keys, texts = [one.embedding for one in documents], [one.content for one in documents]
            put = db.upsert if policy is DuplicatePolicy.OVERWRITE else db.insert
            try:
                put(ids, keys, payloads=[payload_of(one) for one in documents], texts=texts)
            except DuplicateId as error:
                if policy is DuplicatePolicy.SKIP:  # written by another thread, or handle, since
                    db.refresh()
                    continue
                raise DuplicateDocument(f"{error}; or choose a policy: SKIP, OVERWRITE") from None
            return len(documents)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents; ids that are not stored are fine."""
        self.db.delete(own_ids(self.db, document_ids))

    @of_one_state
    def delete_all_documents(self, recreate_index: bool = False) -> None:
        """Delete all documents; with `recreate_index` their room on disk is given back, too."""
        self.db.delete(where={})
        if recreate_index:
            self.db.compact()

    @of_one_state
    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        """Delete the documents that match; how many there were."""
        return self.db.delete(where=_where(filters) or {})

    @of_one_state
    def update_by_filter(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        """Set these fields in the meta of the documents that match, in one commit; how many there were."""
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
            except UnknownId:  # deleted since it was read
                self.db.refresh()

    @of_one_state
    def count_documents_by_filter(self, filters: dict[str, Any]) -> int:
        """Return the number of documents that match."""
        return self.db.count(_where(filters))

    @of_one_state
    def count_unique_metadata_by_filter(self, filters: dict[str, Any], metadata_fields: list[str]) -> dict[str, int]:
        """Return the number of different values of each field in the documents that match."""
        kinds: dict[str, set[str]] = {name.removeprefix("meta."): set() for name in metadata_fields}
        for meta in self._metas(filters):
            for name, values in kinds.items():
                if meta.get(name) is not None:
                    values.add(json.dumps(meta[name], sort_keys=True))
        return {name: len(values) for name, values in kinds.items()}

    @of_one_state
    def get_metadata_fields_info(self) -> dict[str, dict[str, str]]:
        """Each field of the documents' meta and its type: "boolean", "int", "float" or "keyword"."""
        types = {bool: "boolean", int: "int", float: "float"}
        fields = {name: value for meta in self._metas() for name, value in meta.items() if value is not None}
        return {name: {"type": types.get(type(value), "keyword")} for name, value in fields.items()}

    @of_one_state
    def get_metadata_field_min_max(self, metadata_field: str) -> dict[str, Any]:
        """The least and largest number, or text, of a field; None where there are none, or both."""
        values: list[Any] = [meta.get(metadata_field.removeprefix("meta.")) for meta in self._metas()]
        values = [value for value in values if isinstance(value, int | float | str)]
        if not values or len({isinstance(value, str) for value in values}) > 1:
            return {"min": None, "max": None}
        return {"min": min(values), "max": max(values)}

    @of_one_state
    def get_metadata_field_unique_values(
        self,
        metadata_field: str,
        search_term: str | None = None,
        from_: int = 0,
        size: int = 10,
        filters: dict[str, Any] | None = None,
    ) -> tuple[list[Any], int]:
        """A page of the different values of a field, in the order of their text, and how many there are in all."""
        values = [meta.get(metadata_field.removeprefix("meta.")) for meta in self._metas(filters)]
        kinds = {json.dumps(value, sort_keys=True): value for value in values if value is not None}
        kept = [kind for kind in kinds.values() if (search_term or "").lower() in str(kind).lower()]
        kept.sort(key=lambda one: (str(one), type(one).__name__))
        first = check.integer(from_, "from_", 0)
        return kept[first : first + check.integer(size, "size", 0)], len(kept)

    def embedding_retrieval(
        self,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        return_embedding: bool = False,
    ) -> list[Document]:
        """The documents nearest to an embedding (d,), with their scores, best first; those without one are not found.

        scale_score: scores from 0 to 1, by `softdb.integrations.documents.relevance`.
        """
        return self._retrieved(None, filters, top_k, scale_score, return_embedding, queries=[query_embedding])

    def bm25_retrieval(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int = 10, scale_score: bool = False
    ) -> list[Document]:
        """The documents that match the words of a text best (BM25), with their scores."""
        return self._retrieved("text", filters, top_k, scale_score, False, texts=[query])

    def hybrid_retrieval(
        self,
        query: str,
        query_embedding: list[float],
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        scale_score: bool = False,
        fusion: Literal["scores", "ranks"] | float = "scores",
    ) -> list[Document]:
        """The documents best by words and vectors together; `fusion` as of `SoftDB.search`."""
        asked = {"queries": [query_embedding], "texts": [query], "fusion": fusion}
        return self._retrieved("hybrid", filters, top_k, scale_score, False, **asked)

    def _retrieved(
        self, mode: str | None, filters: Any, top_k: int, scale_score: bool, return_embedding: bool, **asked: Any
    ) -> list[Document]:
        db, where = self.db, _where(filters)
        if top_k == 0:
            return []
        hits = found(db, k=top_k, where=where, mode=mode, **asked)
        keys = {one.id: one.key for one in stored(db, [hit.id for hit in hits])} if return_embedding else {}
        scale = relevance(db.metric, mode) if scale_score else float
        return [document(hit.id, hit.text, hit.payload, scale(hit.score), keys.get(hit.id)) for hit in hits]

    def _metas(self, filters: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        for batch in self.db.scan(where=_where(filters)):
            for payload in batch.payloads:
                yield {k: v for k, v in payload.items() if k != PARTS} if isinstance(payload, dict) else {}

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


def _place(path: object) -> str | None:
    """Return the path of the documents, None for memory. Raises BadInput."""
    if path is None:
        return None
    expected = "a directory's path, a cluster's table, or None for memory"
    return (isinstance(path, str | os.PathLike) and table_at(path)) or str(check.folder(path, "path", expected))


def _where(filters: Any) -> dict[str, Any] | None:
    """The filter of softdb. Raises RefusedFilter."""
    if filters is None or filters == {}:
        return None
    try:
        where = where_of(filters)
        parse(where)
        return where
    except BadFilter as error:
        raise RefusedFilter(str(error)) from None
