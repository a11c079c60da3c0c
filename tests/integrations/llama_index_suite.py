"""A suite for any vector store of LlamaIndex: inherit `VectorStoreSuite` and give it a fixture `store`.

The meaning of each call is that of LlamaIndex's documentation (`llama_index/core/vector_stores/types.py`) and of its
reference store, `SimpleVectorStore`. The file needs llama-index-core, pytest and pytest-asyncio (mode "auto"), and no
network.

A store that deviates says so in `lacks`: the name of a capability from `CAPABILITIES`, and the reason. The tests that
need the capability are then expected to fail, each of them, so that a store that gains the capability notices.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
    TransformComponent,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

CAPABILITIES = {
    "nodes": "queries return nodes, and `get_nodes` is there",
    "whole documents": "a Document comes back as a Document, and the bytes of a Node's media come back",
    "nested filters": "a MetadataFilters may hold other MetadataFilters",
    "values of two types": "a filter on a field that is a text in some nodes and a number in others raises no error",
    "doc_ids": "`VectorStoreQuery.doc_ids` restricts a query to the nodes of these documents",
    "empty node_ids": "`VectorStoreQuery.node_ids=[]`, as `VectorStoreIndex.as_retriever` passes it, restricts nothing",
    "text search": "modes `text_search` and `sparse`",
    "hybrid": "modes `hybrid` and `semantic_hybrid`, with `alpha`",
    "mmr": "mode `mmr`, with `mmr_threshold` as an argument of `query`",
    "mmr of the query": "`VectorStoreQuery.mmr_threshold`",
    "persistence": "`persist`, and a way to open the store again",
}


def needs(capability: str) -> Callable[[Any], Any]:
    """Mark a test, or a class of tests, that a store without this capability must fail."""
    assert capability in CAPABILITIES, capability
    return pytest.mark.capability(capability)


class WordEmbedding(BaseEmbedding):
    """An embedding without a model: each word adds 1 to a coordinate chosen by its checksum."""

    size: int = 64

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.01] * self.size
        for word in text.lower().split():
            vector[zlib.crc32(word.encode()) % self.size] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Sentences(TransformComponent):
    """A splitter without a tokenizer: a node for each sentence, with its position and its neighbours."""

    def __call__(self, nodes: Any, **_: Any) -> list[BaseNode]:
        made: list[BaseNode] = []
        for document in nodes:
            start = 0
            for number, sentence in enumerate(document.text.split(". ")):
                source = {NodeRelationship.SOURCE: document.as_related_node_info()}
                made.append(
                    TextNode(
                        id_=f"{document.id_}-{number}",
                        text=sentence,
                        metadata=dict(document.metadata),
                        relationships=source,
                        start_char_idx=start,
                        end_char_idx=start + len(sentence),
                    )
                )
                start += len(sentence) + 2
        return made


def node(name: str, embedding: list[float], text: str = "", source: str | None = None, **metadata: Any) -> TextNode:
    """A node, of a source document if one is named."""
    relations: Any = {} if source is None else {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)}
    return TextNode(id_=name, embedding=embedding, text=text, metadata=metadata, relationships=relations)


def nodes() -> list[TextNode]:
    """Five nodes, nearest to (1, 0, 0, 0) in the order of their names; "d" has no metadata and no source."""
    return [
        node(
            "a", [1.0, 0.0, 0.0, 0.0], "the cat sleeps in the sun", "doc 1", year=1979, lang="en", score=0.5,
            tags=["cat", "pet"], sizes=[1, 2], title="The Cat", active=True,
        ),
        node(
            "b", [0.9, 0.1, 0.0, 0.0], "a dog barks", "doc 1", year=1995, lang="de", score=1.5, tags=["dog"],
            sizes=[2, 3], title="Der Hund", active=False,
        ),
        node(
            "c", [0.7, 0.3, 0.0, 0.0], "cats and dogs, and a bird", "doc 2", year=2001, lang="en", score=-1.0, tags=[],
            title="", note=None,
        ),
        node("d", [0.5, 0.5, 0.0, 0.0], "a bird sings"),
        node(
            "e", [0.1, 0.9, 0.0, 0.0], "fish swim under a bridge", "döc 3", year=1995, lang="日本語", score=2,
            tags=["cat", "ünï"], title="ÜBER THE DOG", note="new", **{"a.b": "dotted", "": "empty name"},
        ),
    ]  # fmt: skip


QUERY = [1.0, 0.0, 0.0, 0.0]

# (field, operator, value) -> the nodes that match
OPERATORS: list[tuple[str, str, Any, str]] = [
    ("lang", "==", "en", "ac"),
    ("lang", "==", "日本語", "e"),
    ("lang", "==", "EN", ""),
    ("lang", "==", "", ""),
    ("title", "==", "", "c"),
    ("year", "==", 1995, "be"),
    ("year", "==", 1995.0, "be"),
    ("year", "==", 1, ""),
    ("score", "==", 0.5, "a"),
    ("score", "==", 2, "e"),
    ("score", "==", 2.0, "e"),
    ("active", "==", 1, "a"),
    ("active", "==", 0, "b"),
    ("a.b", "==", "dotted", "e"),
    ("", "==", "empty name", "e"),
    ("tags", "==", ["dog"], "b"),
    ("tags", "==", ["pet", "cat"], ""),
    ("nowhere", "==", "en", ""),
    ("note", "==", None, ""),
    ("lang", "!=", "en", "bde"),
    ("year", "!=", 1995, "acd"),
    ("score", "!=", 0.5, "bcde"),
    ("active", "!=", 1, "bcde"),
    ("note", "!=", "new", "abcd"),
    ("nowhere", "!=", 1, "abcde"),
    ("year", ">", 1979, "bce"),
    ("year", ">", 1979.5, "bce"),
    ("score", ">", 0, "abe"),
    ("lang", ">", "de", "ace"),
    ("nowhere", ">", 1, ""),
    ("year", ">=", 1995, "bce"),
    ("score", ">=", 1.5, "be"),
    ("year", "<", 1995, "a"),
    ("score", "<", 0.25, "c"),
    ("lang", "<", "en", "b"),
    ("note", "<", "z", "e"),
    ("year", "<=", 1995, "abe"),
    ("score", "<=", -1.0, "c"),
    ("lang", "in", ["de", "日本語"], "be"),
    ("year", "in", [1979, 2001, 3000], "ac"),
    ("score", "in", [1.5, -1.0], "bc"),
    ("lang", "in", [], ""),
    ("active", "in", [1, 7], "a"),
    ("tags", "in", ["cat", "dog"], ""),
    ("lang", "nin", ["de", "日本語"], "acd"),
    ("year", "nin", [1995], "acd"),
    ("score", "nin", [0.5, 2.0], "bcd"),
    ("lang", "nin", [], "abcde"),
    ("tags", "any", ["pet", "ünï"], "ae"),
    ("tags", "any", ["nothing"], ""),
    ("tags", "any", [], ""),
    ("sizes", "any", [1, 3], "ab"),
    ("title", "any", ["Cat", "Hund"], "ab"),
    ("tags", "all", ["cat", "pet"], "a"),
    ("tags", "all", ["cat"], "ae"),
    ("tags", "all", [], "abce"),
    ("sizes", "all", [2, 3], "b"),
    ("tags", "contains", "cat", "ae"),
    ("tags", "contains", "ca", ""),
    ("sizes", "contains", 2, "ab"),
    ("sizes", "contains", 2.0, "ab"),
    ("title", "contains", "Cat", "a"),
    ("nowhere", "contains", "x", ""),
    ("title", "text_match", "Cat", "a"),
    ("title", "text_match", "cat", ""),
    ("title", "text_match", "r H", "b"),
    ("title", "text_match", "", "abce"),
    ("nowhere", "text_match", "x", ""),
    ("title", "text_match_insensitive", "the", "ae"),
    ("title", "text_match_insensitive", "über THE", "e"),
    ("title", "text_match_insensitive", "r h", "b"),
    ("nowhere", "text_match_insensitive", "x", ""),
    ("tags", "is_empty", None, "cd"),
    ("title", "is_empty", None, "cd"),
    ("note", "is_empty", None, "abcd"),
    ("active", "is_empty", None, "cde"),
    ("score", "is_empty", None, "d"),
    ("nowhere", "is_empty", None, "abcde"),
    ("ref_doc_id", "==", "doc 1", "ab"),
    ("doc_id", "in", ["doc 2", "döc 3"], "ce"),
    ("document_id", "!=", "doc 1", "cde"),
]


def filters(*conditions: tuple[str, str, Any] | MetadataFilters, condition: Any = "and") -> MetadataFilters:
    """Filters from (field, operator, value)."""
    made: list[Any] = []
    for each in conditions:
        if isinstance(each, MetadataFilters):
            made.append(each)
        else:
            made.append(MetadataFilter(key=each[0], operator=FilterOperator(each[1]), value=each[2]))
    return MetadataFilters(filters=made, condition=None if condition is None else FilterCondition(condition))


def query(text: str | None = None, k: int = 10, mode: str = "default", **settings: Any) -> VectorStoreQuery:
    """A query for the nodes nearest to `QUERY`."""
    settings = {"query_embedding": QUERY, "filters": None, **settings}
    return VectorStoreQuery(similarity_top_k=k, query_str=text, mode=VectorStoreQueryMode(mode), **settings)


def names(result: VectorStoreQueryResult) -> str:
    """The names of the nodes of a result, which must agree with its scores and nodes."""
    ids = list(result.ids or [])
    assert len(result.similarities or []) == len(ids)
    if result.nodes is not None:
        assert [each.node_id for each in result.nodes] == ids
    return "".join(ids)


def every(store: BasePydanticVectorStore, where: MetadataFilters | None = None) -> str:
    """The names of all nodes that match, in the order of the alphabet."""
    return "".join(sorted(names(store.query(query(k=100, filters=where)))))


def bare(each: BaseNode) -> BaseNode:
    """A copy of a node without its embedding."""
    made = each.model_copy()
    made.embedding = None
    return made


class VectorStoreSuite:
    """The tests. `store` is a fixture: an empty store for vectors of 4 numbers, or, if it is asked, of 64."""

    lacks: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def dim(self, request: pytest.FixtureRequest) -> int:
        """The width of the vectors of this test."""
        return WordEmbedding().size if request.node.get_closest_marker("words") else len(QUERY)

    @pytest.fixture
    def store(self, dim: int) -> Any:
        raise NotImplementedError("a suite needs a fixture `store`")

    def reopened(self, store: Any, path: str) -> Any:
        """Return the store that `store.persist(path)` has written. A store that must be closed first does so here."""
        return type(store).from_persist_path(path)

    @pytest.fixture(autouse=True)
    def _expects_what_is_lacking(self, request: pytest.FixtureRequest) -> None:
        assert set(self.lacks) <= set(CAPABILITIES), "lacks names an unknown capability"
        for marker in request.node.iter_markers("capability"):
            if marker.args[0] in self.lacks:
                request.node.add_marker(pytest.mark.xfail(reason=self.lacks[marker.args[0]], strict=True))

    @pytest.fixture
    def filled(self, store: Any) -> Any:
        """The store with five nodes."""
        store.add(nodes())
        return store

    # -- writing -------------------------------------------------------------------------------------------------------

    def test_add_returns_the_ids_in_order(self, store: Any) -> None:
        assert store.add(nodes()) == list("abcde")
        assert store.add([]) == []
        assert every(store) == "abcde"

    def test_add_leaves_the_nodes_as_they_are(self, store: Any) -> None:
        before, given = nodes(), nodes()
        store.add(given)
        assert given == before

    def test_a_node_of_the_same_id_replaces_the_old(self, filled: Any) -> None:
        filled.add([node("a", [0.0, 0.0, 0.0, 1.0], "new", "doc 9", lang="xx")])
        assert every(filled) == "abcde"
        assert names(filled.query(query(k=1, query_embedding=[0.0, 0.0, 0.0, 1.0]))) == "a"
        assert every(filled, filters(("lang", "==", "en"))) == "c"
        filled.delete("doc 1")
        assert every(filled) == "acde"

    def test_the_last_of_two_nodes_of_one_id_stays(self, store: Any) -> None:
        twice = [node("a", QUERY, lang="old"), node("b", QUERY), node("a", QUERY, lang="new")]
        assert store.add(twice) == ["a", "b", "a"]
        assert every(store) == "ab"
        assert every(store, filters(("lang", "==", "new"))) == "a"
        assert every(store, filters(("lang", "==", "old"))) == ""

    def test_a_node_without_an_embedding_is_refused(self, store: Any) -> None:
        with pytest.raises(ValueError, match="embedding"):
            store.add([TextNode(text="no embedding")])

    def test_nodes_with_equal_vectors_are_all_there(self, store: Any) -> None:
        store.add([node(name, QUERY) for name in "abcdef"])
        assert sorted(names(store.query(query()))) == list("abcdef")
        assert len(names(store.query(query(k=3)))) == 3

    def test_delete_by_the_source_document(self, filled: Any) -> None:
        filled.delete("doc 1")
        assert every(filled) == "cde"
        filled.delete("döc 3")
        filled.delete("nothing")
        filled.delete("d")  # the id of a node, not of a document
        assert every(filled) == "cd"

    @pytest.mark.parametrize(
        ("arguments", "left"),
        [
            ({"node_ids": ["a", "e", "nothing"]}, "bcd"),
            ({"node_ids": []}, "abcde"),
            ({"filters": filters(("lang", "==", "en"))}, "bde"),
            ({"filters": filters(("lang", "==", "en"), ("year", "<", 1990), condition="or")}, "bde"),
            ({"node_ids": ["a", "b"], "filters": filters(("lang", "==", "en"))}, "bcde"),
            ({"node_ids": ["b"], "filters": filters(("nowhere", "==", 1))}, "abcde"),
        ],
        ids=str,
    )
    def test_delete_nodes(self, filled: Any, arguments: dict[str, Any], left: str) -> None:
        filled.delete_nodes(**arguments)
        assert every(filled) == left

    def test_clear(self, filled: Any) -> None:
        filled.clear()
        assert every(filled) == ""
        filled.clear()
        filled.add(nodes()[:2])
        assert every(filled) == "ab"

    # -- queries -------------------------------------------------------------------------------------------------------

    def test_the_nearest_come_first(self, filled: Any) -> None:
        result = filled.query(query())
        assert names(result) == "abcde"
        assert result.similarities == sorted(result.similarities, reverse=True)
        assert len({round(float(score), 6) for score in result.similarities}) == 5

    @pytest.mark.parametrize("k", [1, 3, 5, 6, 1000])
    def test_as_many_as_there_are(self, filled: Any, k: int) -> None:
        assert names(filled.query(query(k=k))) == "abcde"[:k]

    def test_an_empty_store_answers(self, store: Any) -> None:
        assert names(store.query(query())) == ""
        assert names(store.query(query(filters=filters(("year", ">", 1))))) == ""
        store.delete("doc 1")
        store.delete_nodes(["a"])
        store.clear()

    @pytest.mark.parametrize(("field", "operator", "value", "expected"), OPERATORS, ids=str)
    def test_an_operator(self, filled: Any, field: str, operator: str, value: Any, expected: str) -> None:
        assert every(filled, filters((field, operator, value))) == expected

    def test_every_operator_is_tried(self) -> None:
        assert {operator for _, operator, _, _ in OPERATORS} == {operator.value for operator in FilterOperator}

    @needs("values of two types")
    @pytest.mark.parametrize(
        ("operator", "value", "expected"),
        [
            (">", 1990, ["number"]),
            ("<=", "1995", ["text"]),
            ("text_match", "99", ["text"]),
            ("text_match", "x", []),
            ("text_match_insensitive", "99", ["text"]),
            ("contains", "99", ["text"]),
            ("any", ["99", "x"], ["list", "text"]),
        ],
        ids=str,
    )
    def test_a_field_of_several_types(self, store: Any, operator: str, value: Any, expected: list[str]) -> None:
        years: dict[str, Any] = {"number": 1995, "text": "1995", "list": ["x"], "object": {"y": 1}}
        store.add([node(name, QUERY, year=year) for name, year in years.items()])
        result = store.query(query(filters=filters(("year", operator, value))))
        assert sorted(result.ids) == expected

    @pytest.mark.parametrize(("value", "expected"), [(1995, "number"), ("1995", "text"), (["x"], "list")], ids=str)
    def test_equality_with_a_field_of_several_types(self, store: Any, value: Any, expected: str) -> None:
        years: dict[str, Any] = {"number": 1995, "text": "1995", "list": ["x"], "object": {"y": 1}}
        store.add([node(name, QUERY, year=year) for name, year in years.items()])
        assert store.query(query(filters=filters(("year", "==", value)))).ids == [expected]
        others = sorted({*years} - {expected})
        assert sorted(store.query(query(filters=filters(("year", "!=", value)))).ids) == others

    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (filters(("lang", "==", "en"), ("year", ">", 1990)), "c"),
            (filters(("lang", "==", "en"), ("year", ">", 1990), condition="or"), "abce"),
            (filters(("lang", "==", "en"), ("year", ">", 1990), condition="not"), "d"),
            (filters(("lang", "==", "en"), condition="not"), "bde"),
            (filters(("lang", "==", "en"), ("year", ">", 1990), condition=None), "c"),
            (filters(("tags", "is_empty", None), ("year", "!=", 2001)), "d"),
            (filters(), "abcde"),
            (filters(condition="or"), "abcde"),
            (filters(condition="not"), "abcde"),
            (None, "abcde"),
        ],
        ids=str,
    )
    def test_conditions(self, filled: Any, where: MetadataFilters | None, expected: str) -> None:
        assert every(filled, where) == expected

    @needs("nested filters")
    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (filters(("year", "==", 1995), filters(("lang", "==", "de"), ("lang", "==", "en"), condition="or")), "b"),
            (filters(("year", "==", 1979), filters(("year", "==", 1995), ("lang", "!=", "de")), condition="or"), "ae"),
            (filters(filters(("lang", "==", "en"), condition="not"), filters(("year", ">", 1990))), "be"),
            (filters(filters(filters(("lang", "==", "de"))), condition="not"), "acde"),
        ],
        ids=str,
    )
    def test_nested_conditions(self, filled: Any, where: MetadataFilters, expected: str) -> None:
        assert every(filled, where) == expected

    def test_a_filter_does_not_shrink_the_answer(self, store: Any) -> None:
        far = [node(f"far {i}", [0.0, 1.0, 0.0, float(i)], kind="far") for i in range(3)]
        store.add([node(f"near {i}", [1.0, 0.0, 0.0, i / 100], kind="near") for i in range(50)] + far)
        result = store.query(query(k=3, filters=filters(("kind", "==", "far"))))
        assert sorted(result.ids) == ["far 0", "far 1", "far 2"]

    def test_node_ids_restrict(self, filled: Any) -> None:
        assert names(filled.query(query(node_ids=["d", "b", "nothing"]))) == "bd"
        assert names(filled.query(query(node_ids=["d", "b"], filters=filters(("lang", "==", "de"))))) == "b"
        assert names(filled.query(query(node_ids=["nothing"]))) == ""

    @needs("empty node_ids")
    def test_empty_node_ids_restrict_nothing(self, filled: Any) -> None:
        assert names(filled.query(query(node_ids=[]))) == "abcde"

    @needs("doc_ids")
    def test_doc_ids_restrict(self, filled: Any) -> None:
        assert names(filled.query(query(doc_ids=["doc 1", "nothing"]))) == "ab"
        assert names(filled.query(query(doc_ids=["doc 1", "döc 3"], node_ids=["b", "c", "e"]))) == "be"

    @needs("text search")
    @pytest.mark.parametrize("mode", ["text_search", "sparse"])
    def test_by_words(self, filled: Any, mode: str) -> None:
        found = filled.query(query("sleeps cat", mode=mode, query_embedding=None))
        assert names(found) == "a"
        assert found.similarities[0] > 0
        assert sorted(names(filled.query(query("bird", mode=mode)))) == ["c", "d"]
        assert names(filled.query(query("bird", mode=mode, filters=filters(("lang", "==", "en"))))) == "c"
        assert names(filled.query(query("bird", k=1, mode=mode))) in ("c", "d")
        assert names(filled.query(query("nothing", mode=mode))) == ""

    @needs("hybrid")
    @pytest.mark.parametrize("mode", ["hybrid", "semantic_hybrid"])
    def test_by_words_and_vectors(self, filled: Any, mode: str) -> None:
        assert names(filled.query(query("bridge", mode=mode, alpha=1.0))) == "abcde"
        assert names(filled.query(query("bridge", mode=mode, alpha=0.0)))[0] == "e"
        half = filled.query(query("bridge", mode=mode, alpha=0.5, k=5))
        assert half.similarities == sorted(half.similarities, reverse=True)
        assert {*names(half)[:2]} == {"a", "e"}
        assert names(filled.query(query("bridge", mode=mode, k=1, filters=filters(("lang", "==", "de"))))) == "b"
        assert len(names(filled.query(query("bridge", mode=mode, k=2)))) == 2
        assert len(names(filled.query(query("bridge", mode=mode, k=2, hybrid_top_k=3)))) == 3

    @needs("mmr")
    def test_mmr(self, store: Any) -> None:
        twins = [node(name, [1.0, 0.02 * i, 0.0, 0.0]) for i, name in enumerate("abc")]
        store.add([*twins, node("other", [0.6, 0.0, 0.8, 0.0]), node("far", [-1.0, 0.0, 0.0, 0.0])])
        ask = query(k=2, mode="mmr")
        assert list(store.query(ask, mmr_threshold=1.0).ids) == ["a", "b"]
        first, second = store.query(ask, mmr_threshold=0.4).ids
        assert first == "a"
        assert second in ("other", "far")
        assert store.query(ask).ids[0] == "a"
        assert set(store.query(query(k=10, mode="mmr")).ids) == {"a", "b", "c", "other", "far"}
        only = query(k=2, mode="mmr", node_ids=["b", "c", "far"])
        assert list(store.query(only, mmr_threshold=1.0).ids) == ["b", "c"]

    @needs("mmr of the query")
    def test_mmr_with_the_threshold_of_the_query(self, store: Any) -> None:
        store.add([node("a", QUERY), node("b", [1.0, 0.01, 0.0, 0.0]), node("other", [0.6, 0.0, 0.8, 0.0])])
        assert list(store.query(query(k=2, mode="mmr", mmr_threshold=0.99)).ids) == ["a", "b"]
        assert list(store.query(query(k=2, mode="mmr", mmr_threshold=0.3)).ids) == ["a", "other"]

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @needs("nodes")
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({}, "abcde"),
            ({"node_ids": ["e", "a", "nothing", "e"]}, "ea"),
            ({"node_ids": []}, ""),
            ({"filters": filters(("lang", "==", "en"))}, "ac"),
            ({"node_ids": ["c", "b", "a"], "filters": filters(("lang", "==", "en"))}, "ca"),
        ],
        ids=str,
    )
    def test_get_nodes(self, filled: Any, arguments: dict[str, Any], expected: str) -> None:
        assert "".join(each.node_id for each in filled.get_nodes(**arguments)) == expected

    @needs("nodes")
    @pytest.mark.parametrize(
        "made",
        [
            TextNode(id_="a", text="plain"),
            TextNode(id_="a", text=""),
            TextNode(id_="ü/😀 'x'", text="naïve 日本語 \u0000 '\"\\ \n", metadata={"ключ": "з", "a.b": None, "": [1]}),
            TextNode(id_="a", text="x", metadata={"n": 1, "f": 1.5, "t": True, "l": ["a", 1], "d": {"e": {"f": None}}}),
            TextNode(
                id_="a",
                text="whole",
                metadata={"page": 3, "file": "a.txt", "text": "not the text", "ref_doc_id": "not the document"},
                excluded_embed_metadata_keys=["page"],
                excluded_llm_metadata_keys=["file"],
                metadata_template="{key}={value}",
                metadata_separator=" | ",
                text_template="{metadata_str}: {content}",
                mimetype="text/markdown",
                start_char_idx=10,
                end_char_idx=15,
                relationships={
                    NodeRelationship.SOURCE: Document(text="source", metadata={"x": 1}).as_related_node_info(),
                    NodeRelationship.PREVIOUS: RelatedNodeInfo(node_id="p", node_type="1", hash="h"),
                    NodeRelationship.NEXT: RelatedNodeInfo(node_id="n", metadata={"deep": [1, {"y": None}]}),
                    NodeRelationship.CHILD: [RelatedNodeInfo(node_id="k1"), RelatedNodeInfo(node_id="k2")],
                },
            ),
            IndexNode(id_="a", text="index", index_id="other"),
            IndexNode(id_="a", text="index", index_id="other", obj=TextNode(id_="in", text="inner", metadata={"m": 1})),
            ImageNode(id_="a", text="image", image="aGVsbG8=", image_mimetype="image/png", text_embedding=[0.5, 1.0]),
            ImageNode(id_="a", image_path="/pictures/a.png", image_url="https://example.org/a.png"),
            Node(
                id_="a", text_resource=MediaResource(text="multi"), image_resource=MediaResource(path=Path("/a/b.png"))
            ),
        ],
        ids=lambda made: f"{type(made).__name__} {made.metadata}",
    )
    def test_a_node_comes_back_equal(self, store: Any, made: BaseNode) -> None:
        self._comes_back(store, made)

    @needs("nodes")
    @needs("whole documents")
    @pytest.mark.parametrize(
        "made",
        [
            Document(id_="a", text="document", metadata={"year": 1}),
            Node(
                id_="a", text_resource=MediaResource(text="x"), image_resource=MediaResource(data=b"\x89PNG\r\n\x1a\n")
            ),
            Node(id_="a", audio_resource=MediaResource(url="https://example.org/a.mp3", mimetype="audio/mpeg")),
        ],
        ids=lambda made: f"{type(made).__name__} {made.metadata}",
    )
    def test_a_document_comes_back_whole(self, store: Any, made: BaseNode) -> None:
        self._comes_back(store, made)

    def _comes_back(self, store: Any, made: BaseNode) -> None:
        given = copy.deepcopy(made)
        given.embedding = [0.25, 0.5, 0.0, 1.0]
        store.add([given])
        for back in (*store.get_nodes([made.node_id]), *store.query(query()).nodes, *store.get_nodes()):
            assert type(back) is type(made)
            assert bare(back) == made
            assert back.hash == made.hash
            assert back.ref_doc_id == made.ref_doc_id

    # -- persistence ---------------------------------------------------------------------------------------------------

    @needs("persistence")
    def test_a_persisted_store_is_the_same(self, filled: Any, tmp_path: Path) -> None:
        path = str(tmp_path / "kept" / "store.json")
        filled.persist(path)
        filled.delete("doc 2")
        filled.persist(path)
        again = self.reopened(filled, path)
        assert names(again.query(query())) == "abde"
        assert every(again, filters(("tags", "contains", "cat"))) == "ae"
        again.delete("doc 1")
        again.add(nodes()[:1])
        assert every(again) == "ade"

    # -- asyncio -------------------------------------------------------------------------------------------------------

    async def test_asynchronous_calls(self, store: Any) -> None:
        assert await store.async_add(nodes()) == list("abcde")
        assert names(await store.aquery(query(k=2))) == "ab"
        await store.adelete("doc 1")
        await store.adelete_nodes(["d"])
        await store.adelete_nodes(filters=filters(("lang", "==", "en")))
        assert names(await store.aquery(query())) == "e"
        await store.aclear()
        assert names(await store.aquery(query())) == ""

    @needs("nodes")
    async def test_asynchronous_get_nodes(self, filled: Any) -> None:
        assert [each.node_id for each in await filled.aget_nodes(["b", "a"])] == ["b", "a"]
        assert [each.node_id for each in await filled.aget_nodes(filters=filters(("lang", "==", "de")))] == ["b"]

    # -- within LlamaIndex ---------------------------------------------------------------------------------------------

    DOCUMENTS: ClassVar[list[Any]] = [
        Document(id_="cats", text="the cat sleeps. the cat purrs loudly", metadata={"kind": "cat", "year": 2000}),
        Document(id_="dogs", text="a dog barks. a dog runs after the ball", metadata={"kind": "dog", "year": 2010}),
    ]

    @pytest.fixture
    def index(self, store: Any) -> VectorStoreIndex:
        """An index over four sentences."""
        return VectorStoreIndex.from_documents(
            copy.deepcopy(self.DOCUMENTS),
            StorageContext.from_defaults(vector_store=store),
            embed_model=WordEmbedding(),
            transformations=[Sentences()],
        )

    @pytest.mark.words
    def test_an_index(self, index: VectorStoreIndex) -> None:
        best = index.as_retriever(similarity_top_k=1).retrieve("which dog barks")[0]
        assert best.node.node_id == "dogs-0"
        assert best.node.text == "a dog barks"
        assert (best.node.start_char_idx, best.node.end_char_idx) == (0, 11)
        assert best.score is not None
        assert best.node.ref_doc_id == "dogs"
        where = filters(("kind", "==", "cat"))
        of_cats = index.as_retriever(similarity_top_k=9, filters=where).retrieve("which dog barks")
        assert sorted(each.node_id for each in of_cats) == ["cats-0", "cats-1"]

    @pytest.mark.words
    async def test_an_index_from_asyncio(self, index: VectorStoreIndex) -> None:
        best = await index.as_retriever(similarity_top_k=2).aretrieve("a cat purrs")
        assert best[0].node_id == "cats-1"
        await index.ainsert(Document(id_="birds", text="a bird sings"))
        assert (await index.as_retriever(similarity_top_k=1).aretrieve("bird sings"))[0].node_id == "birds-0"

    @pytest.mark.words
    def test_documents_are_inserted_deleted_and_refreshed(self, index: VectorStoreIndex) -> None:
        retriever = VectorIndexRetriever(index, similarity_top_k=9)
        index.insert(Document(id_="birds", text="a bird sings. a bird flies"))
        assert len(retriever.retrieve("bird")) == 6
        changed = copy.deepcopy(self.DOCUMENTS)
        changed[0].set_content("the cat eats fish")
        assert index.refresh_ref_docs(changed) == [True, False]
        assert index.refresh_ref_docs(changed) == [False, False]
        left = [each.node.get_content() for each in retriever.retrieve("the cat eats fish")]
        assert left[0] == "the cat eats fish"
        assert len(left) == 5
        index.delete_ref_doc("dogs", delete_from_docstore=True)
        assert sorted(each.node_id for each in retriever.retrieve("dog")) == ["birds-0", "birds-1", "cats-0"]
        index.delete_nodes(["birds-1"], delete_from_docstore=True)
        assert sorted(each.node_id for each in retriever.retrieve("dog")) == ["birds-0", "cats-0"]

    @pytest.mark.words
    @needs("nodes")
    def test_an_index_over_a_filled_store(self, index: VectorStoreIndex, store: Any) -> None:
        again = VectorStoreIndex.from_vector_store(store, embed_model=WordEmbedding(), transformations=[Sentences()])
        found = again.as_retriever(similarity_top_k=2, filters=filters(("year", ">", 2005))).retrieve("dog")
        assert sorted(each.node_id for each in found) == ["dogs-0", "dogs-1"]
        again.insert(Document(id_="birds", text="a bird sings"))
        assert again.as_retriever(similarity_top_k=1).retrieve("bird")[0].node.text == "a bird sings"

    @pytest.mark.words
    @needs("text search")
    @needs("hybrid")
    def test_the_modes_of_a_retriever(self, index: VectorStoreIndex) -> None:
        for mode in ("text_search", "hybrid", "mmr"):
            settings: dict[str, Any] = {"similarity_top_k": 1, "vector_store_query_mode": mode}
            assert index.as_retriever(**settings).retrieve("purrs loudly")[0].node_id == "cats-1"

    @pytest.mark.words
    @pytest.mark.parametrize("strategy", list(DocstoreStrategy), ids=str)
    def test_a_pipeline(self, store: Any, strategy: DocstoreStrategy) -> None:
        pipeline = IngestionPipeline(
            transformations=[Sentences(), WordEmbedding()],
            vector_store=store,
            docstore=SimpleDocumentStore(),
            docstore_strategy=strategy,
        )
        assert len(pipeline.run(documents=copy.deepcopy(self.DOCUMENTS))) == 4
        assert len(pipeline.run(documents=copy.deepcopy(self.DOCUMENTS))) == 0
        changed = copy.deepcopy(self.DOCUMENTS)
        changed[0].set_content("one sentence about a cat")
        assert len(pipeline.run(documents=changed[:1] if "delete" in strategy.value else changed)) == 1
        kept = {
            DocstoreStrategy.UPSERTS: ["cats-0", "dogs-0", "dogs-1"],
            DocstoreStrategy.UPSERTS_AND_DELETE: ["cats-0"],
            DocstoreStrategy.DUPLICATES_ONLY: ["cats-0", "cats-1", "dogs-0", "dogs-1"],
        }[strategy]
        result = store.query(query(k=9, query_embedding=WordEmbedding().get_query_embedding("dog")))
        assert sorted(result.ids) == kept
