"""The command line: what a stranger types, and what comes back; errors are one line, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import softdb
from softdb.cli.commands import app

ROOT = Path(__file__).parents[3]
BOOK: list[dict[str, Any]] = [
    {"id": 1, "name": "Schumacher", "first": "Anna", "year": 1990},
    {"id": 2, "name": "Weber", "first": "Sarah", "year": 2001},
    {"id": "three", "name": "Schuler", "first": "Tim"},
]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    shown = (result.output, result.exception)
    assert result.exit_code == code, shown
    assert result.exception is None or isinstance(result.exception, SystemExit), shown
    return result


def fails(*arguments: object) -> str:
    """The one line of an error."""
    result = run(*arguments, code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return line


def answer(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A phone book, its names in n-grams."""
    run("import", tmp_path / "book", lines(tmp_path / "book.jsonl", BOOK), "--text", "name")
    return tmp_path / "book"


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    """Four points of the plane, with classes."""
    rows = [{"id": name, "key": key, "side": i // 2} for i, (name, key) in enumerate(POINTS.items())]
    run("import", tmp_path / "plane", lines(tmp_path / "plane.jsonl", rows), "--value", "side", "--num-classes", 2)
    return tmp_path / "plane"


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """As many vectors as an index can be trained on."""
    np.save(tmp_path / "k.npy", np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32))
    run("import", tmp_path / "vectors", tmp_path / "k.npy")
    return tmp_path / "vectors"


POINTS = {"east": [1, 0], "north": [0, 1], "west": [-1, 0], "south": [0, -1]}

# -- what works --------------------------------------------------------------------------------------------------------


def test_texts_are_imported_and_found(book: Path) -> None:
    (hits,) = answer("search", book, "Schulz", "-k", 2)
    assert [hit["id"] for hit in hits] == ["three", 1]
    assert hits[0]["payload"] == {"name": "Schuler", "first": "Tim"}
    assert hits[0]["score"] > hits[1]["score"] > 0
    shown = run("search", book, "Schulz").stdout.splitlines()
    assert shown[0].split() == ["score", "id", "payload"]
    assert shown[1].split() == [f"{hits[0]['score']:.4f}", "three", "name:", "Schuler,", "first:", "Tim"]
    assert len(shown) == 4


def test_a_filter_narrows_a_search(book: Path) -> None:
    assert [hit["id"] for hit in answer("search", book, "Schulz", "--where", '{"year": {"$gte": 2000}}')[0]] == [2]
    assert answer("search", book, "Schulz", "--where", '{"year": 1}') == [[]]
    assert run("search", book, "Schulz", "--where", '{"year": 1}').stdout.strip() == "nothing found"


def test_queries_may_be_numbers_or_a_file(plane: Path, tmp_path: Path) -> None:
    assert [hit["id"] for hit in answer("search", plane, "[0.9, 0.1]", "-k", 1, "--exact")[0]] == ["east"]
    np.save(tmp_path / "q.npy", [[0.0, 2.0], [-2.0, 0.0]])
    found = answer("search", plane, f"@{tmp_path / 'q.npy'}", "-k", 1)
    assert [[hit["id"] for hit in one] for one in found] == [["north"], ["west"]]
    assert len(run("search", plane, f"@{tmp_path / 'q.npy'}", "-k", 1).stdout.splitlines()) == 4


def test_attend_weighs_all_records(plane: Path) -> None:
    (found,) = answer("attend", plane, "[1, 0]", "--temperature", 0.5)
    scores = np.array([1, 0, -1, 0]) / 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(found["output"], [weights[:2].sum(), weights[2:].sum()], rtol=1e-5)
    np.testing.assert_allclose(found["lse"], np.log(np.exp(scores).sum()), rtol=1e-5)
    np.testing.assert_allclose(found["effective_records"], 1 / (weights**2).sum(), rtol=1e-4)
    assert (found["candidates"], found["exact"], found["missed_mass"]) == (4, True, 0)
    assert found["hits"][0]["id"] == "east"
    np.testing.assert_allclose([hit["weight"] for hit in found["hits"]], sorted(weights, reverse=True), rtol=1e-4)
    shown = run("attend", plane, "[1, 0]", "--temperature", 0.5).stdout
    assert "4 records weighed at temperature 0.5" in shown
    assert f"classes  0: {weights[:2].sum():.1%}, 1: {weights[2:].sum():.1%}" in shown


def test_attend_may_be_cut_to_the_nearest(plane: Path) -> None:
    (found,) = answer("attend", plane, "[1, 0]", "-k", 1, "--temperature", 0.5)
    assert (found["candidates"], found["exact"], found["output"]) == (1, False, [1, 0])
    assert 0 < found["missed_mass"] < 1
    assert "of all weight missed" in run("attend", plane, "[1, 0]", "-k", 1).stdout


def test_attend_may_be_estimated(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    keys = random.standard_normal((30_000, 8)).astype(np.float32)
    with softdb.open(tmp_path / "db", dim=8) as db:
        db.insert(range(30_000), keys)
        db.build_index("ivf")
    asked = [1.0] * 8
    (found,) = answer("attend", tmp_path / "db", json.dumps(asked), "--temperature", 1, "--rtol", 0.2)
    (exact,) = answer("attend", tmp_path / "db", json.dumps(asked), "--temperature", 1)
    error = np.linalg.norm(np.subtract(found["output"], exact["output"]))
    assert found["met"]
    assert error <= 0.2 * np.linalg.norm(exact["output"])
    assert exact["bar"] == 0
    shown = run("attend", tmp_path / "db", json.dumps(asked), "--rtol", 0.2).stdout
    assert "records weighed" in shown


def test_attend_over_nothing_says_so(plane: Path) -> None:
    (found,) = answer("attend", plane, "[1, 0]", "--where", '{"no": 1}')
    assert (found["output"], found["lse"], found["effective_records"], found["hits"]) == ([0, 0], None, 0, [])
    assert "no record takes part" in run("attend", plane, "[1, 0]", "--where", '{"no": 1}').stdout


def test_attend_shows_the_first_numbers_of_a_vector(book: Path) -> None:
    shown = run("attend", book, "Schulz", "--temperature", 0.1).stdout
    assert "output   " in shown
    assert ", … (256 numbers)" in shown


def test_info_tells_what_is_there(book: Path) -> None:
    stats = answer("info", book)
    assert (stats["records"], stats["dim"], stats["metric"], stats["encoder"]) == (3, 256, "dot", "ngrams")
    shown = dict(line.split(maxsplit=1) for line in run("info", book).stdout.splitlines())
    assert (shown["records"], shown["encoder"], shown["index"]) == ("3", "ngrams", "kind  none")


def test_info_is_read_without_torch_and_tells_what_stats_tells(vectors: Path) -> None:
    run("index", vectors, "--kind", "ivf")
    with softdb.open(vectors) as db:
        db.insert(["a", "b"], np.ones((2, 16)))
    program = "import sys; from softdb.cli.commands import app; app(sys.argv[1:], standalone_mode=False); "
    program += "sys.exit(int('torch' in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, "info", str(vectors), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    with softdb.open(vectors, mode="r") as db:
        stats = db.stats().asdict()
    assert stats["index"]["unindexed"] == 2
    assert json.loads(done.stdout) == {**stats, "encoder": None}
    for file in (vectors / "index").iterdir():
        file.unlink()
    assert answer("info", vectors)["index"] is None


def test_a_new_database_is_shaped_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "db"
    rows = [{"name": "a", "vec": [1, 2, 3], "out": [4, 5]}]
    file = lines(tmp_path / "r.jsonl", rows)
    fields = ("--id", "name", "--key", "vec", "--value", "out")
    run("import", path, file, *fields, "--metric", "l2", "--dtype", "float16")
    stats = answer("info", path)
    assert [stats[name] for name in ("dim", "value_dim", "metric", "dtype")] == [3, 2, "l2", "float16"]
    with softdb.open(path, mode="r") as db:
        assert (db["a"].key.tolist(), db["a"].payload) == ([1, 2, 3], None)
    run("import", tmp_path / "narrow", lines(tmp_path / "b.jsonl", BOOK), "--text", "name", "--dim", 32)
    assert answer("info", tmp_path / "narrow")["dim"] == 32
    assert len(answer("search", tmp_path / "narrow", "Weber", "-k", 1)[0]) == 1  # encoded as wide as the keys are


def test_several_files_in_small_batches_and_upsert(tmp_path: Path, book: Path) -> None:
    more = lines(tmp_path / "more.jsonl", [{"id": 1, "name": "Schulz"}, {"id": 4, "name": "Fischer"}])
    gone = run("import", book, tmp_path / "book.jsonl", more, "--text", "name", "--upsert", "--batch-size", 1)
    assert gone.stdout.strip() == f"5 records imported, 4 in {book}"
    assert answer("search", book, "Schulz", "-k", 1)[0][0]["id"] == 1


def test_keys_beside_the_records(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.eye(3))
    run("import", tmp_path / "db", lines(tmp_path / "r.jsonl", BOOK), "--keys", tmp_path / "k.npy")
    hits = answer("search", tmp_path / "db", "[0, 1, 0]", "-k", 1)[0]
    assert hits == [{"id": 2, "score": 1.0, "payload": {"name": "Weber", "first": "Sarah", "year": 2001}}]


def test_export_and_import_are_each_others_inverse(tmp_path: Path, book: Path) -> None:
    assert run("export", book, tmp_path / "out.jsonl").stdout.startswith("3 records written to")
    run("import", tmp_path / "copy", tmp_path / "out.jsonl")
    assert answer("search", tmp_path / "copy", "Schulz", "--encoder", "ngrams") == answer("search", book, "Schulz")


def test_verify_reads_everything_back(book: Path) -> None:
    assert run("verify", book).stdout.startswith("ok: 3 records")
    keys = book / "keys-00000000.npy"
    data = bytearray(keys.read_bytes())
    data[128 + 40] ^= 1
    keys.write_bytes(bytes(data))
    error = fails("verify", book)
    assert "keys-00000000.npy: row 0 differs from its checksum" in error
    assert f"softdb verify {book} --repair DEST" in error
    assert "--repair" in run("verify", "--help").stdout


def test_index_is_built_or_faiss_is_missing(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.random.default_rng(0).normal(size=(2000, 16)))
    run("import", tmp_path / "db", tmp_path / "k.npy")
    run("index", tmp_path / "db", "--kind", "flat")
    assert len(answer("search", tmp_path / "db", "@" + str(tmp_path / "k.npy"), "-k", 1)) == 2000


def test_a_radius_finds_all_that_are_near_enough(plane: Path) -> None:
    assert [hit["id"] for hit in answer("search", plane, "[1, 0.5]", "--radius", 0.5)[0]] == ["east", "north"]
    assert answer("search", plane, "[1, 0.5]", "--radius", 7) == [[]]
    assert "nothing found" in run("search", plane, "[1, 0.5]", "--radius", 7).stdout


def test_records_may_be_left_out(book: Path, plane: Path, tmp_path: Path) -> None:
    found = answer("search", plane, "[1, 0.5]", "-k", 2, "--exclude", "east", "--exclude", "nobody")
    assert [hit["id"] for hit in found[0]] == ["north", "south"]
    rows = [{"id": one, "key": [1.0]} for one in (7, "7", "07", 8)]
    run("import", tmp_path / "db", lines(tmp_path / "r.jsonl", rows))
    left = answer("search", tmp_path / "db", "[1]", "--exclude", 7, "--exclude", "9" * 30)
    assert [hit["id"] for hit in left[0]] == ["07", 8]
    assert [hit["id"] for hit in answer("search", book, "Schuler", "-k", 1, "--exclude", "three")[0]] == [1]


def test_hits_may_be_unlike_each_other(tmp_path: Path) -> None:
    rows = [{"id": name, "key": key} for name, key in (("a", [1, 0]), ("a2", [1, 0.01]), ("b", [0.7, 0.7]))]
    run("import", tmp_path / "db", lines(tmp_path / "r.jsonl", rows), "--metric", "cosine")
    asked = ("search", tmp_path / "db", "[1, 0.1]", "-k", 2)
    assert {hit["id"] for hit in answer(*asked)[0]} == {"a", "a2"}
    assert [hit["id"] for hit in answer(*asked, "--diversity", 0.9)[0]] == ["a2", "b"]
    assert {hit["id"] for hit in answer(*asked, "--diversity", 0.9, "--fetch-k", 2)[0]} == {"a", "a2"}


@pytest.mark.slow
def test_an_index_is_built_and_tuned_for_queries_of_ones_own(vectors: Path, tmp_path: Path) -> None:
    keys = tmp_path / "k.npy"
    report = answer(
        "index", vectors, "--kind", "ivf-sq8", "--recall", 0.5, "-k", 3, "--queries", keys, "--memory", "9M"
    )
    assert (report["kind"], report["k"], report["target"]) == ("ivf-sq8", 3, 0.5)
    assert report["measured_on"] == "queries given"
    assert "measured on queries given" in run("tune", vectors, "--queries", keys).stdout
    tuned = answer("tune", vectors, "--recall", 0.9, "-k", 5)
    assert (tuned["kind"], tuned["k"], tuned["target"]) == ("ivf-sq8", 5, 0.9)
    assert tuned["measured_on"] == "stored keys, each without itself"
    assert answer("info", vectors)["index"]["target"] == 0.9
    assert answer("index", vectors, "--kind", "ivf", "--memory", "100000")["bytes"] <= 100_000


def test_compact_removes_what_is_gone(vectors: Path) -> None:
    with softdb.open(vectors) as db:
        db.delete(range(1500))
    report = answer("compact", vectors)
    assert (report["removed"], report["records"]) == (1500, 500)
    assert report["bytes"] < report["bytes_before"]
    assert run("compact", vectors).stdout.startswith("0 rows removed, 500 records left; ")


def test_one_is_not_counted_as_many(tmp_path: Path) -> None:
    path = tmp_path / "db"
    assert run("import", path, lines(tmp_path / "r.jsonl", [{"id": 1, "key": [1]}])).stdout.startswith("1 record imp")
    assert run("export", path, tmp_path / "out.jsonl").stdout.startswith("1 record written")
    assert "1 record weighed" in run("attend", path, "[1]").stdout
    assert run("verify", path).stdout.startswith("ok: 1 record,")
    assert run("snapshot", path, tmp_path / "copy").stdout.startswith("1 record, ")
    run("import", path, tmp_path / "r.jsonl", "--upsert")
    assert run("compact", path).stdout.startswith("1 row removed, 1 record left; ")


def test_a_snapshot_is_a_database_with_its_encoder(book: Path, tmp_path: Path) -> None:
    with softdb.open(book):  # while it is being written
        shown = run("snapshot", book, tmp_path / "copy").stdout
    assert shown.startswith("3 records, ")
    assert shown.strip().endswith(f"B, copied to {tmp_path / 'copy'}")
    assert answer("search", tmp_path / "copy", "Schulz") == answer("search", book, "Schulz")
    assert answer("snapshot", book, tmp_path / "third")["records"] == 3


def test_fields_are_declared_and_dropped(book: Path) -> None:
    assert "no field has an index" in run("fields", book).stdout
    assert run("fields", book, "--add", "year", "--add", "first").stdout.split() == ["first", "year"]
    assert answer("fields", book, "--add", "name", "--drop", "year") == ["first", "name"]
    assert answer("info", book)["fields"] == ["first", "name"]
    assert (
        "warning: no record has the field 'yeer'; did you mean 'year'?" in run("fields", book, "--add", "yeer").stderr
    )
    run("fields", book, "--drop", "yeer")
    with softdb.open(book):  # to look takes no lock
        assert answer("fields", book) == ["first", "name"]


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"softdb {softdb.__version__}"
    shown = run("--help").stdout
    for name in (
        *("demo", "info", "import", "export", "search", "attend", "verify", "index"),
        *("tune", "compact", "snapshot", "fields", "bench"),
    ):
        assert name in shown
        assert "Usage" in run(name, "--help").stdout


def test_names_are_completed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_SOFTDB_COMPLETE": "complete_bash"}
    program = "import sys; sys.argv = ['softdb']; from softdb.cli import main; main()"
    for words, expected in (("softdb sn", ["snapshot"]), ("softdb index --kin", ["--kind"])):
        environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.stdout.split() == expected
    assert "--install-completion" in run("--help").stdout


def test_without_typer_one_line_says_which_extra_is_missing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for missing in ("typer", "rich"):
        program = f"import sys; sys.modules[{missing!r}] = None; from softdb.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line == "error: the command line needs typer and rich; pip install 'softdb[cli]', or 'softdb[cpu]'"


def test_a_command_is_imported_when_it_is_called(book: Path) -> None:
    program = "import sys; from softdb.cli.commands import app; app(sys.argv[1:], standalone_mode=False); "
    program += "print([name for name in sys.modules if name.startswith('softdb.bench')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, "verify", str(book)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_does_not_wait_for_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "softdb", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "softdb.cli.commands" in modules
    assert not {"torch", "numpy"} & modules


# -- what does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["info", "verify", "index", "tune", "compact", "fields"])
def test_what_is_no_database_is_named(tmp_path: Path, command: str) -> None:
    assert "nothing holds no database" in fails(command, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").touch()
    assert "file is a file" in fails(command, tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs").touch()
    assert "other is another program's directory" in fails(command, tmp_path / "other")


def test_queries_that_cannot_serve(book: Path, plane: Path, tmp_path: Path) -> None:
    assert "queries are 3 wide but this database's keys are 2 wide" in fails("search", plane, "[1, 2, 3]")
    assert "QUERY starts with [ but is not JSON" in fails("search", plane, "[1, 2")
    assert "queries mix text and numbers" in fails("search", book, '["a", 1]', "--encoder", "ngrams")
    assert "no.npy cannot be read as an array of numbers" in fails("search", plane, f"@{tmp_path / 'no.npy'}")
    assert "does not say what made its keys; add --encoder" in fails("search", plane, "east")
    assert "made by the encoder 'ngrams', not 'demo'" in fails("search", book, "Schulz", "--encoder", "demo")
    assert "temperature is 0.0; expected a finite number above 0" in fails(
        "attend", plane, "[1, 0]", "--temperature", 0
    )


def test_an_encoder_that_is_not_installed(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    error = fails("search", plane, "east", "--encoder", "ngram")
    assert "the encoder 'ngram' needs sentence-transformers; pip install 'softdb[text]'" in error


def test_searches_that_contradict_themselves(plane: Path) -> None:
    asked = ("search", plane, "[1, 0]")
    assert "radius and k are both given" in fails(*asked, "--radius", 1, "-k", 2)
    assert "radius and diversity are both given" in fails(*asked, "--radius", 1, "--diversity", 0.5)
    assert "radius is nan; expected the least score" in fails(*asked, "--radius", "nan")
    assert "diversity is 2.0; expected a number from 0 to 1" in fails(*asked, "--diversity", 2)
    assert "fetch_k is 9 without diversity" in fails(*asked, "--fetch-k", 9)
    assert "fetch_k is 1 but k is 10" in fails(*asked, "--diversity", 0.5, "--fetch-k", 1)


def test_indexes_that_cannot_be(vectors: Path, plane: Path, tmp_path: Path) -> None:
    ivf = ("index", vectors, "--kind", "ivf")
    assert "no.npy cannot be read as an array of numbers" in fails(*ivf, "--queries", tmp_path / "no.npy")
    np.savez(tmp_path / "two.npz", np.zeros(2), np.zeros(3))
    assert "two.npz holds several arrays" in fails(*ivf, "--queries", tmp_path / "two.npz")
    np.save(tmp_path / "wide.npy", np.zeros((3, 17)))
    assert "queries are 17 wide but this database's keys are 16 wide" in fails(*ivf, "--queries", tmp_path / "wide.npy")
    assert "memory is 'much'; expected a number of bytes" in fails(*ivf, "--memory", "much")
    assert "memory is 9 bytes, which no index of kind 'ivf' meets" in fails(*ivf, "--memory", 9)
    assert "recall is 2.0; expected a share" in fails(*ivf, "--recall", 2)
    assert "4 records are too few to train an index on" in fails("index", plane, "--kind", "ivf")
    assert "there is no index to tune, search is exact" in fails("tune", vectors)
    run(*ivf)
    assert "recall is 0.0; expected a share above 0" in fails("tune", vectors, "--recall", 0)


def test_copies_and_fields_that_cannot_be(book: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").touch()
    assert "is a directory with something in it" in fails("snapshot", book, tmp_path / "full")
    assert "lies in the database itself" in fails("snapshot", book, book / "copy")
    assert "nothing holds no database" in fails("snapshot", tmp_path / "nothing", tmp_path / "copy")
    assert "field 'year' has no index; indexed fields: none" in fails("fields", book, "--drop", "year")
    assert "field 'nope' has no index" in fails("fields", book, "--add", "year", "--drop", "nope")
    assert answer("fields", book) == []  # nothing was added either
    with softdb.open(book):
        for command in (("compact", book), ("fields", book, "--add", "year"), ("tune", book), ("index", book)):
            assert "is being written by process" in fails(*command)


def test_filters_that_cannot_serve(book: Path) -> None:
    assert "unknown operator '$gtt'" in fails("search", book, "x", "--where", '{"year": {"$gtt": 1}}')
    assert "--where is not JSON" in fails("attend", book, "x", "--where", "{year: 1}")
    assert "where is [1]; expected a dict" in fails("export", book, book.parent / "x.jsonl", "--where", "[1]")


def test_imports_that_cannot_serve(tmp_path: Path, book: Path) -> None:
    path = tmp_path / "db"
    assert "no.jsonl is not a file" in fails("import", path, tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl holds no records" in fails("import", path, tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("{")
    assert "bad.jsonl line 1: not JSON" in fails("import", path, tmp_path / "bad.jsonl")
    file = tmp_path / "book.jsonl"
    assert "no field 'key' for the key" in fails("import", path, file)
    assert "--keys goes with one file, 2 are given" in fails("import", path, file, file, "--keys", file)
    labels = lines(tmp_path / "l.jsonl", [{"id": 1, "key": [1], "y": 1}])
    assert "say how many classes there are with --num-classes" in fails("import", path, labels, "--value", "y")
    assert not path.exists()  # nothing that could not be read has made a database
    assert "id 1 is stored already" in fails("import", book, file, "--text", "name")
    assert "metric=l2 was asked for" in fails("import", book, file, "--text", "name", "--metric", "l2")
    assert answer("info", book)["records"] == 3


def test_a_bad_line_keeps_what_stood_before_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    good = [json.dumps({"id": i, "key": [i]}) for i in range(5)]
    path.write_text("\n".join([*good, "{oops", "{}"]))
    error = fails("import", tmp_path / "db", path, "--batch-size", 2)
    assert "r.jsonl line 6: not JSON" in error
    assert error.endswith("the 5 records before are in the database")
    assert answer("info", tmp_path / "db")["records"] == 5


def test_a_second_writer_is_refused(book: Path) -> None:
    with softdb.open(book):
        assert "is being written by process" in fails("import", book, book.parent / "book.jsonl", "--text", "name")
        assert answer("info", book)["records"] == 3  # reading goes on


def test_the_demo_leaves_other_directories_alone(book: Path) -> None:
    assert "is not a demo database, so it is left alone" in fails("demo", book)
    assert "is not a demo database, so it is left alone" in fails("demo", book, "--fresh")
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


# -- as a process ------------------------------------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "softdb", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.slow
def test_the_real_command_in_a_pipe(book: Path, tmp_path: Path) -> None:
    found = child("search", book, "Schulz", "-k", 1)
    assert (found.returncode, found.stderr) == (0, "")
    assert len(found.stdout.splitlines()) == 2
    assert "\x1b" not in found.stdout  # neither colours nor bars where there is no terminal
    failed = child("search", tmp_path / "nothing", "Schulz")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("error: open: ")
    assert child("search").returncode == 2
