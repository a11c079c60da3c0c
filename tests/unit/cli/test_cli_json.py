"""The interface for scripts: JSON of every command, exit codes, `-` for a pipe, and silence without a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shapes import mismatch, shapes
from typed import answer, fails, lines, run

import softdb
import softdb.tools.demo
from softdb.tools.cli.commands import COMMANDS
from softdb.tools.cli.endings import FAILED, INTERRUPTED, LOCKED, PIPE_CLOSED, UNKNOWN, USAGE
from softdb.tools.demo import DemoReport

pytest_plugins = ["command_world"]
TABLE = shapes()


def fits(command: str, output: Any) -> None:
    shape = TABLE[TABLE[command]] if isinstance(TABLE[command], str) else TABLE[command]
    if command == "info":
        shape = shape | {"index": TABLE["index"] if output["index"] else "null"}
    assert mismatch(output, shape) == []


def test_the_table_has_every_command_and_the_comparer_refuses() -> None:
    assert set(TABLE) == {*COMMANDS, "verify --repair", "error", "warning"} - {"explore", "mcp"}
    assert mismatch([{"id": 1, "n": None}], [{"id": "id", "n": "int or null"}]) == []
    for value, shape in (
        ([1], ["text"]),
        ({"a": 1}, {}),
        ({}, {"a": "any"}),
        (True, "int"),
        (None, "id"),
        (1, ["int"]),
    ):
        assert mismatch(value, shape) != []


def test_every_command_prints_the_documented_json(
    book: Path, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    pairs = lines(
        tmp_path / "pairs.jsonl", [{"query": [1, i / 9], "positives": ["east" if i % 2 else "west"]} for i in range(9)]
    )
    ran: dict[str, tuple[object, ...]] = {
        "import": (other, tmp_path / "book.jsonl", "--text", "name"),
        "export": (book, tmp_path / "out.jsonl"),
        "get": (plane, "east"),
        "count": (book,),
        "search": (book, "Schulz"),
        "attend": (plane, "[1, 0]", "--where", '{"no": 1}'),
        "train": (plane, pairs, "--out", tmp_path / "p.pt", "--epochs", 1, "--holdout", 0.5, "--patience", 0),
        "reembed": (other, "--encoder", "ngrams"),
        "index": (plane,),
        "fields": (book, "--add", "year"),
        "info": (plane,),
        "verify": (book,),
        "compact": (book,),
        "snapshot": (book, tmp_path / "copy"),
        "delete": (book, 1, "nobody"),
        "bench": ("uniform", "--n", 500, "--dim", 4, "--engines", "softdb-flat", "--rounds", 1),
        "verify --repair": (plane, "--repair", tmp_path / "saved"),
    }
    for command, words in ran.items():
        fits(command, answer(command.split()[0], *words))
    fits("insert", answer("insert", book, stdin='{"id": 8, "text": "Fischer"}\n'))
    with monkeypatch.context() as patched:
        patched.setattr(softdb.tools.demo, "run_demo", lambda *_, **__: DemoReport(1, (0.0, 1.0), (0.0, 1.0), 2.5))
        fits("demo", answer("demo", tmp_path / "demo"))
    for words in (("get", plane, "nobody"), ("count", tmp_path / "none"), ("count",), ("nonsense",)):
        result = run(*words, "--json", code=3 if "nobody" in words else 1 if len(words) == 2 else 2)
        fits("error", json.loads(result.stderr))
        assert (result.stdout, json.loads(result.stderr)["error"]["code"]) == ("", result.exit_code)


@pytest.mark.slow
def test_index_commands_print_the_documented_json(vectors: Path) -> None:
    fits("index", answer("index", vectors, "--kind", "ivf"))
    fits("tune", answer("tune", vectors))
    fits("info", answer("info", vectors))


def test_exit_codes_are_those_of_the_page(plane: Path) -> None:
    from shapes import PAGE

    for code in (0, FAILED, USAGE, UNKNOWN, LOCKED, INTERRUPTED, PIPE_CLOSED):
        assert f"\n| {code} |" in PAGE
    assert "'nobody' is not stored" in fails("get", plane, "east", "nobody", code=3)
    assert "is not stored" not in run("delete", plane, "nobody").output
    with softdb.open(plane):
        message = fails("insert", plane, code=4, stdin='{"id": 1, "key": [1, 0], "value": 1}')
        assert "is being written by process" in message
    assert "No such command 'serch'; did you mean search?; see softdb --help" in fails("serch", code=2)
    assert "Missing argument 'PATH'; see " in fails("count", code=2)


def test_records_go_through_pipes_and_come_back_equal(book: Path, plane: Path, tmp_path: Path) -> None:
    """get | insert, export | insert, export | import: keys, values, payloads and texts are the same."""
    with softdb.open(book) as db:
        db.insert(["keyless", "7", 7], [None, [1.0] * 256, [0.1] * 256], texts=["a text", None, "seven"])
    for path in (book, plane):
        whole = run("export", path, "-").stdout
        ids = [json.loads(line)["id"] for line in whole.splitlines()[1:]]
        wanted = "".join(f"{json.dumps(one)}\n" for one in ids)
        records = answer("get", path, "-", stdin=wanted)
        assert [record["id"] for record in records] == ids
        run("import", tmp_path / f"{path.name} again", "-", stdin=whole)
        run("snapshot", path, copy := tmp_path / f"{path.name} copy")
        assert answer("delete", copy, "-", stdin=wanted)["records"] == 0
        printed = "".join(json.dumps(record) + "\n" for record in records)
        assert answer("insert", copy, stdin=printed)["inserted"] == len(ids)
        assert answer("insert", copy, "--upsert", stdin=whole)["records"] == len(ids)
        for other in (copy, tmp_path / f"{path.name} again"):
            assert answer("get", other, "-", stdin=wanted) == records
            assert run("export", other, "-").stdout == whole


def test_ids_are_typed_bare_or_as_json(tmp_path: Path) -> None:
    path = tmp_path / "db"
    rows = [{"id": one, "key": [1]} for one in (7, "7", "8", '"quoted', "-", 2**63 - 1)]
    run("import", path, lines(tmp_path / "r.jsonl", rows))
    typed = ("7", '"7"', "8", '"8"', '"quoted', "9223372036854775807", '"-"')
    assert [one["id"] for one in answer("get", path, *typed)] == [7, "7", "8", "8", '"quoted', 2**63 - 1, "-"]
    assert answer("delete", path, "7") == {"deleted": 1, "records": 5}
    assert answer("get", path, "7")[0]["id"] == "7"
    assert "99999999999999999999" in fails("get", path, "9" * 20, code=3)
    assert len(answer("get", path)) == 5
    assert answer("get", path, "-", stdin="\n") == []
    assert answer("delete", path, "-", stdin="") == {"deleted": 0, "records": 5}
    assert answer("delete", path, "--where", "{}") == {"deleted": 5, "records": 0}
    for words in ((), ("7", "--where", "{}")):
        assert "delete needs either IDs or --where" in fails("delete", path, *words)


def test_queries_come_from_a_pipe(book: Path, plane: Path, tmp_path: Path) -> None:
    actual = answer("search", plane, "-", "-k", 1, stdin="[0, 2]\n\n[-2, 0]\n")
    assert [[hit["id"] for hit in one] for one in actual] == [["north"], ["west"]]
    assert len(answer("attend", plane, "-", stdin="[0, 2]\n[-2, 0]\n")) == 2
    np.save(tmp_path / "q.npy", [[0.0, 2.0], [-2.0, 0.0]])
    assert answer("search", plane, "@-", "-k", 1, stdin=(tmp_path / "q.npy").read_bytes()) == actual
    assert (
        answer("search", book, "-", "-k", 1, stdin="Schulz\nWeber\n")[1] == answer("search", book, "Weber", "-k", 1)[0]
    )
    assert "standard input holds no query" in fails("search", plane, "-", stdin="")
    assert "line 2 of the input starts with [ but is not JSON" in fails("search", plane, "-", stdin="[1, 0]\n[1,\n")
    assert "stdin.npy cannot be read as an array" in fails("search", plane, "@-", stdin="no array")
    assert "mix text and numbers" in fails("search", book, "-", stdin="Weber\n[1]\n")


def test_pages_and_groups(plane: Path) -> None:
    whole = answer("search", plane, "[1, 0.5]")[0]
    assert answer("search", plane, "[1, 0.5]", "-k", 2, "--offset", 2)[0] == whole[2:]
    with softdb.open(plane) as db:
        db.update([one["id"] for one in whole], payloads=[{"doc": i % 2} for i in range(4)])
    grouped = answer("search", plane, "[1, 0.5]", "--group-by", "doc")[0]
    assert [hit["id"] for hit in grouped] == [hit["id"] for hit in whole[:2]]
    assert len(answer("search", plane, "[1, 0.5]", "--group-by", "doc", "--group-size", 2)[0]) == 4


def test_words_are_searched(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with softdb.open(path, dim=2) as db:
        texts = ["In space no one", "A thief in space", "A waitress"]
        db.insert(["alien", "heat", "amelie"], [[1, 0], [0, 1], [0, 0]], texts=texts)
    assert "softdb fields PATH --text words makes one" in fails("search", path, "thief", "--mode", "text")
    run("fields", path, "--text", "words")
    (hits,) = answer("search", path, "thief", "--mode", "text")
    assert [(hit["id"], hit["text"]) for hit in hits] == [("heat", "A thief in space")]
    for fusion in ("ranks", "10"):
        words = ("--words", "thief", "-k", 1, "--fusion", fusion)
        assert answer("search", path, "[0.6, 0.5]", *words)[0][0]["id"] == "heat"
    assert "fusion" in fails("search", path, "[1, 0]", "--words", "thief", "--fusion", "magic")
    run("fields", path, "--text", "none")
    assert "softdb fields PATH --text words makes one" in fails("search", path, "thief", "--mode", "text")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 3: not JSON"),
        ('{"id": 1, "key": [NaN, 1], "value": 1}', "line 3: not JSON (NaN is not a JSON number)"),
        ("[1]", "line 3: [1]; expected an object such as"),
        ('{"key": [1, 0], "value": 1}', "expected an object such as"),
        ('{"id": 9, "key": [1], "value": 1}', "line 3: insert: keys"),
        ('{"id": "east", "key": [1, 0], "value": 1}', "line 3: insert: id 'east' is stored already"),
        ('{"id": 9, "key": [1, 0], "value": 7}', "line 3: insert: label 7"),
        ('{"id": 9, "value": 1}', "line 3: insert: record 0 of the batch has a value and no key"),
        ('{"id": 9, "key": [1, 0], "value": 1, "text": 5}', "line 3: insert: text 0 is 5"),
    ],
)
def test_a_line_that_cannot_be_inserted_is_named(plane: Path, line: str, message: str) -> None:
    good = '{"id": "a", "key": [1, 1], "value": 0}\n\n'
    error = fails("insert", plane, "--batch-size", 1, stdin=good + line + '\n{"id": "b", "text": "never"}\n')
    assert message in error
    assert error.endswith("; 1 record before that is in the database")
    assert answer("count", plane) == {"count": 5}


def test_insert_reports_encoders_and_exports(book: Path, plane: Path, tmp_path: Path) -> None:
    run("insert", book, stdin='{"id": "f", "text": "Fischer", "year": 5}\n')
    assert answer("search", book, "Fischer", "-k", 1)[0][0] | {"score": 0} == {
        "id": "f", "score": 0, "payload": {"year": 5}, "text": "Fischer",
    }  # fmt: skip
    header = json.dumps({"softdb": {"metric": "l2"}})
    assert "the export's metric is l2, but this database's is dot" in fails("insert", plane, stdin=header)
    with softdb.open(tmp_path / "model", dim=2) as db:
        db.core.store.note_encoder("stranger/model")
    message = fails("insert", tmp_path / "model", stdin='{"id": 1, "text": "x"}')
    assert "load it with --encoder stranger/model" in message  # else the record would silently be without a key
    run("insert", tmp_path / "model", stdin='{"id": 1, "key": [1, 2], "text": "x"}')


def test_a_commit_holds_records_with_keys_with_texts_to_embed_and_without_keys(book: Path) -> None:
    with softdb.open(book, mode="r") as db:
        width = db.dim or 0
        (twin,) = db.get([1])
    rows = [
        {"id": "text", "text": "Fischer"}, {"id": "key", "key": [0.5] * width},
        {"id": "none", "key": None, "text": "Fi"}, {"id": "next", "text": twin.text},
    ]  # fmt: skip
    assert answer("insert", book, stdin="".join(json.dumps(row) + "\n" for row in rows))["inserted"] == 4
    with softdb.open(book, mode="r") as db:
        records = db.get(["text", "key", "none", "next"])
        assert records.keyed.tolist() == [True, True, False, True]
        assert records.keys[1].tolist() == [0.5] * width
        assert records.keys[3].tolist() == twin.key.tolist()
