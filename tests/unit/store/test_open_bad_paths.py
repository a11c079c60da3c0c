"""Impossible paths are refused before any file is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from worlds import holding

import softdb

WRONG: list[tuple[Any, str]] = [
    (b"bytes", "as text"),
    (os.fsdecode(b"latin-\xe9"), "not .*UTF-8|surrogate"),
    ("with\0nul", "without NUL"),
    ("x" * 300, "at most 255 bytes"),
    ("a/b/" + "ü" * 200, "at most 255 bytes"),
    (7, "expected"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG, ids=lambda one: repr(one)[:20])
def test_an_impossible_path_is_refused_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for mode in ("rw", "r"):
        with pytest.raises(softdb.BadInput, match=why):
            softdb.open(wrong, dim=2, mode=mode)
    with holding([[1, 2]], ids=["a"]) as db, pytest.raises(softdb.BadInput, match=why):
        db.snapshot(wrong)
    with pytest.raises(softdb.BadInput, match=why):
        softdb.salvage(wrong, "saved")
    assert not list(tmp_path.iterdir())


def test_a_path_in_other_letters_is_fine(tmp_path: Path) -> None:
    for name in ("日本語", "with space", "naïve#?%41", "x" * 255):
        with holding([[1, 2]], ids=["a"], path=tmp_path / name) as db:
            db.snapshot(tmp_path / "copies" / name)
        with softdb.open(tmp_path / "copies" / name, mode="r", verify=True) as copy:
            assert "a" in copy
