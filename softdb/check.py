"""The door: everything from outside becomes canonical here, with every "got / expected / do this" message."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.errors import BadInput, DuplicateId

__all__ = [
    "Array",
    "Encoder",
    "Id",
    "Metric",
    "Schema",
    "device",
    "encoded",
    "filled",
    "finite",
    "identifiers",
    "integer",
    "mask",
    "matrix",
    "payloads",
    "positive",
    "queries",
    "schema",
    "values",
]

Id: TypeAlias = int | str
Array: TypeAlias = NDArray[Any]
Encoder: TypeAlias = Callable[[list[str]], Any]  # n texts -> (n, d)

Batched = TypeVar("Batched", bound=Sized)

MAX_DEPTH = 64  # nesting of a payload or a filter: far below where any JSON parser in the line gives up
MAX_DIM = 1 << 20  # a wider vector is a mistake in the argument
SHOWN = 80  # characters of a rejected value that a message quotes


class Metric(Enum):
    """How a query and a key are compared."""

    DOT = "dot"
    COSINE = "cosine"
    L2 = "l2"

    @classmethod
    def parse(cls, name: object) -> Metric:
        """The metric of that name, or BadInput that lists them."""
        if isinstance(name, Metric):
            return name
        for metric in cls:
            if name == metric.value:
                return metric
        raise BadInput(f"metric is {shown(name)}; choose one of {', '.join(repr(m.value) for m in cls)}")


@dataclass(frozen=True)
class Schema:
    """What a database stores: fixed when it is created."""

    dim: int  # d, width of a key
    value_dim: int | None  # v, width of a value; None: the key serves, unless there are classes
    num_classes: int | None  # values are integer labels below this
    dtype: np.dtype[Any]  # of keys and vector values
    metric: Metric

    @property
    def has_values(self) -> bool:
        """Whether a record carries a value of its own."""
        return self.value_dim is not None or self.num_classes is not None

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """Dtype of the values column."""
        return self.dtype if self.num_classes is None else np.dtype(np.int32)

    @property
    def pooled_dim(self) -> int:
        """v, the width of a soft query's answer."""
        return self.num_classes or self.value_dim or self.dim


def schema(
    dim: object, value_dim: object, num_classes: object, dtype: object, metric: object, stored: Schema | None
) -> Schema:
    """The schema asked for: of a new database, or (`stored`) of one whose own must agree with whatever is given."""
    given: dict[str, Any] = {
        "dim": None if dim is None else integer(dim, "dim", 1, MAX_DIM),
        "value_dim": None if value_dim is None else integer(value_dim, "value_dim", 1, MAX_DIM),
        "num_classes": None if num_classes is None else integer(num_classes, "num_classes", 1, 2**31 - 1),
        "dtype": None if dtype is None else _dtype(dtype),
        "metric": None if metric is None else Metric.parse(metric),
    }
    if value_dim is not None and num_classes is not None:
        raise BadInput("value_dim and num_classes are both given; values are vectors or labels, give one")
    if stored is None:
        if given["dim"] is None:
            raise BadInput("dim is not given; a new database needs the width of its keys")
        return Schema(
            **{**given, "dtype": given["dtype"] or np.dtype(np.float32), "metric": given["metric"] or Metric.DOT}
        )
    for name, asked in given.items():
        if asked is not None and asked != (kept := getattr(stored, name)):
            plain = [one.value if isinstance(one, Metric) else one for one in (asked, kept)]
            raise BadInput(f"{name}={plain[0]} was asked for but this database has {plain[1]}; omit it or open another")
    return stored


def _dtype(value: object) -> np.dtype[Any]:
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "float16"):
        try:
            name = np.dtype(value).name  # type: ignore[call-overload]
        except TypeError:
            name = ""
    if name not in ("float32", "float16"):
        raise BadInput(f"dtype is {shown(value)}; keys are stored as 'float32' or 'float16'")
    return np.dtype(name)


def device(value: object) -> torch.device | None:
    """The device on which queries that are no tensors are answered."""
    if value is None:
        return None
    try:
        found: torch.device = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise BadInput(f"device is {shown(value)}; expected 'cpu' or 'cuda'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is cuda but torch sees no CUDA device; omit it to answer on the CPU")
    return found


def encoded(value: object, name: str, encoder: Encoder | None) -> object:
    """Texts as vectors, by the database's encoder; numbers as they came."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, np.ndarray) and texts.dtype.kind == "U":
        texts = texts.tolist()
    if not isinstance(texts, list | tuple) or not any(isinstance(one, str) for one in texts):
        return value
    if not all(isinstance(one, str) for one in texts):
        raise BadInput(f"{name} mix text and numbers; give all of one kind")
    if encoder is None:
        raise BadInput(f"{name} are text but this database was opened without an encoder; pass encoder= to softdb.open")
    vectors = encoder(list(texts))
    if len(vectors) != len(texts):
        raise BadInput(f"the encoder gave {len(vectors)} vectors for {len(texts)} texts; it must give one for each")
    return vectors


def shown(value: object) -> str:
    """A rejected value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


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


def positive(value: object, name: str) -> float:
    """A finite number above zero."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise BadInput(
            f"{name} is a tensor that wants a gradient, but {name} is a plain number; divide the queries by it"
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{name} is {shown(value)}; expected a number above 0") from None
    if isinstance(value, bool | str) or not (number > 0 and math.isfinite(number)):
        raise BadInput(f"{name} is {shown(value)}; expected a finite number above 0")
    return number


# -- ids ---------------------------------------------------------------------------------------------------------------


def identifiers(value: object, unique: bool = True) -> list[Id]:
    """Ids as a list of `int` and `str`; one id alone is a batch of one.

    Raises BadInput for another type, an int beyond 64 bits or text that is not Unicode, DuplicateId for one that comes
    twice where `unique`.
    """
    if isinstance(value, str | int):
        value = [value]
    elif isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise BadInput(f"ids are {shown(value)}; expected a list of str or int")
    ids = [one if type(one) is str else _identifier(one) for one in value]
    text = "".join(one for one in ids if type(one) is str)
    if not text.isascii():
        _encodable(text, "an id")
    if unique and len(set(ids)) < len(ids):
        seen: set[Id] = set()
        twice = next(one for one in ids if one in seen or seen.add(one))  # type: ignore[func-returns-value]
        raise DuplicateId(f"id {shown(twice)} comes twice in this batch; an id names one record, keep one of them")
    return ids


def _identifier(value: object) -> Id:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise BadInput(f"id {shown(value)} is of type {type(value).__name__}; expected str or int, convert it first")
    if not -(2**63) <= int(value) < 2**63:
        raise BadInput(f"id {shown(int(value))} needs more than 64 bits; store it as str")
    return int(value)


def _encodable(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end]
        raise BadInput(
            f"{what} holds the lone surrogate {bad!a}, which is not Unicode text; decode the source rightly"
        ) from None


# -- numbers -----------------------------------------------------------------------------------------------------------


def _array(value: object, name: str) -> Array:
    """A numeric array of what came: numpy, torch on any device, or (nested) lists."""
    if isinstance(value, Tensor):
        value = value.detach()
        value = (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    elif isinstance(value, Sequence) and any(isinstance(one, Tensor) for one in value):
        value = [one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        raise BadInput(f"{name} are ragged: their rows differ in width; expected one width for all") from None
    if array.dtype.kind not in "fiu":
        raise BadInput(f"{name} are of type {array.dtype}; expected real numbers")
    return array


def matrix(value: object, name: str, width: int, dtype: np.dtype[Any]) -> Array:
    """Vectors as a finite C-contiguous (n, width) array of the column's dtype; one vector alone is a batch of one."""
    array = _array(value, name)
    if array.ndim == 1 and len(array):
        array = array[None]
    if array.size == 0 and (array.ndim != 2 or len(array) == 0):
        raise BadInput(f"{name} are an empty batch; give at least one vector of {width} numbers")
    if array.ndim != 2:
        raise BadInput(f"{name} have {array.ndim} dimensions, shape {array.shape}; expected (n, {width})")
    if array.shape[1] != width:
        raise BadInput(
            f"{name} are {array.shape[1]} wide but this database is {width} wide; re-embed them or open another"
        )
    finite(array, name)
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array, dtype)
    if cast.dtype != array.dtype:
        finite(cast, f"{name}, cast to {dtype},", " (the largest float16 is 65504): scale them, or store float32")
    return cast


def finite(array: Array, name: str, remedy: str = "; remove or repair those rows") -> None:
    """BadInput, naming the first row, where a number is NaN or infinite."""
    if array.dtype.kind != "f":
        return
    if array.itemsize > 2:  # the sum of squares is finite only if all are, and several times cheaper than asking each
        flat = array.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return
    bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
    if len(bad):
        raise BadInput(f"{name} hold NaN or infinity in {len(bad)} of {len(array)} rows, first in row {bad[0]}{remedy}")


def values(value: object, schema: Schema, count: int) -> Array | None:
    """The values column of a batch as stored: (n, v) of the column's dtype, (n,) int32 labels, or None."""
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
    return filled(matrix(value, "values", schema.value_dim, schema.dtype), "values", count)


def _labels(value: object, num_classes: int, count: int) -> Array:
    array = np.atleast_1d(_array(value, "values"))
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


def filled(batch: Batched, name: str, count: int) -> Batched:
    """The batch, if it has one entry for each id."""
    if len(batch) != count:
        raise BadInput(f"{len(batch)} {name} for {count} ids; give one for each id")
    return batch


def queries(value: object, width: int, device: torch.device | None = None) -> Tensor:
    """Queries as a finite (q, width) tensor, at least float32; a tensor keeps its graph and device.

    One query alone becomes (1, width).
    """
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)):
            raise BadInput(f"queries are of type {value.dtype}; expected real numbers")
        tensor = value.to(torch.promote_types(value.dtype, torch.float32))
    else:
        array = _array(value, "queries")
        array = array.astype(np.promote_types(array.dtype, np.float32) if array.dtype.kind == "f" else np.float32)
        tensor = torch.from_numpy(array).to(device)
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.ndim != 2:
        raise BadInput(f"queries have {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; expected (q, {width})")
    if tensor.shape[1] != width:
        raise BadInput(
            f"queries are {tensor.shape[1]} wide but this database's keys are {width} wide; encode them alike"
        )
    if not bool(torch.isfinite(tensor.detach()).all()):
        bad = (~torch.isfinite(tensor.detach()).all(dim=1)).nonzero()[:, 0]
        raise BadInput(f"queries hold NaN or infinity, first in query {int(bad[0])}; remove or repair them")
    return tensor


def mask(value: object, shape: tuple[int, int]) -> Tensor:
    """A boolean (q, len(db)) mask in row order, True = takes part; (len(db),) serves all queries."""
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if tensor.dtype is not torch.bool:
        raise BadInput(f"mask has dtype {tensor.dtype}; expected bool, True where the record takes part")
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.ndim != 2 or tensor.shape[1] != shape[1] or tensor.shape[0] not in (1, shape[0]):
        raise BadInput(f"mask has shape {tuple(tensor.shape)}; expected {shape}: queries by live records, in row order")
    return tensor.expand(shape)


# -- payloads ----------------------------------------------------------------------------------------------------------

_LEAVES = (str, int, bool, type(None))
_MARKS = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":"), "check_circular": False}
_encode = json.JSONEncoder(**_MARKS).encode  # type: ignore[arg-type]
if (_made := getattr(json.encoder, "c_make_encoder", None)) is not None:
    # `encode` makes one of these for every value, which takes longer than a small value itself
    _chunks = _made(
        None, json.JSONEncoder().default, json.encoder.encode_basestring, None, ":", ",", False, False, False
    )

    def _encode(o: Any) -> str:
        return "".join(_chunks(o, 0))


def payloads(value: object, count: int) -> Iterator[str | None]:
    """Payloads as JSON texts, one an id; None stays None. Their number is checked now, each one as it is drawn.

    Drawn inside the transaction, they are encoded while the disk writes the keys; a bad one undoes it all.

    Raises BadInput for what JSON cannot say (another type, NaN, a key that is no str) or nesting beyond 64.
    """
    if value is None:
        return itertools.repeat(None, count)
    if isinstance(value, str | dict) or not isinstance(value, Sequence | np.ndarray):
        if count != 1:
            raise BadInput(f"payloads are {shown(value)}; expected a list with one JSON value for each of {count} ids")
        value = [value]
    filled(value, "payloads", count)
    return (None if one is None else json_text(one, f"payload {i}") for i, one in enumerate(value))


def json_text(value: object, name: str) -> str:
    """The JSON text of a value that JSON can say and give back unchanged (a tuple comes back as a list)."""
    if type(value) not in _LEAVES:
        _json_value(value, name, 1)
    try:
        text = _encode(value)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{name} is not JSON: {error}") from None
    if not text.isascii():
        _encodable(text, name)
    return text


def _json_value(value: object, name: str, depth: int) -> None:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise BadInput(f"{name} nests deeper than {MAX_DEPTH}; flatten it")
    if kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]
            raise BadInput(f"{name} holds {value}, which JSON has no word for; use null or text")
        return
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise BadInput(f"{name} has the key {shown(key)}, which is no str; JSON keys are text, convert it")
    elif not isinstance(value, list | tuple):
        raise BadInput(f"{name} holds a {kind.__name__}; expected JSON: dict, list, str, number, bool or None")
    for inner in value.values() if isinstance(value, dict) else value:
        if type(inner) not in _LEAVES:
            _json_value(inner, name, depth + 1)
