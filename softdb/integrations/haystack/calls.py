"""How the document store's methods are called: awaited in a thread, and asked again where others write meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from softdb.integrations.documents import settled

__all__ = ["awaited", "of_one_state"]


P = ParamSpec("P")
R = TypeVar("R")


def awaited(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The method, to be awaited: it runs in another thread."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


def of_one_state(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method, asked again where another thread of a cluster's handle writes meanwhile."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return settled(self.db, lambda: method(self, *args, **kwargs))

    return call
