"""`softdb reembed`: progress, interruption and resumption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typed import answer, fails, lines, run

import softdb
from softdb.text import HashedNGrams

pytest_plugins = ["command_world"]

ROWS = [{"id": i, "text": f"record {i} of {i * i % 97}"} for i in range(400)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts in n-grams, with the text in the payload."""
    run("import", tmp_path / "texts", lines(tmp_path / "texts.jsonl", ROWS), "--text", "text", "--dim", 32)
    return tmp_path / "texts"


def test_the_encoder_is_changed(texts: Path) -> None:
    shown = run("reembed", texts, "--encoder", "ngrams(3)", "--dim", 64).stdout
    assert shown == "400 records embedded; the keys are now made by ngrams(3), 64 numbers each\n"
    facts = answer("info", texts)
    assert (facts["dim"], facts["encoder"], facts["records"]) == (64, "ngrams(3)", 400)
    assert answer("search", texts, "record 7 of 49", "-k", 1)[0][0]["id"] == 7
    report = answer("reembed", texts, "--encoder", "ngrams")
    assert (report["records"], report["embedded"], report["dim"]) == (400, 400, 256)


def test_impossible_reembeddings_are_refused_by_name(texts: Path, plane: Path) -> None:
    assert "name the encoder of the new keys with --encoder" in fails("reembed", texts)
    assert "record 'east' has no text: its field 'text' is None" in fails("reembed", plane, "--encoder", "ngrams")
    assert "has no text: its field 'title'" in fails("reembed", texts, "--encoder", "ngrams", "--field", "title")
    (texts / "model").mkdir()
    assert "lies in the database's own directory" in fails("reembed", texts, "--encoder", texts / "model")
    run("reembed", plane, "--encoder", "ngrams", "--missing", "nothing", "--dim", 8)
    assert answer("info", plane)["dim"] == 8


HELD = """
import sys, threading
from softdb.text import HashedNGrams
plain, calls = HashedNGrams.__call__, []
def held(self, texts):
    calls.append(len(texts))
    if len(calls) == 10:
        print("held", flush=True)
        threading.Event().wait()
    return plain(self, texts)
HashedNGrams.__call__ = held
sys.argv[0] = "softdb"
from softdb.tools.cli import main
main()
"""


def test_an_interrupted_reembed_reports_progress_and_resumes(texts: Path) -> None:
    command = [sys.executable, "-c", HELD, "reembed", str(texts), "--encoder", "ngrams(4)", "--batch-size", "8"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert (texts / "reembed-0" / "keys-00000000.npy").exists()
    os.kill(child.pid, signal.SIGINT)
    _, actual = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "of 400 records embedded, the database is unchanged; the same command goes on from there" in actual
    done = int(actual.split()[1])
    assert 8 <= done < 400
    with softdb.open(texts, mode="r") as db:
        assert (db.dim, db.encoder_name) == (32, "ngrams")
        assert db.search("record 7 of 49", k=1).ids == [[7]]
    shown = run("reembed", texts, "--encoder", "ngrams(4)").stdout
    embedded = int(shown.split()[0])
    assert embedded <= 400 - done
    assert f"{embedded} records embedded, {400 - embedded} reused from an earlier run; the keys are now made" in shown
    with softdb.open(texts) as db:
        assert db.search("record 7 of 49", k=1).ids == [[7]]
        assert db.get([7]).keys[0].tolist() == HashedNGrams(256, (4,))(["record 7 of 49"])[0].tolist()
