"""Warnings that an answer gives, told beside it."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["note_warnings", "noted"]

_NOTED: list[str] = []
MOST = 20  # that wait to be told


def note_warnings() -> None:
    """From now on warnings of this process go to the next answer, since they may come from any thread."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and len(_NOTED) < MOST:
            _NOTED.append(" ".join(str(message).split()))

    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = show


def noted() -> list[str]:
    """What was warned of since this was asked last."""
    found = list(dict.fromkeys(_NOTED))
    _NOTED.clear()
    return found
