"""Give answers the leading dimensions of their queries: softdb computes with (q, d), users may pass (…, d)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from softdb.check import leading

__all__ = ["nested", "reshaped", "shaped", "shaped_as"]

P = ParamSpec("P")
R = TypeVar("R")


def shaped(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of `queries`, its second parameter: it answers (…, d) as (q, d), and the answer is reshaped."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return shaped_as(function(*args, **kwargs), args[1] if len(args) > 1 else kwargs.get("queries"))

    return call


def shaped_as(answer: R, queries: Any) -> R:
    """Give an answer to q queries the leading dimensions of the checked queries, if these have several."""
    shape = leading(queries)
    return reshaped(answer, shape) if len(shape) > 1 else answer


def reshaped(answer: Any, shape: Sequence[int], dims: int = 1) -> Any:
    """Replace the first `dims` dimensions of a tensor, or of each tensor of an answer, by those of `shape`.

    A number, such as a mean loss, stays as it is. So do functions: an answer reshapes what they return.
    """
    if isinstance(answer, Tensor):
        return answer.reshape(*shape, *answer.shape[dims:]) if answer.ndim else answer
    if hasattr(answer, "_fields"):
        return type(answer)(*(reshaped(column, shape, dims) for column in answer))
    if is_dataclass(answer) and not isinstance(answer, type):
        return replace(answer, **{f.name: reshaped(getattr(answer, f.name), shape, dims) for f in fields(answer)})
    return answer


def nested(items: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return a list with an item for each query, in row-major order, as nested lists of a leading shape."""
    if len(shape) == 1:
        return items
    size = math.prod(shape[1:])
    return [nested(items[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
