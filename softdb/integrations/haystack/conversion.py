"""Conversion of Haystack's documents to records and back.

`content` is the text, `embedding` the key (a document without an embedding is a record without a key) and `meta` the
payload. The payload's field "_haystack" holds a document's blob, sparse embedding and score.
"""

from __future__ import annotations

import base64
from typing import Any

from haystack.dataclasses import ByteStream, Document, SparseEmbedding
from torch import Tensor

from softdb.check import shown
from softdb.errors import BadInput
from softdb.integrations.haystack_filters import EXTRAS


def require_documents(documents: object, dim: int | None) -> list[Any]:
    """Return the documents. Raises BadInput for other objects, and for an embedding not `dim` wide; None: any width."""
    if not isinstance(documents, list) or not all(isinstance(doc, Document) for doc in documents):
        raise BadInput(f"documents are {shown(documents)}; expected a list of Haystack's Document")
    for doc in documents:
        if doc.embedding is not None and dim not in (None, len(doc.embedding)):
            raise BadInput(
                f"document {shown(doc.id)} has an embedding of {len(doc.embedding)} numbers, the store's have {dim}; "
                f"embed it with the model of the others, or make a store with embedding_dim={len(doc.embedding)}"
            )
    return documents


def payload_of(doc: Any) -> dict[str, Any]:
    """Return the payload of the record that stores a document."""
    extras: dict[str, Any] = {}
    if doc.blob is not None:
        data = base64.b64encode(doc.blob.data).decode()
        extras["blob"] = {"data": data, "mime_type": doc.blob.mime_type, "meta": doc.blob.meta}
    if doc.sparse_embedding is not None:
        extras["sparse_embedding"] = doc.sparse_embedding.to_dict()
    if doc.score is not None:
        extras["score"] = doc.score
    return {**plain_meta(doc.meta), **({EXTRAS: extras} if extras else {})}


def plain_meta(meta: object) -> dict[str, Any]:
    """Return a document's meta unchanged. Raises BadInput unless it is a dict without the field "_haystack"."""
    if not isinstance(meta, dict) or EXTRAS in meta:
        raise BadInput(f"meta is {shown(meta)}; expected a dict without the field {EXTRAS!r}, which softdb uses itself")
    return meta


def document(
    name: object, text: str | None, payload: Any, score: float | None = None, key: Tensor | None = None
) -> Any:
    """Return a record as a Document. A payload that is not a JSON object becomes the field "payload" of its meta."""
    meta = dict(payload) if isinstance(payload, dict) else {} if payload is None else {"payload": payload}
    extras = meta.pop(EXTRAS, {})
    blob, sparse = extras.get("blob"), extras.get("sparse_embedding")
    return Document(
        id=str(name),
        content=text,
        meta=meta,
        blob=blob and ByteStream(base64.b64decode(blob["data"]), blob["meta"], blob["mime_type"]),
        sparse_embedding=sparse and SparseEmbedding.from_dict(sparse),
        score=extras.get("score") if score is None else score,
        embedding=None if key is None else key.tolist(),
    )
