"""Arrays of numbers in `.npy` and `.npz` files of anybody's."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib import format

from softdb import check
from softdb.check import Array
from softdb.errors import BadInput

__all__ = ["archived", "matrix_in", "numbers_in"]

_HEADER = 1 << 14  # bytes of a .npy file's header; NumPy reads no longer one than 10,000
_UNPACKED = 1 << 28  # bytes that an array may unpack to, or 16 times the size of the file


def numbers_in(path: Path) -> Array:
    """The array of a `.npy` file, mapped, or of a `.npz` file: its only one, or the one called `keys`, loaded.

    NumPy reads it, after its own parser of headers was given no more than 16 KiB of the file, and only where the dtype
    is a number's and the file is as large as its header says. Nothing is ever unpickled. Raises BadInput naming it.
    """
    if not path.is_file():  # a pipe might never answer
        raise BadInput(f"{path} cannot be read as an array of numbers (no such file); expected a .npy or .npz array")
    try:
        if path.suffix == ".npz":
            return _archived(path)
        with path.open("rb") as file:
            expected = _whole_size(file.read(_HEADER))
        if (size := path.stat().st_size) < expected:
            raise ValueError(f"it has {size} bytes, {expected} expected")
        return format.open_memmap(path, "r")
    except BadInput:
        raise
    except Exception as error:  # zipfile and its decompressors have no one error for a file that is none
        reason = str(error) or type(error).__name__
        raise BadInput(f"{path.name} cannot be read as an array of numbers ({check.shown(reason)})") from None


def _archived(path: Path) -> Array:
    found = archived(path)
    if "keys" not in found and len(found) != 1:
        raise BadInput(f"{path.name} holds {check.shown(list(found))}; expected one array, or one called keys")
    return found["keys" if "keys" in found else next(iter(found))]()


def archived(path: Path) -> dict[str, Callable[[], Array]]:
    """The arrays of a `.npz` file by their names, each loaded when it is asked for. Its errors are of many kinds."""
    with zipfile.ZipFile(path) as archive:
        return {one.filename.removesuffix(".npy"): partial(_member, path, one) for one in archive.infolist()}


def _member(path: Path, member: zipfile.ZipInfo) -> Array:
    with zipfile.ZipFile(path) as archive:
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
        raise ValueError(f"it holds {check.shown(dtype)}, not numbers")
    if len(shape) > 32 or not all(type(extent) is int and 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"its shape is {check.shown(shape)}")
    return file.tell() + dtype.itemsize * math.prod(shape)


def matrix_in(path: Path) -> Array:
    """The (n, d) array of a file."""
    found = numbers_in(path)
    if found.ndim != 2:
        raise BadInput(f"{path.name} has shape {found.shape} and type {found.dtype}; expected (n, d) numbers")
    return found
