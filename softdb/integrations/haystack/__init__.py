"""Haystack's document store and retrievers, on top of a database (`softdb[haystack]`)."""

from softdb.errors import MissingDependency

try:
    import haystack as _  # noqa: F401 - one check for all modules below
except ImportError as error:
    raise MissingDependency("softdb.integrations.haystack needs Haystack; pip install 'softdb[haystack]'") from error

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
