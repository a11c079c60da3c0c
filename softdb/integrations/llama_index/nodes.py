"""Conversion of LlamaIndex's nodes to records and back.

A node's text is the record's text, its embedding the key, its `metadata` the payload. The payload's field
"_llama_index" holds the rest of the node, such as relationships and positions, where it differs from the defaults.
"""

from __future__ import annotations

from typing import Any

from softdb.answers import Hit, Record
from softdb.check import shown
from softdb.errors import BadInput, MissingDependency

try:
    from llama_index.core.schema import BaseNode, Document, ImageDocument, ImageNode, IndexNode, Node, TextNode
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.llama_index: {error}; pip install 'softdb[llama-index]'") from None

EXTRAS = "_llama_index"
SOURCE = f"{EXTRAS}.ref_doc_id"  # path of the id of the document from which a node was made

_TYPES: tuple[Any, ...] = (TextNode, ImageNode, IndexNode, Node, Document, ImageDocument)
_CLASSES = {each.class_name(): each for each in _TYPES}
_ELSEWHERE: Any = {"id_": True, "metadata": True, "embedding": True, "text": True, "text_resource": {"text"}}


def payload_of(node: BaseNode) -> dict[str, Any]:
    """Return the payload of the record that stores a node. Raises BadInput for a node that cannot be stored."""
    if not isinstance(node.metadata, dict) or EXTRAS in node.metadata:
        raise BadInput(f"metadata of node {shown(node.node_id)} has the field {EXTRAS!r}, which softdb uses; rename it")
    classes: list[Any] = [each for each in type(node).__mro__ if each in _TYPES]
    if not classes:
        raise BadInput(f"node is a {type(node).__name__}; expected one of {', '.join(_CLASSES)}, or a subclass")
    try:
        extras = node.model_dump(mode="json", exclude=_ELSEWHERE, exclude_defaults=True)
        extras |= {"class_name": classes[0].class_name(), "ref_doc_id": node.ref_doc_id}
    except ValueError as error:  # an object of an IndexNode that is not JSON, or two source documents
        raise BadInput(f"node {shown(node.node_id)} cannot be stored: {error}") from None
    for name in [name for name in extras if name.endswith("_resource")]:
        if data := getattr(node, name).data:  # base64, which LlamaIndex leaves out of its own files
            extras[name]["data"] = data.decode()
    return {**node.metadata, EXTRAS: extras}


def text_of(node: BaseNode) -> str | None:
    """Return the text of a node, without its metadata; None for a node without a text."""
    if isinstance(node, Node):
        return None if node.text_resource is None else node.text_resource.text
    return node.text  # type: ignore[no-any-return]


def node_of(record: Hit | Record) -> BaseNode:
    """Return a record as a node; if LlamaIndex did not write it, as a TextNode with the payload as metadata."""
    payload = record.payload
    metadata = dict(payload) if isinstance(payload, dict) else {} if payload is None else {"payload": payload}
    extras = metadata.pop(EXTRAS, {})
    node_class = _CLASSES.get(extras.get("class_name"), TextNode)
    fields = {name: value for name, value in extras.items() if name != "ref_doc_id"}
    if not issubclass(node_class, Node):
        fields["text"] = record.text or ""
    elif record.text is not None:
        fields["text_resource"] = {**fields.get("text_resource", {}), "text": record.text}
    return node_class.from_dict({**fields, "id_": str(record.id), "metadata": metadata})
