"""LlamaIndex's vector store, on top of a database (`softdb[llama-index]`).

A node is stored as a record: its text is the text, its embedding the key, its `metadata` the payload. The payload's
field "_llama_index" holds the rest of the node, such as relationships, where it differs from the defaults.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softdb.answers import Hit, Record
from softdb.check import one_of, share, shown
from softdb.cluster import TableCluster
from softdb.database import SoftDB
from softdb.errors import BadFilter, BadInput, MissingDependency
from softdb.integrations.documents import awaited, diverse, matching, open_store, own_ids, retried, search_one, stored
from softdb.integrations.haystack_filters import ORDER
from softdb.opening import existing
from softdb.store.ours import remove_database, require_ours
from softdb.store.paths import spelled

try:
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.schema import BaseNode, Document, ImageDocument, ImageNode, IndexNode, Node, TextNode
    from llama_index.core.vector_stores import types
    from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.llama_index: {error}; pip install 'softdb[llama-index]'") from None

EXTRAS = "_llama_index"
SOURCE = f"{EXTRAS}.ref_doc_id"  # path of the id of the document from which a node was made
_SOURCES = ("ref_doc_id", "doc_id", "document_id")  # LlamaIndex's names for this id in filters
_CLASSES: Any = {node.class_name(): node for node in (TextNode, ImageNode, IndexNode, Node, Document, ImageDocument)}
_ELSEWHERE: Any = {"id_": True, "metadata": True, "embedding": True, "text": True, "text_resource": {"text"}}
_MODES = {
    "default": None, "mmr": None, "text_search": "text", "sparse": "text", "hybrid": "hybrid",
    "semantic_hybrid": "hybrid",
}  # fmt: skip


class SoftDBVectorStore(types.BasePydanticVectorStore):
    """A database as a LlamaIndex vector store.

        store = SoftDBVectorStore("films", dim=384)  # creates the directory if it is missing
        index = VectorStoreIndex.from_documents(documents, StorageContext.from_defaults(vector_store=store))
        index.as_retriever(similarity_top_k=5, vector_store_query_mode="hybrid", filters=filters)

    Args:
        db: an open database, an open cluster over a table (searched by vector alone), or the path of a database; None
            creates a database in memory. With mode="r" each call sees what another process has committed.
        settings: arguments of `softdb.open`, unless `db` is open. A new database has the metric cosine (unless `metric`
            is given) and a text index.

    The attributes `db` and `client` are the database, for all other calls. Asynchronous methods run in threads.
    """

    stores_text: bool = True
    _db: SoftDB | TableCluster = PrivateAttr()

    def __init__(self, db: SoftDB | TableCluster | str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__()
        self._db = db = open_store(db, lambda: {"metric": "cosine"}, **settings)
        if isinstance(db, SoftDB) and db.mode != "r" and not len(db) and SOURCE not in db.fields:
            db.index_field(SOURCE)  # `delete` finds a document's nodes by it; in an empty database it costs nothing

    @property
    def db(self) -> SoftDB | TableCluster:
        """The database or cluster; if it is read-only, it is refreshed."""
        if self._db.mode == "r":
            self._db.refresh()
        return self._db

    client = db

    def __repr_args__(self) -> list[tuple[str, Any]]:
        return [("db", self._db)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the store; unpickling opens the database for reading. Raises BadInput for a database in memory."""
        return type(self), (self._db,)

    def add(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Add nodes, or replace those with the same ids, and return the ids. The call stores all nodes or none.

        Of nodes with the same id the last is stored. Without embeddings, the database's encoder makes the keys. Raises
        BadInput for a missing embedding and metadata that is not JSON, ValueError for other parts that are not JSON.
        """
        if not isinstance(nodes, list | tuple) or not all(isinstance(node, BaseNode) for node in nodes):
            raise BadInput(f"nodes are {shown(nodes)}; expected a list of LlamaIndex's nodes")
        latest = {node.node_id: node for node in nodes}
        bare = [name for name, node in latest.items() if node.embedding is None]
        if bare and (len(bare) < len(latest) or self.db.core.encoder() is None):
            expected = "embed all nodes first, as VectorStoreIndex does, or none if the database has an encoder"
            raise BadInput(f"node {shown(bare[0])} has no embedding; {expected}")
        if latest:
            keys = None if bare else [node.embedding for node in latest.values()]
            payloads, texts = zip(*map(_record, latest.values()), strict=True)
            self.db.upsert(own_ids(self.db, [*latest]), keys, payloads=payloads, texts=texts)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str) -> None:
        """Delete the nodes of a source document; if there are none, do nothing."""
        if not isinstance(ref_doc_id, str):
            raise BadInput(f"ref_doc_id is {shown(ref_doc_id)}; expected a str")
        self.db.delete(where={SOURCE: ref_doc_id})

    @retried
    def delete_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> None:
        """Delete the nodes with these ids (missing ids are ignored), those that match, or those that do both."""
        if node_ids is None and not getattr(filters, "filters", filters):
            raise BadInput("neither node_ids nor filters are given, or the filters are empty; for all nodes: clear()")
        self.db.delete(where=matching(self.db, node_ids, _where(filters)))

    def clear(self) -> None:
        """Delete all nodes."""
        self.db.delete(where={})

    @retried
    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes, without their embeddings: all, or those with these ids, or those that match, or both.

        They come in the order of the ids, each once, without missing ids; or, without ids, in the order of writing.
        """
        db, where = self.db, _where(filters)
        return [_node(record) for record in (db.get(where=where) if node_ids is None else stored(db, node_ids, where))]

    def query(self, query: VectorStoreQuery, **search: Any) -> types.VectorStoreQueryResult:
        """Return the nodes that match a query best, best first; for every metric and mode a larger score is closer.

        Modes: "default" (by vector), "text_search" and "sparse" (by words, BM25), "hybrid" and "semantic_hybrid" (by
        both; `alpha` is the vector's share of the score, by default 0.8), "mmr" (by vector, unlike each other).

        Args:
            query: `node_ids`, `doc_ids` and `filters` restrict the search; empty lists do not.
            search: `where`, a filter as in docs/filters.md, for mode "mmr" `mmr_threshold` (from 0, diverse, to 1),
                `mmr_prefetch_factor` or `mmr_prefetch_k`, and arguments of `SoftDB.search`: `exact`, `offset`, …
        """
        if not isinstance(query, VectorStoreQuery):
            raise BadInput(f"query is {shown(query)}; expected a VectorStoreQuery; a retriever takes texts")
        mode = _MODES[one_of(getattr(query.mode, "value", query.mode), "mode", _MODES)]
        k, text, vector = query.similarity_top_k, query.query_str, query.query_embedding
        if text is None and (mode or vector is None):
            raise BadInput(f"the query has no {'query_str' if mode else 'query_embedding'}; give it")
        params: dict[str, Any] = {"k": k, "mode": mode, "texts": [text] if mode else None}
        if mode != "text":
            params["queries"] = [text if vector is None else vector]
        if query.mode == "mmr":
            weight = search.pop("mmr_threshold", query.mmr_threshold)
            fetch_k = search.pop("mmr_prefetch_k", None) or math.ceil(search.pop("mmr_prefetch_factor", 4) * k)
            params |= diverse(k, fetch_k, 0.5 if weight is None else weight, "mmr_threshold")
        if mode == "hybrid":
            params["k"] = k = query.hybrid_top_k or k
            params["fetch_k"] = max(4 * k, query.sparse_top_k or 0)
            if query.alpha is not None:
                params["fusion"] = ("scores", 1 - share(query.alpha, "alpha"))
        where = [matching(self.db, query.node_ids or None, _where(query.filters)), search.pop("where", {})]
        where += [{SOURCE: {"$in": query.doc_ids}}] if query.doc_ids else []
        hits = search_one(self.db, search, ["where"], where={"$and": where}, **params)
        nodes, scores = [_node(hit) for hit in hits], [float(hit.score) for hit in hits]
        return types.VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Copy a database in memory to a directory, in place of an earlier copy; `StorageContext.persist` calls this.

        A database on disk has stored every change already, and a table is the truth itself: they are left alone. Raises
        BadInput if the path holds anything but a database, or another file system is given.
        """
        if fs is not None:
            raise BadInput(f"fs is {shown(fs)}; a database needs local files: leave fs out, then copy the directory")
        if isinstance(self._db, TableCluster) or self._db.path is not None:
            return
        path = Path(persist_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            self._db.snapshot(Path(folder, "copy"))
            if path.exists():
                require_ours(path)
                remove_database(path)
            os.replace(Path(folder, "copy"), path)

    @classmethod
    def from_persist_path(cls, persist_path: str) -> SoftDBVectorStore:
        """Open the copy that `persist` wrote; changes go to this copy. Raises NotADatabase if there is none."""
        return cls(existing(persist_path))

    async_add = awaited(add)
    adelete = awaited(delete)
    adelete_nodes = awaited(delete_nodes)
    aclear = awaited(clear)
    aget_nodes = awaited(get_nodes)
    aquery = awaited(query)


def _record(node: Any) -> tuple[dict[str, Any], str | None]:
    """Return the payload and the text of the record that stores a node. Raises BadInput."""
    if not isinstance(node.metadata, dict) or EXTRAS in node.metadata:
        raise BadInput(f"metadata of node {shown(node.node_id)} has the field {EXTRAS!r}, which softdb uses; rename it")
    extras = node.model_dump(mode="json", exclude=_ELSEWHERE, exclude_defaults=True)
    for name in [name for name in extras if name.endswith("_resource")]:
        if data := getattr(node, name).data:  # base64, which LlamaIndex leaves out of its own files
            extras[name]["data"] = data.decode()
    text = getattr(getattr(node, "text_resource", node), "text", None)
    return {**node.metadata, EXTRAS: {**extras, "ref_doc_id": node.ref_doc_id}}, text


def _node(record: Hit | Record) -> BaseNode:
    """Return a record as a node; if LlamaIndex did not write it, as a TextNode with the payload as metadata."""
    payload = {} if record.payload is None else record.payload
    metadata = dict(payload) if isinstance(payload, dict) else {"payload": payload}
    fields = metadata.pop(EXTRAS, {})
    node_class = _CLASSES.get(fields.get("class_name"), TextNode)
    if not issubclass(node_class, Node):
        fields = {**fields, "text": record.text or ""}
    elif record.text is not None:
        fields = {**fields, "text_resource": {**fields.get("text_resource", {}), "text": record.text}}
    return node_class.from_dict({**fields, "id_": str(record.id), "metadata": metadata})


def _where(filters: Any) -> dict[str, Any]:
    """Translate filters to softdb's, with SimpleVectorStore's meaning; None matches every node. Raises BadFilter."""
    if filters is None:
        return {}
    if isinstance(filters, MetadataFilter):
        return _comparison(filters.key, filters.operator.value, filters.value)
    if not isinstance(filters, MetadataFilters):
        example = 'MetadataFilters(filters=[MetadataFilter(key="year", value=1990, operator=">")])'
        raise BadFilter(f"filters are {shown(filters)}; expected {example}; softdb's own filters go to where=")
    nodes = [_where(each) for each in filters.filters]
    condition = "and" if filters.condition is None or not nodes else filters.condition.value
    return {"$not": {"$or": nodes}} if condition == "not" else {f"${condition}": nodes}


def _comparison(key: str, operator: str, value: Any) -> dict[str, Any]:
    """Translate a filter on one field. Names with "$" are softdb's, such as "$text" for the node's text."""
    kind: Any = list if operator in ("in", "nin", "any", "all") else str if operator.startswith("text") else object
    if not isinstance(value, kind):
        raise BadFilter(f"{key} is compared with {shown(value)}; {operator!r} takes a {kind.__name__}")
    field = SOURCE if key in _SOURCES else key if key.startswith("$") else spelled([key])
    values = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    truths = [bool(each) for each in values if each in (0, 1)]  # a filter of LlamaIndex holds no truth values
    equal: dict[str, Any] = {field: {"$in": [*values, *truths]}}
    among = equal
    if isinstance(value, list):
        equal = {"$and": [{field: {"$size": len(value)}}, *({f"{field}.{i}": each} for i, each in enumerate(value))]}
    contains = [{field: {"$contains": each}} for each in values]
    missing = [{field: {"$exists": False}}, {field: None}]
    translated: dict[str, dict[str, Any]] = {
        "==": equal,
        "!=": {"$not": equal},
        "in": among,
        "nin": {"$not": among},
        "any": {"$or": contains},
        "contains": {field: {"$contains": value}},
        "all": {"$and": [{"$not": {"$or": missing}}, *contains]},
        "text_match": {field: {"$contains": value, "$gte": ""}},  # no element of a list
        "text_match_insensitive": {field: {"$icontains": value}},
        "is_empty": {"$or": [*missing, {field: ""}, {field: {"$size": 0}}]},
    }
    return {field: {ORDER[operator]: value}} if operator in ORDER else translated[operator]
