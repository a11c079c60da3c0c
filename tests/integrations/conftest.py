from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # models come with packages or are made by the tests
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def key_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key under which index files are signed, kept away from the user's own."""
    path = tmp_path_factory.getbasetemp() / "index.key"
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(path))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path for a test's database."""
    return tmp_path / "db"
