"""LangChain's own suites, unchanged, with no test overridden, skipped or expected to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from softdb.integrations.langchain import SoftDBRetriever, SoftDBVectorStore


class TestVectorStoreInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return SoftDBVectorStore(self.get_embeddings())


class TestVectorStoreOnDisk(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, path: Path) -> Iterator[VectorStore]:
        store = SoftDBVectorStore(self.get_embeddings(), path, metric="l2")
        yield store
        store.db.close()


class TestRetriever(RetrieversIntegrationTests):
    mode: str | None = None

    @property
    def retriever_constructor(self) -> type[SoftDBRetriever]:
        return SoftDBRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        texts = [f"a text of number {i}" for i in range(5)]
        store = SoftDBVectorStore.from_texts(texts, VectorStoreIntegrationTests.get_embeddings())
        return {"vectorstore": store, "mode": self.mode}

    @property
    def retriever_query_example(self) -> str:
        return "a text"


class TestHybridRetriever(TestRetriever):
    mode = "hybrid"


class TestKeywordRetriever(TestRetriever):
    mode = "text"
