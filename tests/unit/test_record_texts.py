"""Texts of records, encoders of any callable, and records without a key."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import holding

import softdb
from softdb import SoftDB, formats
from softdb.check.texts import MAX_TEXT
from softdb.text import HashedNGrams

TEXTS = ["the cat sleeps", "a dog barks", "naïve ü\0 🦉"]
KEYS = np.eye(3, dtype=np.float32)


def test_a_text_is_embedded_and_stored(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", metric="cosine", encoder=HashedNGrams(64)) as db:
        db.insert([1, 2, 3], texts=TEXTS)
        db.insert([4], ["embedded alone"])
        db.insert([5], np.ones((1, 64)), texts=["beside a key"])
    with softdb.open(tmp_path / "db") as db:
        assert db.get([3, 1, 4, 5]).texts == [TEXTS[2], TEXTS[0], None, "beside a key"]
        assert db[5].key.tolist() == [1.0] * 64
        hits = db.search(["a cat asleep", "barking dog"], k=1)
        assert hits.texts == [[TEXTS[0]], [TEXTS[1]]]
        assert hits[0][0].text == TEXTS[0] == next(iter(db.scan()))[0].text
        soft = db.attend("a cat asleep", k=1)
        assert soft.hits is not None
        assert soft.hits.texts == [[TEXTS[0]]]
        before = db[1].key.tolist()
        db.update([1], texts=[TEXTS[1]])
        assert db[1].text == TEXTS[1]
        assert db[1].key.tolist() == db[2].key.tolist() != before
        db.update([1], before, texts=[None])
        assert [db[1].text, db[1].key.tolist()] == [None, before]
        db.upsert([2], texts=["b"], payloads=["p"])
        assert (db[2].text, db[2].payload) == ("b", "p")
        db.update([2], payloads=["q"])
        assert (db[2].text, db[2].payload, db.verify()) == ("b", "q", 5)


def test_any_callable_is_an_encoder(tmp_path: Path) -> None:
    """The lines of the page, with a client that is not there."""
    page = Path(__file__).parents[2] / "docs" / "documents.md"
    (block,) = re.findall(r"```py\n(.*?)```", page.read_text(), re.S)
    asked = list[int]()

    def create(model: str, input: list[str]) -> Any:
        asked.append(len(input))
        return SimpleNamespace(data=[SimpleNamespace(embedding=[float(len(one))] * 1536) for one in input])

    scope: dict[str, Any] = {
        "client": SimpleNamespace(embeddings=SimpleNamespace(create=create)),
        "softdb": SimpleNamespace(open=lambda path, **words: softdb.open(tmp_path / path, **words)),
    }
    exec(block, scope)
    reports = list[tuple[str, int, int]]()
    with scope["db"] as db:
        db.insert(range(600), texts=["x"] * 600, progress=lambda *one: reports.append(one))
        assert db.search("x", k=1).texts == [["x"]]
        assert db.encoder_name == "text-embedding-3-small"
    assert asked == [256, 256, 88, 3, 1]  # 3: the texts of the fingerprint
    assert reports == [("embed", done, 600) for done in (256, 512, 600)]
    with pytest.raises(softdb.BadInput, match=r"made by the encoder 'text-embedding-3-small', not by 'ngrams'"):
        softdb.open(tmp_path / "notes", encoder=HashedNGrams(1536))
    with softdb.open(tmp_path / "notes") as db:
        for ask in (lambda: db.search("x"), lambda: db.insert(["y"], texts=["y"])):
            with pytest.raises(softdb.BadInput, match="texts need the encoder 'text-embedding-3-small'"):
                ask()


def test_progress_is_drawn_and_a_failing_encoder_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def encoder(texts: Sequence[str]) -> Any:
        if "bad" in texts:
            raise RuntimeError("the service is down")
        return np.ones((len(texts), 2))

    with softdb.open(None, dim=2, encoder=encoder) as db:
        db.insert([1], texts=["a"], progress=True)
        for write in (db.insert, db.upsert, db.update):
            with pytest.raises(RuntimeError, match="down"):
                write([1], texts=["bad"], progress=False)
        with pytest.raises(softdb.BadInput, match="progress is 3; expected a callable"):
            db.insert([2], texts=["b"], progress=3)  # type: ignore[arg-type]
        assert (db[1].text, len(db)) == ("a", 1)


@pytest.mark.parametrize("dim", [2, 5])
def test_an_encoder_of_another_width_is_refused(dim: int) -> None:
    with softdb.open(None, dim=3, encoder=lambda texts: np.ones((len(texts), dim))) as db:
        with pytest.raises(softdb.BadInput, match=f"texts are {dim} wide but this database is 3 wide"):
            db.insert([1], texts=["a"])
        assert len(db) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a lone surrogate": ({"texts": ["fine", "\ud800"]}, r"text 1 holds the lone surrogate '\\ud800'"),
    "too long": ({"texts": ["x", "é" * (MAX_TEXT // 2 + 1)]}, "text 1 has 16,777,218 bytes; expected at most 16,777"),
    "a number": ({"texts": ["x", 1]}, "text 1 is 1; expected str, or None"),
    "too few": ({"texts": ["x"]}, "1 texts for 2 ids"),
    "bytes": ({"texts": b"xy"}, r"texts are b'xy'; expected a list"),
    "nothing at all": ({}, "keys are missing; give keys, or texts"),
    "a value without a key": ({"keys": [[1, 2, 3], None], "values": [[1], [2]]}, "record 1 of the batch has a value"),
    "a key without a value": ({"keys": [[1, 2, 3], None]}, "values are missing"),
    "a value alone": ({"texts": ["x", "y"], "values": [[1], [2]]}, "record 0 of the batch has a value and no key"),
    "too few keys": ({"keys": [None]}, "1 keys for 2 ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unstorable_texts_refuse_the_whole_batch(name: str) -> None:
    words, message = REFUSED[name]
    with holding([[1, 2, 3]], [[1]], ids=["b"], texts=["before"]) as db:
        for write in (db.insert, db.upsert):
            with pytest.raises(softdb.BadInput, match=message):
                write(["a", "b"], **words)
        assert (len(db), db["b"].text, db.stats().generation) == (1, "before", 1)


def test_a_text_of_ten_megabytes_is_stored(tmp_path: Path) -> None:
    long = "é 🦉 word " * 800_000
    assert len(long.encode()) > 10_000_000
    with holding([[1]], ids=["long"], texts=[long], path=tmp_path / "db") as db:
        db.snapshot(tmp_path / "copy")
    for path in (tmp_path / "db", tmp_path / "copy"):
        with softdb.open(path, mode="r", verify=True) as db:
            assert db["long"].text == long


def test_an_encoder_cannot_embed_a_missing_text() -> None:
    with softdb.open(None, encoder=HashedNGrams(8)) as db:
        with pytest.raises(softdb.BadInput, match="text 1 is None, which cannot be embedded"):
            db.insert([1, 2], texts=["a", None])
        with pytest.raises(softdb.BadInput, match="keys are missing"):
            db.insert([1], payloads=[{"text": "a"}])
        db.insert([1, 2], [None, [1.0] * 8], texts=["a", None])
        assert (db[1].key, db.core.keyed, len(db)) == (None, 1, 2)
        db.update([1], texts=["b"])
        assert db.search("b", k=1).ids == [[1]]


# -- records without a key ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Keys a, c and e; b and d without."""
    with softdb.open(tmp_path / "db" if request.param else None, dim=3) as db:
        payloads = [{"n": i, "kind": "x" if i % 2 else "y"} for i in range(5)]
        keys = [[1, 0, 0], None, [0, 1, 0], None, [0, 0, 1]]
        db.insert(list("abcde"), keys, payloads=payloads, texts=[f"text {i}" for i in range(5)])
        yield db


def everything(db: SoftDB) -> dict[Any, Any]:
    return {one.id: (one.key is not None, one.payload, one.text) for part in db.scan(2) for one in part}


def test_vectors_never_meet_a_record_without_a_key(mixed: SoftDB) -> None:
    db = mixed
    assert (len(db), db.count(), db.core.keyed, db.stats().records, db.stats().keyless) == (5, 5, 3, 5, 2)
    assert sorted(db.search([[0, 0, 0]], k=10).ids[0]) == ["a", "c", "e"]
    assert db.search([[0, 0, 0]], k=10, where={"kind": "x"}).ids == [[]]
    assert sorted(db.search([[0, 0, 0]], radius=0, exclude_ids=["b", "a"]).ids[0]) == ["c", "e"]
    assert db.attend([[0, 0, 0]]).output.tolist() == [pytest.approx([1 / 3] * 3)]
    assert db.attend([[0, 0, 0]], mask=[True, False, False]).output.tolist() == [[1, 0, 0]]
    assert db.attend([[0, 0, 0]], where={"n": {"$gte": 3}}).output.tolist() == [[0, 0, 1]]
    assert db.count_within([[0, 0, 0]], 0).value.tolist() == [3]
    assert set(db.sample([[0, 0, 0]], 50).hits.ids[0]) == {"a", "c", "e"}
    with pytest.raises(softdb.BadInput, match="id 'b' has no key; give it one with update"):
        db.core.locate(["a", "b"], required=True)
    assert db.core.locate(["a", "b"])[1].tolist() == [0, -1]


def test_a_record_without_a_key_is_found_by_id_and_filter(mixed: SoftDB) -> None:
    db = mixed
    assert "b" in db
    assert (db["b"].key, db["b"].value, db["b"].payload, db["b"].text) == (None, None, {"n": 1, "kind": "x"}, "text 1")
    assert db.get(list("bcd")).keyed.tolist() == [False, True, False]
    assert [part.ids for part in db.scan(2)] == [["a", "b"], ["c", "d"], ["e"]]
    for declared in (False, True):
        if declared:
            db.index_field("n", "kind")
        assert [one for part in db.scan(where={"kind": "x"}) for one in part.ids] == ["b", "d"]
        assert db.count({"$not": {"n": 1}}) == 4
        assert db.count({"kind": "x", "n": {"$lt": 3}}) == 1
        assert db.count({"$or": [{"n": 1}, {"n": 2}]}) == 2
        assert db.count({"missing": {"$exists": False}}) == 5
    db.insert(["f"], payloads=[{"n": 1}])  # the cache of filters is extended
    db.delete(["b"])
    db.update(["d"], payloads=[{"n": 1, "kind": "z"}])
    assert db.count({"$not": {"n": 1}}) == 3
    assert [one for part in db.scan(where={"n": 1}) for one in part.ids] == ["d", "f"]
    assert db.delete(where={"n": 1}) == 2
    assert list(everything(db)) == ["a", "c", "e"]


def test_a_record_without_a_key_survives_compaction_and_gets_a_key(mixed: SoftDB, tmp_path: Path) -> None:
    db, before = mixed, everything(mixed)
    assert db.stats().dead == 0
    assert db.compact().removed == 0
    assert (everything(db), db.verify(), db.stats().dead) == (before, 5, 0)
    db.insert(["f"], texts=["g"])
    db.delete(["d", "a"])
    db.update(["b"], [[2, 2, 2]])
    assert (db["b"].key.tolist(), db["b"].text, db["b"].payload["n"]) == ([2, 2, 2], "text 1", 1)
    assert db.search([[1, 1, 1]], k=1).ids == [["b"]]
    db.upsert(["b"], texts=["none again"])
    for _ in range(2):
        assert db.verify() == len(db) == 4
        assert {one: keyed for one, (keyed, *_) in everything(db).items()} == {
            "c": True,
            "e": True,
            "f": False,
            "b": False,
        }
        db.compact()
    db.snapshot(tmp_path / "copy")
    with softdb.open(tmp_path / "copy", mode="r", verify=True) as copy:
        assert everything(copy) == everything(db)


def test_a_reader_sees_its_generation(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=2) as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.insert(["a"], texts=["t"])
        assert ("a" in reader, len(reader)) == (False, 0)
        reader.refresh()
        db.compact()
        db.insert(["b"], texts=["u"])
        assert (reader["a"].text, "b" in reader, len(reader)) == ("t", False, 1)
        reader.refresh()
        db.delete(["a"])
        assert (len(reader), everything(reader)) == (2, {"b": (False, None, "u")})
        db.compact()
        db.close()
        assert reader.refresh()
        assert reader.verify() == len(reader) == 1


def test_a_keyless_record_gets_key_and_value_together() -> None:
    with softdb.open(None, dim=2, num_classes=3) as db:
        db.insert([1, 2], [None, [1, 2]], [None, 2], texts=["a", "b"])
        assert (db[1].value, db[2].value) == (None, 2)
        for words, what in (({"keys": [[1, 2]]}, "a value"), ({"values": [1]}, "a key")):
            with pytest.raises(softdb.BadInput, match=f"id 1 has neither key nor value, and {what}"):
                db.update([1], **words)
        report = db.reembed(HashedNGrams(16))
        assert (report.records, db[1].key, db[2].value, len(db)) == (1, None, 2, 2)
        db.update([1], np.ones((1, 16)), [0])
        assert (db[1].value, db.verify()) == (0, 2)


@pytest.mark.parametrize("compacted", [False, True])
def test_reembed_makes_keys_of_texts(tmp_path: Path, compacted: bool) -> None:
    with softdb.open(tmp_path / "db", dim=2) as db:
        db.insert(range(10), texts=[f"text number {i}" for i in range(10)])
        db.insert(["with", "old"], np.ones((2, 2)), texts=["a key", None], payloads=[None, {"text": "in the payload"}])
        db.insert(["none"], payloads=[1])
        db.delete([3])
        if compacted:
            db.compact()
        db.insert(["late"], texts=["later"])
        report = db.reembed(HashedNGrams(32), batch_size=4)
        assert (report.records, report.embedded, db.core.keyed, len(db)) == (12, 12, 12, 13)
        assert db["none"].key is None
        for _ in range(2):
            assert db.verify() == 13
            assert db.search("text number 7", k=1).ids == [[7]]
            assert db.search("in the payload", k=1).ids == [["old"]]
            db.compact()
        db.update(["none"], texts=["at last"])
        assert db.search("at last", k=1).ids == [["none"]]


def test_a_record_given_a_text_during_embedding_stays_keyless(tmp_path: Path) -> None:
    """Rows ascend in the files, and its own is behind those that are written; the next run has it."""
    with softdb.open(tmp_path / "db", dim=2) as db:
        db.insert(range(6), texts=[None if i == 2 else f"text {i}" for i in range(6)], payloads=[{}] * 6)
        acts: list[Any] = [lambda: db.delete([0]), lambda: db.update([2], texts=["now"])]

        def tell(what: str, done: int, whole: int) -> None:
            if what == "switch" and acts:
                acts.pop()()

        while acts:
            keyless = [2] if len(acts) == 2 else []
            db.reembed(HashedNGrams(16), progress=tell)
            assert db.verify() == len(db)
            assert [one for one, (keyed, *_) in everything(db).items() if not keyed] == keyless
        db.reembed(HashedNGrams(24))
        assert db.verify() == len(db) == 5
        assert db.search("text 3", k=1).ids == [[3]]
        assert everything(db)[2] == (True, {}, "now")


def test_an_export_carries_texts_and_keyless_records(mixed: SoftDB, tmp_path: Path) -> None:
    mixed.insert(["plain"], [[1, 1, 1]], payloads=["plain"])
    file = tmp_path / "all.jsonl"
    assert formats.export_records(mixed, file) == 6
    with softdb.open(tmp_path / "new", dim=3) as db:
        assert formats.import_records(db, formats.read_records(file, batch_size=2)) == 6
        assert everything(db) == everything(mixed)
        assert db.verify() == 6
        generation = db.stats().generation
        assert formats.import_records(db, formats.read_records(file, batch_size=4), resume=True) == 6
        assert db.stats().generation == generation
        db.update(["b"], texts=["other"])
        with pytest.raises(softdb.BadInput, match="id 'b' is stored already with other contents"):
            formats.import_records(db, formats.read_records(file), resume=True)


def test_an_encoder_is_remembered_while_there_are_no_keys(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=8) as db:
        db.insert([1], texts=["a document"])
    with softdb.open(tmp_path / "db", encoder=HashedNGrams(8)) as db:
        assert db.encoder_name == "ngrams"
        db.insert([2], texts=["a text"])
    with softdb.open(tmp_path / "db") as db:
        assert db.search("a text", k=2).ids == [[2]]


def test_filters_may_require_a_text(mixed: SoftDB) -> None:
    mixed.insert([1, 2], [None, None], texts=["[1, 2] ü\0x", None])
    for where, ids in (
        ({"$text": {"$contains": "xt 1"}}, ["b"]),
        ({"$text": {"$startswith": "text"}, "kind": "y"}, ["a", "c", "e"]),
        ({"$text": {"$in": ["text 3", "text 4"]}}, ["d", "e"]),
        ({"$text": {"$contains": "\0x"}}, [1]),
        ({"$text": {"$exists": False}}, [2]),
        ({"$text": None}, []),
        ({"$text": {"$contains": 1}}, []),
        ({"$not": {"$text": {"$lt": "text 4"}}}, ["e", 2]),
    ):
        assert [one for part in mixed.scan(where=where) for one in part.ids] == ids, where
        near = mixed.search([[1, 1, 1]], k=9, where=where).ids[0]
        assert sorted(near) == [one for one in ids if one in ("a", "c", "e")]
    mixed.update(["b"], texts=["other"])
    assert mixed.count({"$text": {"$contains": "xt 1"}}) == 0
    with pytest.raises(softdb.BadFilter, match=r"unknown operator '\$txt' \(did you mean \$text\?\)"):
        mixed.count({"$txt": "x"})


# -- trust; tests/trust has more ---------------------------------------------------------------------------------------


@pytest.fixture
def rotten(tmp_path: Path) -> Path:
    """One text of five, of a record without a key, has another letter than was written."""
    with softdb.open(tmp_path / "db", dim=2) as db:
        db.insert(range(5), [[1, i] if i % 2 else None for i in range(5)], texts=[f"the text of {i}" for i in range(5)])
    file = tmp_path / "db" / "catalog.sqlite"
    file.write_bytes(file.read_bytes().replace(b"the text of 2", b"the next of 2"))
    return tmp_path / "db"


def test_a_corrupt_text_is_named_and_not_exported(rotten: Path, tmp_path: Path) -> None:
    with softdb.open(rotten) as db:
        with pytest.raises(softdb.CorruptionError, match=r"catalog\.sqlite: text of row 2 differs from its checksum"):
            db.verify()
        with pytest.raises(softdb.CorruptionError, match="text of row 2 differs"):
            db.update([2], [[3, 3]])  # written anew it would have a checksum
    report = softdb.salvage(rotten, tmp_path / "saved")
    assert (report["records"], report["lost_records"], report["notes"]) == (4, 1, [])
    assert report["lost"] == [{"row": 2, "id": 2, "why": "catalog.sqlite: its text differs from its checksum"}]
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert everything(db) == {i: (i % 2 == 1, None, f"the text of {i}") for i in (0, 1, 3, 4)}


def test_salvage_keeps_keyless_records(mixed: SoftDB, tmp_path: Path) -> None:
    mixed.delete(["a"])
    mixed.compact()
    mixed.insert(["f", "g"], [None, [1, 1, 1]], texts=["later", None])
    mixed.delete(["b"])
    mixed.snapshot(tmp_path / "copy")
    report = softdb.salvage(tmp_path / "copy", tmp_path / "saved")
    assert (report["records"], report["lost_records"], report["unconfirmed"], report["notes"]) == (5, 0, [], [])
    with softdb.open(tmp_path / "saved", mode="r", verify=True) as db:
        assert everything(db) == everything(mixed)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM tombstones", "1 rows are live in one table and dead in the other"),
        ("UPDATE records SET value_crc = 1 WHERE id = 'b'", "1 records have a value and no key"),
        ("UPDATE records SET key_crc = 0 WHERE id = 'b'", "1 rows are live in one table and dead in the other"),
        ("UPDATE records SET key_crc = NULL WHERE id = 'a'", "1 rows are live in one table and dead in the other"),
        ("UPDATE records SET text = NULL WHERE id = 'a'", "text of row 0 differs"),
    ],
)
def test_verify_reports_foreign_contents(tmp_path: Path, statement: str, message: str) -> None:
    with softdb.open(tmp_path / "db", dim=1) as db:
        db.insert(["a", "b"], [[1], None], texts=["t", "u"])
    connection = sqlite3.connect(tmp_path / "db" / "catalog.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()
    with softdb.open(tmp_path / "db") as db, pytest.raises(softdb.CorruptionError, match=message):
        db.verify()
