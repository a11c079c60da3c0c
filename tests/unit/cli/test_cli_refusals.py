"""Errors of the command line are one line, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from typed import ROOT, answer, fails, lines, run

import softdb
from softdb.tools.cli.endings import as_typed

pytest_plugins = ["command_world"]


@pytest.mark.parametrize("command", ["info", "verify", "index", "tune", "compact", "fields"])
def test_paths_without_a_database_are_named(tmp_path: Path, command: str) -> None:
    assert "nothing holds no database" in fails(command, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").touch()
    assert "file is a file" in fails(command, tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs").touch()
    assert "other is another program's directory" in fails(command, tmp_path / "other")


def test_queries_that_cannot_serve(book: Path, plane: Path, tmp_path: Path) -> None:
    assert "queries are 3 wide but this database's keys are 2 wide" in fails("search", plane, "[1, 2, 3]")
    assert "queries have 3 dimensions; expected one query (d,) or several (q, d)" in fails(
        "attend", plane, "[[[1, 2]]]"
    )
    assert "QUERY starts with [ but is not JSON" in fails("search", plane, "[1, 2")
    assert "queries mix text and numbers" in fails("search", book, '["a", 1]', "--encoder", "ngrams")
    assert "no.npy cannot be read as an array of numbers" in fails("search", plane, f"@{tmp_path / 'no.npy'}")
    assert "stores no name of an encoder; add --encoder" in fails("search", plane, "east")
    assert "made by the encoder 'ngrams', not 'demo'" in fails("search", book, "Schulz", "--encoder", "demo")
    assert "temperature is 0.0; expected a finite number above 0" in fails(
        "attend", plane, "[1, 0]", "--temperature", 0
    )


def test_a_missing_encoder_package_is_named(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    error = fails("search", plane, "east", "--encoder", "minilm")
    assert "the encoder 'minilm' needs sentence-transformers; pip install 'softdb[text]'" in error


def test_searches_that_contradict_themselves(plane: Path) -> None:
    asked = ("search", plane, "[1, 0]")
    assert "--radius and -k are both given" in fails(*asked, "--radius", 1, "-k", 2)
    assert "--radius and --diversity are both given" in fails(*asked, "--radius", 1, "--diversity", 0.5)
    assert "radius is nan; expected the least score" in fails(*asked, "--radius", "nan")
    assert "diversity is 2.0; expected a number from 0 to 1" in fails(*asked, "--diversity", 2)
    assert "--fetch-k is 9 without --diversity" in fails(*asked, "--fetch-k", 9)
    assert "--fetch-k is 1 but -k is 10" in fails(*asked, "--diversity", 0.5, "--fetch-k", 1)


def test_indexes_that_cannot_be(vectors: Path, plane: Path, tmp_path: Path) -> None:
    ivf = ("index", vectors, "--kind", "ivf")
    assert "no.npy cannot be read as an array of numbers" in fails(*ivf, "--queries", tmp_path / "no.npy")
    np.savez(tmp_path / "two.npz", np.zeros(2), np.zeros(3))
    assert "two.npz holds several arrays" in fails(*ivf, "--queries", tmp_path / "two.npz")
    np.save(tmp_path / "wide.npy", np.zeros((3, 17)))
    assert "queries are 17 wide but this database's keys are 16 wide" in fails(*ivf, "--queries", tmp_path / "wide.npy")
    assert "memory is 'much'; expected a number of bytes" in fails(*ivf, "--memory", "much")
    assert "memory is 9 bytes, but the smallest index of kind 'ivf'" in fails(*ivf, "--memory", 9)
    assert "recall is 2.0; expected a share" in fails(*ivf, "--recall", 2)
    assert "4 records are too few to train an index on" in fails("index", plane, "--kind", "ivf")
    assert fails("tune", vectors).endswith("there is no index to tune; build one: softdb index PATH")
    run(*ivf)
    assert "recall is 0.0; expected a share above 0" in fails("tune", vectors, "--recall", 0)


def test_copies_and_fields_that_cannot_be(book: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").touch()
    assert "is a directory that is not empty" in fails("snapshot", book, tmp_path / "full")
    assert "is inside the database" in fails("snapshot", book, book / "copy")
    assert "nothing holds no database" in fails("snapshot", tmp_path / "nothing", tmp_path / "copy")
    assert "field 'year' has no index; indexed fields: none" in fails("fields", book, "--drop", "year")
    assert "field 'nope' has no index" in fails("fields", book, "--add", "year", "--drop", "nope")
    assert answer("fields", book) == []  # nothing was added either
    with softdb.open(book):
        for command in (("compact", book), ("fields", book, "--add", "year"), ("tune", book), ("index", book)):
            assert "is being written by process" in fails(*command, code=4)


def test_filters_that_cannot_serve(book: Path) -> None:
    assert "unknown operator '$gtt'" in fails("search", book, "x", "--where", '{"year": {"$gtt": 1}}')
    assert "--where is not JSON" in fails("attend", book, "x", "--where", "{year: 1}")
    assert "where is [1]; expected a dict" in fails("export", book, book.parent / "x.jsonl", "--where", "[1]")


def test_imports_that_cannot_serve(tmp_path: Path, book: Path) -> None:
    path = tmp_path / "db"
    assert "no.jsonl does not exist" in fails("import", path, tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl holds no records" in fails("import", path, tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("{")
    assert "bad.jsonl line 1: not JSON" in fails("import", path, tmp_path / "bad.jsonl")
    file = tmp_path / "book.jsonl"
    error = fails("import", path, file)
    seen = "['name', 'first', 'year'], name the right one"
    assert f"book.jsonl line 1: no field 'key' for the key; its fields are {seen}: softdb" in error
    command = f"softdb import {path} {file} --keys KEYS.npy"  # names of one word may be labels
    assert error.endswith(f'{command} (or --key with a column of vectors, as in "[1, 2]")')
    assert "--keys goes with one FILE, but 2 are given" in fails("import", path, file, file, "--keys", file)
    labels = lines(tmp_path / "l.jsonl", [{"id": 1, "key": [1], "y": 1}])
    assert "give the number of classes with --num-classes" in fails("import", path, labels, "--value", "y")
    assert not path.exists()  # nothing that could not be read has made a database
    assert "id 1 is stored already" in fails("import", book, file, "--text", "name")
    assert "--metric l2 was asked for" in fails("import", book, file, "--text", "name", "--metric", "l2")
    assert answer("info", book)["records"] == 3


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"name": "a", "vec": [1, 2]}, "--row-ids --key vec"),
        ({"doc_id": "d", "year": 5}, "--id doc_id --keys KEYS.npy"),
        ({"doc_id": "d", "key": [1]}, "--id doc_id"),
        ({"id": "d", "x0": 0.5, "label": "c0"}, "--keys KEYS.npy"),
        ({"id": "d", "title": "a title", "body": "a longer text"}, "--text body --encoder ngrams"),
    ],
)
def test_an_import_without_ids_or_keys_says_what_to_type(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    error = fails("import", tmp_path / "db", lines(tmp_path / "r.jsonl", [row]))
    command = error.split(": softdb ")[1].split(" (or ")[0].split()
    assert command == ["import", str(tmp_path / "db"), str(tmp_path / "r.jsonl"), *words.split()]
    if "KEYS.npy" in command:
        np.save(tmp_path / "KEYS.npy", [[1.0, 2.0]])
        command[-1] = str(tmp_path / "KEYS.npy")
    assert run(*command).stdout.startswith("1 record imported")


def test_messages_name_options_in_place_of_arguments() -> None:
    names = ("recall", "radius", "k", "fetch_k", "dim")
    options = [click.Option(["-k" if name == "k" else f"--{name.replace('_', '-')}"]) for name in names]
    command = click.Command("index", params=[click.Argument(["field"]), *options])
    expected = {
        "build_index: recall is 2.0": "index: --recall is 2.0",
        "radius and k are both given (2, 3); give one": "--radius and -k are both given (2, 3); give one",
        "give fetch_k, or field= and dim=3; lower k": "give --fetch-k, or field= and --dim 3; lower -k",
        "no index; db.build(), or on a shell softdb index PATH, makes one": "no index; softdb index PATH makes one",
        "records are kept; the radius of k": "records are kept; the radius of k",
        "the word fetch_kind, a dim light": "the word fetch_kind, a dim light",
    }
    assert {message: as_typed(message, command) for message in expected} == expected


def test_records_before_a_bad_line_stay_imported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    good = [json.dumps({"id": i, "key": [i]}) for i in range(5)]
    path.write_text("\n".join([*good, "{oops", "{}"]))
    error = fails("import", tmp_path / "db", path, "--batch-size", 2)
    assert "r.jsonl line 6: not JSON" in error
    assert error.endswith("the 5 records before are in the database")
    assert answer("info", tmp_path / "db")["records"] == 5


def test_a_second_writer_is_refused(book: Path) -> None:
    with softdb.open(book):
        words = ("import", book, book.parent / "book.jsonl", "--text", "name")
        assert "is being written by process" in fails(*words, code=4)
        assert answer("info", book)["records"] == 3  # reading still works


def test_the_demo_leaves_other_directories_alone(book: Path) -> None:
    assert "exists and is not a demo database" in fails("demo", book)
    assert "exists and is not a demo database" in fails("demo", book, "--fresh")
    assert answer("info", book)["records"] == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, book: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in fails("export", book, tmp_path / "file" / "out.jsonl")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("search",),
        ("search", "x", "y", "-k", "0"),
        ("search", "x", "y", "-k", "many"),
        ("import", "x"),
        ("import", "x", "y", "--metric", "manhattan"),
        ("index", "x", "--kind", "magic"),
        ("index", "x", "-k", "0"),
        ("tune", "x", "-k", "0"),
        ("snapshot", "x"),
        ("search", "x", "y", "--radius", "far"),
        ("attend", "x", "y", "--temperature", "warm"),
        ("info", "x", "--nonsense"),
    ],
)
def test_wrong_usage_is_two(arguments: tuple[str, ...]) -> None:
    assert "Traceback" not in run(*arguments, code=2).output


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("row", ['{"id": 1, "key": [1]}', '{"id": 2, "key": [3, 4]}', '{"id": 2, "key": [1e39]}'])
def test_an_import_that_is_refused_at_once_leaves_no_database(tmp_path: Path, row: str, there: bool) -> None:
    (tmp_path / "r.jsonl").write_text(row + '\n{"id": 1, "key": [1]}\n')
    if there:
        (tmp_path / "db").mkdir()
    fails("import", tmp_path / "db", tmp_path / "r.jsonl", "--batch-size", 10)
    left = (tmp_path / "db").exists()
    if "1e39" not in row:  # the first line is good, and in
        assert (tmp_path / "db" / "catalog.sqlite").exists()
    else:
        assert left == there
        assert not left or not list((tmp_path / "db").iterdir())


@pytest.mark.parametrize(
    "words",
    ["info", "search 1,2", "attend 1,2", "insert -", "index", "tune", "compact", "verify", "delete a", "fields --add x",
     "reembed --encoder ngrams", "get a", "count", "snapshot copy", "export out.jsonl"],
)  # fmt: skip
def test_a_typing_error_creates_no_database(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *others = words.split()
    assert "films holds no database" in fails(verb, tmp_path / "films", *others)
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_error_of_an_import_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "notes.jsonl", [{"id": 1, "body": "a thief and a cop", "pages": 3}])
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"$ softdb import notes notes.jsonl\n{fails('import', 'notes', 'notes.jsonl')}\n" in page
