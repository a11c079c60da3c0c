"""The suite of `llama_index_suite.py` over softdb's store and over LlamaIndex's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index_suite import VectorStoreSuite

from softdb.integrations.llama_index import SoftDBVectorStore

pytestmark = pytest.mark.filterwarnings("ignore:no record has the field")  # filters on a field that no node has


class TestInMemory(VectorStoreSuite):
    @pytest.fixture
    def store(self, dim: int) -> Iterator[SoftDBVectorStore]:
        store = SoftDBVectorStore(dim=dim)
        yield store
        store.db.close()


class TestOnDisk(VectorStoreSuite):
    @pytest.fixture
    def store(self, dim: int, path: Path) -> Iterator[SoftDBVectorStore]:
        store = SoftDBVectorStore(path, dim=dim, metric="l2", durability="relaxed")
        yield store
        store.db.close()

    def reopened(self, store: SoftDBVectorStore, path: str) -> SoftDBVectorStore:
        assert not Path(path).exists(), "a database on disk is not copied"
        place = store.db.path
        store.db.close()
        return SoftDBVectorStore(place)


class TestSimpleVectorStore(VectorStoreSuite):
    """LlamaIndex's own store shows that the suite asks for what LlamaIndex defines."""

    lacks: ClassVar[dict[str, str]] = {
        "nodes": "it stores embeddings and metadata; nodes are in the index's docstore",
        "whole documents": "it stores no nodes",
        "nested filters": "build_metadata_filter_fn raises 'Nested MetadataFilters are not supported'",
        "values of two types": "it compares by Python's operators, which raise TypeError",
        "doc_ids": "it ignores them",
        "empty node_ids": "it returns nothing; its index passes the ids of all nodes",
        "text search": "it raises 'Invalid query mode'",
        "hybrid": "it raises 'Invalid query mode'",
        "mmr of the query": "it reads mmr_threshold from the arguments of query alone",
    }

    @pytest.fixture
    def store(self, dim: int) -> Any:
        return SimpleVectorStore()
