"""Following the advice of an error gives the answer: opening and writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from advice import Steps, advice, three
from worlds import holding

import softdb
from softdb.text import HashedNGrams

EYE = np.eye(3, 2, dtype=np.float32)
RANDOM = np.random.default_rng(0).normal(size=(1200, 8)).astype(np.float32)


class Model:
    """An encoder by the name of a model, which softdb does not load."""

    name, dim = "a model", 8

    def __call__(self, texts: Any) -> Any:
        return HashedNGrams(8)(texts)


@advice("make one: softdb.open with mode='rw', or on a shell softdb import")
def test_a_reader_makes_no_database(folder: Path) -> Steps:
    yield lambda: softdb.open(folder / "new", mode="r")
    with softdb.open(folder / "new", mode="rw") as db:
        assert len(db) == 0


@advice("open the database with mode='rw' to write")
def test_a_reader_does_not_write(folder: Path) -> Steps:
    three(folder / "db").close()
    with softdb.open(folder / "db", mode="r") as reader:
        yield lambda: reader.insert(["d"], [[1, 1]])
    with softdb.open(folder / "db", mode="rw") as db:
        db.insert(["d"], [[1, 1]])
        assert "d" in db


@advice("have no index and mode is 'r'; open it with mode='rw'")
def test_a_reader_declares_no_field(folder: Path) -> Steps:
    three(folder / "db").close()
    yield lambda: softdb.open(folder / "db", mode="r", fields=["year"])
    with softdb.open(folder / "db", mode="rw", fields=["year"]) as db:
        assert db.fields == ("year",)


@advice("close it there, or open this one with mode='r'")
def test_two_do_not_write_at_once(folder: Path) -> Steps:
    with three(folder / "db"):
        yield lambda: softdb.open(folder / "db")
        with softdb.open(folder / "db", mode="r") as reader:
            assert len(reader) == 3
    with softdb.open(folder / "db") as db:
        assert len(db) == 3


@advice("restore it from a copy, or open it with mode='r'")
def test_a_catalogue_that_may_not_be_written_is_read(folder: Path) -> Steps:
    three(folder / "db").close()
    with (folder / "db" / "catalog.sqlite").open("r+b") as file:
        file.seek(18)  # the version of the format that a writer must know
        file.write(b"\x09")
    yield lambda: softdb.open(folder / "db")
    with softdb.open(folder / "db", mode="r") as reader:
        assert len(reader) == 3


@advice("pass encoder= to softdb.open")
def test_texts_need_an_encoder(folder: Path) -> Steps:
    with softdb.open(folder / "db", dim=8) as db:
        yield lambda: db.insert(["a"], ["a fox"])
    with softdb.open(folder / "db", encoder=HashedNGrams(8)) as db:
        db.insert(["a"], ["a fox"])
        assert db.search("fox", k=1).ids == [["a"]]


@advice("softdb loads no model by itself; if you trust it, pass it: ")
def test_the_encoder_of_stored_keys_is_given_by_the_caller(folder: Path) -> Steps:
    encoder = Model()
    with softdb.open(folder / "db", encoder=encoder) as db:
        db.insert(["a"], texts=["a fox"])
    with softdb.open(folder / "db") as db:
        yield lambda: db.search("fox")
    with softdb.open(folder / "db", encoder=encoder) as db:  # "or your own encoder of that name"
        assert db.search("fox", k=1).ids == [["a"]]


@advice("changes no settings of a database; give the stored ones, or open it with mode='rw'")
def test_a_reader_changes_no_settings(folder: Path) -> Steps:
    softdb.open(folder / "db").close()
    yield lambda: softdb.open(folder / "db", mode="r", metric="l2")
    softdb.open(folder / "db", mode="r", metric="dot").close()
    with softdb.open(folder / "db", mode="rw", metric="l2") as db:
        assert db.metric == "l2"


@advice("or, if it is the same model, give yours that name: softdb.text.SentenceEncoder(model, name=…)")
def test_the_same_model_may_take_the_stored_name(folder: Path) -> Steps:
    encoder, same = Model(), Model()
    same.name = "model of another name"
    with softdb.open(folder / "db", encoder=encoder) as db:
        db.insert(["a"], texts=["a fox"])
    yield lambda: softdb.open(folder / "db", encoder=same)
    same.name = encoder.name
    with softdb.open(folder / "db", encoder=same) as db:
        assert db.search("fox", k=1).ids == [["a"]]


@advice("open one with value_dim= or num_classes=")
def test_values_need_a_column(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.insert(["d"], [[1, 1]], [[5]])
    with softdb.open(None, dim=2, value_dim=1) as db, softdb.open(None, dim=2, num_classes=3) as labelled:
        db.insert(["d"], [[1, 1]], [[5]])
        labelled.insert(["d"], [[1, 1]], [2])
        assert db.attend([[1, 1]]).output.tolist() == [[5]]
        assert int(labelled.attend([[1, 1]]).output.argmax()) == 2


@advice("give keys, or texts, or keys=[None, …] for records without a key")
def test_records_need_keys_or_texts(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.insert(["d"])
        db.insert(["d"], [[1, 1]])
        db.insert(["e"], texts=["a text"])
        db.insert(["f"], keys=[None])
        assert [db["d"].key is None, db["e"].key is None, db["f"].key is None] == [False, True, True]


@advice("which cannot be embedded; give these records apart, with keys=[None, …]")
def test_no_text_is_not_embedded(folder: Path) -> Steps:
    with softdb.open(None, encoder=HashedNGrams(8)) as db:
        yield lambda: db.insert(["a", "b"], texts=["a fox", None])
        db.insert(["a"], texts=["a fox"])
        db.insert(["b"], keys=[None], texts=[None])
        assert (db["a"].text, db["b"].text, db["b"].key) == ("a fox", None, None)


@advice("give ids or where, one of them; where={} deletes every record")
def test_a_deletion_needs_ids_or_a_filter(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.delete()
        assert db.delete(["a"]) == 1
        assert db.delete(where={}) == 2


@advice("upsert() replaces it", softdb.DuplicateId)
def test_an_id_that_is_stored_is_upserted(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.insert(["a"], [[5, 5]])
        db.upsert(["a"], [[5, 5]])
        assert db.get(["a"]).keys.tolist() == [[5, 5]]


@advice("id 'd' is not stored", softdb.UnknownId)
def test_an_unknown_id_is_checked(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db["d"]
        assert "d" not in db
        assert "a" in db


@advice("pass keys, values, payloads or texts")
def test_an_update_needs_a_column(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.update(["a"])
        db.update(["a"], keys=[[2, 2]])
        db.update(["a"], payloads=[1])
        db.update(["a"], texts=["text"])
        assert (db.get(["a"]).keys.tolist(), db["a"].payload, db["a"].text) == ([[2, 2]], 1, "text")


@advice("has a value and no key; give both, or None for both")
def test_a_value_goes_with_a_key(folder: Path) -> Steps:
    with softdb.open(None, dim=2, value_dim=1) as db:
        yield lambda: db.insert(["a", "b"], [[1, 1], None], [[1], [2]])
        db.insert(["a", "b"], [[1, 1], None], [[1], None])
        db.insert(["c"], [[1, 1]], [[2]])
        assert [one.key is None for one in db.get(["a", "b", "c"])] == [False, True, False]


@advice("needs more than 64 bits; store it as str")
def test_a_large_id_is_text(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.insert([2**63], [[1, 1]])
        db.insert([str(2**63)], [[1, 1]])
        assert str(2**63) in db


@advice("pass a condition as where={'price': {'$gt': 50}}")
def test_a_condition_is_a_filter(folder: Path) -> Steps:
    with holding([[1, 1]], payloads=[{"price": 60}], ids=["a"]) as db:
        yield lambda: db.delete("price > 50")
        assert db.delete(where={"price": {"$gt": 50}}) == 1


@advice("pass its to_dense()")
def test_sparse_tensors_must_be_made_dense(folder: Path) -> Steps:
    with three() as db:
        sparse = torch.eye(2).to_sparse()
        yield lambda: db.search(sparse)
        assert db.search(sparse.to_dense(), k=1).ids == [["a"], ["b"]]


@advice("name the field of the payload that has it with field=")
def test_reembedding_needs_the_texts(folder: Path) -> Steps:
    with holding([[1, 1]], payloads=[{"body": "a fox"}], ids=["a"]) as db:
        yield lambda: db.reembed(HashedNGrams(8))
        db.reembed(HashedNGrams(8), field="body")
        assert db.search("fox", k=1).ids == [["a"]]


@advice("insert records with keys first, or open it with dim=")
def test_soft_queries_need_a_width(folder: Path) -> Steps:
    with softdb.open(folder / "db", value_dim=1) as db:
        yield lambda: db.attend([1.0, 0.0])
        db.insert(["a"], [[1.0, 2.0]], [[7.0]])
        assert db.attend([1.0, 0.0]).output.tolist() == [[7.0]]
    with softdb.open(folder / "other", dim=2) as db:
        assert db.attend([1.0, 0.0]).output.tolist() == [[0.0, 0.0]]


@advice("name yours by fields={'key': …}")
def test_fields_name_the_column_of_keys(folder: Path) -> Steps:
    with softdb.open(None, dim=2) as db:
        yield lambda: db.insert([{"id": "a", "vec": [1, 2]}])
        db.insert([{"id": "a", "vec": [1, 2]}], fields={"key": "vec"})
        db.insert([{"id": "b", "vec": [1, 2]}], fields={"key": None})
        assert [one.key is None for one in db.get(["a", "b"])] == [False, True]


@advice("may each be the")
def test_fields_choose_a_column(folder: Path) -> Steps:
    row = {"id": "a", "key": [1, 2], "vector": [3, 4]}
    with softdb.open(None, dim=2) as db:
        yield lambda: db.insert([row])
        db.insert([row], fields={"key": "key"})
        assert (db["a"].key.tolist(), db["a"].payload) == ([1, 2], {"vector": [3, 4]})


@advice("name the stored records: update(ids, …), or rows with a column of ids")
def test_an_update_needs_ids(folder: Path) -> Steps:
    with holding([[1, 1]], ids=["a"]) as db:
        yield lambda: db.update([{"year": 1}])
        db.update(["a"], payloads=[{"year": 1}])
        db.update([{"id": "a", "seen": 2}], merge=True)
        assert db["a"].payload == {"year": 1, "seen": 2}
