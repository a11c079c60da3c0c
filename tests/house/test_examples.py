"""Every example runs in a process of its own and prints what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = {**os.environ, "PYTHONPATH": str(ROOT)}  # so that the examples run where softdb is not installed
ELSEWHERE = {"cluster.py", "fine_tune.py"}  # by tests/integrations, where the libraries are
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)


def run(example: Path, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(example), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=PATHS)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_run() -> None:
    folders = (ROOT / "tests" / "house", ROOT / "tests" / "integrations")  # those of other libraries where these are
    tests = "".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    assert len(EXAMPLES) >= 5
    assert all(f'"{example.name}"' in tests for example in EXAMPLES)


def test_the_example_loop_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    lines = run(ROOT / "examples" / "train_projection.py", tmp_path, "here").splitlines()
    before, after = ([float(one) for one in line.split()[2::2]] for line in lines[-2:])
    assert lines[-2].startswith("before")
    assert all(b > a + 0.02 for a, b in zip(before, after, strict=True))
    again = run(ROOT / "examples" / "train_projection.py", tmp_path, "here").splitlines()
    assert again == lines[-2:]  # nothing is left to train


def test_the_phone_book_answers_in_three_ways(tmp_path: Path) -> None:
    shown = run(ROOT / "examples" / "phone_book.py", tmp_path, "mine.png")
    lines = [line.split() for line in shown.splitlines() if line]
    assert lines[0] == ["exact", "Schulz", "->", "Lisa"]
    assert shown.splitlines()[1].startswith("without it   get: id 'Schulz' is not stored")
    assert lines[2] == ["approximate", "Schuler", "->", "Tim"]
    assert lines[3] == ["soft", "temperature", "Anna", "Michael", "Julia", "Sarah", "Lisa", "Tim"]
    sweep = [[float(one) for one in line] for line in lines[4:-1]]
    assert sweep[0] == [0.01, 0, 0, 0, 0, 1, 0]  # a database lookup
    assert all(abs(share - 1 / 6) < 0.01 for share in sweep[-1][1:])  # average pooling
    lisa = [row[5] for row in sweep]
    assert lisa == sorted(lisa, reverse=True)
    assert all(abs(sum(row[1:]) - 1) < 0.004 for row in sweep)  # rounded to three digits
    assert all(
        row[6] == max(share for i, share in enumerate(row[1:], 1) if i != 5) for row in sweep
    )  # Tim comes second
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == ["picture", "mine.png"]


def test_two_ranks_train_one_projection_over_all_records(tmp_path: Path) -> None:
    lines = [line.split() for line in run(ROOT / "examples" / "torchrun.py", tmp_path).splitlines()]
    assert lines[0] == ["2", "ranks,", "4", "shards,", "2000", "records"]
    assert float(lines[1][-1]) < 0.2 * float(lines[1][1])
    assert float(lines[2][-1]) > 0.9
