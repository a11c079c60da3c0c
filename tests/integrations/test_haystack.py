"""Behaviour beyond Haystack's mixins: retrieval, pipelines, sharing, foreign records, bad input."""

from __future__ import annotations

import asyncio
import datetime
import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.components.writers import DocumentWriter
from haystack.dataclasses import ByteStream, SparseEmbedding
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy, FilterPolicy
from haystack.errors import FilterError
from haystack.utils.filters import document_matches_filter
from hypothesis import strategies as st

import softdb
from softdb import cluster
from softdb.integrations.haystack import (
    SoftDBDocumentStore,
    SoftDBEmbeddingRetriever,
    SoftDBHybridRetriever,
    SoftDBKeywordRetriever,
)

pytestmark = pytest.mark.filterwarnings("ignore:no record has the field")
FAIL, SKIP, OVERWRITE = DuplicatePolicy.FAIL, DuplicatePolicy.SKIP, DuplicatePolicy.OVERWRITE


def films() -> list[Document]:
    return [
        Document("alien", "In space no one can hear you scream", meta={"year": 1979}, embedding=[1.0, 0.0, 0.0]),
        Document("heat", "A thief and a cop", meta={"year": 1995, "by": {"name": "Mann"}}, embedding=[0.0, 1.0, 0.0]),
        Document("amelie", "A waitress in Paris, in love", meta={"year": 2001}, embedding=[0.0, 0.5, 0.75]),
        Document("ran", "A lord and his sons", meta={"year": 1985, "tags": ["war"]}),
    ]


@pytest.fixture
def store() -> SoftDBDocumentStore:
    made = SoftDBDocumentStore(embedding_dim=3)
    made.write_documents(films())
    return made


def ids(documents: list[Document]) -> list[str]:
    return [document.id for document in documents]


# -- filters -----------------------------------------------------------------------------------------------------------

NUMBERS, WORDS = st.sampled_from([0, 1, 2, 2.5, -1]), st.sampled_from(["", "a", "b", "ü'\"", "$x"])
FIELDS = {"meta.n": NUMBERS, "meta.w": WORDS, "meta.in.n": NUMBERS, "w": WORDS, "content": WORDS, "id": WORDS}


@st.composite
def comparisons(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(list(FIELDS)))
    values = st.none() | FIELDS[name]
    operator = draw(st.sampled_from(["==", "!=", "in", "not in", *([">", ">=", "<", "<="] if ".n" in name else [])]))
    value = draw(st.lists(values, max_size=3) if "in" in operator else values)
    return {"field": name, "operator": operator, "value": value}


def whole(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"operator": st.sampled_from(["AND", "OR", "NOT"]), "conditions": st.lists(parts, max_size=3)}
    )


def met() -> list[Document]:
    metas: list[dict[str, Any]] = [
        {},
        {"n": None, "w": None},
        *({"n": n, "w": w} for n, w in [(0, "a"), (1, "b"), (2.5, ""), (-1, "ü'\""), (2, "$x")]),
        {"in": {"n": 2}},
        {"in": {"n": None}},
        {"in": 2},
    ]
    return [
        Document(content=None if i % 3 == 0 else ["a", "b"][i % 2], meta=meta, id=["", "a", "b"][i % 3] + str(i // 3))
        for i, meta in enumerate(metas)
    ] + [Document("a", "")]


@pytest.fixture(scope="module")
def many() -> SoftDBDocumentStore:
    made = SoftDBDocumentStore(embedding_dim=1, fields=["n"])
    made.write_documents(met())
    return made


@hypothesis.given(asked=st.recursive(comparisons(), whole, max_leaves=5))
@hypothesis.settings(max_examples=300, deadline=None)
def test_a_filter_matches_the_same_as_haystack_s_own(many: SoftDBDocumentStore, asked: dict[str, Any]) -> None:
    assert ids(many.filter_documents(asked)) == [one.id for one in met() if document_matches_filter(asked, one)]


@pytest.mark.parametrize(
    ("name", "operator", "value", "right"),
    [
        ("blob.mime_type", "==", "text/plain", ["b"]),
        ("blob.meta.page", ">", 1, ["b"]),
        ("score", "<", 1, ["b"]),
        ("id", "in", ["a", "x"], ["a"]),
        ("content", "!=", None, ["a"]),
        ("meta.day", ">=", datetime.date(2024, 2, 1), ["a"]),
        ("meta.day", "==", "2024-02-29", ["a"]),
        (r"meta.a\b", "==", 1, ["b"]),
        ("meta.flag", "==", True, ["b"]),
    ],
)
def test_filters_reach_the_other_parts_of_a_document(name: str, operator: str, value: Any, right: list[str]) -> None:
    made = SoftDBDocumentStore()
    blob = ByteStream(b"x", {"page": 2}, "text/plain")
    made.write_documents([Document("a", "text", meta={"day": "2024-02-29"})])
    made.write_documents([Document("b", blob=blob, score=0.5, meta={r"a\b": 1, "flag": True})])
    asked = {"field": name, "operator": operator, "value": value}
    assert ids(made.filter_documents(asked)) == right
    assert made.count_documents_by_filter(asked) == 1


BAD_FILTERS: dict[str, tuple[Any, str]] = {
    "MongoDB's": ({"year": {"$gte": 2020}}, r'write \{"field": "meta.year", "operator": ">=", "value": 2020\}'),
    "equalities": ({"a": 1, "b": "x"}, r'"AND", "conditions": \[\{"field": "meta.a", "operator": "==", "value": 1\}'),
    "a list": ([{"term": {"a": 1}}], "expected a dict"),
    "a function": (lambda one: True, "expected a dict"),
    "lower case": ({"operator": "and", "conditions": []}, "with conditions it is one of AND, OR, NOT"),
    "operator": (
        {"field": "meta.a", "operator": "contains", "value": 1},
        r"with a field it is one of ==, !=, >, >=, <, <=, in, not in",
    ),
    "an operator in a list": ({"field": "meta.a", "operator": [">"], "value": 1}, "it is one of =="),
    "conditions": ({"operator": "AND", "conditions": {}}, "expected a list of filters"),
    "no field": ({"field": None, "operator": "==", "value": 1}, 'such as "meta.year"'),
    "embedding": ({"field": "embedding", "operator": "==", "value": None}, "holds no value to compare"),
    "a list's equality": ({"field": "meta.tags", "operator": "==", "value": ["war"]}, "'in' and 'not in' take a list"),
    "text order": ({"field": "meta.by", "operator": ">", "value": "M"}, "except ISO dates"),
    "NaN": ({"field": "meta.n", "operator": "==", "value": float("nan")}, "is compared with nan"),
    "numpy": ({"field": "meta.n", "operator": "==", "value": np.zeros(2)}, "is compared with"),
    "a dollar": ({"field": "meta.$gt", "operator": "==", "value": 1}, "without a field"),
    "depth": (eval('{"operator": "NOT", "conditions": [' * 40 + "]}" * 40), "nests deeper than"),
}


@pytest.mark.parametrize("bad", list(BAD_FILTERS))
def test_a_filter_in_another_dialect_is_refused_everywhere(store: SoftDBDocumentStore, bad: str) -> None:
    asked, message = BAD_FILTERS[bad]
    for call in (
        store.filter_documents,
        store.delete_by_filter,
        store.count_documents_by_filter,
        lambda one: store.update_by_filter(one, {}),
        lambda one: store.embedding_retrieval([1.0, 0.0, 0.0], one),
        lambda one: SoftDBKeywordRetriever(store, one).run("a"),
    ):
        with pytest.raises(softdb.BadFilter, match=message):
            call(asked)
        with pytest.raises(FilterError):
            call(asked)
    assert store.count_documents() == 4


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_document_comes_back_complete(path: Path) -> None:
    given = [
        Document("text", "some text", meta={"a": [1, None, {"b": True}]}, embedding=[0.5, -1.0]),
        Document("blob", blob=ByteStream(bytes(range(256)), {"page": 1}, "image/png"), meta={"x": 1}),
        Document("sparse", "", sparse_embedding=SparseEmbedding([1, 5], [0.5, 2.0]), score=0.25),
        Document("nothing"),
    ]
    made = SoftDBDocumentStore(path, embedding_dim=2)
    made.write_documents(given)
    made.close()
    again = SoftDBDocumentStore(path)
    assert again.filter_documents() == given
    assert again.db.stats().keyless == 3
    (near,) = again.embedding_retrieval([1.0, 0.0], return_embedding=True)
    assert (near.id, near.embedding) == ("text", [0.5, -1.0])
    assert again.update_by_filter({"field": "meta.x", "operator": "==", "value": 1}, {"x": 2}) == 1
    (blob,) = again.filter_documents({"field": "meta.x", "operator": "==", "value": 2})
    assert (blob.blob, blob.meta) == (given[1].blob, {"x": 2})
    assert again.get_metadata_fields_info() == {"a": {"type": "keyword"}, "x": {"type": "int"}}
    again.close()


def test_policies_decide_what_happens_to_duplicates(store: SoftDBDocumentStore) -> None:
    twice = [Document("new", "first"), Document("heat", "other"), Document("new", "second")]
    for policy in (FAIL, DuplicatePolicy.NONE):
        for error in (DuplicateDocumentError, softdb.DuplicateId):
            with pytest.raises(error, match="or choose a policy"):
                store.write_documents(twice, policy)
    assert store.count_documents() == 4
    assert store.write_documents(twice, SKIP) == 1
    assert store.write_documents(twice, SKIP) == 0
    assert [store.db[name].text for name in ("new", "heat")] == ["first", "A thief and a cop"]
    assert store.write_documents(twice, OVERWRITE) == 2
    assert [store.db[name].text for name in ("new", "heat")] == ["second", "other"]
    assert store.db["heat"].key is None  # replaced whole
    assert store.write_documents([]) == 0


BAD: dict[str, tuple[Any, str]] = {
    "a number as a name": ({"meta": {1: "x"}}, "which is no str"),
    "our own field": ({"meta": {"_haystack": 1}}, "softdb uses itself"),
    "width": ({"embedding": [1.0] * 4}, "'bad' has an embedding of 4 numbers, the store's have 3.*embedding_dim=4"),
    "an empty embedding": ({"embedding": []}, "an embedding of 0 numbers"),
    "no numbers": ({"embedding": ["x", "y", "z"]}, "keys"),
    "infinity": ({"embedding": [float("inf"), 0.0, 0.0]}, "inf"),
}


@pytest.mark.parametrize("policy", [FAIL, SKIP, OVERWRITE])
@pytest.mark.parametrize("bad", list(BAD))
def test_a_bad_document_leaves_all_of_its_batch_unwritten(
    store: SoftDBDocumentStore, bad: str, policy: DuplicatePolicy
) -> None:
    parts, message = BAD[bad]
    with pytest.raises(softdb.BadInput, match=message):
        store.write_documents([Document("good", "x"), Document("bad", "x", **parts)], policy)
    assert ids(store.filter_documents()) == ids(films())


def test_other_bad_input(store: SoftDBDocumentStore) -> None:
    some: Any = store
    make: Any = SoftDBDocumentStore
    retriever: Any = SoftDBKeywordRetriever
    calls: list[tuple[Any, str]] = [
        (lambda: some.write_documents(Document("x")), "expected a list of Haystack's Document"),
        (lambda: some.write_documents([], "skip"), "expected a DuplicatePolicy"),
        (lambda: some.update_by_filter({}, ["x"]), "expected a dict"),
        (lambda: some.update_by_filter({}, {"x": {1}}), "holds a set"),
        (lambda: some.embedding_retrieval([1.0]), "queries are 1 wide but"),
        (lambda: some.embedding_retrieval([[1.0, 0.0, 0.0]]), "the embedding of the query is nested"),
        (lambda: some.embedding_retrieval([1.0, 0.0, 0.0], top_k=-1), "k is -1"),
        (lambda: some.hybrid_retrieval("x", [1.0, 0.0, 0.0], fusion="max"), "'scores', 'ranks'"),
        (lambda: retriever(store, top_k=0), "top_k is 0"),
        (lambda: retriever("films"), "expected a SoftDBDocumentStore"),
        (lambda: retriever(store, filter_policy="mix"), "choose one of 'replace', 'merge'"),
        (lambda: some.delete_documents("alien"), "ids are 'alien'; expected a list of str"),
        (lambda: store.get_metadata_field_unique_values("year", size=-1), "size is -1"),
        (lambda: make(5), "expected a directory's path, a cluster's table, or None for memory"),
        (lambda: make(fields="year"), "expected a list of field names"),
        (lambda: make(metric="l3"), "metric"),
        (lambda: make(embedding_dim=0), "dim is 0"),
    ]
    for call, message in calls:
        with pytest.raises(softdb.BadInput, match=message):
            call()
    assert [one.meta for one in store.filter_documents()] == [one.meta for one in films()]


def test_a_database_of_softdb_s_is_read_as_documents(path: Path) -> None:
    with softdb.open(path, dim=2, metric="l2") as db:
        db.insert([7, "b"], [[1, 0], [0, 1]], payloads=[{"year": 1979}, "word"], texts=["seven", None])
    made = SoftDBDocumentStore(path)
    assert made.embedding_retrieval([1.0, 0.0], top_k=1) == [Document("7", "seven", meta={"year": 1979}, score=0.0)]
    assert made.filter_documents()[1] == Document("b", meta={"payload": "word"}, embedding=[0.0, 1.0])
    assert made.write_documents([Document("7", "new", embedding=[1.0, 0.0])], OVERWRITE) == 1
    assert made.db[7].text == "new"
    with pytest.raises(softdb.BadInput, match=r"index_text\(\).* makes one"):
        made.bm25_retrieval("new")
    made.delete_documents(["7", "none"])
    assert ids(made.filter_documents()) == ["b"]
    made.close()


# -- retrieval and pipelines -------------------------------------------------------------------------------------------

YOUNG = {"field": "meta.year", "operator": ">", "value": 1980}


async def test_three_ways_to_retrieve(store: SoftDBDocumentStore) -> None:
    query, vector = "love in Paris or a lord", [1.0, 0.1, 0.0]
    near, words, both = (
        kind(store) for kind in (SoftDBEmbeddingRetriever, SoftDBKeywordRetriever, SoftDBHybridRetriever)
    )
    assert ids(near.run(vector)["documents"]) == ["alien", "heat", "amelie"]  # not those without an embedding
    assert ids(near.run(vector, YOUNG, 1)["documents"]) == ["heat"]
    assert set(ids(words.run(query, top_k=2)["documents"])) == {"amelie", "ran"}
    assert "ran" in ids(both.run(query, vector)["documents"])
    assert near.run(vector, top_k=0) == {"documents": []}
    for retriever, asked in [(near, (vector,)), (words, (query,)), (both, (query, vector))]:
        actual = retriever.run(*asked)["documents"]
        assert (await retriever.run_async(*asked))["documents"] == actual
        scaled = [one.score for one in retriever.run(*asked, scale_score=True)["documents"]]
        assert scaled == sorted(scaled, reverse=True)
        assert all(0 <= one <= 1 for one in scaled)
        assert all(one.embedding is None for one in actual)
    assert near.run(vector, return_embedding=True)["documents"][0].embedding == [1.0, 0.0, 0.0]
    merged = SoftDBKeywordRetriever(store, YOUNG, filter_policy="merge")
    assert ids(merged.run(query, {"field": "id", "operator": "in", "value": ["ran", "alien"]})["documents"]) == ["ran"]
    assert ids(SoftDBKeywordRetriever(store, YOUNG).run("space")["documents"]) == []
    for fusion in ("ranks", 0.9, 0.1):
        fused = SoftDBHybridRetriever(store, fusion=fusion).run("space", vector)["documents"]
        assert ids(fused)[0] == "alien"
        expected = store.hybrid_retrieval("space", vector, fusion=fusion)
        assert [one.score for one in fused] == [one.score for one in expected]


def test_a_pipeline_is_saved_and_its_retrievers_share_a_directory(path: Path) -> None:
    made = SoftDBDocumentStore(path, embedding_dim=3, fields=["year"])
    writing = Pipeline()
    writing.add_component("writer", DocumentWriter(made, policy=SKIP))
    assert writing.run({"documents": films()})["writer"]["documents_written"] == 4

    asking = Pipeline()
    asking.add_component("near", SoftDBEmbeddingRetriever(made, top_k=1))
    asking.add_component("words", SoftDBKeywordRetriever(made, YOUNG, filter_policy=FilterPolicy.MERGE))
    asking.add_component("both", SoftDBHybridRetriever(made, fusion="ranks", scale_score=True))
    asking.add_component("joiner", DocumentJoiner())
    for name in ("near", "words", "both"):
        asking.connect(name, "joiner")
    vector = [1.0, 0.0, 0.0]
    data = {
        "near": {"query_embedding": vector},
        "words": {"query": "lord"},
        "both": {"query": "Paris", "query_embedding": vector, "top_k": 1},
    }
    right = ids(asking.run(data)["joiner"]["documents"])
    assert {"alien", "ran"} <= set(right)

    with pytest.raises(Exception, match="softdb"):  # as for every package that is not Haystack's own
        Pipeline.loads(asking.dumps())
    loaded = Pipeline.loads(asking.dumps(), allowed_modules=["softdb.integrations.*"])
    assert loaded.to_dict()["components"] == asking.to_dict()["components"]
    assert ids(loaded.run(data)["joiner"]["documents"]) == right
    stores = [loaded.get_component(name).document_store for name in ("near", "words", "both")]
    assert all(one.db is made.db for one in stores)
    there = Pipeline.loads(asking.dumps(), allowed_modules=["softdb.integrations.*"])
    assert ids(asyncio.run(there.run_async(data))["joiner"]["documents"]) == right
    loaded.close()
    asyncio.run(there.close_async())
    with pytest.raises(softdb.Closed, match="make another"):
        stores[0].count_documents()
    assert made.count_documents() == 4  # its own use has not ended
    made.close()


# -- handles -----------------------------------------------------------------------------------------------------------


def test_stores_of_one_directory_share_it_until_the_last_is_closed(path: Path) -> None:
    first = SoftDBDocumentStore(path, embedding_dim=3)
    second = SoftDBDocumentStore(str(path.parent / "." / path.name), fields=["year"])
    reader = SoftDBDocumentStore(path, mode="r")
    first.write_documents(films())
    assert second.count_documents() == reader.count_documents() == 4
    assert second.db.fields == ("year",)
    for settings in ({"embedding_dim": 4}, {"metric": "l2"}):
        with pytest.raises(softdb.BadInput, match="but this database"):
            SoftDBDocumentStore(path, **settings)
    with pytest.raises(softdb.ReadOnly, match="insert"):
        reader.write_documents([Document("x")])
    with pytest.raises(softdb.DatabaseLocked, match="mode='r'"):
        softdb.open(path)
    first.close()
    first.close()
    with pytest.raises(softdb.Closed, match="make another"):
        first.count_documents()
    assert second.count_documents() == 4
    second.close()
    softdb.open(path).close()  # no handle holds the lock now
    third = SoftDBDocumentStore(path)
    del third  # a collected store holds no lock, either
    gc.collect()
    softdb.open(path).close()
    reader.close()


def test_a_store_on_disk_is_serialised_and_one_in_memory_is_refused(path: Path, store: SoftDBDocumentStore) -> None:
    own = SoftDBDocumentStore(path, embedding_dim=3)
    own.write_documents(films())
    there = pickle.loads(pickle.dumps(own))
    assert there.filter_documents() == own.filter_documents() == films()
    assert there.mode == "r"
    with pytest.raises(softdb.BadInput, match="give it a path"):
        pickle.dumps(store)
    again = SoftDBDocumentStore.from_dict(own.to_dict())
    assert again.to_dict() == own.to_dict()
    for one in (own, there, again):
        one.close()


async def test_calls_are_awaited_off_the_event_loop_s_thread(store: SoftDBDocumentStore) -> None:
    threads: list[int] = []

    class Watched(SoftDBDocumentStore):
        @property
        def db(self) -> Any:
            threads.append(threading.get_ident())
            return super().db

    watched = Watched(embedding_dim=3)
    threads.clear()
    await watched.write_documents_async(films())
    names = [name for name in dir(watched) if name.endswith("_async")]
    assert len(names) == 16
    assert await watched.count_documents_async() == 4
    assert ids(await watched.embedding_retrieval_async([1.0, 0.0, 0.0], top_k=1)) == ["alien"]
    assert ids(await watched.bm25_retrieval_async("lord")) == ["ran"]
    assert ids((await SoftDBHybridRetriever(watched).run_async("lord", [1.0, 0.0, 0.0]))["documents"])[:1] == ["alien"]
    assert threads
    assert threading.get_ident() not in threads


def test_writers_in_threads_neither_lose_nor_double_documents(store: SoftDBDocumentStore) -> None:
    written: list[int] = []

    def write(first: int) -> None:
        documents = [Document(str(i), str(i)) for i in range(first, first + 40)]
        for i in range(0, 40, 8):
            written.append(store.write_documents(documents[i : i + 8], SKIP))
            store.write_documents(films(), OVERWRITE)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 0, 20)]
    for one in threads:
        one.start()
    while any(thread.is_alive() for thread in threads):
        assert len(store.embedding_retrieval([1.0, 0.0, 0.0], return_embedding=True)) == 3
    assert sum(written) == 60
    assert store.count_documents() == 64


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of an empty table of a cluster with its shards in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = str(tmp_path / "films.lance")
    cluster.create(url, dim=3, metric="cosine", shards=2).close()
    return url


YEARS = [
    None,
    {"field": "meta.year", "operator": ">=", "value": 1985},
    {"field": "meta.by.name", "operator": "==", "value": "Mann"},
    {"field": "content", "operator": "!=", "value": "A thief and a cop"},
    {"field": "id", "operator": "in", "value": ["ran", "heat"]},
]


def test_a_cluster_is_a_store_of_the_same_documents(store: SoftDBDocumentStore, table: str) -> None:
    with cluster.open(table) as db:
        shared = SoftDBDocumentStore(db)
        assert shared.count_documents() == 0
        assert shared.write_documents(films()) == 4
        for asked in YEARS:
            actual, right = (one.filter_documents(asked) for one in (shared, store))
            assert sorted(actual, key=lambda one: one.id) == sorted(right, key=lambda one: one.id)
            each: list[dict[str, Any]] = [{}, {"scale_score": True, "return_embedding": True, "top_k": 2}]
            for words in each:
                hits, expected = (one.embedding_retrieval([0.2, 0.9, 0.1], asked, **words) for one in (shared, store))
                assert ids(hits) == ids(expected)
                assert [hit.embedding for hit in hits] == [one.embedding for one in expected]
                assert [hit.score for hit in hits] == pytest.approx([one.score for one in expected], abs=1e-6)
        for one in (shared, store):
            assert one.update_by_filter(YEARS[1] or {}, {"seen": True}) == 3
            assert one.count_unique_metadata_by_filter({}, ["year", "seen"]) == {"year": 4, "seen": 1}
            assert one.get_metadata_field_min_max("meta.year") == {"min": 1979, "max": 2001}
            assert one.delete_by_filter({"field": "meta.seen", "operator": "==", "value": True}) == 3
            assert ids(one.filter_documents()) == ["alien"]
            with pytest.raises(DuplicateDocumentError, match="or choose a policy"):
                one.write_documents(films(), FAIL)
            assert one.write_documents(films(), SKIP) == 3
            assert one.write_documents(films(), OVERWRITE) == 4
            one.delete_documents(["ran", "nowhere"])
            one.delete_all_documents(recreate_index=True)
            assert one.count_documents() == 0
        shared.close()
        assert not db.closed, "the handle is the caller's"


def test_features_that_a_cluster_lacks_are_refused(table: str) -> None:
    shared = SoftDBDocumentStore(table)
    with pytest.raises(softdb.BadInput, match="a cluster does not search by text"):
        shared.bm25_retrieval("lord")
    with pytest.raises(softdb.BadInput, match="a cluster does not search by text"):
        shared.hybrid_retrieval("lord", [1.0, 0.0, 0.0])
    with pytest.raises(softdb.BadInput, match="a cluster declares none"):
        SoftDBDocumentStore(table, fields=["year"])
    with pytest.raises(softdb.BadInput, match="dim=4 was asked for but this database has 3"):
        SoftDBDocumentStore(table, embedding_dim=4)
    db: Any = shared.db
    shared.close()
    with pytest.raises(softdb.Closed, match="the cluster was closed"):
        SoftDBDocumentStore(db)


def test_writes_of_another_handle_are_seen(table: str) -> None:
    """Each handle reads a version of its own: a retry without a refresh would never end."""
    with cluster.open(table) as ours, cluster.open(table) as other:
        shared = SoftDBDocumentStore(ours)
        SoftDBDocumentStore(other).write_documents(films())
        assert shared.count_documents() == 0
        assert shared.write_documents(films(), SKIP) == 0
        assert shared.count_documents() == 4
        other.delete(["heat"])
        assert shared.update_by_filter({"field": "meta.year", "operator": ">", "value": 0}, {"seen": 1}) == 3
        assert ours["ran"].payload == {"year": 1985, "tags": ["war"], "seen": 1}
        other.upsert(["late"], [[1, 0, 0]])
        with cluster.open(table, "r") as reads:
            follows = SoftDBDocumentStore(reads)
            other.upsert(["later"], [[1, 0, 0]])
            assert follows.count_documents() == 5


def test_a_store_on_a_table_travels_by_its_address(table: str) -> None:
    with cluster.open(table) as db:
        SoftDBDocumentStore(db).write_documents(films())
        pipeline = Pipeline()
        pipeline.add_component("retriever", SoftDBEmbeddingRetriever(SoftDBDocumentStore(db), top_k=1))
        pipeline.add_component("writer", DocumentWriter(SoftDBDocumentStore(db), OVERWRITE))
        again = Pipeline.loads(pipeline.dumps(), allowed_modules=["softdb.integrations.*"])
        stores = [again.get_component(name).document_store for name in ("retriever", "writer")]
        assert stores[0].db is stores[1].db
        assert stores[0].db is not db
        actual = again.run({"retriever": {"query_embedding": [1.0, 0.0, 0.0]}, "writer": {"documents": films()[:1]}})
        assert ids(actual["retriever"]["documents"]) == ["alien"]
        travelled = pickle.loads(pickle.dumps(SoftDBDocumentStore(db)))
        assert (travelled.mode, travelled.count_documents()) == ("r", 4)
        for one in (*stores, travelled):
            one.close()
        assert stores[0]._shared is None


def test_threads_of_one_handle_read_while_others_write(table: str) -> None:
    with cluster.open(table) as db:
        shared, failed, done = SoftDBDocumentStore(db), list[Exception](), threading.Event()
        shared.write_documents(films())

        def read() -> None:
            try:
                while not done.is_set():
                    assert shared.count_documents() >= 4
                    assert {*ids(shared.filter_documents())} >= {"alien", "ran"}
                    assert ids(shared.embedding_retrieval([1.0, 0.0, 0.0], top_k=1)) == ["alien"]
                    assert shared.get_metadata_field_min_max("year")["min"] == 1979
            except Exception as error:
                failed.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for one in readers:
            one.start()
        for i in range(25):
            documents = [Document(f"{i} {j}", "a film", meta={"year": 2000 + i}) for j in range(4)]
            assert shared.write_documents(documents, SKIP) == 4
        done.set()
        for one in readers:
            one.join()
        assert failed == []
        assert shared.count_documents() == 104
