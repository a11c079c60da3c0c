"""Limits on a query's steps and a copy's size, computed from the bytes on disk: a damaged header may claim any size."""

from __future__ import annotations

import os
from collections.abc import Callable

STEPS = 20_000  # thousands of SQLite's steps allowed to any query, plus 100 steps for each byte of the file
DENSEST = 1024  # largest ratio of claimed size to bytes on disk: no file system compresses better


def step_limit(size: int) -> Callable[[], bool]:
    """Return a progress handler of SQLite, called every thousand steps: True if a query on `size` bytes must stop."""
    remaining = iter(range(STEPS + size // 10))
    return lambda: next(remaining, None) is None


def occupied(path: str) -> int:
    """Return the bytes that a file occupies on disk; 0 if it does not exist."""
    try:
        return os.stat(path).st_blocks * 512 if path else 0
    except OSError:
        return 0
