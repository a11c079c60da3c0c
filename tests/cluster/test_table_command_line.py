"""The command line on a cluster's table prints the same as on one database of the same records."""

from __future__ import annotations

import json
import shutil
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("typer", reason="the command line is typer's")

from rich.console import Console
from typer.testing import CliRunner, Result

import softdb
from softdb import cluster
from softdb.formats import Rows, read_records
from softdb.opening import table_at
from softdb.tools.cli.commands import app

N, DIM = 200, 6
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
ASKED = json.dumps(KEYS[3].tolist())


def run(*words: object, code: int = 0, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def answer(*words: object, stdin: str | None = None) -> Any:
    return json.loads(run(*words, "--json", stdin=stdin).stdout)


def error(*words: object, code: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", code=code).stderr)["error"]
    return found


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One database and a cluster's table of the same records; half of the ids read as numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ids = [f"r{i}" if i % 2 else str(i) for i in range(N)]
    given: Any = {"values": np.eye(3)[np.arange(N) % 3], "payloads": [{"n": i, "odd": i % 2} for i in range(N)]}
    words: Any = {"dim": DIM, "value_dim": 3, "metric": "cosine"}
    with softdb.open(tmp_path / "one", **words) as one, cluster.create(tmp_path / "t.lance", shards=4, **words) as db:
        one.insert(ids, KEYS, **given, texts=[f"text {i}" for i in range(N)])
        db.insert(ids, KEYS, **given, texts=[f"text {i}" for i in range(N)])
    return tmp_path / "one", tmp_path / "t.lance"


def alike(found: Any, right: Any) -> None:
    """Equal, numbers but for rounding."""
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        for name, part in right.items():
            alike(found[name], part)
    elif isinstance(right, list):
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            alike(one, other)
    elif isinstance(right, float):
        assert found == pytest.approx(right, rel=1e-5, abs=1e-6)
    else:
        assert found == right


READS: list[tuple[object, ...]] = [
    ("get", "r1", "4", '"8"'),
    ("count",),
    ("count", "--where", '{"odd": 1}'),
    ("search", ASKED, "-k", 7, "--where", '{"odd": 1}', "--exclude", "r3", "--offset", 1),
    ("search", ASKED, "--radius", 0.5),
    ("search", ASKED, "-k", 3, "--exact"),
    ("attend", ASKED, "--temperature", 0.2),
    ("attend", ASKED, "-k", 9, "--where", '{"odd": 0}'),
]


def test_reading_commands_print_the_same_as_for_one_database(places: tuple[Path, Path]) -> None:
    one, table = places
    for command, *words in READS:
        actual, right = (answer(command, place, *words) for place in (table, one))
        alike(actual, right)
        assert right not in ([], {})
        if command == "attend" and "-k" in words:
            assert 0.1 < right[0]["missed_mass"] < 1
            assert "of all weight missed" in run(command, table, *words).stdout
    assert error("get", table, "nobody", code=3) == error("get", one, "nobody", code=3)
    lines = f"{ASKED}\n{json.dumps(KEYS[5].tolist())}\n"
    alike(*(answer("search", place, "-", "-k", 2, stdin=lines) for place in (table, one)))
    facts, other = (answer("info", place) for place in (table, one))
    for name in ("records", "dim", "value_dim", "metric", "keyless", "encoder"):
        assert facts[name] == other[name]
    assert facts["path"] == str(table)
    assert "r3" in run("search", table, ASKED).stdout


def test_writing_commands_change_the_same_as_in_one_database(places: tuple[Path, Path], tmp_path: Path) -> None:
    new = json.dumps({"id": "new", "key": KEYS[0].tolist(), "value": [0, 0, 1], "payload": {"n": -1}, "text": "a"})
    again = new.replace('"n": -1', '"n": -2')
    for place in places:
        assert answer("insert", place, stdin=new + "\n") == {"inserted": 1, "records": N + 1}
        assert error_of_insert(place, new)["type"] == "DuplicateId"
        assert answer("insert", place, "--upsert", stdin=again + "\n") == {"inserted": 1, "records": N + 1}
        assert answer("get", place, "new")[0]["payload"] == {"n": -2}
        assert answer("delete", place, "r1", "7000", "nobody") == {"deleted": 1, "records": N}
        assert answer("delete", place, "--where", '{"n": {"$lt": 10}}') == {"deleted": 10, "records": N - 10}
        (tmp_path / "more.jsonl").write_text(new + "\n" + new.replace('"new"', '"newer"') + "\n")
        assert answer("import", place, tmp_path / "more.jsonl", "--value", "value") == {"imported": 2, "records": N - 8}
        assert "differ" not in run("import", place, tmp_path / "more.jsonl", "--value", "value", "--upsert").output
    alike(*(answer("search", place, ASKED, "-k", 5) for place in places))
    report = answer("compact", places[1])
    assert (report["records"], report["segments"]) == (N - 8, 1)
    assert report["segments_before"] > 1
    assert report["removed"] > 0
    alike(*(answer("search", place, ASKED, "-k", 5) for place in places))


def error_of_insert(place: Path, line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("insert", place, "--json", code=1, stdin=line + "\n").stderr)["error"]
    return found


def test_training_brings_the_same_projection(places: tuple[Path, Path], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    turned = np.roll(KEYS[:60], 1, axis=1).tolist()
    rows = [{"query": turned[i], "positives": f"r{i}" if i % 2 else str(i)} for i in range(60)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--epochs", 4, "--lr", 0.05, "--patience", 0, "--temperature", 0.2)
    one, table = (answer("train", place, pairs, "--out", tmp_path / f"{place.name}.pt", *words) for place in places)
    assert one["after"]["mrr_100"] > one["before"]["mrr_100"]
    assert one.pop("projection") != table.pop("projection")
    for each in (one, table):
        for epoch in each["history"]:
            epoch["loss"] = round(epoch["loss"], 4)
    alike(table, one)
    projected = ("--projection", tmp_path / "t.lance.pt")
    alike(*(answer("search", place, json.dumps(turned[5]), *projected) for place in places))
    refused = error("train", places[1], pairs, "--out", tmp_path / "no.pt", "--keys")
    assert refused["type"] == "BadInput"
    assert "softdb snapshot" in refused["message"]


def test_a_snapshot_is_one_database_and_an_index_stays(places: tuple[Path, Path], tmp_path: Path) -> None:
    one, table = places
    assert answer("snapshot", table, tmp_path / "copy")["records"] == N
    assert answer("verify", tmp_path / "copy") == {"records": N}
    alike(*(answer("search", place, ASKED) for place in (tmp_path / "copy", one)))
    pytest.importorskip("faiss", reason="an index is FAISS's")
    with cluster.create(tmp_path / "large.lance", dim=DIM, shards=2, ids="int") as db:
        db.insert(range(2600), np.random.default_rng(1).normal(size=(2600, DIM)))
    reports = answer("index", tmp_path / "large.lance", "--kind", "hnsw")
    assert [report["kind"] for report in reports] == ["hnsw"] * 2
    assert sum(report["records"] for report in reports) == 2600
    assert answer("info", tmp_path / "large.lance")["index"]["kind"] == "hnsw"


def exported(file: Path) -> list[Any]:
    """Records of an exported file by id."""
    found = [one for rows in read_records(file) for one in rows_of(rows)]
    return sorted(found, key=lambda one: str(one[0]))


def rows_of(rows: Rows) -> list[Any]:
    columns = (rows.keys, [None] * len(rows) if rows.values is None else rows.values)
    keys, values = ([None if one is None else np.asarray(one).tolist() for one in column] for column in columns)
    return list(zip(rows.ids, keys, values, rows.payloads, rows.texts, strict=True))


def test_an_export_holds_the_same_and_makes_the_same_database(places: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is pyarrow's")
    line = '{"id": "bare", "text": "no key"}\n'
    for place in places:
        answer("insert", place, stdin=line)
    for suffix in (".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".lance"):
        one, table = (tmp_path / f"{place.stem}-out{suffix}" for place in places)
        for place, file in zip(places, (one, table), strict=True):
            assert answer("export", place, file) == {"records": N + 1, "file": str(file)}
        assert exported(table) == exported(one)
        assert next(read_records(table)).header == next(read_records(one)).header
    answer("import", tmp_path / "again", tmp_path / "t-out.parquet")
    with softdb.open(places[0], mode="r") as right, softdb.open(tmp_path / "again", mode="r") as again:
        names = [one.id for one in right.get([f"r{i}" if i % 2 else str(i) for i in range(N)])] + ["bare"]
        mine, own = again.get(names), right.get(names)
        assert (again.core.header, len(again)) == (right.core.header, len(right))
        assert torch.equal(mine.keys, own.keys)
        assert torch.equal(mine.keyed, own.keyed)
        assert own.values is not None
        assert mine.values is not None
        assert torch.equal(mine.values[:-1], own.values[:-1])
        assert (mine.payloads, mine.texts) == (own.payloads, own.texts)
    odd = ("--where", '{"odd": 1}')
    printed = [sorted(run("export", place, "-", *odd).stdout.splitlines()) for place in places]
    assert len(printed[0]) == N // 2 + 1
    assert printed[0] == printed[1]


def test_integer_ids_and_an_empty_table_are_exported(tmp_path: Path, places: tuple[Path, Path]) -> None:
    with cluster.create(tmp_path / "whole.lance", dim=DIM, shards=2, ids="int", num_classes=3) as db:
        answer("export", tmp_path / "whole.lance", tmp_path / "none.parquet")
        db.insert(range(5), KEYS[:5], [0, 1, 2, 0, 1])
    answer("export", tmp_path / "whole.lance", tmp_path / "some.npz")
    with np.load(tmp_path / "some.npz") as found:
        order = np.argsort(found["ids"])
        assert found["ids"][order].tolist() == [0, 1, 2, 3, 4]
        assert np.array_equal(found["keys"][order], KEYS[:5])
        assert found["values"][order].tolist() == [0, 1, 2, 0, 1]
    with cluster.open(tmp_path / "whole.lance", "r") as db:
        table = db.to_arrow(["id", "value"]).sort_by("id")
        assert table.to_pydict() == {"id": [0, 1, 2, 3, 4], "value": [0, 1, 2, 0, 1]}
    assert list(read_records(tmp_path / "none.parquet")) == []


def test_a_terminal_shows_progress_while_shards_are_built(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table, shown = places[1], StringIO()
    console = Console(file=shown, force_terminal=True, width=120)

    def told(folder: str, *words: object) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))  # where no shard is made yet
        shown.seek(0)
        shown.truncate()
        run(*words)
        return shown.getvalue()

    piped = run("count", table).output
    assert piped == f"{N}\n"
    assert told("piped", "count", table) == ""
    monkeypatch.setattr("softdb.terminal.terminal", lambda stderr=False: console)
    assert told("json", "count", table, "--json") == ""
    for folder, *words in (("search", "search", table, ASKED), ("delete", "delete", table, "none")):
        actual = told(str(folder), *words)
        assert "shards" in actual
        assert f"{N}/{N}" in actual
        assert "shards" not in told(str(folder), *words), "every one is there"


@pytest.mark.parametrize("words", [("tune",), ("fields",), ("reembed", "--encoder", "ngrams")], ids=str)
def test_commands_that_need_one_database_refuse_a_table(places: tuple[Path, Path], words: tuple[str, ...]) -> None:
    command, *others = words
    refused = error(command, places[1], *others)
    assert refused["type"] == "NotADatabase"
    assert f"'softdb snapshot {places[1]} DIRECTORY'" in refused["message"]


def test_verify_compares_the_shards_with_the_table(places: tuple[Path, Path]) -> None:
    assert answer("verify", places[1]) == {"records": N}


def test_questions_that_a_cluster_cannot_answer_are_errors(places: tuple[Path, Path]) -> None:
    for words in (("search", places[1], "text 3", "--mode", "text"), ("search", places[1], ASKED, "--group-by", "odd")):
        assert "a cluster does not search" in error(*words)["message"]
    assert "created with" not in error("import", places[1], places[0])["message"]


def test_a_missing_extra_is_named(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    for command in ("count", "info", "compact"):
        assert error(command, places[1]) == {
            "type": "MissingDependency",
            "message": "a cluster needs lance; pip install 'softdb[cluster]'",
            "code": 1,
        }


def test_ray_answers_where_its_address_is_known(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def opened(url: str, mode: str, **words: Any) -> Any:
        asked.update(words, url=url, mode=mode)
        raise softdb.BadInput("that will do")

    monkeypatch.setattr(cluster, "open", opened)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert error("count", "s3://bucket/records.lance")["message"] == "that will do"
    assert (asked["url"], asked["mode"], asked["on"]) == ("s3://bucket/records.lance", "r", "ray")
    monkeypatch.delenv("RAY_ADDRESS")
    error("delete", places[1], "r1")
    assert (asked["url"], asked["mode"], asked["on"]) == (str(places[1]), "rw", "here")


def test_a_path_that_names_a_table(places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, table = places
    assert (table_at(one), table_at(table), table_at(tmp_path / "none")) == (None, str(table), None)
    assert table_at("s3://bucket/a/t.lance") == table_at(Path("s3://bucket/a/t.lance")) == "s3://bucket/a/t.lance"
    with pytest.raises(softdb.NotADatabase, match=r"open: s3://bucket/t is a Lance table"):
        softdb.open("s3://bucket/t", dim=3)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(one, "gs:/copy")
    assert table_at("gs:/copy") is None
    shutil.copytree(table / "_versions", one / "_versions")  # a stranger's folder in a database
    assert table_at(one) is None
    assert answer("count", one) == {"count": N}
