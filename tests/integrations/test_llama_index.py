"""Behaviour beyond the suite: foreign records, softdb's own arguments, encoders, persistence, threads, bad input."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import BaseNode, IndexNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index_suite import OPERATORS, QUERY, WordEmbedding, every, filters, names, node, nodes, query

import softdb
from softdb import cluster
from softdb.errors import BadFilter, BadInput, NotADatabase, UnknownField
from softdb.integrations.langchain import SoftDBVectorStore as LangChainStore
from softdb.integrations.llama_index import SoftDBVectorStore
from softdb.text import HashedNGrams

pytestmark = pytest.mark.filterwarnings("ignore:no record has the field")


@pytest.fixture
def store() -> SoftDBVectorStore:
    store = SoftDBVectorStore(dim=4)
    store.add(nodes())
    return store


def test_metadata_is_the_payload(store: SoftDBVectorStore) -> None:
    record = store.db["a"]
    assert record.text == "the cat sleeps in the sun"
    assert store.db.count({"lang": "en", "year": {"$gte": 1979}}) == 2
    assert store.db.count({"tags": {"$contains": "cat"}}) == 2
    payload = dict(record.payload)
    assert set(payload.pop("_llama_index")) == {"class_name", "ref_doc_id", "relationships"}
    assert payload == nodes()[0].metadata
    assert store.client is store.db


def test_records_of_others_are_nodes() -> None:
    with softdb.open(None, metric="cosine", encoder=HashedNGrams()) as db:
        db.insert([7, "7a"], texts=["seven", None], keys=np.eye(2, 256), payloads=[{"n": 1}, ["no object"]])
        LangChainStore(None, db).add_texts(["of LangChain"], [{"n": 2}], ids=["l"])
        db.insert(["bare"], keys=np.eye(1, 256))
        store = SoftDBVectorStore(db)
        assert store.get_nodes() == [
            TextNode(id_="7", text="seven", metadata={"n": 1}),
            TextNode(id_="7a", text="", metadata={"payload": ["no object"]}),
            TextNode(id_="l", text="of LangChain", metadata={"n": 2}),
            TextNode(id_="bare", text=""),
        ]
        assert [each.node_id for each in store.get_nodes(["7", "l"], filters(("n", "<", 2)))] == ["7"]
        assert names(store.query(query("of Langchain", 1, query_embedding=None))) == "l"
        store.add([TextNode(id_="7", text="seven again")])  # the record with the integer id
        assert store.db[7].text == "seven again"
        store.delete_nodes(["7", "bare"])
        assert [record.id for record in db] == ["7a", "l"]


def test_a_text_that_changed_in_the_database_is_the_node_s(store: SoftDBVectorStore) -> None:
    store.add([Document(id_="doc", text="old", embedding=QUERY), Document(id_="empty", embedding=QUERY)])
    store.db.update(["doc", "empty", "a"], texts=["new", "now a text", None])
    assert [each.get_content() for each in store.get_nodes(["doc", "empty", "a"])] == ["new", "now a text", ""]


def test_an_encoder_makes_the_keys() -> None:
    store = SoftDBVectorStore(encoder=HashedNGrams(64))
    store.add([TextNode(id_="x", text="the cat sleeps"), TextNode(id_="y", text="a dog barks")])
    for mode in ("default", "hybrid", "mmr"):
        assert names(store.query(query("sleeping cats", 1, mode=mode, query_embedding=None))) == "x"
    with pytest.raises(BadInput, match="node 'z' has no embedding"):
        store.add([TextNode(id_="w", embedding=[0.5] * 64), TextNode(id_="z")])
    assert every_id(store) == ["x", "y"]


def every_id(store: SoftDBVectorStore) -> list[str]:
    return [each.node_id for each in store.get_nodes()]


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_get_nodes_and_delete_filter_as_queries_do(store: SoftDBVectorStore, case: Any) -> None:
    where = filters(case[:3])
    assert "".join(each.node_id for each in store.get_nodes(filters=where)) == case[3]
    store.delete_nodes(filters=where)
    assert "".join(sorted(each.node_id for each in store.get_nodes())) == "".join(sorted({*"abcde"} - {*case[3]}))


def test_filters_on_the_text_and_softdb_s_own(store: SoftDBVectorStore) -> None:
    assert every(store, filters(("$text", "text_match", "bird"))) == "cd"
    assert every(store, filters(("$text", "text_match_insensitive", "FISH"))) == "e"
    assert every(store, filters(("$id", "in", ["a", "e"]))) == "ae"
    store.add([node("n", QUERY, author={"name": "Ann"}, **{"author.name": "literal"})])
    assert every(store, filters(("author.name", "==", "literal"))) == "n"
    assert names(store.query(query(), where={"author.name": "Ann"})) == "n"
    assert names(store.query(query(filters=filters(("lang", "==", "en"))), where={"year": {"$gt": 1990}})) == "c"


def test_arguments_of_a_search(store: SoftDBVectorStore) -> None:
    assert names(store.query(query(k=2), offset=1, exact=True)) == "bc"
    assert names(store.query(query(k=2), exclude_ids=[["a"]])) == "bc"
    assert names(store.query(query(k=9), group_by="lang")) == "abe"
    assert names(store.query(query(), radius=0.9)) == "abc"
    retriever = VectorStoreIndex.from_vector_store(store, embed_model=Fixed()).as_retriever(
        similarity_top_k=1, vector_store_kwargs={"where": {"lang": {"$ne": "en"}}}
    )
    assert retriever.retrieve("anything")[0].node_id == "b"


class Fixed(WordEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return QUERY


def test_alpha_is_the_share_of_the_vector_s_score(store: SoftDBVectorStore) -> None:
    for alpha in (0.0, 0.25, 0.5, 0.8, 1.0):
        result = store.query(query("bird", mode="hybrid", alpha=alpha))
        hits = store.db.search([QUERY], texts="bird", fetch_k=40, fusion=("scores", 1 - alpha))
        assert (result.ids, result.similarities) == (hits.ids[0], hits.scores[0].tolist())
    default, same = (store.query(query("bird", mode="hybrid", alpha=alpha)) for alpha in (None, 0.8))
    assert default.ids == same.ids
    assert default.similarities == pytest.approx(same.similarities)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_mmr_is_softdb_s(threshold: float) -> None:
    vectors = np.random.default_rng(3).standard_normal((40, 4)).tolist()
    store = SoftDBVectorStore(dim=4)
    store.add([node(str(i), vector) for i, vector in enumerate(vectors)])
    ask = query(k=5, mode="mmr", query_embedding=vectors[0])
    for prefetch, fetch_k in (({}, 20), ({"mmr_prefetch_factor": 1.5}, 8), ({"mmr_prefetch_k": 30}, 30)):
        result = store.query(ask, mmr_threshold=threshold, **prefetch)
        hits = store.db.search([vectors[0]], 5, diversity=1 - threshold, fetch_k=fetch_k)
        assert result.ids == hits.ids[0]


BAD: list[tuple[Any, str]] = [
    (lambda s: s.add("text"), "nodes are 'text'; expected a list"),
    (lambda s: s.add([TextNode(), "text"]), "expected a list of LlamaIndex's nodes"),
    (lambda s: s.add([TextNode(id_="x")]), "node 'x' has no embedding"),
    (lambda s: s.add([node("x", [1.0])]), "1"),
    (lambda s: s.add([node("x", [float("nan")] * 4)]), "keys hold NaN"),
    (lambda s: s.add([node("y", QUERY), node("x", QUERY, bad=object())]), "object"),
    (lambda s: s.add([node("x", QUERY, _llama_index=1)]), "'_llama_index', which softdb uses"),
    (lambda s: s.delete(7), "ref_doc_id is 7; expected a str"),
    (lambda s: s.delete_nodes(), r"neither node_ids nor filters .* for all nodes: clear\(\)"),
    (lambda s: s.delete_nodes(filters=MetadataFilters(filters=[])), r"the filters are empty; for all nodes: clear\(\)"),
    (lambda s: s.delete_nodes("a"), "ids are 'a'; expected a list of str"),
    (lambda s: s.get_nodes("a"), "ids are 'a'; expected a list of str"),
    (lambda s: s.query("text"), "query is 'text'; expected a VectorStoreQuery"),
    (lambda s: s.query(query(mode="svm")), "mode is 'svm'; choose one of 'default', 'mmr', 'text_search'"),
    (lambda s: s.query(query(query_embedding=None)), "no query_embedding"),
    (lambda s: s.query(query("text", query_embedding=None)), "without an encoder"),
    (lambda s: s.query(query(mode="text_search")), "no query_str"),
    (lambda s: s.query(query(mode="hybrid")), "no query_str"),
    (lambda s: s.query(query(query_embedding=[1.0])), "1"),
    (lambda s: s.query(query(k=0)), "k is 0"),
    (lambda s: s.query(query("bird", mode="hybrid", alpha=1.5)), "alpha is 1.5; expected a number from 0"),
    (lambda s: s.query(query(), filter={"year": 1}), "a search takes no filter; it takes where, diversity"),
    (lambda s: s.query(query(), mmr_threshold=0.5), "a search takes no mmr_threshold"),
    (lambda s: s.query(query(mode="mmr"), mmr_threshold=2), "mmr_threshold is 2; expected a number from 0"),
    (lambda s: s.query(query(mode="mmr"), mmr_prefetch_factor=2, mmr_prefetch_k=9), "takes no mmr_prefetch_factor"),
    (lambda s: s.query(query(filters={"year": 1990})), r"expected MetadataFilters\(.*go to where="),
    (lambda s: s.query(query(filters=filters(("year", "in", 3)))), "year is compared with 3; 'in' takes a list"),
    (lambda s: s.query(query(filters=filters(("year", "text_match", 3)))), "'text_match' takes a str"),
    (lambda s: s.query(query(filters=filters(("year", ">", None)))), "only numbers and strings have an order"),
    (lambda s: s.query(query(filters=filters(("year", "contains", ["x"])))), "for lists: "),
    (lambda s: s.query(query(filters=filters(("$nothing", "==", 1)))), "unknown operator"),
    (lambda s: s.query(query(filters=deep(100))), "nests deeper than"),
    (lambda s: s.persist("x", fs=object()), "needs local files"),
    (lambda s: SoftDBVectorStore(s.db, dim=4), "dim given with an open database"),
]


def two_sources() -> BaseNode:
    made = node("x", QUERY)
    made.relationships = {NodeRelationship.SOURCE: [RelatedNodeInfo(node_id="1"), RelatedNodeInfo(node_id="2")]}
    return made


def deep(levels: int) -> MetadataFilters:
    where = filters(("year", "==", 1))
    for _ in range(levels):
        where = filters(where)
    return where


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_changes_nothing(store: SoftDBVectorStore, call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call(store)
    assert every(store) == "abcde"


def test_a_node_that_llama_index_cannot_write_is_refused(store: SoftDBVectorStore) -> None:
    with pytest.raises(ValueError, match="Source object must be a single"):
        store.add([two_sources()])
    with pytest.raises(ValueError, match="not serializable"):
        store.add([IndexNode(id_="x", index_id="i", obj={1, 2}, embedding=QUERY)])
    assert every(store) == "abcde"


def test_errors_are_typed(store: SoftDBVectorStore) -> None:
    with pytest.raises(NotADatabase, match="nowhere holds no database"):
        SoftDBVectorStore.from_persist_path("nowhere")
    with pytest.raises(BadFilter, match="MetadataFilters"):
        store.get_nodes(filters={"year": 1})
    with pytest.warns(UnknownField, match="'yaer'; did you mean 'year'"):
        assert every(store, filters(("yaer", "==", 1995))) == ""


def test_one_add_is_one_commit(store: SoftDBVectorStore) -> None:
    before = store.db.stats().generation
    store.add([node(str(i), QUERY) for i in range(3000)])
    assert store.db.stats().generation == before + 1


def test_a_document_s_nodes_are_found_by_an_index(store: SoftDBVectorStore, path: Path) -> None:
    assert store.db.fields == ("_llama_index.ref_doc_id",)
    with softdb.open(path, dim=4) as db:
        db.insert(["old"], [QUERY])
        SoftDBVectorStore(db)
        assert db.fields == ()  # a database with records is left as it is


def test_a_database_on_disk_is_there_again(path: Path) -> None:
    store = SoftDBVectorStore(path, dim=4, fields=["year"])
    assert sorted(store.db.fields) == ["_llama_index.ref_doc_id", "year"]
    store.add(nodes())
    follower = SoftDBVectorStore(path, mode="r")
    store.add([node("f", QUERY)])
    assert len(every(follower)) == 6
    assert follower.get_nodes(["f"]) == [TextNode(id_="f")]
    copied = pickle.loads(pickle.dumps(store))
    assert repr(store) == f"SoftDBVectorStore({store})" == f"SoftDBVectorStore(db={store.db})"
    assert str(path) in repr(store)
    assert every(copied) == "abcdef"
    with pytest.raises(softdb.errors.ReadOnly):
        copied.clear()
    for each in (store, follower, copied):
        each.db.close()
    with SoftDBVectorStore(path).db as db:
        assert db.metric == "cosine"
        assert len(db) == 6


def test_a_store_in_memory_is_persisted_with_its_index(tmp_path: Path) -> None:
    store = SoftDBVectorStore(dim=WordEmbedding().size)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex([TextNode(id_="a", text="cats")], storage_context=context, embed_model=WordEmbedding())
    folder = tmp_path / "storage"
    index.storage_context.persist(folder)
    index.insert_nodes([TextNode(id_="b", text="a dog barks")])
    index.storage_context.persist(folder)

    again = SoftDBVectorStore.from_persist_path(str(folder / "default__vector_store.json"))
    context = StorageContext.from_defaults(vector_store=again, persist_dir=str(folder))
    loaded: Any = load_index_from_storage(context, embed_model=WordEmbedding())
    assert loaded.as_retriever(similarity_top_k=1).retrieve("dog barks")[0].node_id == "b"
    loaded.insert_nodes([TextNode(id_="c", text="a bird sings")])
    loaded.storage_context.persist(folder)  # the database there is the store's own
    again.db.close()
    assert every_id(SoftDBVectorStore(folder / "default__vector_store.json", mode="r")) == ["a", "b", "c"]


def test_persist_replaces_nothing_but_databases(store: SoftDBVectorStore, tmp_path: Path) -> None:
    notes = tmp_path / "notes" / "mine.txt"
    notes.parent.mkdir()
    notes.write_text("important")
    for path in (notes.parent, notes):
        with pytest.raises(BadInput, match="not created by softdb"):
            store.persist(str(path))
    assert notes.read_text() == "important"
    assert sorted(tmp_path.iterdir()) == [notes.parent]


def test_asyncio_goes_on_meanwhile(store: SoftDBVectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, int] = {}

    async def calls() -> None:
        loop = asyncio.get_running_loop()

        def watched(name: str) -> Any:
            method = getattr(softdb.SoftDB, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                moved = threading.Event()
                loop.call_soon_threadsafe(moved.set)
                assert moved.wait(60), "the event loop stands still"
                threads[name] = threading.get_ident()
                return method(*args, **kwargs)

            return call

        for name in ("upsert", "delete", "get", "search"):
            monkeypatch.setattr(softdb.SoftDB, name, watched(name))
        await asyncio.gather(store.async_add([node("f", QUERY)]), store.aquery(query()), store.aget_nodes())
        await asyncio.gather(store.adelete("doc 1"), store.adelete_nodes(["c"]))
        await store.aclear()

    asyncio.run(calls())
    assert set(threads) == {"upsert", "delete", "get", "search"}
    assert threading.get_ident() not in threads.values()


def test_queries_while_nodes_are_replaced(store: SoftDBVectorStore) -> None:
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            store.add(nodes())

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(30):
            assert sorted(names(store.query(query("bird", mode="hybrid")))) == list("abcde")
            assert [each.node_id for each in store.get_nodes(list("edcba"))] == list("edcba")
    finally:
        stop.set()
        writer.join()


def test_a_cluster_over_a_table_is_a_store(tmp_path: Path) -> None:
    with cluster.create(tmp_path / "t.lance", dim=4, shards=2, metric="cosine", cache=tmp_path / "cache") as db:
        store = SoftDBVectorStore(db)
        store.add(nodes())
        assert names(store.query(query())) == "abcde"
        assert every(store, filters(("title", "text_match_insensitive", "the"))) == "ae"
        store.delete("doc 1")
        assert sorted(every_id(store)) == list("cde")
        with pytest.raises(BadInput, match="texts"):
            store.query(query("bird", mode="text_search"))
        store.persist(str(tmp_path / "kept"))  # the table is the truth
        assert not (tmp_path / "kept").exists()


def test_from_documents_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    documents = [Document(id_="long", text="A sentence about cats. " * 300), Document(id_="dog", text="A dog barks.")]
    store = SoftDBVectorStore(dim=WordEmbedding().size)
    index = VectorStoreIndex.from_documents(
        documents, StorageContext.from_defaults(vector_store=store), embed_model=WordEmbedding()
    )
    assert index.as_retriever(similarity_top_k=1).retrieve("a dog barks.")[0].node.ref_doc_id == "dog"
    assert len(store.get_nodes(filters=filters(("ref_doc_id", "==", "long")))) > 1
