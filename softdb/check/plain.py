"""Check single values: numbers, choices, lengths, tensors; and quote values in messages."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "attribute", "dense", "filled", "holds", "integer", "is_tensor", "number", "one_of", "positive", "share", "shown",
    "temperature",
]  # fmt: skip

Batched = TypeVar("Batched", bound=Sized)

INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES = INTEGERS | {"bool", "bfloat16", "float16", "float32", "float64"}  # the dtypes that softdb reads
SHOWN = 80  # maximum characters of a rejected value that a message quotes
LEAST_HEAT = 1e-30  # smallest number in a temperature that is a tensor; its inverse is the largest


def shown(value: object) -> str:
    """Return a rejected value's repr for a message, cut to SHOWN characters."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, too many digits, or a broken `__repr__`: the message must still be built
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute of a caller's object, or the default if it is absent; an error in a property is raised."""
    try:
        return getattr(owner, name)
    except AttributeError:
        if hasattr(type(owner), name):
            raise
        return default


def holds(condition: Tensor) -> bool:
    """Read a bool tensor (). Return True where no value can be read: under torch.compile and in torch.func.vmap."""
    import torch

    with contextlib.suppress(RuntimeError):
        return torch.compiler.is_compiling() or bool(condition)
    return True


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return True for a torch tensor, without importing torch, so that reading metadata stays fast."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def integer(value: object, name: str, low: int = 1, high: int | None = None) -> int:
    """Return a whole number of at least `low` (and at most `high`). Raises BadInput."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the device 'meta'
        raise BadInput(f"{name} is {shown(value)}; expected a whole number {bounds}") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise BadInput(f"{name} is {shown(value)}; expected a whole number {bounds}")
    return number


def one_of(value: object, name: str, choices: Iterable[str]) -> str:
    """Return a value that is one of the choices. Raises BadInput."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise BadInput(f"{name} is {shown(value)}; choose one of {', '.join(map(repr, known))}")
    return str(value)


def dense(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor unchanged. Raises BadInput if it is sparse, nested, on 'meta', or of an unknown dtype."""
    import torch

    if tensor.is_nested:
        raise BadInput(f"{name} are a nested tensor, whose rows may differ in width; pass its to_padded_tensor(0.0)")
    if tensor.layout is not torch.strided:
        raise BadInput(f"{name} are a sparse tensor ({tensor.layout}); pass its to_dense()")
    if tensor.device.type == "meta":
        raise BadInput(f"{name} are a tensor on the device 'meta', which holds no numbers; move it to 'cpu' or 'cuda'")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise BadInput(f"{name} are of type {tensor.dtype}; expected real numbers, such as float32")
    return tensor.resolve_neg()


def number(
    value: object,
    name: str,
    expected: str,  # expected numbers, for the message
    fits: Callable[[float], bool],
    gradient: str = "it only selects records; pass a plain number",  # why it has no gradient, for the message
) -> float:
    """Return a finite number for which `fits` returns True. Raises BadInput."""
    if type(value) is float and abs(value) < math.inf and fits(value):
        return value
    if is_tensor(value) and value.requires_grad:
        raise BadInput(f"{name} is a tensor that wants a gradient, but {gradient}")
    with contextlib.suppress(TypeError, ValueError, RuntimeError, ArithmeticError):
        converted = float(value)  # type: ignore[arg-type]
        if not isinstance(value, bool | str) and abs(converted) < math.inf and fits(converted):
            return converted
    raise BadInput(f"{name} is {shown(value)}; expected {expected}")


def positive(value: object, name: str) -> float:
    """Return a finite number above zero. Raises BadInput."""
    return number(value, name, "a finite number above 0", lambda x: x > 0, "it is not trained; pass its item()")


def temperature(value: object, leading: Sequence[int] = ()) -> float | Tensor:  # a number, or (q,)
    """Return the temperature of soft queries: a number, or a tensor (q,) with a number for each of the q queries.

    A tensor must broadcast to the queries' leading shape, and keeps its graph. One element becomes a number if no
    gradient is wanted. Raises BadInput for other shapes, integers, NaN, and numbers that are not above 0.
    """
    expected = "a finite number above 0, or a floating tensor of such numbers"
    if is_tensor(value):
        import torch

        if not value.is_floating_point() or value.is_nested or value.is_sparse or value.device.type == "meta":
            raise BadInput(f"temperature is {shown(value)} of type {value.dtype}; expected {expected}")
        if value.numel() == 1 and not (value.requires_grad and torch.is_grad_enabled()):
            value = value.item()
    if not is_tensor(value):
        return number(value, "temperature", expected, lambda x: x > 0)
    try:
        every = value.broadcast_to(tuple(leading))
    except RuntimeError:
        raise BadInput(
            f"temperature has shape {tuple(value.shape)} and the queries {tuple(leading)}; expected a number, or a "
            "shape that broadcasts to that of the queries"
        ) from None
    numbers = value.detach()
    if not bool(((numbers >= LEAST_HEAT) & (numbers <= 1 / LEAST_HEAT)).all()):
        raise BadInput(
            f"temperature is {shown(value)}; expected numbers from {LEAST_HEAT:g} to {1 / LEAST_HEAT:g}; to keep a "
            "learnt one above 0, learn its logarithm"
        )
    return every.reshape(-1)


def share(value: object, name: str) -> float:
    """Return a number from 0 to 1. Raises BadInput."""
    return number(value, name, "a number from 0 to 1", lambda x: 0 <= x <= 1)


def filled(batch: Batched, name: str, count: int) -> Batched:
    """Return a batch unchanged. Raises BadInput unless it has one entry for each of `count` ids."""
    if getattr(batch, "shape", None) == ():
        raise BadInput(f"{name} are {shown(batch)}; expected a list with one item for each of {count} ids")
    if len(batch) != count:
        raise BadInput(f"{len(batch)} {name} for {count} ids; give one for each id")
    return batch
