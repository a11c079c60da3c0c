"""Check keys, values, queries and masks, and convert them to arrays and tensors; also devices and encoders."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from softdb.check.plain import attribute, dense, filled, integer, is_tensor, shown
from softdb.check.schemas import MAX_DIM, Schema
from softdb.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Array", "Encoder", "all_finite", "are_texts", "devices", "encoded", "finite", "leading", "mask", "matrix",
    "numbers", "precise", "queries", "query_encoder", "resident_dtype", "sample_weights", "values", "vectors",
]  # fmt: skip

Array: TypeAlias = NDArray[Any]
Encoder: TypeAlias = Callable[[list[str]], Any]  # n texts -> (n, d)


def devices(value: object) -> tuple[torch.device, ...] | None:
    """Return the devices to compute on: the CPU, or one or several GPUs that torch sees; None for None."""
    if value is None:
        return None
    listed = value if isinstance(value, list | tuple) else [value]
    chosen = tuple(_device(item) for item in listed)
    mixed = len(chosen) > 1 and any(device.type == "cpu" for device in chosen)
    if not chosen or len(set(chosen)) < len(chosen) or mixed:
        raise BadInput(f"device is {shown(value)}; expected one device, or a list of GPUs that are all different")
    return chosen


def resident_dtype(value: object) -> torch.dtype | None:
    """Return the dtype of columns on a device, given as a torch dtype or a name; None: the stored dtype."""
    if value is None:
        return None
    import torch

    known = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    dtype = known.get((value if isinstance(value, str) else shown(value)).removeprefix("torch."))
    if dtype is None:
        raise BadInput(f"dtype is {shown(value)}; expected 'float32', 'float16' or 'bfloat16', or None to keep it")
    return dtype


def _device(value: object) -> torch.device:
    import torch

    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        raise BadInput(f"device is {shown(value)}; expected 'cpu', 'cuda', 'cuda:1' or a list of GPUs") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"device is {shown(value)}, which softdb does not support; expected 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {device} but torch sees no CUDA device; omit device to answer on the CPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise BadInput(f"device is {device} but the last that torch sees is 'cuda:{last}'; choose one up to that")
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def precise() -> contextlib.AbstractContextManager[Any]:
    """Disable autocast in a block, so that answers are as precise as their queries inside a model with autocast."""
    import torch

    stack = contextlib.ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def are_texts(value: object) -> bool:
    """Return True for a str, an array of str, or a list or tuple that holds a str."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind == "U")
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(item, str) for item in value))


def query_encoder(encoder: Encoder | None) -> Encoder | None:
    """Return the encoder of queries: its method `encode_queries` if there is one, else the encoder itself."""
    method = attribute(encoder, "encode_queries")
    return method if callable(method) else encoder


def encoded(value: object, name: str, encoder_of: Callable[[], Encoder | None]) -> object:
    """Encode texts as vectors, by the encoder that `encoder_of` returns; return anything else unchanged."""
    if not are_texts(value):
        return value
    texts: Any = [value] if isinstance(value, str) else value.tolist() if isinstance(value, np.ndarray) else value
    if not all(isinstance(text, str) for text in texts):
        raise BadInput(f"{name} mix text and numbers; give only texts or only numbers")
    encoder = encoder_of()
    if encoder is None:
        raise BadInput(f"{name} are text but this database was opened without an encoder; pass encoder= to softdb.open")
    vectors = encoder(list(texts))
    expected = f"for {len(texts)} texts; it must give one vector for each"
    try:
        count, width = len(vectors), next((np.ndim(vector) for vector in vectors), 1)
    except TypeError:
        raise BadInput(f"the encoder gave {shown(vectors)} {expected}") from None
    if count != len(texts) or not width:
        raise BadInput(f"the encoder gave {count} {'vectors' if width else 'numbers'} {expected}")
    return vectors


def numbers(value: Any, name: str) -> Array:
    """Convert a numpy array, a tensor on any device, or (nested) lists to a numeric array. Raises BadInput."""
    if is_tensor(value):
        import torch

        value = dense(value, name).detach()
        value = (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    elif type(value) is not np.ndarray and isinstance(value, Sequence) and any(is_tensor(item) for item in value):
        value = [numbers(item, name) if is_tensor(item) else item for item in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        widths = [len(row) if isinstance(row, list | tuple) else np.size(row) for row in value]
        odd = next((i for i, width in enumerate(widths) if width != widths[0]), 0)
        differs = f"row {odd} has {widths[odd]} numbers, row 0 has {widths[0]}" if odd else "their rows differ in width"
        raise BadInput(f"{name} are ragged: {differs}; expected one width for all") from None
    if array.dtype.kind not in "fiu" or array.itemsize > 8:
        advice = "; of a column of arrays pass np.stack(column)" if array.dtype == object else ""
        raise BadInput(f"{name} are of type {array.dtype}; expected real numbers of at most 64 bits{advice}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def matrix(value: object, name: str, width: int, dtype: np.dtype[Any]) -> Array:
    """Return vectors as a finite C-contiguous (n, width) array of a dtype; a single vector becomes (1, width).

    Any width is right if `width` is 0.
    """
    array = numbers(value, name)
    if array.ndim == 1 and len(array):
        array = array[None]
    if array.size == 0 and (array.ndim != 2 or len(array) == 0):
        raise BadInput(f"{name} are an empty batch; give at least one vector of {width or 'd'} numbers")
    if array.ndim != 2:
        raise BadInput(f"{name} have {array.ndim} dimensions, shape {array.shape}; expected (n, {width or 'd'})")
    width = width or integer(array.shape[1], f"the width of {name}", 1, MAX_DIM)
    if array.shape[1] != width:
        raise BadInput(
            f"{name} are {array.shape[1]} wide but this database is {width} wide; embed again or open another database"
        )
    finite(array, name)
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore", under="ignore"):
        cast = np.ascontiguousarray(array, dtype)
    if cast.dtype != array.dtype:
        advice = "scale them" + (", or store float32" if dtype == np.float16 else "")
        finite(cast, f"{name}, cast to {dtype},", f" (the largest {dtype} is {np.finfo(dtype).max:g}): {advice}")
    return cast


def all_finite(array: Array) -> bool:
    """Return True if the sum of squares is finite: then every number is finite. False proves nothing."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return math.isfinite(np.dot(flat, flat))


def finite(array: Array, name: str, remedy: str = "; remove or repair those rows") -> None:
    """Raise BadInput, naming the first row, if a number is NaN or infinite."""
    if array.dtype.kind != "f":
        return
    if array.itemsize > 2 and all_finite(array):
        return
    bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
    if len(bad):
        raise BadInput(f"{name} hold NaN or infinity in {len(bad)} of {len(array)} rows, first in row {bad[0]}{remedy}")


def sample_weights(value: object, *shape: int) -> NDArray[np.float64]:  # (*shape)
    """Return weights of samples, which are at least 0 and not all 0, in float64. Raises BadInput."""
    weights = numbers(value, "sample_weight").astype(np.float64)
    if weights.shape != shape:
        raise BadInput(f"sample_weight has shape {weights.shape}; expected {shape}, a number for each sample")
    finite(weights, "sample_weight", "; give numbers of at least 0")
    with np.errstate(over="ignore"):
        least, total = weights.min(initial=0), weights.sum()
    if least < 0 or not 0 < total < np.inf:
        expected = "no negative number, and a finite sum above zero"
        raise BadInput(f"sample_weight: the least number is {least:g} and the sum {total:g}; expected {expected}")
    return weights


def values(value: object, schema: Schema, count: int) -> Array | None:
    """Return the values of a batch as stored: (n, v) of the column's dtype, (n,) int32 labels, or None."""
    if not schema.has_values:
        if value is not None:
            raise BadInput(
                "values were given but this database has no value column; open one with value_dim= or num_classes="
            )
        return None
    if value is None:
        kind = f"value_dim={schema.value_dim}" if schema.num_classes is None else f"num_classes={schema.num_classes}"
        raise BadInput(f"values are missing; this database was made with {kind} and every record needs one")
    if schema.num_classes is not None:
        return _labels(value, schema.num_classes, count)
    assert schema.value_dim is not None  # has_values without classes
    if schema.value_dim == 1 and (array := numbers(value, "values")).ndim == 1:
        value = array[:, None]
    return filled(matrix(value, "values", schema.value_dim, schema.dtype), "values", count)


def _labels(value: object, num_classes: int, count: int) -> Array:
    array = np.atleast_1d(numbers(value, "values"))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadInput(
            f"values have dtype {array.dtype} and shape {array.shape}; expected ({count},) integer class labels"
        )
    outside = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(outside):
        raise BadInput(
            f"label {array[outside[0]]} in row {outside[0]} is out of range; expected 0 to {num_classes - 1}"
        )
    return filled(array.astype(np.int32), "values", count)


def has_tangent(tensor: Tensor) -> bool:
    """Return True for a tensor that carries a tangent of forward mode."""
    from torch.autograd.forward_ad import unpack_dual

    return unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def vectors(value: object, width: int) -> NDArray[np.float32] | None:
    """Return queries (q, width) as numpy, without a copy, if they are float32 on the CPU and want no gradient.

    Return None otherwise: the caller then uses `queries`. NaN and infinity are not checked for.
    """
    if is_tensor(value) and not value.requires_grad and value.is_cpu and not has_tangent(value):
        try:
            value = value.numpy()
        except (RuntimeError, TypeError):  # sparse, within a transform, or of a dtype that numpy lacks
            return None
    if type(value) is not np.ndarray or value.dtype != np.float32 or not value.flags.c_contiguous:
        return None
    if value.ndim == 1:
        value = value[None]
    return value if value.ndim == 2 and value.shape[1] == width and len(value) else None


def queries(
    value: object, width: int, device: torch.device | None = None, taker: str = "this database's keys are"
) -> Tensor:
    """Return queries (…, width) as a finite (q, width) tensor of at least float32; a tensor keeps its graph and device.

    A width of 0 stands for any width: the database has no keys that decide it.

    Lists become float32, as in torch; arrays and tensors of float64 stay float64. A single query becomes (1, width).
    `leading` returns the dimensions that are flattened. `taker` says whose width this is, for the error message.
    Raises BadInput.
    """
    import torch

    if is_tensor(value):
        signed = (torch.int8, torch.int16, torch.int32, torch.int64)
        tensor = dense(value, "queries")
        if tensor.dtype not in (torch.float32, torch.float64):
            if not (tensor.is_floating_point() or tensor.dtype in signed):
                raise BadInput(f"queries are of type {tensor.dtype}; expected real numbers")
            tensor = tensor.to(torch.float32)
    else:
        array = numbers(value, "queries")
        wide = array.dtype.kind == "f" and not isinstance(value, list | tuple)
        with np.errstate(over="ignore"):
            array = array.astype(np.promote_types(array.dtype, np.float32) if wide else np.float32)
        tensor = torch.from_numpy(array).to(device)
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.shape[-1:] != (width,) and (width or not tensor.ndim or not tensor.shape[-1]):
        came = f"{tensor.shape[1]} wide" if tensor.ndim == 2 else f"of shape {tuple(tensor.shape)}"
        raise BadInput(f"queries are {came} but {taker} {width} wide; encode them alike")
    if has_tangent(tensor):
        raise BadInput(
            "queries carry tangents of forward mode (jvp), which no database follows; use torch.autograd.grad"
        )
    # a finite sum proves that all numbers are finite; otherwise they are checked, as a sum may also overflow
    if not math.isfinite(float(tensor.detach().sum())) and not bool(torch.isfinite(tensor.detach()).all()):
        bad = (~torch.isfinite(tensor.detach()).all(dim=-1)).nonzero()[0].tolist()
        first = bad[0] if len(bad) == 1 else tuple(bad)
        raise BadInput(f"queries hold NaN or infinity, first in query {first}; remove or repair them")
    return tensor if tensor.ndim == 2 else tensor.flatten(0, -2)


def leading(value: Any, count: int = 1) -> tuple[int, ...]:
    """Return the leading shape (…) of checked queries (…, d); (count,) for texts, a single query and a batch (q, d)."""
    sizes: list[int] = []
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        sizes.append(len(value))
        value = value[0]
    shape = (*sizes, *np.shape(value))
    return shape[:-1] if len(shape) > 2 else (count,)


def mask(value: object, shape: Sequence[int]) -> Tensor:
    """Return the mask (q, n) of keyed records in row order, True = takes part, from a bool mask that fits (…, n)."""
    import torch

    expected = "expected bool, True where the record takes part"
    try:
        tensor = value if is_tensor(value) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"mask is {shown(value)}; {expected}") from None
    if dense(tensor, "mask").dtype is not torch.bool:
        raise BadInput(f"mask has dtype {tensor.dtype}; {expected}")
    with contextlib.suppress(RuntimeError):
        if tensor.shape[-1:] == tuple(shape[-1:]):
            return tensor.expand(*shape).flatten(0, -2)
    raise BadInput(
        f"mask has shape {tuple(tensor.shape)}; expected {tuple(shape)}: queries by live records, in row order"
    )
