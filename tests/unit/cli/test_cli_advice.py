"""Following the advice of an error on a shell gives the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typed import answer, fails, lines, run
from worlds import holding

import softdb
from softdb.formats import export_records
from softdb.text import HashedNGrams

D = 16
TEXTS = [{"id": i, "text": text} for i, text in enumerate(["a red fox", "a blue whale", "a green frog"])]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A database of three texts."""
    run("import", tmp_path / "texts", lines(tmp_path / "texts.jsonl", TEXTS), "--text", "text", "--dim", D)
    return tmp_path / "texts"


def by_model(path: Path) -> Path:
    """A database whose keys a model made that no command loads by itself."""
    with softdb.open(path, dim=D) as db:
        db.core.store.note_encoder("a model")
        db.insert(["a"], HashedNGrams(D)(["a red fox"]), texts=["a red fox"])
    return path


def test_a_deletion_needs_ids_or_a_filter(texts: Path) -> None:
    assert "delete needs either IDs or --where; --where '{}' deletes every record" in fails("delete", texts)
    run("delete", texts, "0")
    run("delete", texts, "--where", "{}")
    assert answer("count", texts) == 0 or answer("info", texts)["records"] == 0


def test_the_encoder_must_be_that_of_the_keys(texts: Path) -> None:
    error = fails("search", texts, "fox", "--encoder", "demo")
    assert "; leave --encoder out" in error
    assert answer("search", texts, "fox", "-k", 1)[0][0]["id"] == 0


def test_text_queries_over_keys_of_an_unknown_encoder_need_one(tmp_path: Path) -> None:
    holding(HashedNGrams(D)(["a red fox", "a blue whale"]), ids=["a", "b"], path=tmp_path / "db").close()
    error = fails("search", tmp_path / "db", "fox")
    assert "stores no name of an encoder; add --encoder (ngrams, demo or a model), or give numbers: '[1, 0]'" in error
    assert answer("search", tmp_path / "db", "fox", "-k", 1, "--encoder", "ngrams")[0][0]["id"] == "a"
    numbers = str(HashedNGrams(D)(["fox"])[0].tolist())
    assert answer("search", tmp_path / "db", numbers, "-k", 1)[0][0]["id"] == "a"


def test_words_need_an_index(texts: Path) -> None:
    error = fails("search", texts, "fox", "--mode", "text")
    command = re.search(r"index; softdb (fields) PATH (--text) (words) makes one", error)
    assert command is not None
    run(command[1], texts, *command.groups()[1:])
    assert [hit["id"] for hit in answer("search", texts, "fox", "--mode", "text")[0]] == [0]


@pytest.mark.parametrize(("mode", "words"), [("text", []), ("text", ["--words", "fox"]), ("hybrid", [])])
def test_numbers_beside_words_are_given_by_words(texts: Path, mode: str, words: list[str]) -> None:
    run("fields", texts, "--text", "words")
    numbers = str(HashedNGrams(D)(["fox"])[0].tolist())
    error = fails("search", texts, numbers, "--mode", mode, *words)
    assert "type words as QUERY or, to compare both, add --mode hybrid --words WORDS" in error
    assert answer("search", texts, numbers, "--mode", "hybrid", "--words", "fox")[0][0]["id"] == 0
    assert answer("search", texts, "fox", "--mode", "text")[0][0]["id"] == 0


def test_settings_are_of_a_repair(texts: Path, tmp_path: Path) -> None:
    error = fails("verify", texts, "--dim", D)
    assert "--dim and other settings go with --repair; add --repair DEST, or leave them out" in error
    run("verify", texts)
    run("verify", texts, "--repair", tmp_path / "saved", "--dim", D)
    assert answer("info", tmp_path / "saved")["records"] == 3


def test_damaged_databases_are_salvaged_by_the_advised_command(texts: Path, tmp_path: Path) -> None:
    (column,) = texts.glob("keys-*.npy")
    data = bytearray(column.read_bytes())
    data[130] ^= 0xFF  # of the first record
    column.write_bytes(data)
    error = fails("verify", texts)
    assert "; or save all intact records with softdb verify " in error
    assert error.endswith(f" {texts} --repair DEST")
    run("verify", texts, "--repair", tmp_path / "saved")
    with softdb.open(tmp_path / "saved", mode="r") as db:
        assert {one.text for some in db.scan() for one in some} >= {"a blue whale", "a green frog"}


def test_keys_beside_several_files_are_imported_one_by_one(tmp_path: Path) -> None:
    files = [lines(tmp_path / f"{name}.jsonl", [{"id": name}]) for name in "ab"]
    for file in files:
        np.save(file.with_suffix(".npy"), [[1.0, 0.0]])
    error = fails("import", tmp_path / "db", *files, "--keys", tmp_path / "a.npy")
    assert " are given; import them one by one" in error
    for file in files:
        run("import", tmp_path / "db", file, "--keys", file.with_suffix(".npy"))
    assert answer("info", tmp_path / "db")["records"] == 2


def test_labels_need_their_number(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", [{"id": 1, "key": [1, 0], "label": 2}])
    words: list[Any] = ["import", tmp_path / "db", file, "--value", "label"]
    assert "give the number of classes with --num-classes" in fails(*words)
    run(*words, "--num-classes", 3)
    assert answer("get", tmp_path / "db", 1)[0]["value"] == 2


def test_an_interrupted_import_resumes(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", [{"id": i, "key": [i, 1]} for i in range(5)])
    run("import", tmp_path / "db", file)
    assert "and --resume continues an interrupted import" in fails("import", tmp_path / "db", file)
    run("import", tmp_path / "db", file, "--resume")
    assert answer("info", tmp_path / "db")["records"] == 5


def test_an_import_names_the_database_first(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", TEXTS)
    assert "is a file; name the database first: softdb import DATABASE " in fails("import", file, tmp_path / "db")
    assert answer("import", tmp_path / "db", file)["imported"] == 3


def test_an_export_of_another_encoder_is_embedded_again(tmp_path: Path, texts: Path) -> None:
    with softdb.open(by_model(tmp_path / "model")) as db:
        export_records(db, tmp_path / "model.jsonl")
    error = fails("import", texts, tmp_path / "model.jsonl")
    assert "or embed its texts anew: --text text" in error
    run("import", texts, tmp_path / "model.jsonl", "--text", "text")
    actual = answer("search", texts, "a red fox", "-k", 2)[0]
    assert {hit["id"] for hit in actual} == {0, "a"}


def test_collections_are_named(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance", reason="Lance tables need pylance")
    pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
    for name in ("one", "two"):
        lance.write_dataset(pa.table({"id": [name], "key": [[1.0, 0.0]]}), str(tmp_path / "l" / f"{name}.lance"))
    error = fails("import", tmp_path / "db", tmp_path / "l")
    assert " (--collection)" in error
    assert "name one of ['one', 'two']" in error
    run("import", tmp_path / "db", tmp_path / "l", "--collection", "two")
    assert answer("get", tmp_path / "db", "two")[0]["id"] == "two"


def test_reembedding_names_its_encoder(texts: Path, tmp_path: Path) -> None:
    assert "name the encoder of the new keys with --encoder" in fails("reembed", texts)
    run("reembed", texts, "--encoder", "ngrams", "--dim", 32)
    assert answer("info", texts)["dim"] == 32
    assert " has its own width; leave --dim out" in fails("reembed", texts, "--encoder", "demo", "--dim", 32)
    error = fails("reembed", texts, "--projection", tmp_path / "no.pt", "--encoder", "ngrams")
    assert "--projection takes no texts; leave out --encoder, --field, --missing and --dim" in error


def test_training_names_its_checkpoint(tmp_path: Path) -> None:
    holding(np.random.default_rng(0).normal(size=(8, 2)), path=tmp_path / "db").close()
    pairs = lines(tmp_path / "pairs.jsonl", [{"query": [1, i / 9], "positives": [i % 8]} for i in range(16)])
    words: list[Any] = ["train", tmp_path / "db", pairs, "--out", tmp_path / "p.pt", "--epochs", 1, "--patience", 0]
    error = fails(*words, "--resume")
    assert "--resume needs a checkpoint; give its file with --checkpoint" in error
    run(*words, "--checkpoint", tmp_path / "run.ckpt")
    run(*words[:-4], "--epochs", 2, "--patience", 0, "--checkpoint", tmp_path / "run.ckpt", "--resume")
    assert (tmp_path / "p.pt").exists()


def test_an_export_replaces_a_file_if_forced(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert " exists already; name another file, or replace it with --force" in fails("export", texts, out)
    assert out.read_text() == "mine"
    for words in ((tmp_path / "other.jsonl",), (out, "--force")):
        assert run("export", texts, *words).stdout.startswith("3 records written")
