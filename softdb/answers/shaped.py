"""Give answers the leading dimensions of their queries: softdb computes with (q, d), users may pass (…, d)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from softdb.check import leading

__all__ = ["nested", "shaped", "shaped_as"]

P = ParamSpec("P")
R = TypeVar("R")


def shaped(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function whose second parameter is `queries`, so that its answer has their leading dimensions.

    The function answers queries (…, d) as if they were (q, d), in row-major order.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return shaped_as(function(*args, **kwargs), args[1] if len(args) > 1 else kwargs.get("queries"))

    return call


def shaped_as(answer: R, queries: Any) -> R:
    """Give an answer to q queries the leading dimensions of the checked queries, if these have several."""
    shape = leading(queries)
    return _reshaped(answer, shape) if len(shape) > 1 else answer


def _reshaped(answer: Any, shape: Sequence[int]) -> Any:
    """Replace the first dimension q of a tensor, or of each tensor of an answer, by the dimensions of `shape`.

    A number, such as a mean loss, stays as it is. So do functions: an answer reshapes what they return.
    """
    if isinstance(answer, Tensor):
        return answer.reshape(*shape, *answer.shape[1:]) if answer.ndim else answer
    if hasattr(answer, "_fields"):
        return type(answer)(*(_reshaped(column, shape) for column in answer))
    if is_dataclass(answer) and not isinstance(answer, type):
        columns = {field.name: _reshaped(getattr(answer, field.name), shape) for field in fields(answer)}
        return replace(answer, **columns)
    return answer


def nested(items: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return a list with an item for each query, in row-major order, as nested lists of a leading shape."""
    if len(shape) == 1:
        return items
    size = math.prod(shape[1:])
    return [nested(items[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
