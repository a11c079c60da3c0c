"""Behaviour beyond LangChain's suites: filters, diversity, relevance, full text, foreign records, bad input."""

from __future__ import annotations

import asyncio
import datetime
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.structured_query import Comparator, Comparison, Operation, Operator, StructuredQuery
from langchain_core.vectorstores.utils import maximal_marginal_relevance

import softdb
from softdb import cluster
from softdb.errors import BadInput
from softdb.integrations.langchain import SoftDBRetriever, SoftDBTranslator, SoftDBVectorStore
from softdb.text import HashedNGrams

TEXTS = ["the cat sleeps", "a dog barks", "cats and dogs", "a bird sings", "fish swim"]
METADATAS: list[dict[str, Any]] = [
    {"n": 0, "lang": "en", "tags": ["cat"]},
    {"n": 1, "lang": "de", "tags": ["dog", "loud"]},
    {"n": 2, "lang": "en", "author": {"name": "Ann"}},
    {"n": 3, "day": "2024-02-29"},
    {},
]


class Counted(Embeddings):
    """A fake embedding that records its texts and threads; it waits until an event loop has run."""

    def __init__(self, size: int = 6, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.fake, self.loop, self.documents = DeterministicFakeEmbedding(size=size), loop, 0
        self.threads: set[int] = set()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.documents += len(texts)
        self.threads.add(threading.get_ident())
        return list(self.fake.embed_documents(texts))

    def embed_query(self, text: str) -> list[float]:
        self.threads.add(threading.get_ident())
        if self.loop is not None:
            gone_on = threading.Event()
            self.loop.call_soon_threadsafe(gone_on.set)
            assert gone_on.wait(60), "the event loop stands still"
        return list(self.fake.embed_query(text))


@pytest.fixture
def store() -> SoftDBVectorStore:
    return SoftDBVectorStore.from_texts(TEXTS, Counted(), METADATAS, ids=list("abcde"))


def named(documents: list[Document]) -> str:
    return "".join(sorted(str(document.id) for document in documents))


def test_a_cluster_over_a_table_is_a_store(tmp_path: Path) -> None:
    url, cache = tmp_path / "films.lance", tmp_path / "cache"
    with cluster.create(url, dim=6, shards=2, metric="cosine", cache=cache) as db:
        store = SoftDBVectorStore.from_texts(TEXTS, Counted(), METADATAS, ids=["a", "b", "c", "d", "7"], db=db)
        own = SoftDBVectorStore.from_texts(TEXTS, Counted(), METADATAS, ids=["a", "b", "c", "d", "7"])
        for asked in ({}, {"filter": {"lang": "en"}}, {"offset": 1, "exclude_ids": [["a"]]}):
            for (one, score), (other, expected) in zip(
                store.similarity_search_with_score("cat", 3, **asked),
                own.similarity_search_with_score("cat", 3, **asked),
                strict=True,
            ):
                assert one == other
                assert score == pytest.approx(expected, abs=1e-6)
        assert store.get_by_ids(["7", "nowhere", "b"]) == own.get_by_ids(["7", "nowhere", "b"])
        store.delete(["a", "nowhere"])
        assert named(store.as_retriever(k=9).invoke("cat")) == "7bcd"
        with pytest.raises(BadInput, match="mode"):
            store.similarity_search("cat", mode="text")
        with cluster.open(url, "r", cache=cache) as reads:
            follows = SoftDBVectorStore(Counted(), reads)
            store.add_texts(["a cow"], ids=["e"])
            assert follows.get_by_ids(["e"])[0].page_content == "a cow"


EQ, AND, OR, NOT = Comparator.EQ, Operator.AND, Operator.OR, Operator.NOT


@pytest.mark.parametrize(
    ("asked", "right"),
    [
        ({"lang": "en"}, "ac"),
        ({"n": {"$gte": 1, "$lt": 3}}, "bc"),
        ({"$or": [{"lang": "de"}, {"author.name": "Ann"}]}, "bc"),
        ({"tags": {"$contains": "loud"}}, "b"),
        ({"$text": {"$match": "dogs"}}, "c"),
        ({"$id": {"$in": ["a", "e", "x"]}}, "ae"),
        ({}, "abcde"),
        (Comparison(EQ, "lang", "en"), "ac"),
        (Comparison(Comparator.NIN, "n", [0, 1]), "cde"),
        (Comparison(Comparator.CONTAIN, "tags", "cat"), "a"),
        (Comparison(Comparator.LTE, "day", {"type": "date", "date": "2024-03-01"}), "d"),
        (Operation(OR, [Comparison(EQ, "n", 3), Operation(NOT, [Comparison(Comparator.LT, "n", 9)])]), "de"),
        (Operation(AND, [Comparison(Comparator.NE, "n", 0), Comparison(EQ, "lang", "en")]), "c"),
    ],
    ids=repr,
)
def test_filters_are_softdb_s_or_structured_queries(store: SoftDBVectorStore, asked: Any, right: str) -> None:
    assert named(store.similarity_search("q", k=9, filter=asked)) == right
    assert named(store.max_marginal_relevance_search("q", k=9, filter=asked)) == right
    assert named(store.similarity_search("cat dog", k=9, filter=asked, mode="hybrid")) == right


def test_a_self_query_is_translated() -> None:
    query = StructuredQuery(query="cats", filter=Comparison(EQ, "lang", "en"))
    assert query.accept(SoftDBTranslator()) == ("cats", {"filter": {"lang": {"$eq": "en"}}})


@pytest.mark.parametrize("lambda_mult", [0.0, 0.3, 0.5, 1.0])
def test_mmr_is_langchain_s(lambda_mult: float) -> None:
    embedding, texts = DeterministicFakeEmbedding(size=4), [f"text {i}" for i in range(40)]
    store = SoftDBVectorStore.from_texts(texts, embedding, ids=texts)
    near = [texts.index(str(one.id)) for one in store.similarity_search("q", k=20)]
    query, keys = embedding.embed_query("q"), embedding.embed_documents(texts)
    right = maximal_marginal_relevance(np.array(query), [keys[i] for i in near], lambda_mult, 7)
    expected = [texts[near[i]] for i in right]
    assert [one.id for one in store.max_marginal_relevance_search("q", 7, 20, lambda_mult)] == expected
    by_vector = store.max_marginal_relevance_search_by_vector(query, 7, 20, lambda_mult)
    assert [one.id for one in by_vector] == expected
    assert len(store.max_marginal_relevance_search("q", k=30)) == 30  # more than fetch_k


@pytest.mark.parametrize("mode", ["vector", "text", "hybrid"])
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
async def test_relevance_is_from_0_to_1_in_the_order_of_scores(metric: str, mode: str) -> None:
    store = SoftDBVectorStore.from_texts(TEXTS, Counted(), ids=list("abcde"), metric=metric)
    asked: dict[str, Any] = {"k": 5, "mode": mode}
    scores = store.similarity_search_with_score("cats and dogs", **asked)
    actual = store.similarity_search_with_relevance_scores("cats and dogs", **asked)
    assert [one.id for one, _ in actual] == [one.id for one, _ in scores]
    values = [share for _, share in actual]
    assert values == sorted(values, reverse=True)
    assert all(0 <= share <= 1 for share in values)
    if metric != "dot":
        assert actual[0][0].id == "c"
    if (metric, mode) in (("cosine", "vector"), ("l2", "vector")):
        assert values[0] == pytest.approx(1, abs=1e-3)
    assert await store.asimilarity_search_with_relevance_scores("cats and dogs", **asked) == actual
    threshold = (values[0] + values[1]) / 2 if len(values) > 1 else values[0]
    search = store.as_retriever(search_type="similarity_score_threshold", score_threshold=threshold, **asked)
    assert search.invoke("cats and dogs") == [actual[0][0]]
    mine = SoftDBVectorStore(store.embedding, store.db, relevance_score_fn=lambda score: 0.25)
    assert {share for _, share in mine.similarity_search_with_relevance_scores("q", **asked)} <= {0.25}


def test_full_text_finds_documents_with_random_vectors(store: SoftDBVectorStore) -> None:
    assert [one.id for one in store.similarity_search("sings", k=1, mode="text")] == ["d"]
    assert "d" in named(store.similarity_search("sings", k=2, mode="hybrid", fusion="ranks"))
    retriever = store.as_retriever(k=1, mode="text", filter={"lang": "en"})
    assert isinstance(retriever, SoftDBRetriever)
    assert [one.id for one in retriever.invoke("dog barks or dogs")] == ["c"]
    with pytest.raises(ValueError, match="search_type"):
        store.as_retriever(search_type="nearest")


def test_records_of_softdb_are_documents_without_a_new_embedding(path: Path) -> None:
    embedding = Counted(3)
    with softdb.open(path, dim=3) as db:
        db.insert(["a", 7, "8", 8], np.eye(4, 3), payloads=[{"x": 1}, None, "word", [1]], texts=["A", None, "C", "D"])
        store = SoftDBVectorStore(embedding, db)
        right = [
            Document(id="a", page_content="A", metadata={"x": 1}),
            Document(id="7", page_content=""),
            Document(id="8", page_content="C", metadata={"payload": "word"}),
        ]
        assert store.get_by_ids(["a", "7", "no", "8", "a"]) == right
        assert {one.page_content for one in store.similarity_search("q", k=9)} == {"A", "", "C", "D"}
        assert embedding.documents == 0
        store.add_texts(["B"], ids=["7"])  # replaces the integer
        assert db[7].text == "B"
        assert "7" not in db
        store.delete(["8", "7", "none"])  # the text goes before the integer of that name
        assert sorted(map(str, db.get(["a", 8]).ids)) == ["8", "a"]
        assert len(db) == 2


async def test_the_event_loop_goes_on(path: Path) -> None:
    embedding = Counted(loop=asyncio.get_running_loop())
    store = await SoftDBVectorStore.afrom_texts(TEXTS, embedding, METADATAS, ids=list("abcde"), db=path)
    retriever = store.as_retriever(k=2)
    actual = await asyncio.gather(*(retriever.ainvoke(text) for text in TEXTS))
    assert [mine[0].page_content for mine in actual] == TEXTS
    assert await store.amax_marginal_relevance_search(TEXTS[0], k=1) == actual[0][:1]
    assert [one.id for one, _ in await store.asimilarity_search_with_score(TEXTS[1], k=1)] == ["b"]
    assert await store.aget_by_ids(["c"]) == [Document(id="c", page_content=TEXTS[2], metadata=METADATAS[2])]
    assert await store.aadd_documents([Document("new", id="f")]) == ["f"]
    assert await store.adelete(["f"])
    assert embedding.threads
    assert threading.get_ident() not in embedding.threads
    store.db.close()


def test_a_directory_is_opened_again_and_read_beside_its_writer(path: Path) -> None:
    embedding = Counted()
    first = SoftDBVectorStore.from_texts(TEXTS, embedding, ids=list("abcde"), db=path)
    reader = SoftDBVectorStore(embedding, path, mode="r")
    with pytest.raises(softdb.DatabaseLocked, match="mode='r'"):
        SoftDBVectorStore(embedding, path)
    first.add_texts(["a late text"], ids=["late"])
    assert reader.similarity_search("a late text", k=1)[0].id == "late"  # it is seen without a refresh
    assert [one.id for one in reader.get_by_ids(["late"])] == ["late"]
    with pytest.raises(softdb.ReadOnly, match="upsert"):
        reader.add_texts(["x"])
    embedding.documents = 0
    first.db.close()
    again = SoftDBVectorStore(embedding, path)
    assert isinstance(again.db, softdb.SoftDB)
    assert (len(again.db), again.db.metric, again.db.text_index) == (6, "cosine", "words")
    assert again.similarity_search("a dog barks", k=1)[0].id == "b"
    assert embedding.documents == 3  # the texts that tell models apart
    for one in (again, reader):
        one.db.close()
    for call in (lambda: again.similarity_search("q"), lambda: again.add_texts(["x"]), lambda: again.get_by_ids(["a"])):
        with pytest.raises(softdb.Closed, match="open the database again"):
            call()


class Other(Counted):
    """Another model of the same width."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[number + 1 for number in vector] for vector in super().embed_documents(texts)]


def test_another_model_of_the_same_width_is_refused(path: Path) -> None:
    store = SoftDBVectorStore.from_texts(TEXTS, Counted(), ids=list("abcde"), db=path)
    for db in (store.db, path):
        with pytest.raises(softdb.BadInput, match="not the one that made the keys"):
            SoftDBVectorStore(Other(), db)
        store.db.close()
    again = SoftDBVectorStore(Counted(), path)  # the refused store has closed the database
    assert again.similarity_search("a dog barks", k=1)[0].id == "b"


def test_a_store_on_disk_is_serialised_and_one_in_memory_is_refused(path: Path, store: SoftDBVectorStore) -> None:
    own = SoftDBVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=6), ids=list("abcde"), db=path)
    there = pickle.loads(pickle.dumps(own))
    assert there.similarity_search("fish swim", k=1) == own.similarity_search("fish swim", k=1)
    assert there.db.mode == "r"
    with pytest.raises(softdb.BadInput, match="in memory cannot be pickled; give it a path"):
        pickle.dumps(store)
    for one in (own, there):
        one.db.close()


def test_the_database_s_own_encoder_serves_where_no_embedding_is_given() -> None:
    store = SoftDBVectorStore.from_texts(TEXTS, None, METADATAS, encoder=HashedNGrams(64))
    assert store.embeddings is None
    assert store.similarity_search("the cats sleep", k=1)[0].page_content == TEXTS[0]
    assert store.similarity_search("the cats sleep", k=1, mode="hybrid")[0].page_content == TEXTS[0]
    assert store.as_retriever(k=1, search_type="mmr").invoke("dog barks")[0].metadata == METADATAS[1]
    words = SoftDBVectorStore.from_texts(TEXTS, None, dim=1)  # neither: documents without a vector
    assert words.similarity_search("sings", mode="text")[0].page_content == TEXTS[3]
    assert words.db.stats().keyless == 5


def test_langchain_s_indexing_updates_and_cleans_up(store: SoftDBVectorStore) -> None:
    store.delete()
    assert len(store.db) == 0
    records = InMemoryRecordManager("films")
    records.create_schema()
    documents = [Document(text, metadata={"source": text[0]}) for text in TEXTS]

    def indexed(some: list[Document]) -> tuple[int, int, int]:
        report = index(some, records, store, cleanup="full", source_id_key="source", key_encoder="sha256", batch_size=2)
        return report["num_added"], report["num_skipped"], report["num_deleted"]

    assert indexed(documents) == (5, 0, 0)
    assert indexed(documents[:3]) == (0, 3, 2)
    assert len(store.db) == 3


BAD: dict[str, tuple[Any, str]] = {
    "a typo of an argument": (lambda s: s.similarity_search("q", filters={}), "takes no filters; it takes k, filter"),
    "softdb's own name": (lambda s: s.similarity_search("q", where={}), "takes no where; it takes k, filter"),
    "a function": (lambda s: s.similarity_search("q", filter=lambda one: True), "filter is a function"),
    "FAISS's list": (lambda s: s.similarity_search("q", filter={"n": [1, 2]}), r"for lists: \$in"),
    "pgvector's $like": (lambda s: s.similarity_search("q", filter={"lang": {"$like": "e%"}}), r"unknown operator"),
    "Elasticsearch's list": (lambda s: s.similarity_search("q", filter=[{"term": {"n": 1}}]), "expected a dict"),
    "Haystack's": (
        lambda s: s.similarity_search("q", filter={"field": "meta.n", "operator": ">", "value": 1}),
        r"Haystack's dialect; write \{\"n\": \{\"\$gt\": 1\}\}",
    ),
    "LIKE": (lambda s: s.similarity_search("q", filter=Comparison(Comparator.LIKE, "n", "x")), "use CONTAIN"),
    "mode": (lambda s: s.similarity_search("q", mode="bm25"), "expected 'vector', 'text' or 'hybrid'"),
    "query": (lambda s: s.similarity_search([1.0]), "for a vector call similarity_search_by_vector"),
    "lambda": (
        lambda s: s.max_marginal_relevance_search("q", lambda_mult=2),
        "lambda_mult is 2; expected a number from 0 to 1",
    ),
    "k": (lambda s: s.similarity_search("q", k=0), "k is 0"),
    "width": (lambda s: s.similarity_search_by_vector([1.0, 2.0]), "queries are 2 wide but"),
    "another model": (lambda s: SoftDBVectorStore(Counted(5), s.db).add_texts(["x"]), "vectors are 5 wide but"),
    "no str": (lambda s: s.add_texts("x"), "expected a list of str"),
    "a text that is None": (lambda s: s.add_texts(["x", None]), "expected a list of str"),
    "no documents": (lambda s: s.add_documents([{"page_content": "x"}]), "expected a list of LangChain's Document"),
    "an id, not a list": (lambda s: s.delete("a"), "ids are 'a'; expected a list of str"),
    "an id to get": (lambda s: s.get_by_ids("abc"), "ids are 'abc'; expected a list of str"),
    "an id to add": (lambda s: s.add_texts(["x"], ids="x"), "ids are 'x'; expected a list of str"),
    "an id that is None": (lambda s: s.get_by_ids([None]), "id None is of type NoneType"),
    "metadatas": (lambda s: s.add_texts(["x", "y"], [{}]), "2 texts, 1 metadatas and 2 ids"),
    "ids": (lambda s: s.add_texts(["x"], ids=["1", "2"]), "1 texts, 1 metadatas and 2 ids"),
    "twice": (lambda s: s.add_texts(["x", "y"], ids=["1", "1"]), "comes twice"),
    "batch": (lambda s: s.add_texts(["x"], batch_size=0), "batch_size is 0"),
    "the wrong way round": (lambda s: SoftDBVectorStore("films", s.embedding), "expected LangChain's Embeddings"),
    "no embedding": (lambda s: SoftDBVectorStore(None), "there is no embedding; give one, or encoder="),
    "an encoder": (lambda s: SoftDBVectorStore(HashedNGrams()), "or None with encoder= for an encoder of softdb"),
    "settings": (lambda s: SoftDBVectorStore(s.embedding, s.db, metric="l2"), "metric given with an open database"),
}


def test_delete_by_ids_and_filter(store: SoftDBVectorStore) -> None:
    store.delete(["a", "b", "none"], filter={"lang": "en"})
    assert sorted(store.db.get().ids) == ["b", "c", "d", "e"]


@pytest.mark.parametrize("bad", list(BAD))
def test_bad_input_is_refused_before_anything_changes(store: SoftDBVectorStore, bad: str) -> None:
    call, message = BAD[bad]
    with pytest.raises(softdb.BadInput, match=message):
        call(store)
    assert len(store.db) == 5


def test_numbers_of_numpy_dates_and_nan_become_json(store: SoftDBVectorStore) -> None:
    meta = {"a": np.ones(1), "b": np.float32(2), "c": datetime.date(2020, 1, 2), "d": float("nan")}
    store.add_texts(["x"], [meta], ids=["x"])
    assert store.get_by_ids(["x"])[0].metadata == {"a": [1.0], "b": 2.0, "c": "2020-01-02", "d": None}


def test_a_missing_text_index_names_index_text(path: Path) -> None:
    with softdb.open(path, dim=6) as db, pytest.raises(softdb.BadInput, match=r"index_text\(\).* makes one"):
        SoftDBVectorStore(Counted(), db).similarity_search("q", mode="hybrid")
    with pytest.raises(softdb.NotADatabase, match="holds no database"):
        SoftDBVectorStore(Counted(), path / "none", mode="r")


def test_batches_before_a_failing_batch_are_stored(store: SoftDBVectorStore) -> None:
    with pytest.raises(softdb.BadInput, match="holds a set"):
        store.add_texts(["x", "y", "z"], [{}, {}, {"z": {1}}], ids=["x", "y", "z"], batch_size=2)
    assert [one.id for one in store.get_by_ids(["x", "y", "z"])] == ["x", "y"]
    assert store.add_texts([]) == []


def test_searches_go_on_while_documents_are_replaced(store: SoftDBVectorStore) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.add_texts(TEXTS, ids=list("abcde"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            assert named(store.similarity_search("q", k=9)) == "abcde"
            assert len(store.get_by_ids(list("abcde"))) == 5
    finally:
        stop.set()
        writer.join()
