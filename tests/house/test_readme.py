"""README tells the truth: every Python block runs, and its commands are the ones that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), scope)
    assert len(blocks("python")) >= 4


def test_the_example_is_twenty_lines() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_two_commands_are_there() -> None:
    main, tests = blocks("console")[:2]
    assert main.startswith("pip install -c constraints.txt")
    assert main.rstrip().endswith("softdb demo")
    assert tests.rstrip().endswith("&& pytest")


def test_what_the_format_says_is_what_is_written(tmp_path: Path) -> None:
    import softdb
    from softdb.store import format

    text = README.read_text()
    assert f"0x{format.APPLICATION:X}" in text.replace("0x736f6674", "0x736F6674")
    assert f"format version, now {format.FORMAT}," in text
    with softdb.open(tmp_path / "db", dim=2, value_dim=1) as db:
        db.insert(["a"], [[1, 2]], [[3]])
        names = {path.name for path in (tmp_path / "db").iterdir()}
    assert {"catalog.sqlite", "lock", "keys-00000000.npy", "values-00000000.npy"} <= names


def test_every_public_error_is_exported() -> None:
    import softdb
    from softdb import errors

    assert set(errors.__all__) <= set(softdb.__all__)
