"""Every example runs in a process of its own, with `--quick` and `--plot`, and prints what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'tests' / 'checked'}:{ROOT}",
}  # checks pictures; softdb need not be installed
ELSEWHERE = {"cluster.py", "fine_tune.py"}  # by tests/integrations, where the libraries are
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in {*ELSEWHERE, "shared.py"})


QUICK = ("--quick", "--plot", "drawn.png")


def assert_drawn(folder: Path) -> None:
    assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")


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


def test_every_example_has_the_shared_arguments_and_says_so() -> None:
    for example in EXAMPLES + [ROOT / "examples" / name for name in ELSEWHERE]:
        text = example.read_text()
        assert "arguments(__doc__" in text, example
        assert "[--plot PICTURE.png] [--quick]\n" in text, example


WRONG = [
    ("drawn", "'drawn' is not the name of a picture; give a path ending in .png, .pdf or .svg"),
    ("drawn.exe", "'drawn.exe' is not the name of a picture"),
    ("missing/drawn.png", "the folder 'missing' does not exist; make it, or choose another"),
    ("folder.png", "'folder.png' is a folder; give the path of a file in it"),
]


@pytest.mark.parametrize(("path", "message"), WRONG)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(sys, "argv", ["example.py", "--plot", path])
    from shared import arguments

    with pytest.raises(SystemExit, match=r"^2$"):
        arguments("An example.")
    assert f"error: argument --plot: {message}" in capsys.readouterr().err
    assert [name.name for name in tmp_path.iterdir()] == ["folder.png"]


def test_an_example_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["example.py", "--plot", "drawn.png"])
    from shared import arguments

    with pytest.raises(SystemExit, match=r"^2$"):
        arguments("An example.")
    assert "pip install 'softdb[plot]'" in capsys.readouterr().err


def test_the_example_loop_learns_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    lines = run(ROOT / "examples" / "train_projection.py", tmp_path, "here", *QUICK).splitlines()
    assert_drawn(tmp_path)
    before, after = ([float(one) for one in line.split()[2::2]] for line in lines[-2:])
    assert lines[-2].startswith("before")
    assert all(b > a + 0.02 for a, b in zip(before, after, strict=True))
    again = run(ROOT / "examples" / "train_projection.py", tmp_path, "here", "--quick").splitlines()
    assert again == lines[-2:]  # nothing is left to train


def test_the_phone_book_answers_in_three_ways(tmp_path: Path) -> None:
    shown = run(ROOT / "examples" / "phone_book.py", tmp_path, *QUICK)
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
    assert_drawn(tmp_path)
    assert lines[-1] == ["picture", "drawn.png"]


def test_two_ranks_train_one_projection_over_all_records(tmp_path: Path) -> None:
    lines = [line.split() for line in run(ROOT / "examples" / "torchrun.py", tmp_path, *QUICK).splitlines()]
    assert_drawn(tmp_path)
    assert lines[0] == ["2", "ranks,", "4", "shards,", "2000", "records"]
    assert float(lines[1][-1]) < 0.2 * float(lines[1][1])
    assert float(lines[2][-1]) > 0.9
