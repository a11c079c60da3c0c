"""Decorators that run a function outside torch.compile and autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from softdb.check import precise

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function so that torch.compile calls it without tracing it: a graph cannot hold files.

    Otherwise dynamo would trace the checks and the catalogue queries, and trace them again for other ids.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function so that it runs without autocast and untraced (see `untraced`)."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with precise():
            return function(*args, **kwargs)

    return untraced(call)
