from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TALLY = pytest.StashKey[Counter[str]]()

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait ruin a shared machine


@pytest.fixture(autouse=True)
def key_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key under which index files are signed, kept away from the user's own."""
    path = tmp_path_factory.getbasetemp() / "index.key"
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(path))
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="a JSON file that takes what the tests of trust have counted")


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a run has tried, in plain counts by name ("kills", "kills: acknowledged records lost"); shown at its end."""
    counts: Counter[str] = request.config.stash.setdefault(TALLY, Counter())
    yield counts
    path = request.config.getoption("figures")
    if path is not None and counts:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **counts}, indent=1, sort_keys=True) + "\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, count in sorted(config.stash.get(TALLY, Counter()).items()):
        terminalreporter.write_line(f"{name}: {count:,}")
