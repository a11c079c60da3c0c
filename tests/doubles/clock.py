"""A clock that a test turns by hand, in place of the machine's."""

from __future__ import annotations

from types import SimpleNamespace


class Clock:
    """Seconds that advance only by `spend`, and by `tick` at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self._tick = 0.0, tick

    def __call__(self) -> float:
        """Time that the clock shows."""
        self.now += self._tick
        return self.now

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    @property
    def module(self) -> SimpleNamespace:
        """It in place of the module `time`."""
        return SimpleNamespace(perf_counter=self, monotonic=self)
