"""What holds a build of an index until a state is reached."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from softdb.index.background import Build


def goes_on_once_waited_for(patch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """Open a gate as soon as somebody waits for the end of a build."""
    wait = Build._wait

    def waits(build: Build[Any], seconds: float | None) -> bool:
        gate.set()
        return wait(build, seconds)

    patch.setattr(Build, "_wait", waits)
