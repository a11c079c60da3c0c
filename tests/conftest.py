from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

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
