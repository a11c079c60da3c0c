"""Arrays of numbers in `.npy` and `.npz` files from outside.

The header is read by `numpy.lib.format`, out of the first `_LONGEST` bytes; an array is made only where its dtype is a
number's and the file is as large as its header says. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format
from numpy.typing import NDArray

from softdb.check.plain import shown
from softdb.errors import BadInput

__all__ = ["numbers_in"]

_LONGEST = 1 << 14  # bytes of a header; NumPy reads no longer one than 10,000


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    start: int  # of the numbers in the file
    bytes: int  # what the numbers take


def numbers_in(path: Path) -> NDArray[Any]:
    """The array of a `.npy` file, mapped, or of a `.npz` file: its only one, or the one called `keys`, loaded.

    Raises BadInput that names the file.
    """
    if not path.is_file():  # a pipe might never answer
        raise BadInput(f"{path} cannot be read as an array of numbers (no such file); expected a .npy or .npz array")
    try:
        return _archived(path) if path.suffix == ".npz" else _mapped(path)
    except BadInput:
        raise
    except Exception as error:  # zipfile and its decompressors have no one error for a file that is none
        reason = str(error) or type(error).__name__
        raise BadInput(f"{path.name} cannot be read as an array of numbers ({shown(reason)})") from None


def _mapped(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        head, size = _header(file.read(_LONGEST)), os.fstat(file.fileno()).st_size
        if size < head.start + head.bytes:
            raise ValueError(f"it has {size} bytes, {head.start + head.bytes} expected")
        if not head.bytes:
            return np.zeros(head.shape, head.dtype)
        return np.memmap(file, head.dtype, "r", head.start, head.shape, head.order)


def _archived(path: Path) -> NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        name = "keys" if "keys" in names else names[0] if len(names) == 1 else None
        if name is None:
            raise BadInput(f"{path.name} holds {shown(names)}; expected one array, or one called keys")
        member = archive.infolist()[names.index(name)]
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others blow up a million times
            raise ValueError("it is compressed in a way that NumPy does not write")
        with archive.open(member) as file:
            head = _header(file.read(_LONGEST))
            if member.file_size != head.start + head.bytes:
                raise ValueError(f"{name} has {member.file_size} bytes, {head.start + head.bytes} expected")
            file.seek(head.start)
            found = np.empty(head.bytes, np.uint8)  # takes memory only where it is filled
            _fill(found, file)
    return found.view(head.dtype).reshape(head.shape, order=head.order)


def _fill(room: NDArray[np.uint8], file: Any) -> None:
    done = 0
    while done < len(room):
        count = file.readinto(room[done : done + (1 << 20)])
        if not count:
            raise ValueError(f"it ends after {done} bytes, {len(room)} expected")
        done += count


def _header(begins: bytes) -> _Header:
    """What a `.npy` file that begins so says of itself. Raises ValueError where that is no array of numbers."""
    file = io.BytesIO(begins)
    version, _ = format.read_magic(file)
    if version not in (1, 2, 3):
        raise ValueError(f"it has the format version {version}; NumPy writes 1 to 3")
    # versions 2 and 3 differ only in names of fields, which arrays of numbers do not have
    read = format.read_array_header_1_0 if version == 1 else format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds {shown(dtype)}, not numbers")
    if len(shape) > 32 or not all(type(extent) is int and 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"its shape is {shown(shape)}")
    return _Header(dtype, shape, "F" if fortran else "C", file.tell(), dtype.itemsize * math.prod(shape))
