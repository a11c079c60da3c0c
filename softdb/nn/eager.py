"""Decorators that run a function outside torch.compile and autocast, and refuse transforms of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from softdb.check import precise
from softdb.scoring.once import plain_calls

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that torch.compile calls the function without tracing it: a graph cannot read files.

    Otherwise dynamo would trace the checks and the catalogue queries, and trace both again whenever the ids change.
    Inside a transform of torch.func the function raises BadInput if torch cannot differentiate or batch it there.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        with plain_calls(function.__qualname__):
            return function(*args, **kwargs)

    return call


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it runs without autocast, and without being traced by torch.compile."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with precise():
            return function(*args, **kwargs)

    return untraced(call)
