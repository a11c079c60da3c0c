"""The first things that a newcomer types: other programs' options, files without options, a look at the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typed import BOOK, answer, fails, lines, run

import softdb

pytest_plugins = ["command_world"]


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (("sarch", "p"), "did you mean search?"),
        (("ls", "p"), "in softdb it is get;"),
        (("search", "p", "q", "--limit", 2), "No such option: --limit; in softdb it is -k;"),
        (("search", "p", "q", "-n", 2), "No such option: -n; in softdb it is -k;"),
        (("count", "p", "--filter", "{}"), "No such option: --filter; in softdb it is --where;"),
        (("search", "p", "q", "--wher", "{}"), "No such option: --wher; did you mean --where?"),
        (("zzz", "p"), "No such command 'zzz'; see softdb --help"),
    ],
)
def test_an_unknown_word_is_answered_with_the_right_one(words: tuple[object, ...], own: str) -> None:
    assert own in fails(*words, code=2)


def test_short_help_and_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("-h").stdout == run("--help").stdout
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("import", "-h").stdout
    assert {"--num-classes", "--batch-size"} <= set(narrow.split())
    assert "…" not in narrow.partition("Options:")[2]


def test_a_file_needs_no_options_if_its_fields_have_the_usual_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = [{"id": "a", "text": "a cat sleeps", "year": 1990}, {"id": "b", "text": "a dog barks", "year": 2000}]
    vectors = [{"id": "a", "embedding": [1.0, 0.0], "year": 1990}, {"id": "b", "embedding": [0.0, 1.0], "year": 2000}]
    for name, given, dim in (("texts", rows, 256), ("vectors", vectors, 2)):
        frame = pandas.DataFrame(given)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        frame.to_parquet(tmp_path / f"{name}.parquet")
        for file in (lines(tmp_path / f"{name}.jsonl", given), tmp_path / f"{name}.csv", tmp_path / f"{name}.parquet"):
            path = tmp_path / f"{name} of {file.suffix}"
            assert answer("import", path, file) == {"imported": 2, "records": 2}
            with softdb.open(path, mode="r") as db:
                assert (db.dim, db["b"].payload, db["a"].text) == (dim, {"year": 2000}, given[0].get("text"))


def test_a_line_may_lack_the_text_that_no_option_names(tmp_path: Path) -> None:
    rows = [{"id": 1, "key": [1, 0], "text": "first"}, {"id": 2, "key": [0, 1]}]
    run("import", tmp_path / "db", lines(tmp_path / "rows.jsonl", rows))
    assert [record["text"] for record in answer("get", tmp_path / "db")] == ["first", None]


def test_a_parquet_file_with_other_columns_is_answered_with_a_command(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    file = tmp_path / "vec.parquet"
    pandas.DataFrame({"vec": [[1.0, 0.0]], "year": [1]}).to_parquet(file)
    assert fails("import", tmp_path / "db", file).endswith("--row-ids --key vec")
    assert fails("import", tmp_path / "db", file, "--row-ids").endswith("--row-ids --key vec")


def test_import_names_the_form_of_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(BOOK))
    assert "write a JSON list as lines: jq -c '.[]'" in fails("import", tmp_path / "db", tmp_path / "rows.json")


def test_get_shows_the_first_records_and_those_of_a_filter(book: Path) -> None:
    assert [record["id"] for record in answer("get", book)] == [1, 2, "three"]
    assert [record["id"] for record in answer("get", book, "--limit", 1, "--offset", 1)] == [2]
    assert [record["id"] for record in answer("get", book, "--where", '{"year": 2001}')] == [2]
    assert answer("get", book, "1", "three", "--where", '{"year": 2001}') == []
    assert answer("get", book, "-", stdin="") == []
    many = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(20))
    assert answer("insert", book, stdin=many) == {"inserted": 20, "records": 23}
    assert len(answer("get", book)) == 10


def test_insert_takes_vectors_by_their_usual_names_and_makes_ids(plane: Path) -> None:
    rows = '{"vector": [1, 1], "value": 0, "n": 1}\n{"embedding": [2, 1], "value": 1}\n'
    assert answer("insert", plane, stdin=rows)["inserted"] == 2
    first, second = answer("get", plane, "--limit", 2, "--offset", 4)
    assert (first["key"], first["payload"], second["key"]) == ([1, 1], {"n": 1}, [2, 1])
    mixed = rows + '{"id": 9, "key": [1, 1], "value": 0}\n'
    assert "line 3 is" in (error := fails("insert", plane, stdin=mixed))
    assert "with an id in every line or in none" in error


def test_a_filter_or_query_in_another_language_is_answered_with_the_form(plane: Path) -> None:
    assert """write it like '{"year": {"$gt": 1990}}'""" in fails("count", plane, "--where", "year > 1990")
    assert "or give numbers: '[1, 0]'" in fails("search", plane, "1,0")
