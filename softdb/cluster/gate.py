"""A gate between the answers of a shard and its changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Gate"]


class Gate:
    """Lets answers pass side by side, and a change only while there is none."""

    def __init__(self) -> None:
        self._condition, self._passing, self._closing = threading.Condition(), 0, 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """For an answer: waits for changes that wait or go on."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closing)
            self._passing += 1
        try:
            yield
        finally:
            with self._condition:
                self._passing -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """For a change: waits for the answers that go on."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closing)
            self._closing = 1
            self._condition.wait_for(lambda: not self._passing)
        try:
            yield
        finally:
            with self._condition:
                self._closing = 0
                self._condition.notify_all()
