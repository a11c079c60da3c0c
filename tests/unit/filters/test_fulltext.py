"""Full text against BM25 in plain Python and FTS5, over random writes; an index that does not match the texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from reference import bm25
from worlds import holding

import softdb
from softdb.errors import BadFilter, BadInput, CorruptionError
from softdb.store import format

WORDS = [
    "the", "of", "über", "Schulz", "fox", "Fox", "naïve", "don't", "e-mail", "猫", "x", '"quoted"', "AND", "*", "a:b",
]  # fmt: skip
CUT = {"don't": ["don", "t"], "e-mail": ["e", "mail"], '"quoted"': ["quoted"], "*": [], "a:b": ["a", "b"]}
SAME = {"über": "uber", "naïve": "naive"}


def tokens(text: str) -> list[str]:
    """Tokens of the test's words under unicode61 without diacritics."""
    return [SAME.get(part, part).lower() for word in text.split() for part in CUT.get(word, [word])]


def some_text(chance: random.Random, most: int = 12) -> str:
    return " ".join(chance.choices(WORDS, range(len(WORDS), 0, -1), k=chance.randint(0, most)))


def raw_hits(texts: dict[Any, str], query: str, tokenizer: str = "words") -> dict[Any, float]:
    """Scores by FTS5's own table for all words of a query, OR-ed."""
    table = apsw.Connection(":memory:")
    table.execute(f"CREATE VIRTUAL TABLE t USING fts5(text, tokenize='{format.TOKENIZERS[tokenizer]}')")
    table.executemany("INSERT INTO t(rowid, text) VALUES(?, ?)", texts.items())
    asked = " OR ".join('"{}"'.format(word.replace('"', '""')) for word in query.split()) or '""'
    return {row: -score for row, score in table.execute("SELECT rowid, bm25(t) FROM t WHERE t MATCH ?", (asked,))}


def require_like(db: softdb.SoftDB, texts: dict[Any, str], queries: list[str], k: int, **how: Any) -> None:
    """Every answer is the best of what Python and FTS5 say, of the records that take part."""
    keep = how.pop("keep", texts.keys())
    hits = db.search(texts=queries, mode="text", k=k, **how)
    for i, query in enumerate(queries):
        raw = raw_hits(texts, query)
        plain = bm25([tokens(word) for word in query.split()], {name: tokens(text) for name, text in texts.items()})
        assert raw.keys() == plain.keys()
        assert np.allclose([raw[one] for one in plain], list(plain.values()), rtol=0, atol=1e-9)
        best = sorted((score for one, score in raw.items() if one in keep), reverse=True)[:k]
        assert np.allclose([hit.score for hit in hits[i]], best, rtol=0, atol=1e-9)
        for hit in hits[i]:
            assert hit.id in keep
            assert hit.score == pytest.approx(raw[hit.id], abs=1e-9)
            assert hit.text == texts[hit.id]


@pytest.fixture
def db() -> Iterator[softdb.SoftDB]:
    with holding(np.eye(3, 2), ids=[0, 1, 2], texts=["the quick fox", "a lazy dog", None]) as db:
        db.index_text()
        yield db


@pytest.mark.parametrize("seed", range(3))
def test_any_history_is_searched_as_fts5_and_plain_python_would(tmp_path: Path, seed: int) -> None:
    chance, texts, payloads = random.Random(seed), dict[int, str](), dict[int, int]()
    path, fresh = tmp_path / "db", 0
    db = holding([[0, 1]], payloads=[{"x": 0}], ids=[-1], texts=["before the index"], path=path)
    texts[-1], payloads[-1] = "before the index", 0
    db.index_text()
    reader = softdb.open(path, mode="r")
    for _ in range(20):
        names = chance.sample(sorted(texts), min(len(texts), chance.randint(1, 3)))
        news = [some_text(chance) for _ in names]
        match chance.choice(["insert", "insert", "keyless", "upsert", "update", "move", "delete", "compact", "reopen"]):
            case "insert" | "keyless" as how:
                names = list(range(fresh, fresh + chance.randint(1, 4)))
                fresh += len(names)
                news, xs = [some_text(chance) for _ in names], [chance.randint(0, 2) for _ in names]
                keys = None if how == "keyless" else np.ones((len(names), 2))
                db.insert(names, keys, texts=news, payloads=[{"x": x} for x in xs])
                texts |= zip(names, news, strict=True)
                payloads |= zip(names, xs, strict=True)
            case "upsert" if names:
                db.upsert(names, np.ones((len(names), 2)), texts=news, payloads=[{"x": 1}] * len(names))
                texts |= zip(names, news, strict=True)
                payloads |= dict.fromkeys(names, 1)
            case "update" if names:
                db.update(names, texts=news)
                texts |= zip(names, news, strict=True)
            case "move" if names:
                db.update(names, keys=np.zeros((len(names), 2)))
            case "delete" if names:
                db.delete(names)
                for name in names:
                    del texts[name], payloads[name]
            case "compact":
                db.compact()
            case "reopen":
                db.close()
                db = softdb.open(path)
        queries = [some_text(chance, 6) for _ in range(2)]
        require_like(db, texts, queries, chance.choice([1, 3, 50]))
        x = chance.randint(0, 2)
        require_like(db, texts, queries, 3, where={"x": x}, keep={text for text in texts if payloads[text] == x})
        require_like(db, texts, queries, 3, exclude_ids=[*names, "?"], keep=texts.keys() - set(names))
        require_like(reader, texts, queries, 5)
    assert db.verify() == reader.verify() == len(db) == len(texts)
    db.snapshot(tmp_path / "copy")
    with softdb.open(tmp_path / "copy", mode="r") as copy:
        require_like(copy, texts, ["the fox", "Schulz"], 5)
    reader.close()
    db.close()
    softdb.salvage(path, tmp_path / "saved")
    with softdb.open(tmp_path / "saved") as saved:
        assert saved.text_index == "words"
        require_like(saved, texts, ["the fox", "Schulz"], 5)


def test_trigrams_find_parts_of_words(db: softdb.SoftDB) -> None:
    db.upsert(["a", "b"], np.ones((2, 2)), texts=["Donaudampfschiffahrt", "Herr Schülz"])
    assert not db.search("dampfschiff", mode="text")[0]
    db.index_text("trigram")
    assert db.text_index == "trigram"
    assert db.search(["dampfschiff", "schulz", "SCHÜ", "ab", "quick dog"], mode="text").ids == [
        ["a"], ["b"], ["b"], [], [1, 0],
    ]  # fmt: skip
    raw = raw_hits(dict(enumerate(map(str, db.get([0, 1, "a", "b"]).texts))), "the dog", "trigram")
    scores = [hit.score for hit in db.search("the dog", mode="text")[0]]
    assert scores == pytest.approx(sorted(raw.values(), reverse=True), abs=1e-9)
    db.index_text("words")
    assert db.search("fox", mode="text").ids == [[0]]
    db.drop_text_index()
    db.drop_text_index()
    assert not db.text_index
    assert db.verify() == 5


def test_a_filter_may_ask_for_words(db: softdb.SoftDB) -> None:
    db.insert(["late"], texts=["FOX; the dog"], payloads=[{"x": 1}])

    def found(words: str, **more: Any) -> list[Any]:
        return [one for some in db.scan(where={"$text": {"$match": words}, **more}) for one in some.ids]

    assert found("fox the") == [0, "late"]
    assert found("fox dog") == ["late"]
    assert found("fox", x=1) == found("dog the") == ["late"]
    assert found('NEAR("x y*') == []
    assert db.count({"$not": {"$text": {"$match": "fox"}}}) == 2  # a record without a text, too
    assert db.search([[1, 1]], where={"$text": {"$match": "quick fox"}}).ids == [[0]]
    assert db.search("dog", mode="text", where={"$text": {"$match": "lazy"}}).ids == [[1]]
    assert float(db.attend([[1, 1]], where={"$text": {"$match": "lazy"}}).lse) == pytest.approx(1)
    db.update([1], texts=["a quick fox"])
    db.delete("late")
    assert found("fox quick") == [0, 1]
    db.index_text("trigram")
    assert found("uic") == [0, 1]
    with pytest.raises(BadFilter, match="expected words"):
        found(" ")
    with pytest.raises(BadFilter, match=r"did you mean \$match|unknown operator"):
        db.count({"x": {"$match": "fox"}})
    db.drop_text_index()
    with pytest.raises(BadFilter, match=r"no text index; the writer's db.index_text\(\)"):
        found("fox")


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "... !!! ?", '"', '""', "AND", "NOT", "NEAR(fox dog)", "text:fox -", "f*", "^the", "\0", "(",
     "{a b}:c", "fox\0dog", "'; DROP TABLE records --", "x" * 100_000, "fox " * 20_000],
)  # fmt: skip
def test_no_mark_in_a_text_is_an_operator(db: softdb.SoftDB, text: str) -> None:
    results = {hit.id for hit in db.search(text, mode="text", k=3)[0]}
    words = {word.strip("\"'().,*^:{}!?;- ") for word in text.replace("\0", " ").lower().split()}
    assert results == {i for i, own in enumerate(["the quick fox", "a lazy dog"]) if words & set(own.split())} or (
        results == {0, 1} and text == "NEAR(fox dog)"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"texts": "a\ud800"}, "lone surrogate"),
        ({"texts": "a" * 10_000_000}, "10,000,000 characters"),
        ({"texts": ["a", None]}, "expected a str or a list of str"),
        ({"texts": 3}, "expected a str"),
        ({"texts": "a", "mode": "lexical"}, "choose one of 'hybrid', 'text', 'vector'"),
        ({"texts": "a", "mode": "hybrid"}, "no encoder"),
        ({"texts": "a", "mode": "vector"}, "without an encoder"),
        ({"queries": [[1, 0]], "texts": "a", "mode": "text"}, "both given"),
        ({"queries": [[1, 0]], "texts": ["a", "b"]}, "1 queries for 2 texts"),
        ({"queries": [[1, 0]], "texts": "a", "fusion": -1}, "fusion is -1"),
        ({"queries": [[1, 0]], "texts": "a", "fusion": "sum"}, "fusion is 'sum'"),
        ({"queries": [[1, 0]], "texts": "a", "fusion": ("scores", 2)}, "the text's share in fusion is 2"),
        ({"queries": [[1, 0]], "texts": "a", "fusion": ("ranks", 0.5)}, r"fusion is \('ranks', 0.5\)"),
        ({"queries": [[1, 0]], "texts": "a", "fetch_k": 1, "k": 2}, "fetch_k"),
        ({"queries": [[1, 0]], "fusion": 1}, "which has one score"),
        ({"texts": "a", "fetch_k": 3}, "fetch_k"),
        ({"texts": "a", "radius": 3}, "radius is 3"),
        ({"texts": "a", "diversity": 0.3}, "diversity"),
        ({"texts": "a", "k": 0}, "k is 0"),
        ({}, "neither queries nor texts"),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_a_line(db: softdb.SoftDB, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        db.search(**asked)
    assert "\n" not in str(error.value)


def test_without_an_index_the_error_names_index_text(db: softdb.SoftDB) -> None:
    db.drop_text_index()
    with pytest.raises(BadInput, match=r"no text index; the writer's db.index_text\(\), or on a shell"):
        db.search("fox", mode="text")
    with pytest.raises(BadInput, match="choose one of 'words', 'trigram'"):
        db.index_text("porter")  # type: ignore[arg-type]


TAMPERED = {
    "forgets": "DELETE FROM texts WHERE rowid = 0",
    "invents": "INSERT INTO texts(rowid, text) VALUES(77, 'fox')",
    "lies": "DELETE FROM texts WHERE rowid = 0; INSERT INTO texts(rowid, text) VALUES(0, 'a lazy fox')",
    "length": "UPDATE texts_docsize SET sz = x'ff' WHERE id = 0",
    "longer": "UPDATE texts_docsize SET sz = x'09' WHERE id = 0",
    "pages": "UPDATE texts_data SET block = zeroblob(50) WHERE id > 100",
    "no structure": "DELETE FROM texts_data WHERE id = 10",
    "no settings": "DELETE FROM texts_config",
    "of another version": "UPDATE texts_config SET v = 99 WHERE k = 'version'",
}


UNSEEN = ("forgets", "lies", "longer")  # a search cannot tell; a record that it finds is one


@pytest.mark.parametrize("how", TAMPERED)
def test_an_index_that_mismatches_the_texts_is_noticed_and_rebuilt(tmp_path: Path, how: str) -> None:
    with holding(np.eye(2), ids=[0, 1], texts=["the quick fox", "a lazy dog"], path=tmp_path) as db:
        db.index_text()
    raw = apsw.Connection(str(tmp_path / "catalog.sqlite"))
    raw.execute(TAMPERED[how])
    raw.close()
    with softdb.open(tmp_path) as db:
        with pytest.raises(CorruptionError, match=r"text index|malformed|fts5") as error:
            db.verify()
        assert "\n" not in str(error.value)
        if how in UNSEEN:
            assert {hit.id for hit in db.search("fox", mode="text")[0]} <= {0, 1}
        else:
            with pytest.raises(CorruptionError, match=r"rebuild it by drop_text_index\(\), then index_text"):
                db.search("fox", mode="text")
        db.drop_text_index()
        db.index_text()
        assert (db.verify(), db.search("fox", mode="text").ids) == (2, [[0]])


@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("how", ["length", "no structure", "no settings", "of another version"])
def test_a_write_that_a_damaged_index_refuses_raises_and_changes_nothing(
    tmp_path: Path, how: str, durability: Any
) -> None:
    with holding(np.eye(2), ids=[0, 1], texts=["the quick fox", "a lazy dog"], path=tmp_path) as db:
        db.index_text()
    raw = apsw.Connection(str(tmp_path / "catalog.sqlite"))
    raw.execute(TAMPERED[how])
    raw.close()
    with softdb.open(tmp_path, durability=durability) as db:
        db.update([1], payloads=[{"x": 1}])
        before = db.refresh()
        writes: list[Callable[[], object]] = [
            lambda: db.update([0], texts=["new"]),
            lambda: db.upsert([0, 2], np.ones((2, 2)), texts=["new", "fox"]),
            lambda: db.delete([0]),
            lambda: db.insert([2], np.ones((1, 2)), texts=["new"]),  # which does not meet a wrong length
        ]
        for write in writes[: 3 if how == "length" else 4]:
            with pytest.raises(CorruptionError, match=r"rebuild it by drop_text_index\(\), then index_text") as error:
                write()
            assert "\n" not in str(error.value)
            assert (db.refresh(), len(db)) == (before, 2)
        db.drop_text_index()
        db.index_text()
        db.insert([2], np.ones((1, 2)), texts=["new fox"])
    with softdb.open(tmp_path, verify=True) as db:
        assert db.search("fox", mode="text").ids == [[2, 0]]
        assert db[1].payload == {"x": 1}


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='porter')",
        "CREATE VIRTUAL TABLE more USING fts5(text)",
        "CREATE TABLE texts_data(id INTEGER PRIMARY KEY, block BLOB)",
    ],
)
def test_other_tables_of_texts_are_refused(tmp_path: Path, statement: str) -> None:
    softdb.open(tmp_path, dim=2).close()
    raw = apsw.Connection(str(tmp_path / "catalog.sqlite"))
    raw.execute(statement)
    raw.close()
    with pytest.raises(CorruptionError, match="that softdb does not write"):
        softdb.open(tmp_path)


def test_the_cache_of_words_is_bounded(db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.filters.fulltext.MAX_CACHED", 3)
    for word in ["the", "a", "fox", "quick", "dog", "the"]:
        assert len(db.search(word, mode="text")[0]) == 1
    assert db._store._full_text._size <= 3
