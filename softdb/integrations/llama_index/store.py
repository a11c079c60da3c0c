"""`SoftDBVectorStore`: a database as a LlamaIndex vector store."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_DIR,
    DEFAULT_PERSIST_FNAME,
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from softdb import check
from softdb.check import shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.integrations.documents import (
    awaited,
    diverse,
    open_store,
    own_ids,
    require_known,
    retried,
    search_one,
    stored,
)
from softdb.integrations.llama_index.filters import where_of
from softdb.integrations.llama_index.nodes import SOURCE, node_of, payload_of, text_of
from softdb.store.ours import remove_database, require_ours

_MODES = {
    "default": "vector", "mmr": "vector", "text_search": "text", "sparse": "text", "hybrid": "hybrid",
    "semantic_hybrid": "hybrid",
}  # fmt: skip
_MMR = ("mmr_threshold", "mmr_prefetch_factor", "mmr_prefetch_k")


class SoftDBVectorStore(BasePydanticVectorStore):
    """A database as a LlamaIndex vector store.

        store = SoftDBVectorStore("films", dim=384)  # creates the directory if it is missing
        index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
        index.as_retriever(similarity_top_k=5, vector_store_query_mode="hybrid", filters=filters)

    Args:
        db: an open database, an open cluster over a table (searched by vector alone), or the path of a database; None
            creates a database in memory.
        settings: arguments of `softdb.open`, unless `db` is open. A new database has the metric cosine (unless `metric`
            is given) and a text index.

    The attributes `db` and `client` are the database, for all other calls. Asynchronous methods run in threads.

    Raises the errors of `softdb.open`; DatabaseLocked if another store or process writes to the path: pass one open
    database to both stores, or open the second with mode="r", which sees at each call what has been committed.
    """

    stores_text: bool = True
    _db: Any = PrivateAttr()

    def __init__(self, db: SoftDB | TableCluster | str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__()
        self._db = db = open_store(db, lambda: {"metric": "cosine"}, **settings)
        if isinstance(db, SoftDB) and db.mode != "r" and not len(db) and SOURCE not in db.fields:
            db.index_field(SOURCE)  # `delete` finds a document's nodes by it; in an empty database it costs nothing

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class."""
        return "SoftDBVectorStore"

    @property
    def db(self) -> SoftDB | TableCluster:
        """The database or cluster; if it is read-only, it is refreshed."""
        db: SoftDB | TableCluster = self._db
        if db.mode == "r":
            db.refresh()
        return db

    client = db

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the store; unpickling opens the database for reading. Raises BadInput for a database in memory."""
        return type(self), (self._db,)

    def add(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Add nodes, or replace those with the same ids, and return the ids. The call stores all nodes or none.

        Of nodes with the same id the last is stored. Without embeddings, the database's encoder makes the keys.

        Raises BadInput for other objects, for nodes without an embedding if the database has no encoder or other nodes
        have one, and for metadata that is not JSON.
        """
        if not isinstance(nodes, list | tuple) or not all(isinstance(node, BaseNode) for node in nodes):
            raise BadInput(f"nodes are {shown(nodes)}; expected a list of LlamaIndex's nodes")
        latest = {node.node_id: node for node in nodes}
        bare = [name for name, node in latest.items() if node.embedding is None]
        if bare and (len(bare) < len(latest) or self.db.core.encoder() is None):
            raise BadInput(
                f"node {shown(bare[0])} has no embedding; embed all nodes first, as VectorStoreIndex does, or none if "
                "the database has an encoder"
            )
        if not latest:
            return []
        keys = None if bare else [node.embedding for node in latest.values()]
        payloads, texts = [payload_of(node) for node in latest.values()], [text_of(node) for node in latest.values()]
        self.db.upsert(own_ids(self.db, [*latest]), keys, payloads=payloads, texts=texts)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str) -> None:
        """Delete the nodes of a source document; if there are none, do nothing."""
        if not isinstance(ref_doc_id, str):
            raise BadInput(f"ref_doc_id is {shown(ref_doc_id)}; expected a str")
        self.db.delete(where={SOURCE: ref_doc_id})

    @retried
    def delete_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> None:
        """Delete the nodes with these ids (missing ids are ignored), those that match, or those that do both.

        Raises BadInput if neither is given: `clear` deletes all nodes.
        """
        if node_ids is None and filters is None:
            raise BadInput("neither node_ids nor filters are given; to delete every node call clear()")
        self.db.delete(where=self._where(node_ids, filters))

    def clear(self) -> None:
        """Delete all nodes."""
        self.db.delete(where={})

    @retried
    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes, without their embeddings: all, or those with these ids, or those that match, or both.

        With ids, nodes come in the order of the ids, each once, and missing ids are skipped; otherwise in the order of
        writing, without those that another thread replaces meanwhile.
        """
        db = self.db
        if node_ids is not None and filters is None:
            return [node_of(record) for record in stored(db, own_ids(db, node_ids))]
        nodes = [node_of(record) for batch in db.scan(where=self._where(node_ids, filters)) for record in batch]
        if node_ids is None:
            return nodes
        by_id = {node.node_id: node for node in nodes}
        return [by_id[name] for name in dict.fromkeys(node_ids) if name in by_id]

    def query(self, query: VectorStoreQuery, **search: Any) -> VectorStoreQueryResult:
        """Return the nodes that match a query best, best first; for every metric and mode a larger score is closer.

        Modes: "default" (by vector), "text_search" and "sparse" (by words, BM25), "hybrid" and "semantic_hybrid" (by
        both; `alpha` is the vector's share of the score, by default 0.8), "mmr" (by vector, unlike each other).

        Args:
            query: `node_ids`, `doc_ids` and `filters` restrict the search; empty lists do not.
            search: `where`, a filter as in docs/filters.md, for mode "mmr" `mmr_threshold` (from 0, diverse, to 1),
                `mmr_prefetch_factor` or `mmr_prefetch_k`, and arguments of `SoftDB.search`: `exact`, `offset`, …

        Raises BadInput for other modes and arguments, and if the mode needs an embedding or a text that is missing.
        """
        if not isinstance(query, VectorStoreQuery):
            raise BadInput(f"query is {shown(query)}; expected a VectorStoreQuery; a retriever takes texts")
        require_known(search, "where", *(_MMR if query.mode == "mmr" else ()))
        where = {"$and": [self._where(query.node_ids or None, query.filters), search.pop("where", {})]}
        if query.doc_ids:
            where["$and"].append({SOURCE: {"$in": query.doc_ids}})
        params = _params(query, {name: search.pop(name) for name in _MMR if name in search})
        hits = search_one(self.db, where=where, **{**params, **search})
        nodes = [node_of(hit) for hit in hits]
        scores = [float(hit.score) for hit in hits]
        return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])

    def _where(self, node_ids: Sequence[str] | None, filters: MetadataFilters | None) -> dict[str, Any]:
        where = where_of(filters)
        return where if node_ids is None else {"$and": [{"$id": {"$in": own_ids(self.db, node_ids)}}, where]}

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Copy a database in memory to a directory, in place of an earlier copy; `StorageContext.persist` calls this.

        A database on disk has stored every change already, and a table is the truth itself: they are left alone.

        Raises BadInput if the path holds anything but a database, or `fs` is not the local file system.
        """
        path = _local(persist_path, fs)
        if isinstance(self._db, TableCluster) or self._db.path is not None:
            return
        if path.exists():
            require_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = Path(folder, "copy")
            self._db.snapshot(copy)
            if path.exists():
                remove_database(path)
            os.replace(copy, path)

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: Any = None, **settings: Any) -> SoftDBVectorStore:
        """Open the copy that `persist` wrote; changes go to this copy. Raises BadInput if there is none."""
        path = _local(persist_path, fs)
        if not path.is_dir():
            raise BadInput(f"there is no database at {path}; open a database that is on disk by its own path")
        return cls(path, **settings)

    @classmethod
    def from_persist_dir(
        cls, persist_dir: str = DEFAULT_PERSIST_DIR, namespace: str = "default", fs: Any = None, **settings: Any
    ) -> SoftDBVectorStore:
        """Open the copy that `StorageContext.persist(persist_dir)` wrote."""
        return cls.from_persist_path(os.path.join(persist_dir, f"{namespace}__{DEFAULT_PERSIST_FNAME}"), fs, **settings)

    async_add = awaited(add)
    adelete = awaited(delete)
    adelete_nodes = awaited(delete_nodes)
    aclear = awaited(clear)
    aget_nodes = awaited(get_nodes)
    aquery = awaited(query)


def _local(path: object, fs: object) -> Path:
    """Return a path of the local file system. Raises BadInput for other file systems."""
    if fs is not None and not isinstance(fs, LocalFileSystem):
        raise BadInput(f"fs is {shown(fs)}; a database needs local files: leave fs out, then copy the directory")
    return check.folder(path, "persist_path", "a directory's path")


def _params(query: VectorStoreQuery, mmr: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the search, without the filter. Raises BadInput."""
    if query.mode not in _MODES:
        raise BadInput(f"mode is {shown(getattr(query.mode, 'value', query.mode))}; expected {', '.join(_MODES)}")
    if query.embedding_field is not None:
        raise BadInput(f"embedding_field is {shown(query.embedding_field)}; a record has one key, so leave it out")
    mode, k = _MODES[query.mode], check.integer(query.similarity_top_k, "similarity_top_k")
    params: dict[str, Any] = {"k": k}
    if query.query_embedding is not None and mode != "text":
        params["queries"] = [query.query_embedding]
    if mode != "vector" or query.query_embedding is None:
        if query.query_str is None:
            raise BadInput(f"the query has no {'query_embedding' if mode == 'vector' else 'query_str'}; give it")
        params |= {"mode": mode, "texts": [query.query_str]}
    if query.mode == "mmr":
        return params | _diverse(query, **mmr)
    if mode == "hybrid":
        params["k"] = query.hybrid_top_k or k
        params["fetch_k"] = max(4 * params["k"], k, query.sparse_top_k or 0)
        if query.alpha is not None:
            expected = "a number from 0 (words alone) to 1 (vectors alone)"
            params["fusion"] = ("scores", 1 - check.number(query.alpha, "alpha", expected, lambda x: 0 <= x <= 1))
    return params


def _diverse(
    query: VectorStoreQuery,
    mmr_threshold: float | None = None,
    mmr_prefetch_factor: float | None = None,
    mmr_prefetch_k: int | None = None,
) -> dict[str, Any]:
    if mmr_prefetch_factor is not None and mmr_prefetch_k is not None:
        raise BadInput("mmr_prefetch_factor and mmr_prefetch_k are both given; give one of them")
    weight = query.mmr_threshold if mmr_threshold is None else mmr_threshold
    factor = 4 if mmr_prefetch_factor is None else mmr_prefetch_factor
    factor = check.number(factor, "mmr_prefetch_factor", "a number of at least 1", lambda x: x >= 1)
    fetch_k = math.ceil(factor * query.similarity_top_k) if mmr_prefetch_k is None else mmr_prefetch_k
    return diverse(query.similarity_top_k, fetch_k, 0.5 if weight is None else weight, "mmr_threshold")
