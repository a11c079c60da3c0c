"""The one stopwatch: seconds of a call, by which ways of answering are compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returned, and its seconds."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def fastest(run: Callable[[], object], turns: int) -> float:
    """Return the seconds of the fastest of some calls, the first of which warms up."""
    return min(timed(run)[1] for _ in range(turns))
