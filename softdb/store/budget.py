"""Limits on a query's steps and a copy's size, computed from the bytes on disk: a damaged header may claim any size."""

from __future__ import annotations

import math
import os

STEPS = 20_000  # thousands of SQLite's steps allowed to any query, plus 100 steps for each byte of the file
DENSEST = 1024  # largest ratio of claimed size to bytes on disk: no file system compresses better


class Budget:
    """Progress handler of SQLite, called every thousand steps, which stops a query that takes too many steps."""

    def __init__(self) -> None:
        self._steps = math.inf  # remaining steps, in thousands

    def allow(self, size: int) -> None:
        """Limit the steps of the next query, on a catalogue of `size` bytes."""
        self._steps = STEPS + size // 10

    def end(self) -> None:
        """Remove the limit at the end of a query: statements that write have none."""
        self._steps = math.inf

    def __call__(self) -> bool:
        """Count a thousand steps, and return True if the query must stop."""
        self._steps -= 1
        return self._steps < 0


def occupied(path: str) -> int:
    """Return the bytes that a file occupies on disk; 0 if it does not exist."""
    try:
        return os.stat(path).st_blocks * 512 if path else 0
    except OSError:
        return 0
