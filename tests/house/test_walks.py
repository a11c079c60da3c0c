"""The walks of docs/architecture.md are the calls that run, in that order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from worlds import holding

import softdb
import softdb.train
from softdb.cluster.cluster_core import ClusterCore
from softdb.database import Core, DatabaseCore

ROOT = Path(softdb.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"

Step = tuple[str, str]  # file and function


def walk(heading: str) -> list[Step]:
    """The steps of a section's table."""
    section = ARCHITECTURE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(softdb/[\w/]+\.py)` \| (.+?) \|", section, re.MULTILINE)
    return [(path, name.split(".")[-1]) for path, names in rows for name in re.findall(r"`([\w.]+)`", names)]


def called(db: softdb.SoftDB, run: Callable[[softdb.SoftDB], object]) -> list[Step]:
    """Functions of softdb that a call runs, here and on the store's thread, in the order of their beginnings."""
    steps: list[Step] = []
    home = str(ROOT.parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            steps.append((code.co_filename[len(home) + 1 :], code.co_name))

    try:
        sys.setprofile(note)
        db._store.run(sys.setprofile, note)
        run(db)
    finally:
        sys.setprofile(None)
        db._store.run(sys.setprofile, None)
    return steps


@pytest.fixture(scope="module")
def db() -> Iterator[softdb.SoftDB]:
    random = np.random.default_rng(0)
    with holding(random.standard_normal((30_000, 16))) as opened:
        opened.build_index("ivf", recall=0.8)
        yield opened


QUERIES = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
WAYS: dict[str, Callable[[softdb.SoftDB], object]] = {
    "A search by an index": lambda db: db.search(QUERIES, k=10, exclude_ids=[]),  # more than the plain one
    "An exact soft query": lambda db: db.attend(QUERIES, temperature=4.0),
    "An estimated soft query": lambda db: db.attend(QUERIES[:1], temperature=4.0, rtol=0.5, max_draws=400),
    "A training step": lambda db: softdb.train.fit(db, QUERIES, list(range(64)), epochs=1, patience=None),
    "An insert": lambda db: db.insert([f"new {len(db)}"], QUERIES[:1]),
}


@pytest.mark.parametrize("heading", WAYS)
def test_walks_of_the_architecture_page_are_what_runs(db: softdb.SoftDB, heading: str) -> None:
    actual = walk(heading)  # of files of Python: no profiler sees the kernels
    assert len(actual) >= 5
    WAYS[heading](db)  # lazy imports and caches are no steps
    run = iter(called(db, WAYS[heading]))
    missed = [step for step in actual if step not in run]  # `in` continues from the last step that it found
    assert missed == [], "not called, or not in this order"


MOST = {"A search by an index": 9, "An exact soft query": 8, "An insert": 10}  # frames of softdb down to the last step


def depths(db: softdb.SoftDB, run: Callable[[softdb.SoftDB], object]) -> dict[Step, int]:
    """Frames of softdb on the stack at the first call of each function, across the store's thread."""
    frames: dict[Step, int] = {}
    home, caller, waiting = str(ROOT.parent), threading.get_ident(), [0]

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        depth = 0 if threading.get_ident() == caller else waiting[0]
        above: FrameType | None = frame
        while above is not None:
            depth += above.f_code.co_filename.startswith(str(ROOT))
            above = above.f_back
        code = frame.f_code
        if threading.get_ident() == caller:
            waiting[0] = depth if code.co_filename.endswith("worker.py") else 0
        frames.setdefault((code.co_filename[len(home) + 1 :], code.co_name), depth)

    try:
        sys.setprofile(note)
        db._store.run(sys.setprofile, note)
        run(db)
    finally:
        sys.setprofile(None)
        db._store.run(sys.setprofile, None)
    return frames


@pytest.mark.parametrize("heading", MOST)
def test_a_walk_is_short(db: softdb.SoftDB, heading: str) -> None:
    WAYS[heading](db)
    frames = depths(db, WAYS[heading])
    deepest = max((frames[step], step) for step in walk(heading) if step in frames)
    assert deepest[0] <= MOST[heading], deepest


def test_a_database_and_a_cluster_provide_a_core(db: softdb.SoftDB) -> None:
    """Each defines whatever `Core` declares, so that the verbs are written once."""
    declared = [name for name in vars(Core) if not name.startswith("_")]
    assert len(declared) > 20
    for kind in (DatabaseCore, ClusterCore):
        missing = [name for name in declared if getattr(kind, name) is getattr(Core, name)]
        assert set(missing) <= {
            "created",
            "device",
            "device_failed",
            "header",
            "as_queries",
            "request",
            "require_width",
        }, kind
    assert isinstance(db.core, DatabaseCore)
    assert db.core.header == {**db.core.schema.described, "fields": (), "encoder": None}
