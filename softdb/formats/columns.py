"""Files of bare vectors: `.npy`, `.npz`, `.safetensors`, and those of other benchmarks. Mapped, but for `.npz`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import MAX_DIM, Array, shown
from softdb.errors import BadInput
from softdb.formats.arrays import archived, matrix_in
from softdb.formats.lines import Header
from softdb.formats.vectors import READERS

__all__ = ["COLUMNS", "KeyColumns", "columns_in"]

COLUMNS = (".npy", ".npz", ".safetensors", *(kind for kind in READERS if kind))
_SAFE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
         "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}  # fmt: skip


@dataclass(frozen=True)
class KeyColumns:
    """Arrays with a row a record; what can be sliced serves."""

    keys: Any  # (n, d)
    values: Any = None  # (n, v) or (n,)
    ids: Any = None  # (n,) integers; None: row numbers
    header: Header | None = None


def columns_in(path: Path, kind: str) -> KeyColumns:
    """The arrays in a file. Raises BadInput naming it."""
    columns = _columns(path, kind)
    widths = [column.shape[1] for column in (columns.keys, columns.values) if column is not None and column.ndim == 2]
    if not all(0 < width <= MAX_DIM for width in widths):
        raise BadInput(f"{path.name} holds vectors of {shown(widths)} numbers; expected 1 to {MAX_DIM:,}")
    return columns


def _columns(path: Path, kind: str) -> KeyColumns:
    if kind == ".npy":
        return KeyColumns(matrix_in(path))
    if kind in READERS:
        return KeyColumns(READERS[kind](path).keys)
    found, header = _npz(path) if kind == ".npz" else _safetensors(path)
    matrices = [name for name, array in found.items() if array.ndim == 2]
    name = "keys" if "keys" in found else matrices[0] if len(matrices) == 1 else None
    if name is None or found[name].ndim != 2 or found[name].dtype.kind not in "fiu":
        raise BadInput(
            f"{path.name} holds {shown(list(found))}; expected one (n, d) array of numbers, or one called keys"
        )
    keys, values, ids = found[name], found.get("values"), found.get("ids")
    for what, column in (("values", values), ("ids", ids)):
        if column is not None and column.shape[:1] != (len(keys),):
            raise BadInput(f"{path.name} holds {len(keys)} keys and {what} {shown(column.shape)}; they go row by row")
    if ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise BadInput(f"{path.name} holds ids of shape {ids.shape} and type {ids.dtype}; expected (n,) integers")
    return KeyColumns(keys, values, ids, header)


def _npz(path: Path) -> tuple[dict[str, Array], Header | None]:
    try:
        names = archived(path)
    except Exception:  # says what is wrong
        return {"keys": matrix_in(path)}, None
    if "keys" not in names:
        return {"keys": matrix_in(path)}, None
    try:
        return {name: names[name]() for name in ("keys", "values", "ids") if name in names}, None
    except Exception as error:  # as of `numbers_in`
        raise BadInput(f"{path.name} cannot be read as arrays of numbers ({shown(str(error))})") from None


def _safetensors(path: Path) -> tuple[dict[str, Any], Header | None]:
    """The tensors of a `.safetensors` file, mapped: 8 bytes with the length of a JSON header, the header, the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100_000_000:  # as the format says
                raise ValueError(f"its header would have {length:,} bytes")
            said = json.loads(file.read(length))
        metadata, found = said.pop("__metadata__", {}), {}
        for name, one in said.items():
            (start, end), dtype, shape = one["data_offsets"], np.dtype(_SAFE[one["dtype"]]), tuple(one["shape"])
            if end - start != dtype.itemsize * math.prod(shape) or not 0 <= start <= path.stat().st_size - 8 - length:
                raise ValueError(f"{name} is of another size than its shape says")
            array = np.memmap(path, dtype, "r", 8 + length + start, shape) if end > start else np.zeros(shape, dtype)
            found[name] = _BFloat16(array) if one["dtype"] == "BF16" else array
        header = metadata.get("softdb")
        return found, None if header is None else Header.of(json.loads(header), path.name)
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadInput(f"{path.name} cannot be read as safetensors ({shown(str(error))}); fetch it again") from None


class _BFloat16:
    """Numbers whose 16 bits are the upper half of a float32's."""

    def __init__(self, halves: Array) -> None:
        self._halves, self.shape, self.ndim, self.dtype = halves, halves.shape, halves.ndim, np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self._halves)

    def __getitem__(self, places: slice) -> Array:
        return (self._halves[places].astype(np.uint32) << 16).view(np.float32)
