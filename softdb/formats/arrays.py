"""Files of bare vectors: `.npy`, `.npz`, `.safetensors`, and those of other benchmarks. Mapped, but for `.npz`."""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format

from softdb.check import MAX_DIM, Array, shown
from softdb.errors import BadInput
from softdb.formats.lines import Header
from softdb.formats.sources import readable
from softdb.formats.vectors import READERS

__all__ = ["COLUMNS", "KeyColumns", "columns_in", "numbers_in"]

COLUMNS = (".npy", ".npz", ".safetensors", *(kind for kind in READERS if kind))
_HEADER = 1 << 14  # bytes of a .npy file's header; NumPy reads no longer one than 10,000
_UNPACKED = 1 << 28  # bytes that an array may unpack to, or 16 times the size of the file
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
    if kind in READERS:
        return KeyColumns(READERS[kind](path).keys)
    arrays, header = _safetensors(path) if kind == ".safetensors" else ({}, None)
    if kind == ".npz" and path.is_file():
        with readable(path, " as an array of numbers"):
            arrays = _archived(path, "keys", "values", "ids")
    if kind != ".safetensors" and "keys" not in arrays:
        keys = numbers_in(path)
        if keys.ndim != 2:
            raise BadInput(f"{path.name} has shape {keys.shape} and type {keys.dtype}; expected (n, d) numbers")
        return KeyColumns(keys)
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    name = "keys" if "keys" in arrays else matrices[0] if len(matrices) == 1 else None
    if name is None or arrays[name].ndim != 2 or arrays[name].dtype.kind not in "fiu":
        raise BadInput(
            f"{path.name} holds {shown(list(arrays))}; expected one (n, d) array of numbers, or one called keys"
        )
    keys, values, ids = arrays[name], arrays.get("values"), arrays.get("ids")
    for what, column in (("values", values), ("ids", ids)):
        if column is not None and column.shape[:1] != (len(keys),):
            raise BadInput(f"{path.name} holds {len(keys)} keys and {what} {shown(column.shape)}; they go row by row")
    if ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise BadInput(f"{path.name} holds ids of shape {ids.shape} and type {ids.dtype}; expected (n,) integers")
    return KeyColumns(keys, values, ids, header)


def numbers_in(path: Path) -> Array:
    """The array of a `.npy` file, mapped, or of a `.npz` file: its only one, or the one called `keys`, loaded.

    NumPy reads it, after its own parser of headers was given no more than 16 KiB of the file, and only where the dtype
    is a number's and the file is as large as its header says. Nothing is ever unpickled. Raises BadInput naming it.
    """
    if not path.is_file():  # a pipe might never answer
        raise BadInput(f"{path} cannot be read as an array of numbers (no such file); expected a .npy or .npz array")
    with readable(path, " as an array of numbers"):
        if path.suffix == ".npz":
            return next(iter(_archived(path, "keys", only=True).values()))
        with path.open("rb") as file:
            expected = _whole_size(file.read(_HEADER))
        if (size := path.stat().st_size) < expected:
            raise ValueError(f"it has {size} bytes, {expected} expected")
        return format.open_memmap(path, "r")


def _archived(path: Path, *wanted: str, only: bool = False) -> dict[str, Array]:
    """Some arrays of a `.npz` file by name; `only`: its only one, if none of them is there."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        if only and not members.keys() & set(wanted):
            if len(members) != 1:
                raise BadInput(f"{path.name} holds {shown(list(members))}; expected one array, or one called keys")
            wanted = (*members,)
        return {name: _member(path, archive, members[name]) for name in wanted if name in members}


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others blow up a million times
        raise ValueError("it is compressed in a way that NumPy does not write")
    with archive.open(member) as file:
        if member.file_size != (expected := _whole_size(file.read(_HEADER))):
            raise ValueError(
                f"{member.filename.removesuffix('.npy')} has {member.file_size} bytes, {expected} expected"
            )
        if expected > max(_UNPACKED, 16 * path.stat().st_size):
            raise ValueError(f"it would unpack to {expected:,} bytes; save it as .npy, which is mapped")
        file.seek(0)
        return np.asarray(format.read_array(file, allow_pickle=False))


def _whole_size(begins: bytes) -> int:
    """The bytes of a `.npy` file that begins so, by its header. Raises ValueError where it is no array of numbers."""
    file = io.BytesIO(begins)
    version, _ = format.read_magic(file)
    if version not in (1, 2, 3):
        raise ValueError(f"it has the format version {version}; NumPy writes 1 to 3")
    # versions 2 and 3 differ only in names of fields, which arrays of numbers do not have
    read = format.read_array_header_1_0 if version == 1 else format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds {shown(dtype)}, not numbers")
    if len(shape) > 32 or not all(type(extent) is int and 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"its shape is {shown(shape)}")
    return file.tell() + dtype.itemsize * math.prod(shape)


def _safetensors(path: Path) -> tuple[dict[str, Any], Header | None]:
    """The tensors of a `.safetensors` file, mapped: 8 bytes with the length of a JSON header, the header, the data."""
    with readable(path, " as safetensors", "; fetch it again"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100_000_000:  # as the format says
                raise ValueError(f"its header would have {length:,} bytes")
            tensors = json.loads(file.read(length))
        metadata, arrays = tensors.pop("__metadata__", {}), {}
        for name, tensor in tensors.items():
            (start, end), shape = tensor["data_offsets"], tuple(tensor["shape"])
            dtype = np.dtype(_SAFE[tensor["dtype"]])
            if end - start != dtype.itemsize * math.prod(shape) or not 0 <= start <= path.stat().st_size - 8 - length:
                raise ValueError(f"{name} is of another size than its shape says")
            array = np.memmap(path, dtype, "r", 8 + length + start, shape) if end > start else np.zeros(shape, dtype)
            arrays[name] = _BFloat16(array) if tensor["dtype"] == "BF16" else array
        header = metadata.get("softdb")
        return arrays, None if header is None else Header.of(json.loads(header), path.name)


class _BFloat16:
    """Numbers whose 16 bits are the upper half of a float32's."""

    def __init__(self, halves: Array) -> None:
        self._halves, self.shape, self.ndim, self.dtype = halves, halves.shape, halves.ndim, np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self._halves)

    def __getitem__(self, places: slice) -> Array:
        return (self._halves[places].astype(np.uint32) << 16).view(np.float32)
