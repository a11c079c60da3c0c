"""Haystack's document store and retrievers, on top of a database (`softdb[haystack]`)."""

from softdb.integrations.haystack.retrievers import (
    SoftDBEmbeddingRetriever,
    SoftDBHybridRetriever,
    SoftDBKeywordRetriever,
)
from softdb.integrations.haystack.store import DuplicateDocument, RefusedFilter, SoftDBDocumentStore

__all__ = [
    "DuplicateDocument",
    "RefusedFilter",
    "SoftDBDocumentStore",
    "SoftDBEmbeddingRetriever",
    "SoftDBHybridRetriever",
    "SoftDBKeywordRetriever",
]
