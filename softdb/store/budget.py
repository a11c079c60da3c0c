"""Limits of a query or a copy. Guarantee: it follows from the bytes on disk, not from what a header claims."""

from __future__ import annotations

import math
import os

STEPS = 20_000  # thousands of SQLite's steps that any query may take; and a hundred a byte of the file
DENSEST = 1024  # a file that claims more bytes for each on disk is none: nothing compresses so well


class Budget:
    """A progress handler of SQLite, called every thousand steps: it stops a query that takes too many."""

    def __init__(self) -> None:
        self._steps = math.inf  # thousands

    def allow(self, size: int) -> None:
        """A query begins, on a catalogue of so many bytes."""
        self._steps = STEPS + size // 10

    def end(self) -> None:
        """It has ended: a statement that writes is never stopped."""
        self._steps = math.inf

    def __call__(self) -> bool:
        """True if the work is to stop."""
        self._steps -= 1
        return self._steps < 0


def occupied(path: str) -> int:
    """Bytes of a file on disk; 0 where there is none."""
    try:
        return os.stat(path).st_blocks * 512 if path else 0
    except OSError:
        return 0
