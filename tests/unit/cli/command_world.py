"""Databases that the tests of the command line ask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typed import BOOK, lines, run

POINTS = {"east": [1, 0], "north": [0, 1], "west": [-1, 0], "south": [0, -1]}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A phone book, its names in n-grams."""
    run("import", tmp_path / "book", lines(tmp_path / "book.jsonl", BOOK), "--text", "name")
    return tmp_path / "book"


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    """Four points of the plane, with classes."""
    rows = [{"id": name, "key": key, "side": i // 2} for i, (name, key) in enumerate(POINTS.items())]
    run("import", tmp_path / "plane", lines(tmp_path / "plane.jsonl", rows), "--value", "side", "--num-classes", 2)
    return tmp_path / "plane"


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """Enough vectors to train an index."""
    np.save(tmp_path / "k.npy", np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32))
    run("import", tmp_path / "vectors", tmp_path / "k.npy")
    return tmp_path / "vectors"
