"""Haystack's document store and retrievers, on top of a database (`softdb[haystack]`)."""

from softdb.errors import MissingDependency

try:
    from softdb.integrations.haystack.retrievers import (
        SoftDBEmbeddingRetriever,
        SoftDBHybridRetriever,
        SoftDBKeywordRetriever,
    )
    from softdb.integrations.haystack.store import DuplicateDocument, RefusedFilter, SoftDBDocumentStore
except ImportError as error:
    raise MissingDependency(f"softdb.integrations.haystack: {error}; pip install 'softdb[haystack]'") from error

__all__ = [
    "DuplicateDocument", "RefusedFilter", "SoftDBDocumentStore", "SoftDBEmbeddingRetriever", "SoftDBHybridRetriever",
    "SoftDBKeywordRetriever",
]  # fmt: skip
