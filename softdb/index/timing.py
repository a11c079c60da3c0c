"""Measure the wall-clock time of calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and the seconds that it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def fastest(run: Callable[[], object], turns: int) -> float:
    """Return the seconds of the fastest of `turns` calls."""
    return min(timed(run)[1] for _ in range(turns))
