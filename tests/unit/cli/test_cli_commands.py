"""Commands of the command line and their output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typed import BOOK, answer, fails, lines, run
from worlds import holding

import softdb
from softdb.tools.cli.commands import COMMANDS

pytest_plugins = ["command_world"]


def test_texts_are_imported_and_found(book: Path) -> None:
    (hits,) = answer("search", book, "Schulz", "-k", 2)
    assert [hit["id"] for hit in hits] == ["three", 1]
    assert (hits[0]["payload"], hits[0]["text"]) == ({"first": "Tim"}, "Schuler")
    assert hits[0]["score"] > hits[1]["score"] > 0
    shown = run("search", book, "Schulz").stdout.splitlines()
    assert shown[0].split() == ["score", "id", "payload", "text"]
    assert shown[1].split() == [f"{hits[0]['score']:.4f}", "three", "first:", "Tim", "Schuler"]
    assert len(shown) == 4


def test_a_filter_narrows_a_search(book: Path) -> None:
    assert [hit["id"] for hit in answer("search", book, "Schulz", "--where", '{"year": {"$gte": 2000}}')[0]] == [2]
    assert answer("search", book, "Schulz", "--where", '{"year": 1}') == [[]]
    assert run("search", book, "Schulz", "--where", '{"year": 1}').stdout.strip() == "nothing found"


def test_queries_may_be_numbers_or_a_file(plane: Path, tmp_path: Path) -> None:
    assert [hit["id"] for hit in answer("search", plane, "[0.9, 0.1]", "-k", 1, "--exact")[0]] == ["east"]
    np.save(tmp_path / "q.npy", [[0.0, 2.0], [-2.0, 0.0]])
    actual = answer("search", plane, f"@{tmp_path / 'q.npy'}", "-k", 1)
    assert [[hit["id"] for hit in one] for one in actual] == [["north"], ["west"]]
    shown = run("search", plane, f"@{tmp_path / 'q.npy'}", "-k", 1).stdout.splitlines()
    assert (len(shown), shown[0], shown[3:5]) == (7, "query 1", ["", "query 2"])
    assert run("attend", plane, f"@{tmp_path / 'q.npy'}").stdout.count("query ") == 2


def test_queries_of_texts_are_headings_and_texts_are_one_line(book: Path) -> None:
    run("insert", book, stdin='{"id": 9, "text": "Zuse\\n\\n     and    sons"}')
    shown = run("search", book, "-", "-k", 1, stdin="Zuse and sons\nWeber").stdout
    assert shown.startswith("query 1: Zuse and sons\n")
    assert "  9   Zuse and sons\n\nquery 2: Weber\n" in shown


def test_attend_weighs_all_records(plane: Path) -> None:
    (actual,) = answer("attend", plane, "[1, 0]", "--temperature", 0.5)
    scores = np.array([1, 0, -1, 0]) / 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(actual["output"], [weights[:2].sum(), weights[2:].sum()], rtol=1e-5)
    np.testing.assert_allclose(actual["lse"], np.log(np.exp(scores).sum()), rtol=1e-5)
    np.testing.assert_allclose(actual["effective_records"], 1 / (weights**2).sum(), rtol=1e-4)
    assert (actual["candidates"], actual["exact"], actual["missed_mass"]) == (4, True, 0)
    assert actual["hits"][0]["id"] == "east"
    np.testing.assert_allclose([hit["weight"] for hit in actual["hits"]], sorted(weights, reverse=True), rtol=1e-4)
    shown = run("attend", plane, "[1, 0]", "--temperature", 0.5).stdout
    assert "4 records weighed at temperature 0.5" in shown
    assert f"classes  0: {weights[:2].sum():.1%}, 1: {weights[2:].sum():.1%}" in shown


def test_attend_may_be_cut_to_the_nearest(plane: Path) -> None:
    (actual,) = answer("attend", plane, "[1, 0]", "-k", 1, "--temperature", 0.5)
    assert (actual["candidates"], actual["exact"], actual["output"]) == (1, False, [1, 0])
    assert 0 < actual["missed_mass"] < 1
    assert "of all weight missed" in run("attend", plane, "[1, 0]", "-k", 1).stdout


def test_attend_may_be_estimated(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    keys = random.standard_normal((30_000, 8)).astype(np.float32)
    with holding(keys, path=tmp_path / "db") as db:
        db.build_index("ivf")
    asked = [1.0] * 8
    (actual,) = answer("attend", tmp_path / "db", json.dumps(asked), "--temperature", 1, "--rtol", 0.2)
    (exact,) = answer("attend", tmp_path / "db", json.dumps(asked), "--temperature", 1)
    error = np.linalg.norm(np.subtract(actual["output"], exact["output"]))
    assert actual["met"]
    assert error <= 0.2 * np.linalg.norm(exact["output"])
    assert exact["bar"] == 0
    shown = run("attend", tmp_path / "db", json.dumps(asked), "--rtol", 0.2).stdout
    assert "records weighed" in shown


def test_attend_over_no_records_is_reported(plane: Path) -> None:
    (actual,) = answer("attend", plane, "[1, 0]", "--where", '{"no": 1}')
    assert (actual["output"], actual["lse"], actual["effective_records"], actual["hits"]) == ([0, 0], None, 0, [])
    assert "no record takes part" in run("attend", plane, "[1, 0]", "--where", '{"no": 1}').stdout


def test_attend_shows_the_first_numbers_of_a_vector(book: Path) -> None:
    shown = run("attend", book, "Schulz", "--temperature", 0.1).stdout
    assert "output   " in shown
    assert ", … (256 numbers)" in shown


def test_info_lists_the_contents(book: Path) -> None:
    stats = answer("info", book)
    assert (stats["records"], stats["dim"], stats["metric"], stats["encoder"]) == (3, 256, "dot", "ngrams")
    shown = dict(line.split(maxsplit=1) for line in run("info", book).stdout.splitlines())
    assert (shown["records"], shown["encoder"], shown["index"]) == ("3", "ngrams", "kind  none")


def test_a_new_database_has_the_requested_shape(tmp_path: Path) -> None:
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
    assert hits == [{"id": 2, "score": 1.0, "payload": {"name": "Weber", "first": "Sarah", "year": 2001}, "text": None}]


def test_an_export_takes_metric_schema_fields_and_encoder_along(tmp_path: Path) -> None:
    """A cosine database that came back as one of inner products would rank otherwise, without a word."""
    rows = [{"id": i, "key": [i + 1.0, 10.0 - i], "value": i % 3, "year": i} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, copy = tmp_path / "db", tmp_path / "copy"
    words = ("--value", "value", "--num-classes", 3, "--metric", "cosine", "--dtype", "float16")
    run("import", path, tmp_path / "rows.jsonl", *words)
    run("fields", path, "--add", "year")
    run("export", path, tmp_path / "out.jsonl")
    run("import", copy, tmp_path / "out.jsonl")
    before, after = (json.loads(run("info", one, "--json").stdout) for one in (path, copy))
    for name in ("dim", "value_dim", "num_classes", "dtype", "metric", "fields", "records"):
        assert before[name] == after[name], name
    with softdb.open(path, mode="r") as one, softdb.open(copy, mode="r") as other:
        assert one.search([[1.0, 0.0]], k=9).ids == other.search([[1.0, 0.0]], k=9).ids
    run("import", tmp_path / "dot", tmp_path / "rows.jsonl", "--value", "value", "--num-classes", 3)
    message = fails("import", tmp_path / "dot", tmp_path / "out.jsonl", "--upsert")
    assert "exported from a database with the metric cosine, but this one has dot" in message


def test_an_export_of_texts_notes_their_encoder_and_loads_no_model(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "a fox"}\n')
    run("import", tmp_path / "db", tmp_path / "rows.jsonl", "--text", "text", "--encoder", "ngrams")
    run("export", tmp_path / "db", tmp_path / "out.jsonl")
    run("import", tmp_path / "copy", tmp_path / "out.jsonl")
    assert "a fox" in run("search", tmp_path / "copy", "fox").stdout
    header = (tmp_path / "out.jsonl").read_text().replace('"ngrams"', '"stranger/model"')
    (tmp_path / "out.jsonl").write_text(header)
    run("import", tmp_path / "other", tmp_path / "out.jsonl")
    assert "load it with --encoder stranger/model" in fails("search", tmp_path / "other", "fox")


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
    actual = answer("search", plane, "[1, 0.5]", "-k", 2, "--exclude", "east", "--exclude", "nobody")
    assert [hit["id"] for hit in actual[0]] == ["north", "south"]
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
    report = answer("index", vectors, "--kind", "ivf", "--recall", 0.5, "-k", 3, "--queries", keys, "--memory", "9M")
    assert (report["kind"], report["k"], report["target"]) == ("ivf", 3, 0.5)
    assert report["measured_on"] == "queries given"
    assert "queries given" in run("tune", vectors, "--queries", keys).stdout
    tuned = answer("tune", vectors, "--recall", 0.9, "-k", 5)
    assert (tuned["kind"], tuned["k"], tuned["target"]) == ("ivf", 5, 0.9)
    assert tuned["measured_on"] == "stored keys, each without itself"
    assert answer("info", vectors)["index"]["target"] == 0.9
    assert answer("index", vectors, "--kind", "ivf", "--memory", "100000")["bytes"] <= 100_000


def test_compact_removes_deleted_records(vectors: Path) -> None:
    with softdb.open(vectors) as db:
        db.delete(range(1500))
    report = answer("compact", vectors)
    assert (report["removed"], report["records"]) == (1500, 500)
    assert report["bytes"] < report["bytes_before"]
    assert run("compact", vectors).stdout.startswith("0 rows removed, 500 records left; ")


def test_counts_use_singular_and_plural(tmp_path: Path) -> None:
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
    with pytest.warns(softdb.UnknownField, match="no record has the field 'yeer'; did you mean 'year'?"):
        run("fields", book, "--add", "yeer")
    run("fields", book, "--drop", "yeer")
    assert "text index: words" in run("fields", book, "--text", "words").stdout
    assert answer("info", book)["text_index"] == "words"
    with softdb.open(book):  # to look takes no lock
        assert answer("fields", book) == ["first", "name"]


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"softdb {softdb.__version__}"
    shown = run("--help").stdout
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    assert run(code=2).stdout == shown
    for name in COMMANDS:
        assert re.search(rf"^  .*\b{name}\b", shown, re.MULTILINE), name
        assert "Usage" in run(name, "--help").stdout
