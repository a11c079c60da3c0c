"""Frames of softdb between a soft query and FAISS or a kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from with_kernels import NEEDS_KERNELS
from worlds import clusters, indexed

import softdb
from softdb import kernels

pytest.importorskip("faiss")
pytestmark = NEEDS_KERNELS

FRAMES = 9  # the verb, what guards it, and whatever stands between it and the work


def depth(frame: FrameType | None) -> int:
    """Frames of softdb on a stack."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    return sum("/softdb/" in name and "/tests/" not in name for name in names)


@pytest.fixture(scope="module")
def db() -> Iterator[softdb.SoftDB]:
    with indexed(clusters(np.random.default_rng(0), 30_000)) as opened:
        opened.watch(share=0)
        yield opened


class Noted:
    """The kernels, or one of their objects; each call is noted with the frame that it came from."""

    def __init__(self, inner: Any, note: Callable[[str, FrameType], None]) -> None:
        self.inner, self.note = inner, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("Attention", "Draw"):
            return lambda *args: Noted(found(*args), self.note)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any) -> Any:
            self.note(name, sys._getframe(1))
            return found(*args)

        return call


def deepest(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Frames of softdb on the stack when FAISS, and when each kernel, is called."""
    for _ in range(2):
        run()  # lazy imports and caches are not counted
    depths: dict[str, int] = {}

    def note(name: str, frame: FrameType) -> None:
        depths[name] = max(depths.get(name, 0), depth(frame))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/faiss/" in frame.f_code.co_filename:
            note("faiss", frame)

    noted = Noted(kernels.native(), note)
    monkeypatch.setattr(kernels, "loaded", lambda: noted)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return depths


WAYS: dict[str, dict[str, Any]] = {"exact": {}, "k": {"k": 10}, "rtol": {"rtol": 0.5, "max_draws": 400}}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("queries", [8, 16])
@pytest.mark.parametrize("way", WAYS)
def test_a_soft_query_takes_few_frames(
    db: softdb.SoftDB, way: str, queries: int, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = torch.ones(queries, 16, requires_grad=gradient)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        actual = deepest(lambda: db.attend(asked, temperature=4.0, **WAYS[way]), monkeypatch)
    finally:
        torch.set_num_threads(threads)
    assert actual
    assert max(actual.values()) <= FRAMES, actual
