"""No autocast inside softdb."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["precise"]


def precise() -> contextlib.AbstractContextManager[Any]:
    """Answers are as precise as their queries, whatever a model around them is cast to."""
    import torch

    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
