"""The figures of docs/durability.md are those that the tests counted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("trust")


def test_the_table_is_made_from_the_results(trust: Any) -> None:
    results = json.loads(trust.RESULTS.read_text())
    assert list(results) == list(trust.SUITES), "benchmarks/trust.py makes what is missing"
    assert trust.shown(trust.DOCS.read_text(), results) == trust.DOCS.read_text(), "benchmarks/trust.py makes it anew"


def test_each_file_of_a_suite_is_there_and_counts(trust: Any) -> None:
    for suite in trust.SUITES.values():
        texts = [(ROOT / path).read_text() for path in suite.paths]
        assert all("tally" in text for text in texts), suite.files


def test_a_wrong_answer_shows_in_the_table(trust: Any) -> None:
    results = json.loads(trust.RESULTS.read_text())
    results["kill"]["figures"]["kills: deleted records back"] += 7
    assert "| 7 | " in trust.table(results)
