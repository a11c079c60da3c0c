"""Checks of single values: integers, positive numbers, choices, lengths, Unicode text; how messages quote a value."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["clamped", "dense", "encodable", "filled", "integer", "is_tensor", "one_of", "positive", "precise", "shown"]

Batched = TypeVar("Batched", bound=Sized)

SHOWN = 80  # characters of a rejected value that a message quotes


def shown(value: object) -> str:
    """A rejected value as a message quotes it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, too many digits, or whatever a `__repr__` does: what is wrong is said anyway
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether something is a tensor. Does not import torch, so that the metadata of a database is read without it."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def integer(value: object, name: str, low: int = 1, high: int | None = None) -> int:
    """A whole number of at least `low` (and at most `high`)."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadInput(f"{name} is {shown(value)}; expected a whole number {bounds}") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise BadInput(f"{name} is {shown(value)}; expected a whole number {bounds}")
    return number


def clamped(value: object, name: str, most: int) -> int:
    """A whole number of at least 1, cut down to `most`: asking for more than there is asks for all."""
    return min(integer(value, name), max(most, 1))


def one_of(value: object, name: str, choices: Iterable[str]) -> str:
    """One of some words."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise BadInput(f"{name} is {shown(value)}; choose one of {', '.join(map(repr, known))}")
    return str(value)


def dense(tensor: Tensor, name: str) -> Tensor:
    """A tensor whose numbers can be read: dense, on a device that holds them, of a type that softdb computes in."""
    import torch

    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool)
    integers = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
    if tensor.layout is not torch.strided:
        raise BadInput(f"{name} are a sparse tensor ({tensor.layout}); pass its to_dense()")
    if tensor.device.type == "meta":
        raise BadInput(f"{name} are a tensor on the device 'meta', which holds no numbers; move it to 'cpu' or 'cuda'")
    if tensor.dtype not in (*kinds, *integers):
        raise BadInput(f"{name} are of type {tensor.dtype}; expected real numbers, such as float32")
    return tensor


def positive(value: object, name: str) -> float:
    """A finite number above zero."""
    if is_tensor(value) and value.requires_grad:
        raise BadInput(
            f"{name} is a tensor that wants a gradient, but {name} is a plain number; divide the queries by it"
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BadInput(f"{name} is {shown(value)}; expected a number above 0") from None
    if isinstance(value, bool | str) or not (number > 0 and math.isfinite(number)):
        raise BadInput(f"{name} is {shown(value)}; expected a finite number above 0")
    return number


def filled(batch: Batched, name: str, count: int) -> Batched:
    """The batch, if it has one entry for each id."""
    if len(batch) != count:
        raise BadInput(f"{len(batch)} {name} for {count} ids; give one for each id")
    return batch


def encodable(text: str, what: str) -> None:
    """BadInput where a text holds a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end]
        raise BadInput(
            f"{what} holds the lone surrogate {bad!a}, which is not Unicode text; decode the source rightly"
        ) from None


def precise() -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off: answers are as precise as their queries, whatever a model around them is cast to."""
    import torch

    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
