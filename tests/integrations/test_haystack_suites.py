"""Haystack's own mixins for document stores, all of them, synchronous and asynchronous, in memory and on disk.

Two things are said here because the mixins ask for them: what no policy means (their `test_write_documents` does
nothing but raise), and how documents compare: embeddings come back as the float32 that they were stored in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from haystack import Document
from haystack.testing import document_store as suites
from haystack.testing import document_store_async as async_suites

from softdb.integrations.haystack import DuplicateDocument, SoftDBDocumentStore

pytestmark = pytest.mark.filterwarnings("ignore:no record has the field")  # the suites ask for such


def as_stored(one: Document) -> Document:
    kept = None if one.embedding is None else np.asarray(one.embedding, np.float32).tolist()
    return replace(one, embedding=kept)


class Compared:
    @staticmethod
    def assert_documents_are_equal(received: list[Document], expected: list[Document]) -> None:
        assert received == [as_stored(one) for one in expected]


class TestStore(
    Compared,
    suites.DocumentStoreBaseExtendedTests,
    suites.CountDocumentsByFilterTest,
    suites.CountUniqueMetadataByFilterTest,
    suites.GetMetadataFieldsInfoTest,
    suites.GetMetadataFieldMinMaxTest,
    suites.GetMetadataFieldUniqueValuesTest,
):
    @pytest.fixture
    def document_store(self) -> SoftDBDocumentStore:
        return SoftDBDocumentStore()

    def test_write_documents(self, document_store: SoftDBDocumentStore) -> None:
        one = Document(content="test doc")
        assert document_store.write_documents([one]) == 1
        with pytest.raises(DuplicateDocument, match="stored already"):
            document_store.write_documents([one])
        self.assert_documents_are_equal(document_store.filter_documents(), [one])


class TestAsync(
    Compared,
    async_suites.CountDocumentsAsyncTest,
    async_suites.CountDocumentsByFilterAsyncTest,
    async_suites.CountUniqueMetadataByFilterAsyncTest,
    async_suites.DeleteAllAsyncTest,
    async_suites.DeleteByFilterAsyncTest,
    async_suites.DeleteDocumentsAsyncTest,
    async_suites.FilterDocumentsAsyncTest,
    async_suites.GetMetadataFieldMinMaxAsyncTest,
    async_suites.GetMetadataFieldUniqueValuesAsyncTest,
    async_suites.GetMetadataFieldsInfoAsyncTest,
    async_suites.UpdateByFilterAsyncTest,
    async_suites.WriteDocumentsAsyncTest,
):
    @pytest.fixture
    def document_store(self) -> SoftDBDocumentStore:
        return SoftDBDocumentStore()

    async def test_write_documents_async(self, document_store: SoftDBDocumentStore) -> None:
        one = Document(content="test doc")
        assert await document_store.write_documents_async([one]) == 1
        with pytest.raises(DuplicateDocument, match="stored already"):
            await document_store.write_documents_async([one])
        self.assert_documents_are_equal(await document_store.filter_documents_async(), [one])


@pytest.fixture
def on_disk(path: Path) -> Iterator[SoftDBDocumentStore]:
    store = SoftDBDocumentStore(path, fields=["number", "name"])
    yield store
    store.close()


class TestStoreOnDisk(TestStore):
    @pytest.fixture
    def document_store(self, on_disk: SoftDBDocumentStore) -> SoftDBDocumentStore:
        return on_disk


class TestAsyncOnDisk(TestAsync):
    @pytest.fixture
    def document_store(self, on_disk: SoftDBDocumentStore) -> SoftDBDocumentStore:
        return on_disk


def test_no_mixin_of_haystack_is_left_out() -> None:
    def mixins(module: Any, of: type) -> set[str]:
        results = {name for name, one in vars(module).items() if name.endswith("Test") and isinstance(one, type)}
        return {name for name in results if not issubclass(of, vars(module)[name])}

    assert mixins(suites, TestStore) == mixins(async_suites, TestAsync) == set()
