"""The command line as a process: what it imports, completes, and writes into a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typed import ROOT, answer, fails, run

import softdb

pytest_plugins = ["command_world"]


def without_torch(*words: object) -> object:
    """The JSON of a command that ends well, in a process that has not imported torch."""
    program = "import sys; from softdb.tools.cli.commands import app; app(sys.argv[1:], standalone_mode=False); "
    program += "sys.exit(9 if 'torch' in sys.modules else 0)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", program, *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_commands_that_read_metadata_do_not_import_torch(book: Path) -> None:
    with softdb.open(book, mode="r") as db:
        whole, some, where = len(db), db.count({"year": {"$gte": 0}}), '{"year": {"$gte": 0}}'
        stats = db.stats().asdict()
    assert without_torch("info", book) == stats
    assert without_torch("count", book) == {"count": whole}
    assert without_torch("count", book, "--where", where) == {"count": some}
    assert without_torch("verify", book) == {"records": whole}


def test_public_modules_are_imported_at_their_first_use() -> None:
    names = ("cluster", "data", "formats", "nn", "plots", "pool", "scores", "text", "train", "weights")
    program = "import sys, softdb; assert not {f'softdb.{n}' for n in sys.argv} & set(sys.modules); "
    program += "[getattr(softdb, n) for n in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *names], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    with pytest.raises(AttributeError, match="module 'softdb' has no attribute 'lazyy'"):
        softdb.lazyy  # type: ignore[attr-defined]  # noqa: B018


def test_refusals_of_the_store_are_printed_like_others(book: Path) -> None:
    unknown, where = "field 'year' is given the unknown operator '$what'", '{"year": {"$what": 0}}'
    assert fails("count", book, "--where", where).startswith(f"error: count: {unknown}")
    with (book / "keys-00000000.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"damaged")
    assert fails("verify", book).startswith("error: verify: 1 damaged: keys-00000000.npy: row 0 differs")
    (book / "keys-00000000.npy").unlink()
    assert fails("count", book).startswith("error: open: ")


def test_info_and_stats_agree_about_the_index(vectors: Path) -> None:
    run("index", vectors, "--kind", "ivf")
    with softdb.open(vectors) as db:
        db.insert(["a", "b"], np.ones((2, 16)))
    with softdb.open(vectors, mode="r") as db:
        stats = db.stats().asdict()
    assert stats["index"]["unindexed"] == 2
    assert without_torch("info", vectors) == stats
    for file in (vectors / "index").iterdir():
        file.unlink()
    assert answer("info", vectors)["index"] is None


def test_names_are_completed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_SOFTDB_COMPLETE": "complete_bash"}
    program = "import sys; sys.argv = ['softdb']; from softdb.tools.cli import main; main()"
    for words, expected in (("softdb sn", ["snapshot"]), ("softdb index --kin", ["--kind"])):
        environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.stdout.split() == expected
    shown = [child("--show-completion", shell) for shell in ("bash", "zsh", "fish")]
    assert all(one.returncode == 0 and "_SOFTDB_COMPLETE=complete_" in one.stdout for one in shown)
    sourced = subprocess.run(["bash", "-n"], input=shown[0].stdout, capture_output=True, text=True)
    assert (sourced.returncode, sourced.stderr) == (0, "")
    assert "Shell csh not supported" in child("--show-completion", "csh").stderr
    assert "--install-completion" in run("--help").stdout


def test_without_typer_one_line_names_the_missing_extra() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for missing in ("typer", "rich"):
        program = f"import sys; sys.modules[{missing!r}] = None; from softdb.tools.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line == "error: the command line needs typer and rich; pip install 'softdb[cli]', or 'softdb[cpu]'"


def test_a_command_is_imported_when_it_is_called(book: Path) -> None:
    program = "import sys; from softdb.tools.cli.commands import app; app(sys.argv[1:], standalone_mode=False); "
    program += "print([name for name in sys.modules if name.startswith('softdb.tools.bench')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, "verify", str(book)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_does_not_wait_for_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "softdb", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "softdb.tools.cli.commands" in modules
    assert not {"torch", "numpy"} & modules


def child(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "softdb", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_a_pipe_is_plain_text_whatever_the_environment_wants(tmp_path: Path) -> None:
    forced = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm", "PYTHONIOENCODING": "ascii"}
    with softdb.open(tmp_path / "db", dim=1) as db:
        db.insert(["\u00fc"], payloads=[{"word": "\u2192"}])
    shown = child("get", tmp_path / "db", "\u00fc", **forced)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    assert "\\u2192" in shown.stdout  # a letter that the terminal has not is no error
    failed = child("count", tmp_path / "none", **forced)
    assert "\x1b" not in failed.stderr


def test_a_closed_pipe_is_quiet_and_a_full_disk_is_one_line(book: Path) -> None:
    command = [sys.executable, "-m", "softdb", "export", str(book), "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            command[3:] = ["info", str(book)]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=120)
        assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


WAITS = """
import sys
from softdb.tools.cli import by_id
lines = by_id.input_lines
def telling(file):
    for line in lines(file):
        yield line
        print("waits", flush=True)  # for another line
by_id.input_lines = telling
sys.argv[0] = "softdb"
from softdb.tools.cli import main
main()
"""


def test_ctrl_c_reports_the_records_on_disk(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1):
        pass
    command = [sys.executable, "-c", WAITS, "insert", str(tmp_path / "db"), "--batch-size", "1", "--json"]
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b'{"id": 1, "key": [1]}\n{"id": 2}\n')
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == [b"waits\n"] * 2
        assert answer("count", tmp_path / "db")["count"] == 2
        process.send_signal(signal.SIGINT)  # while the pipe is open: it waits for a line
        assert process.wait(60) == 130
        said = json.loads(process.stderr.read())["error"]
    assert said == {"type": "Interrupted", "message": "interrupted: 2 records inserted, on disk", "code": 130}


@pytest.mark.slow
def test_the_real_command_in_a_pipe(book: Path, tmp_path: Path) -> None:
    actual = child("search", book, "Schulz", "-k", 1)
    assert (actual.returncode, actual.stderr) == (0, "")
    assert len(actual.stdout.splitlines()) == 2
    assert "\x1b" not in actual.stdout  # neither colours nor bars where there is no terminal
    failed = child("search", tmp_path / "nothing", "Schulz")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("error: open: ")
    assert child("search").returncode == 2
