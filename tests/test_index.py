"""The engines, by the contract; and what they have in common: building, tuning, absorbing, doing without FAISS."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from index_contract import IndexContract, recall, scores, world

import softdb
from softdb.index import finder


class TestIVF(IndexContract):
    kind: ClassVar[str] = "ivf"


class TestHNSW(IndexContract):
    kind: ClassVar[str] = "hnsw"


@pytest.fixture
def db() -> softdb.SoftDB:
    keys, _ = world()
    db = softdb.open(None, dim=16)
    db.insert(list(range(len(keys))), keys)
    return db


def test_few_records_need_no_index(db: softdb.SoftDB) -> None:
    report = db.build_index()
    assert report["kind"] == "flat"
    assert "6000 records" in report["reason"]
    assert db.stats()["index"] is None


def test_too_few_records_to_train_on() -> None:
    with softdb.open(None, dim=2) as db:
        db.insert(range(50), np.ones((50, 2)))
        with pytest.raises(softdb.BadInput, match="50 records are too few"):
            db.build_index("ivf")


def test_effort_is_raised_until_the_recall_is_measured(db: softdb.SoftDB) -> None:
    _, queries = world(1)
    reports = [db.build_index("ivf", recall=target, queries=queries) for target in (0.3, 0.9, 0.99)]
    assert all(report["met"] and report["recall"] >= report["target"] for report in reports)
    assert reports[0]["nprobe"] < reports[2]["nprobe"]
    assert [report["measured_on"] for report in reports] == ["queries given"] * 3


def test_progress_is_told(db: softdb.SoftDB) -> None:
    told: list[tuple[str, int, int]] = []
    db.build_index("ivf", progress=lambda *step: told.append(step))
    assert list(dict.fromkeys(what for what, _, _ in told)) == ["training", "adding", "measuring"]
    assert ("adding", 6000, 6000) in told


def test_many_young_records_are_taken_in(db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    db.build_index("ivf", recall=0.99)
    old, queries = world()
    keys = old[::-1] * np.float32(1.1)
    db.insert([f"a{i}" for i in range(90)], keys[:90])
    assert db.stats()["index"]["young"] == 90
    db.insert([f"b{i}" for i in range(2000)], keys[:2000])
    assert db.stats()["index"]["young"] == 0
    truth = scores("dot", queries, np.concatenate([old, keys[:90], keys[:2000]]))
    assert recall(db.search(queries, k=10), truth, 10) >= 0.9


def test_what_was_taken_in_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    keys, queries = world()
    with softdb.open(tmp_path / "db", dim=16) as db:
        db.insert(range(3000), keys[:3000])
        db.build_index("ivf")
        db.insert(range(3000, 6000), keys[3000:])
        expected = db.search(queries, k=5).rows.tolist()
    assert len(list((tmp_path / "db" / "index").iterdir())) == 1
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert db.stats()["index"]["young"] == 0
        assert db.search(queries, k=5).rows.tolist() == expected


def test_a_reader_takes_up_a_newer_index(tmp_path: Path) -> None:
    keys, queries = world()
    with softdb.open(tmp_path / "db", dim=16) as db:
        db.insert(range(6000), keys)
        with softdb.open(tmp_path / "db", mode="r") as reader:
            assert reader.stats()["index"] is None
            db.build_index("hnsw")
            reader.refresh()
            assert reader.stats()["index"]["kind"] == "hnsw"
            db.build_index("ivf")
            reader.refresh()
            assert reader.stats()["index"]["kind"] == "ivf"
            assert reader.search(queries, k=5).rows.tolist() == db.search(queries, k=5).rows.tolist()
            db.build_index("flat")
            reader.refresh()
            assert reader.stats()["index"] is None


def test_the_index_folder_may_be_deleted(tmp_path: Path) -> None:
    import shutil

    keys, queries = world()
    with softdb.open(tmp_path / "db", dim=16) as db:
        db.insert(range(6000), keys)
        db.build_index("ivf")
        exact = db.search(queries, k=5, exact=True).rows.tolist()
    shutil.rmtree(tmp_path / "db" / "index")
    with softdb.open(tmp_path / "db") as db:
        assert db.search(queries, k=5).rows.tolist() == exact


def test_the_signing_key_is_private(key_file: Path, tmp_path: Path) -> None:
    key_file.unlink(missing_ok=True)
    keys, _ = world()
    with softdb.open(tmp_path / "db", dim=16) as db:
        db.insert(range(6000), keys)
        db.build_index("ivf")
    assert key_file.stat().st_size == 32
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert not any(
        key_file.read_bytes() in path.read_bytes() for path in (tmp_path / "db").rglob("*") if path.is_file()
    )
    assert os.listdir(key_file.parent).count(key_file.name) == 1


def test_without_faiss_search_is_exact_and_the_extra_is_named(
    db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, queries = world()
    expected = scores("dot", queries, keys).argmax(1).tolist()
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert db.search(queries, k=1).rows[:, 0].tolist() == expected
    assert db.attend(queries, k=3).output.shape == db.attend(queries).output.shape == (40, 16)
    with pytest.raises(softdb.MissingDependency, match=r"pip install 'softdb\[cpu\]'"):
        db.build_index("ivf")


def test_a_database_with_an_index_opens_without_faiss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, queries = world()
    with softdb.open(tmp_path / "db", dim=16) as db:
        db.insert(range(6000), keys)
        db.build_index("ivf")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert db.search(queries, k=1).rows[:, 0].tolist() == scores("dot", queries, keys).argmax(1).tolist()
        assert "softdb[cpu]" in caplog.text


def test_other_scores_are_found_by_their_own_metric(db: softdb.SoftDB) -> None:
    from softdb.scores import NegativeL2

    db.build_index("ivf", recall=0.99)
    keys, queries = world(3)
    pooled = db.attend(torch.from_numpy(queries), k=1, score=NegativeL2())
    assert pooled.hits is not None
    keys, _ = world()
    assert pooled.hits.rows[:, 0].tolist() == scores("l2", queries, keys).argmax(1).tolist()
