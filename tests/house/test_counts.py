"""The counts of the source do not get worse: counts.json holds those that were last committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counts import COMMITTED, counts

MEASURED = counts()


@pytest.mark.parametrize("name", MEASURED)
def test_a_count_does_not_rise(name: str) -> None:
    """A change that needs more raises the committed number by that much and gives a reason."""
    assert MEASURED[name] <= json.loads(COMMITTED.read_text())[name]


def test_every_count_is_committed() -> None:
    assert json.loads(COMMITTED.read_text()).keys() == MEASURED.keys()


BAD = '''"""Whether it is bad."""
import sys


class Source:
    """A source."""


class Near(Source):
    """What is near."""

    @abstractmethod
    def f(self, a, b, c, d, e, f, g):
        """Return a frame."""
        one = sys._getframe()
        return isinstance(a, Near | int), one
'''


def test_each_fault_is_counted(tmp_path: Path) -> None:
    """A file with one fault of each kind raises each count."""
    for folder in ("attend", "index"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bad.py").write_text(BAD)
    (tmp_path / "long.py").write_text("\n" * 390)
    (tmp_path / "long.cc").write_text("\n" * 9)
    assert counts(tmp_path) == {
        "lines of Python": 390 + 2 * BAD.count("\n"),
        "lines of C++": 9,
        "docstrings that open with a question word": 4,
        "uses of vague names": 4,
        "file names in several folders": 1,
        "public names of SoftDB": MEASURED["public names of SoftDB"],
        "isinstance tests of a source": 2,
        "abstract methods": 2,
        "inner functions of seven and more parameters": 2,
        "privates of CPython or torch": 2,
        "files of 390 lines and more": 1,
    }
