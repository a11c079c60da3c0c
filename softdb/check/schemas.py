"""Check paths of databases, and their schema: metric and columns."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check.ids import encodable
from softdb.check.plain import integer, one_of, shown
from softdb.errors import BadInput

__all__ = ["MAX_DIM", "Metric", "Schema", "folder", "schema"]

MAX_DIM = 1 << 20  # maximum width of a key: a larger one is surely a mistake


class Metric(Enum):
    """Metric that compares a query with a key."""

    DOT = "dot"
    COSINE = "cosine"
    L2 = "l2"

    @classmethod
    def parse(cls, name: object) -> Metric:
        """Return the metric of this name. Raises BadInput that lists the valid names."""
        if isinstance(name, Metric):
            return name
        return cls(one_of(name, "metric", [metric.value for metric in cls]))


@dataclass(frozen=True)
class Schema:
    """Schema of a database, fixed when it is created or, if its width is undecided, by the first keys."""

    dim: int  # d, width of a key; 0: undecided, until the first records with keys
    value_dim: int | None  # v, width of a value; None: labels if there are classes, else the key serves as the value
    num_classes: int | None  # values are integer labels from 0 to num_classes - 1
    dtype: np.dtype[Any]  # of keys and vector values
    metric: Metric

    @property
    def described(self) -> dict[str, Any]:
        """The arguments of `softdb.open` that make a database of this schema."""
        return {
            "dim": self.dim or None,
            "value_dim": self.value_dim,
            "num_classes": self.num_classes,
            "dtype": self.dtype.name,
            "metric": self.metric.value,
        }

    @property
    def has_values(self) -> bool:
        """True if records have values or labels; False: their keys serve as values."""
        return self.value_dim is not None or self.num_classes is not None

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """Dtype of the values column."""
        return self.dtype if self.num_classes is None else np.dtype(np.int32)

    @property
    def pooled_dim(self) -> int:
        """Width v of a soft query's answer."""
        return self.num_classes or self.value_dim or self.dim


def schema(
    dim: object, value_dim: object, num_classes: object, dtype: object, metric: object, stored: Schema | None
) -> Schema:
    """Return the schema of a new database, or `stored`, which no given argument may contradict. Raises BadInput.

    A new database without `dim` is undecided: until it has keys, arguments may change every setting.
    """
    wanted: dict[str, Any] = {
        "dim": None if dim is None else integer(dim, "dim", 1, MAX_DIM),
        "value_dim": None if value_dim is None else integer(value_dim, "value_dim", 1, MAX_DIM),
        "num_classes": None if num_classes is None else integer(num_classes, "num_classes", 1, 2**31 - 1),
        "dtype": None if dtype is None else _dtype(dtype),
        "metric": None if metric is None else Metric.parse(metric),
    }
    if value_dim is not None and num_classes is not None:
        raise BadInput("value_dim and num_classes are both given; values are vectors or labels; give one of them")
    if stored is None:
        defaults: dict[str, Any] = {"dim": 0, "dtype": np.dtype(np.float32), "metric": Metric.DOT}
        return Schema(**wanted | {name: wanted[name] or default for name, default in defaults.items()})
    if not stored.dim:
        values = () if value_dim is None is num_classes else ("value_dim", "num_classes")  # one replaces the other
        stored = replace(stored, **{n: new for n, new in wanted.items() if new is not None or n in values})
    for name, new in wanted.items():
        if new is not None and new != (old := getattr(stored, name)):
            plain = [setting.value if isinstance(setting, Metric) else setting for setting in (new, old)]
            raise BadInput(f"{name}={plain[0]} was asked for but this database has {plain[1]}; omit it or open another")
    return stored


def _dtype(value: object) -> np.dtype[Any]:
    name = (value if isinstance(value, str) else shown(value)).removeprefix("torch.")
    if name not in ("float32", "float16"):
        try:
            name = np.dtype(value).name  # type: ignore[call-overload]
        except (TypeError, ValueError, RuntimeError):
            name = ""
    if name not in ("float32", "float16"):
        raise BadInput(f"dtype is {shown(value)}; keys are stored as 'float32' or 'float16'")
    return np.dtype(name)


def folder(value: object, name: str, expected: str) -> Path:
    """Return a directory's path that SQLite and file systems accept: UTF-8, names of at most 255 bytes."""
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise BadInput(f"{name} is {shown(value)}; expected {expected}, as text")
    encodable(text, name)
    if "\0" in text or any(len(component.encode()) > 255 for component in text.split(os.sep)):
        raise BadInput(f"{name} is {shown(text)}; expected names without NUL, of at most 255 bytes each")
    return Path(os.path.expanduser(text))
