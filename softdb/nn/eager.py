"""Decorators that keep torch.compile and autocast out, as for the verbs of a database."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from softdb.check import precise

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.compile runs as it is, as it does the verbs of a database: a graph cannot hold files.

    Without it dynamo would trace the checks and the look into the catalogue, and trace them anew for other ids.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """As `untraced`, and without autocast."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with precise():
            return function(*args, **kwargs)

    return untraced(call)
