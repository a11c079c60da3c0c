"""A database opened without a width is a good database, and its first keys decide the width."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
import torch

import softdb
from softdb import nn
from softdb.formats import export_records, import_records, read_header, read_records
from softdb.store.format import setting_crc
from softdb.text import HashedNGrams

KEYS = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


def undecided(db: softdb.SoftDB) -> bool:
    """True if the database has no width yet."""
    return db.dim is None


def keyless(path: Path | None, **words: Any) -> softdb.SoftDB:
    """A database of three records without keys."""
    db = softdb.open(path, **words)
    db.insert(["a", "b"], keys=[None, None], payloads=[{"n": 1}, {"n": 2}], texts=["red", None])
    db.insert(["c"], payloads=[{"n": 3}])
    return db


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_the_first_keys_decide_the_width(tmp_path: Path, durability: Any) -> None:
    with softdb.open(tmp_path / "db", durability=durability) as db:
        assert undecided(db)
        assert db.stats().dim is None
        assert "dim undecided" in repr(db)
        db.insert(["a", "b", "c"], KEYS)
        assert (db.dim, db.value_dim, db.metric, db.dtype) == (5, None, "dot", "float32")
        np.testing.assert_array_equal(db.get(["c", "a"]).keys, KEYS[[2, 0]])
        assert db.search(KEYS[:1], k=3).scores.shape == (1, 3)
        with pytest.raises(softdb.BadInput, match="insert: keys are 4 wide but this database is 5 wide"):
            db.insert(["d"], KEYS[:1, :4])
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert db.dim == 5
        assert db.verify() == 3


def test_settings_may_change_until_there_are_keys(tmp_path: Path) -> None:
    keyless(tmp_path / "db", num_classes=3).close()
    with pytest.raises(softdb.BadInput, match=r"open: mode='r' changes no settings of a database; .*mode='rw'"):
        softdb.open(tmp_path / "db", mode="r", metric="cosine")
    softdb.open(tmp_path / "db", mode="r", dim=3, metric="dot").close()
    with softdb.open(tmp_path / "db", metric="cosine", dtype="float16", value_dim=2) as db:
        assert db.search("red", k=1).ids == db.search([1.0]).ids == [[]]
    with softdb.open(tmp_path / "db") as db:
        assert (db.metric, db.dtype, db.value_dim, db.num_classes, len(db)) == ("cosine", "float16", 2, None, 3)
        db.insert(["d"], KEYS[:1], values=[[1, 2]])
        assert torch.equal(torch.as_tensor(db["d"].value), torch.tensor([1.0, 2.0]))
        assert db["d"].key is not None
        assert db["d"].key.dtype is torch.float16
    settings: list[dict[str, Any]] = [{"metric": "l2"}, {"dtype": "float32"}, {"num_classes": 3}]
    for setting in settings:
        with pytest.raises(softdb.BadInput, match=f"{next(iter(setting))}=.* was asked for but this database has"):
            softdb.open(tmp_path / "db", **setting)
    with softdb.open(tmp_path / "db") as db:
        assert db.verify() == 4


@pytest.mark.parametrize("path", ["db", None])
def test_records_without_keys_leave_it_undecided(tmp_path: Path, path: str | None) -> None:
    with keyless(None if path is None else tmp_path / path) as db:
        assert undecided(db)
        assert db.get(["c", "a"]).keys.shape == (2, 0)
        assert db["a"].key is None
        assert db.count({"n": {"$gt": 1}}) == 2
        db.delete(["c"])
        db.upsert(["b"], payloads=[{"n": 9}])
        db.update(["a"], payloads=[{"n": 8}], texts=["blue"])
        db.compact()
        assert db.verify() == 2
        db.insert(["d"], KEYS[:1])  # after rows that no segment holds
        assert db.search(KEYS[:1], k=3).ids == [["d"]]
        db.update(["a"], KEYS[1:2])
        assert sorted(db.search(KEYS[:1], k=3).ids[0]) == ["a", "d"]
        assert db["a"].payload == {"n": 8}
        assert db["b"].payload == {"n": 9}
        db.compact()
        assert db.verify() == 3
    if path:
        with softdb.open(tmp_path / path) as db:
            assert db.get(["a", "d"]).keys.tolist() == KEYS[[1, 0]].tolist()


def test_an_update_may_give_the_first_key(tmp_path: Path) -> None:
    with keyless(tmp_path / "db", value_dim=2) as db:
        with pytest.raises(softdb.BadInput, match="has neither key nor value"):
            db.update(["a"], values=[[1.0, 2.0]])
        assert undecided(db)
        db.update(["a"], KEYS[:1], [[1.0, 2.0]])
        assert (db.dim, db.value_dim) == (5, 2)
        assert db["a"].payload == {"n": 1}
        np.testing.assert_allclose(db.attend(KEYS[:1]).output, [[1, 2]])


@pytest.mark.parametrize("first", ["insert", "upsert"])
@pytest.mark.parametrize("values", [{"value_dim": 2}, {"num_classes": 3}])
def test_a_first_batch_with_values(first: str, values: dict[str, int]) -> None:
    db, vectors = softdb.open(None, **values), "value_dim" in values  # type: ignore[arg-type]
    given = [[1.0, 2.0], None, [3.0, 4.0]] if vectors else [1, None, 2]
    getattr(db, first)(["a", "b", "c"], [KEYS[0], None, KEYS[2]], given)
    assert db.dim == 5
    np.testing.assert_array_equal(np.asarray(db.get(["c", "b"]).values), [[3, 4], [0, 0]] if vectors else [2, 0])
    with pytest.raises(softdb.BadInput, match="values are missing"):
        db.insert(["d"], KEYS[:1])


@pytest.mark.parametrize("values", [[0, 1, 2], np.ones((3, 4)), [[1.0], None, [2.0]]])
def test_values_without_a_column_are_refused(values: Any) -> None:
    db = softdb.open(None)
    with pytest.raises(softdb.BadInput, match="no value column; open one with value_dim= or num_classes="):
        db.insert(["a", "b", "c"], [KEYS[0], None if values[1] is None else KEYS[1], KEYS[2]], values)
    assert undecided(db)
    assert len(db) == 0


@pytest.mark.parametrize("keys", [np.ones((3, 0)), [[], [], []], [[1, 2], [1], [2]], 3.0, [[np.nan, 1]] * 3])
def test_keys_that_decide_no_width_are_refused(keys: Any) -> None:
    db = softdb.open(None)
    with pytest.raises(softdb.BadInput, match="keys"):
        db.insert(["a", "b", "c"], keys)
    assert undecided(db)
    db.insert(["a"], KEYS[:1])
    assert db.dim == 5


def test_a_refused_first_batch_decides_nothing(tmp_path: Path) -> None:
    with keyless(tmp_path / "db") as db:
        with pytest.raises(softdb.DuplicateId):
            db.insert(["x", "a"], KEYS[:2])
        assert undecided(db)
        db.insert(["y"], payloads=[1])
        db.insert(["x"], KEYS[:1, :2])
        assert db.dim == 2
        assert db.verify() == 5


def test_an_undecided_database_answers_or_says_why_not(tmp_path: Path) -> None:
    for db in (softdb.open(None), keyless(tmp_path / "db")):
        assert db.search(np.zeros((2, 7)), k=3).ids == [[], []]
        assert db.search([1.0, 2.0], radius=0.5).ids == [[]]
        assert db.search([1.0, 2.0], where={"n": 1}, exact=True).ids == [[]]
        assert db.build_index().kind == "flat"
        db.index_text()
        hits = db.search(texts="red", mode="text").ids
        assert db.search([1.0, 2.0], texts="red", mode="hybrid").ids == hits == [["a"] if len(db) else []]
        asks: list[Callable[[], Any]] = [
            lambda db=db: db.attend([1.0, 2.0]), lambda db=db: db.attend([1.0, 2.0], k=1),  # type: ignore[misc]
            lambda db=db: db.sample([1.0, 2.0]), lambda db=db: nn.Attention(db, 4, 1),  # type: ignore[misc]
            lambda db=db: nn.Memory(db), lambda db=db: nn.View(db, lambda keys: keys),  # type: ignore[misc]
        ]  # fmt: skip
        for ask in asks:
            with pytest.raises(softdb.BadInput, match="no keys yet, so their width is undecided"):
                ask()
        with pytest.raises(softdb.BadInput, match=r"queries are of shape \(\)"):
            db.search(np.float32(1))


def test_a_reader_learns_the_width(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r") as reader:
        assert reader.search(KEYS[:1]).ids == [[]]
        db.insert(["a", "b", "c"], KEYS)
        assert undecided(reader)
        reader.refresh()
        assert reader.dim == 5
        assert reader.search(KEYS[1:2], k=3).ids == db.search(KEYS[1:2], k=3).ids


def test_copies_of_an_undecided_database_are_undecided(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="exports a table, too")
    with keyless(tmp_path / "db", metric="l2") as db:
        db.snapshot(tmp_path / "copy")
        for name in ("out.jsonl", "out.parquet"):
            export_records(db, tmp_path / name)
    header = read_header(tmp_path / "out.jsonl")
    assert header is not None
    assert header.dim is None
    for name in ("out.jsonl", "out.parquet"):
        with softdb.open(None, **header.schema) as other:
            import_records(other, read_records(tmp_path / name))
            assert (other.dim, other.metric, len(other)) == (None, "l2", 3)
            assert other["a"].text == "red"
    assert softdb.salvage(tmp_path / "db", tmp_path / "saved")["records"] == 3
    for copy in ("copy", "saved"):
        with softdb.open(tmp_path / copy) as other:
            assert undecided(other)
            other.insert(["d"], KEYS[:1])
            assert other.verify() == 4


def test_a_later_opening_may_decide(tmp_path: Path) -> None:
    keyless(tmp_path / "db").close()
    with softdb.open(tmp_path / "db", mode="r", dim=7, encoder=HashedNGrams(7)) as db:
        assert undecided(db)
    with softdb.open(tmp_path / "db", dim=7, value_dim=2) as db:
        assert (db.dim, db.value_dim) == (7, 2)
    with pytest.raises(softdb.BadInput, match="dim=5 was asked for but this database has 7"):
        softdb.open(tmp_path / "db", dim=5)
    with pytest.raises(softdb.BadInput, match="metric=l2 was asked for"):
        softdb.open(tmp_path / "db", metric="l2")


def test_reembedding_decides(tmp_path: Path) -> None:
    for path in (tmp_path / "db", None):
        with softdb.open(path) as db:
            db.insert([1, 2], keys=[None, None], texts=["the cat sleeps", "a dog barks"])
            db.reembed("ngrams")
            assert (db.dim, db.encoder_name) == (256, "ngrams")
            assert db.search("sleeping cats", k=1).ids == [[1]]
            db.insert([3], texts=["cats"])
            assert db.verify() == 3


def test_of_two_widths_at_once_the_first_stays() -> None:
    for _ in range(10):
        db, outcomes, barrier = softdb.open(None), dict[int, object](), threading.Barrier(4)

        def insert(width: int, db: softdb.SoftDB = db, into: Any = outcomes, barrier: Any = barrier) -> None:
            barrier.wait()
            try:
                db.insert([width], np.ones((1, width)))
                into[width] = None
            except softdb.BadInput as refused:
                into[width] = str(refused)

        threads = [threading.Thread(target=insert, args=(width,)) for width in (2, 3, 4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [width for width, outcome in outcomes.items() if outcome is None]
        assert winners == [db.dim]
        assert list(db.get(winners).ids) == winners
        assert sum(f"this database is {db.dim} wide" in str(outcome) for outcome in outcomes.values()) == 3


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_killed_writer_leaves_it_as_committed(tmp_path: Path, commits: int) -> None:
    child = os.fork()
    if not child:
        db = softdb.open(tmp_path / "db")
        if commits:
            db.insert(["a"], payloads=[1])
        if commits == 2:
            db.insert(["b"], KEYS[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with softdb.open(tmp_path / "db", mode="r") as reader:
        assert (reader.dim, len(reader)) == (5 if commits == 2 else None, commits)
    with softdb.open(tmp_path / "db") as db:
        db.insert(["c"], KEYS[1:2])
        assert db.dim == 5
        assert db.verify() == commits + 1


def test_a_width_of_null_beside_a_segment_is_refused(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db") as db:
        db.insert(["a"], KEYS[:1])
    connection = apsw.Connection(str(tmp_path / "db" / "catalog.sqlite"))
    row = ("dim", None, setting_crc("dim", None))
    connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?, ?)", row)
    connection.close()
    with pytest.raises(softdb.CorruptionError, match=r"keys-00000000\.npy has"):
        softdb.open(tmp_path / "db", mode="r")
