"""A stopped import reports its progress and resumes to the same bits as an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.clock import Clock
from rich.console import Console
from typed import answer, fails, lines, run
from typer.testing import CliRunner

import softdb
import softdb.text
from softdb.encoders import FIXED_TEXTS
from softdb.formats import Fields, Rows, export_records, import_records, read_records
from softdb.terminal import progress
from softdb.tools.cli.commands import app

N = 900

HELD = """
import sys, threading
from softdb.database import Verbs
plain, batches = Verbs.insert, []
def held(self, *args, **words):
    batches.append(plain(self, *args, **words))
    if len(batches) == 4:
        print("held", flush=True)
        threading.Event().wait()
Verbs.insert = held
sys.argv[0] = "softdb"
from softdb.tools.cli import main
main()
"""


def source(folder: Path, kind: str) -> list[object]:
    """A file to import, with the words that go with it."""
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    random = np.random.default_rng(0)
    keys = random.standard_normal((N, 5)).astype(np.float32)
    if kind == "npy":
        np.save(folder / "keys.npy", keys)
        return [folder / "keys.npy"]
    if kind == "texts":
        rows: list[dict[str, Any]] = [{"id": i, "text": f"record {i} of {i * i % 97}", "n": i} for i in range(N)]
        return [lines(folder / "rows.jsonl", rows), "--text", "text", "--dim", 32]
    if kind in ("export", "parquet"):
        with softdb.open(None, dim=5, value_dim=2, metric="cosine", fields=["n"], dtype="float16") as db:
            db.core.store.note_encoder("some model")
            db.insert([f"r{i}" for i in range(N)], keys, random.standard_normal((N, 2)), [{"n": i} for i in range(N)])
            name = "out.parquet" if kind == "parquet" else "out.jsonl.gz"
            export_records(db, folder / name)
        return [folder / name]
    rows = [{"id": f"r{i}", "key": keys[i].tolist(), "value": i % 3, "n": i, "é": "x" * (i % 50)} for i in range(N)]
    return [lines(folder / "rows.jsonl", rows), "--value", "value", "--num-classes", 3, "--metric", "l2"]


def stored(path: Path) -> tuple[dict[str, bytes], list[str], tuple[object, ...]]:
    """The columns' bytes, every record in its order, and what the database is."""
    columns = {one.name: one.read_bytes() for one in sorted(path.glob("*.npy"))}
    with softdb.open(path, mode="r", verify=True) as db:
        records = [
            json.dumps([record.id, record.payload, row])
            for some in db.scan()
            for record, row in zip(some, db.core.locate(some.ids)[1].tolist(), strict=True)
        ]
        facts = (db.dim, db.value_dim, db.num_classes, db.metric, db.dtype, db.fields, db.encoder_name)
    return columns, records, facts


def stopped(path: Path, words: list[object], how: int) -> tuple[int, str]:
    """Start an import, and stop it when some of it is in."""
    command = [sys.executable, "-c", HELD, "import", str(path), *map(str, words), "--batch-size", "100"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert list(path.glob("keys-0000000[1-9].npy")), "there is no second segment"
    os.kill(child.pid, how)
    return child.wait(60), child.communicate()[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["jsonl", "npy", "texts", "export", "parquet"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_stopped_import_resumes_to_the_same_result(tmp_path: Path, kind: str, how: int) -> None:
    words = source(tmp_path, kind)
    run("import", tmp_path / "whole", *words, "--batch-size", 100)
    code, actual = stopped(tmp_path / "db", words, how)
    with softdb.open(tmp_path / "db", mode="r", verify=True) as db:
        count = len(db)
    assert 0 < count < N
    assert count % 100 == 0
    if how == signal.SIGINT:
        assert code == 130
        assert f"interrupted: {count} records in {tmp_path / 'db'}, on disk; the same command with --resume" in actual
    shown = fails("import", tmp_path / "db", *words, "--batch-size", 100)
    assert "is stored already" in shown
    assert "and --resume continues an interrupted import" in shown
    shown = run("import", tmp_path / "db", *words, "--batch-size", 100, "--resume").stdout
    assert shown == f"{N - count} records imported, {count} already stored, {N} in {tmp_path / 'db'}\n"
    assert stored(tmp_path / "db") == stored(tmp_path / "whole")
    run("import", tmp_path / "db", *words, "--batch-size", 70, "--resume")  # nothing is left to do
    assert stored(tmp_path / "db") == stored(tmp_path / "whole")


@pytest.mark.parametrize("part", ["payload", "key", "value"])
def test_a_record_that_differs_is_refused_or_replaced(tmp_path: Path, part: str) -> None:
    words = source(tmp_path, "jsonl")
    run("import", tmp_path / "db", *words)
    with softdb.open(tmp_path / "db") as db:
        changed: dict[str, Any] = {"payload": {"n": -1}, "key": [1, 2, 3, 4, 5], "value": 2}
        db.update(["r7"], **{f"{part}s": [changed[part]]})  # type: ignore[arg-type]
        before = len(list(db.scan()))
    error = fails("import", tmp_path / "db", *words, "--resume")
    assert "rows.jsonl line 8: id 'r7' is stored already with other contents" in error
    run("import", tmp_path / "db", *words, "--resume", "--upsert")
    run("import", tmp_path / "db", *words, "--resume")
    assert answer("info", tmp_path / "db")["records"] == N
    assert answer("info", tmp_path / "db")["dead"] <= (1 if part == "payload" else 2)
    assert before


def test_texts_that_are_in_are_not_encoded_again(tmp_path: Path) -> None:
    words = source(tmp_path, "texts")
    run("import", tmp_path / "db", *words, "--batch-size", 100)
    seen = list[str]()
    with softdb.open(tmp_path / "db") as db:
        db.delete([5])

    class Counting(softdb.text.HashedNGrams):
        def __call__(self, texts: Any) -> Any:
            seen.extend(texts)
            return super().__call__(texts)

    with softdb.open(tmp_path / "db", encoder=Counting(32)) as db:
        batches = read_records(tmp_path / "rows.jsonl", fields=Fields(text="text"), batch_size=100)
        assert import_records(db, batches, resume=True) == N
    assert seen == [*FIXED_TEXTS, "record 5 of 25"]


def test_an_array_has_rows_and_a_file_has_lines(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.ones((30, 3)))
    run("import", tmp_path / "db", tmp_path / "k.npy")
    assert "k.npy row 0: " in fails("import", tmp_path / "db", tmp_path / "k.npy")
    assert "lines" not in fails("import", tmp_path / "db", tmp_path / "k.npy")


def test_an_unfinished_creation_is_completed(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "catalog.sqlite").touch()
    words = source(tmp_path, "jsonl")
    run("import", tmp_path / "db", *words, "--resume")
    assert answer("info", tmp_path / "db")["records"] == N
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "catalog.sqlite").write_bytes(b"another program's" * 500)
    assert "not a softdb catalogue" in fails("import", tmp_path / "other", *words)
    assert (tmp_path / "other" / "catalog.sqlite").stat().st_size == 8500


def test_the_progress_bar_shows_rate_and_remaining_time(tmp_path: Path) -> None:
    shown = StringIO()
    clock = Clock()
    console = Console(file=shown, force_terminal=True, width=120, get_time=clock)
    with progress("import", console, rate=True) as say:
        for done in range(0, 1001, 100):
            say("rows.jsonl", done, 1000)
            clock.spend(0.02)
    assert "/s" in shown.getvalue()
    assert "left" in shown.getvalue()


def test_progress_is_reported_for_each_batch_of_texts(tmp_path: Path) -> None:
    source(tmp_path, "texts")
    reports = list[Rows]()
    with softdb.open(None, encoder=softdb.text.HashedNGrams(8)) as db:
        batches = read_records(tmp_path / "rows.jsonl", fields=Fields(text="text"), batch_size=256)
        import_records(db, batches, progress=reports.append)
    assert list(map(len, reports)) == [256, 256, 256, 132]


def test_a_null_key_is_a_record_without_a_key_or_with_its_texts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "key": [1, 2], "n": 1}, {"id": 2, "key": None, "text": "a b", "n": 2}]
    file = lines(tmp_path / "r.jsonl", rows)
    assert run("import", tmp_path / "db", file).stdout.startswith("2 records imported")
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert (db[1].key.tolist(), db[2].key, db[2].payload) == ([1, 2], None, {"text": "a b", "n": 2})
    run("import", tmp_path / "texts", lines(tmp_path / "t.jsonl", rows[1:]), "--text", "text", "--encoder", "ngrams")
    with softdb.open(tmp_path / "texts", mode="r") as db:
        assert (db[2].key.norm() > 0, db[2].text, db[2].payload) == (True, "a b", {"n": 2})


def test_cells_of_csv_become_numbers_and_booleans(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text('id,key,a,b,c,d\n007,"[1, 2]",True,false,TRUE,"[1]"\n')
    run("import", tmp_path / "db", tmp_path / "r.csv")
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert db["007"].payload == {"a": True, "b": False, "c": "TRUE", "d": "[1]"}


def test_default_n_grams_are_a_warning(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", [{"id": 1, "text": "a b"}])
    words = ["import", str(tmp_path / "db"), str(file), "--text", "text"]
    with pytest.warns(softdb.EncoderWarning, match="n-grams, which find similar spelling; choose a model.*--encoder"):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--upsert"]).exit_code == 0  # the stored name has chosen


def test_the_error_after_one_record_is_singular(tmp_path: Path) -> None:
    file = lines(tmp_path / "r.jsonl", [{"id": 1, "key": [1]}, {"id": 1, "key": [2]}])
    error = fails("import", tmp_path / "db", file, "--batch-size", 1)
    assert error.endswith("; the 1 record before is in the database")
