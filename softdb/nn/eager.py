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
    """Wrap a function so that torch.compile calls the function without tracing it: a graph cannot read files.

    Otherwise dynamo would trace the checks and the catalogue queries, and trace both again whenever the ids change.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it runs without autocast, and without being traced by torch.compile."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with precise():
            return function(*args, **kwargs)

    return untraced(call)
