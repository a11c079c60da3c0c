"""Haystack's documents as records, and back.

`content` is the text, `embedding` the key (a document without one is a record without a key), `meta` the payload. What
else a document has (blob, sparse embedding, score) lies in the payload's field "_haystack".
"""

from __future__ import annotations

import base64
from typing import Any

from torch import Tensor

from softdb.check import shown
from softdb.errors import BadInput, MissingDependency
from softdb.integrations.haystack_filters import PARTS

try:
    from haystack.dataclasses import ByteStream, Document, SparseEmbedding
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.haystack: {error}; pip install 'softdb[haystack]'") from None


def require_documents(documents: object, dim: int) -> list[Any]:
    """Documents with embeddings of that width, or none. Raises BadInput."""
    if not isinstance(documents, list) or not all(isinstance(one, Document) for one in documents):
        raise BadInput(f"documents are {shown(documents)}; expected a list of Haystack's Document")
    for one in documents:
        if one.embedding is not None and len(one.embedding) != dim:
            raise BadInput(
                f"document {shown(one.id)} has an embedding of {len(one.embedding)} numbers, the store's have {dim}; "
                f"embed it with the model of the others, or make a store with embedding_dim={len(one.embedding)}"
            )
    return documents


def payload_of(one: Any) -> dict[str, Any]:
    """The payload of a document."""
    parts: dict[str, Any] = {}
    if one.blob is not None:
        data = base64.b64encode(one.blob.data).decode()
        parts["blob"] = {"data": data, "mime_type": one.blob.mime_type, "meta": one.blob.meta}
    if one.sparse_embedding is not None:
        parts["sparse_embedding"] = one.sparse_embedding.to_dict()
    if one.score is not None:
        parts["score"] = one.score
    return {**plain_meta(one.meta), **({PARTS: parts} if parts else {})}


def plain_meta(meta: object) -> dict[str, Any]:
    """A document's meta. Raises BadInput where it is no dict, or names the field that is softdb's own."""
    if not isinstance(meta, dict) or PARTS in meta:
        raise BadInput(f"meta is {shown(meta)}; expected a dict without the field {PARTS!r}, which softdb uses itself")
    return meta


def document(
    name: object, text: str | None, payload: Any, score: float | None = None, key: Tensor | None = None
) -> Any:
    """The document that a record is; a payload that is no object becomes the field "payload" of its meta."""
    meta = dict(payload) if isinstance(payload, dict) else {} if payload is None else {"payload": payload}
    parts = meta.pop(PARTS, {})
    blob, sparse = parts.get("blob"), parts.get("sparse_embedding")
    return Document(
        id=str(name),
        content=text,
        meta=meta,
        blob=blob and ByteStream(base64.b64decode(blob["data"]), blob["meta"], blob["mime_type"]),
        sparse_embedding=sparse and SparseEmbedding.from_dict(sparse),
        score=parts.get("score") if score is None else score,
        embedding=None if key is None else key.tolist(),
    )
