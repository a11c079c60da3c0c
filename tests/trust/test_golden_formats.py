"""Golden directories: a database of each released format version opens in every later version."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from tap import Failing, tapped

import softdb
from softdb.store.format import FORMAT

GOLDEN = Path(__file__).parents[1] / "golden"
DIRECTORIES = sorted(path.parent for path in GOLDEN.glob("format-*/*/expected.json"))


@pytest.fixture(params=DIRECTORIES, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request: pytest.FixtureRequest, tally: Counter[str]) -> Path:
    tally["golden directories opened"] += 1
    path: Path = request.param
    return path


@pytest.fixture
def path(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden / "db", tmp_path / "db")


@pytest.fixture
def expected(golden: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((golden / "expected.json").read_text())
    return found


def holds(db: softdb.SoftDB, expected: dict[str, Any]) -> None:
    """Assert that the database holds exactly these records in this order, by every kind of question."""
    stats, records = db.stats(), expected["records"]
    assert {name: getattr(stats, name) for name in expected["schema"]} == expected["schema"]
    assert stats.fields == expected["fields"]
    assert db.verify() == len(db) == db.count() == db.count({}) == len(records)
    ids = [record["id"] for record in records]
    for actual in (*db.scan(len(records)), db.get(ids)):
        assert actual.ids == ids
        keyed = actual.keyed.tolist()
        assert keyed == [record["key"] is not None for record in records]
        same(actual.keys[actual.keyed], [record["key"] for record in records if record["key"] is not None])
        same(np.asarray(actual.values)[keyed], [record["value"] for record in records if record["key"] is not None])
        assert actual.texts == [record["text"] for record in records]
        # as text: 1, 1.0 and true are equal in Python
        assert [json.dumps(payload) for payload in actual.payloads] == [
            json.dumps(record["payload"]) for record in records
        ]
    years = [record["id"] for record in records if isinstance(record["payload"], dict) and "year" in record["payload"]]
    assert [one for part in db.scan(where={"year": {"$exists": True}}) for one in part.ids] == years
    assert db.text_index == expected["text_index"]
    for word in ("the", "golden", "log"):
        having = {record["id"] for record in records if record["text"] and word in record["text"]}
        assert {hit.id for hit in db.search(texts=word, mode="text", k=len(ids))[0]} == having
    hits = db.search(np.ones((1, stats.dim)), k=len(ids))
    assert sorted(map(repr, hits.ids[0])) == sorted(
        repr(record["id"]) for record in records if record["key"] is not None
    )


def same(found: Any, expected: list[Any]) -> None:
    """Return whether two arrays are equal to the bit: -0.0 is not 0.0."""
    column = np.asarray(found)
    assert column.tobytes() == np.array(expected).astype(column.dtype).tobytes()


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_golden_directory_opens_with_its_records(path: Path, expected: dict[str, Any], mode: Any) -> None:
    for _ in range(2):
        with softdb.open(path, mode=mode, verify=True) as db:
            holds(db, expected)


def test_a_reader_leaves_the_files_as_they_are(path: Path, golden: Path, expected: dict[str, Any]) -> None:
    with softdb.open(path, mode="r") as db:
        holds(db, expected)
    for file in filter(Path.is_file, (golden / "db").rglob("*")):
        assert (path / file.name).read_bytes() == file.read_bytes(), f"{file.name} was changed by a reader"


def test_a_reader_copies_a_golden_directory(path: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    with softdb.open(path, mode="r") as db:
        db.snapshot(tmp_path / "copy")
    for mode in ("r", "rw"):
        with softdb.open(tmp_path / "copy", mode=mode, verify=True) as db:
            holds(db, expected)


def test_a_golden_directory_opens_on_read_only_media(
    path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = path / "catalog.sqlite-wal"
    path.chmod(0o555)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # as for others than root
    try:
        if log.exists() and log.stat().st_size:  # its commits cannot be read there, and must not be passed over
            with pytest.raises(softdb.NotADatabase, match="open the database once for writing"):
                softdb.open(path, mode="r")
        else:
            with softdb.open(path, mode="r") as db:
                holds(db, expected)
    finally:
        path.chmod(0o755)


def test_a_reader_keeps_its_generation_while_a_writer_continues(path: Path, expected: dict[str, Any]) -> None:
    with softdb.open(path, mode="r") as before, softdb.open(path) as writer, softdb.open(path, mode="r") as after:
        for db in (before, after):
            holds(db, expected)
        written(writer, expected["records"])
        for db in (before, after):
            db.refresh()
            holds(db, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dead", [False, True])
def test_an_opening_that_fails_at_any_step_loses_no_record(
    golden: Path, expected: dict[str, Any], tmp_path: Path, dead: bool, tally: Counter[str]
) -> None:
    for at in itertools.count(1):
        path = shutil.copytree(golden / "db", tmp_path / f"db{at}")
        tap = Failing(lambda _, n, at=at: n == at or (dead and n > at))  # type: ignore[misc]
        # apsw.Error: our VFS is in Python, and apsw raises there what SQLite passes over when it closes
        with tapped(tap, inside=path), contextlib.suppress(softdb.SoftDBError, OSError, apsw.Error):
            softdb.open(path).close()
        left = path.rename(tmp_path / f"left{at}")
        for mode in ("r", "rw"):
            with softdb.open(shutil.copytree(left, tmp_path / f"{mode}{at}"), mode=mode) as db:
                holds(db, expected)
        tally["golden directories: faults while opening"] += tap.seen >= at
        if tap.seen < at:
            break
    assert at > 3, "no step was made to fail"


def test_a_golden_directory_is_written_compacted_copied_and_reopened(
    path: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    records = expected["records"]
    with softdb.open(path) as db:
        for step in (written, removed, replaced):
            step(db, records)
            holds(db, expected)
            db.compact()
            holds(db, expected)
        db.snapshot(tmp_path / "copy")
    for place in (path, tmp_path / "copy"):
        for mode in ("r", "rw"):
            with softdb.open(place, mode=mode, verify=True) as db:
                holds(db, expected)


def written(db: softdb.SoftDB, records: list[dict[str, Any]]) -> None:
    """Two new records, and one in the place of the first."""
    width = db.stats().dim
    for i, one in enumerate(("golden", 77_777, records[0]["id"])):
        fresh = {**records[1], "id": one, "key": [float(i)] * width, "payload": {"year": i}, "text": "golden"}
        db.upsert([one], [fresh["key"]], [fresh["value"]], [fresh["payload"]], texts=["golden"])
        records[:] = [*(record for record in records if record["id"] != one), fresh]


def removed(db: softdb.SoftDB, records: list[dict[str, Any]]) -> None:
    """A third of the records, by id and by filter."""
    gone = [record["id"] for record in records[::3]]
    assert db.delete(gone) == len(gone)
    records[:] = [record for i, record in enumerate(records) if i % 3]
    old = [
        record for record in records if isinstance(record["payload"], dict) and record["payload"].get("year") == 2020
    ]
    assert db.delete(where={"year": 2020}) == len(old)
    records[:] = [record for record in records if record not in old]


def replaced(db: softdb.SoftDB, records: list[dict[str, Any]]) -> None:
    """One payload."""
    db.update([records[0]["id"]], payloads=[{"year": "none"}])
    records[0]["payload"] = {"year": "none"}


def test_every_format_has_its_directories() -> None:
    made = {path.parent.name for path in DIRECTORIES}
    assert made == {f"format-{number}" for number in range(1, FORMAT + 1)}, "run tests/golden/make.py once a format"


def test_the_golden_files_are_those_that_were_released() -> None:
    spec = importlib.util.spec_from_file_location("make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.digests() == make.SUMS.read_text(), "a golden directory was changed; restore it from the repository"


def test_the_golden_files_stay_small() -> None:
    for folder in GOLDEN.glob("format-*"):
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 300_000, folder.name
