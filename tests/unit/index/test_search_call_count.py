"""Python calls and frames of one search, which cost microseconds each."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import Any

import numpy as np
import pytest
from worlds import indexed

import softdb

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

CALLS, FRAMES = 45, 10  # Python calls of a search; frames of softdb from the verb to the kernel


@pytest.fixture(scope="module", params=["dot", "cosine", "l2"])
def db(request: pytest.FixtureRequest) -> softdb.SoftDB:
    db = indexed(metric=request.param)
    db.watch(share=0)
    return db


def counted(db: softdb.SoftDB, query: Any) -> tuple[int, int]:
    """Python calls of one search, and the most frames of softdb on the stack at once."""
    calls, frames = 0, 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, frames
        if event != "call":
            return
        calls += 1
        stack = [above.f_code.co_filename for above, _ in traceback.walk_stack(frame)]
        frames = max(frames, sum("/softdb/" in name and "/tests/" not in name for name in stack))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        db.search(query, k=10)
    finally:
        sys.setprofile(before)
    return calls, frames


@pytest.mark.few(1)
def test_a_warm_search_by_the_index_takes_few_calls(db: softdb.SoftDB) -> None:
    query = np.ones((1, 16), np.float32)
    for _ in range(3):
        db.search(query, k=10)
    calls, frames = counted(db, query)
    assert 0 < calls <= CALLS
    assert 0 < frames <= FRAMES
