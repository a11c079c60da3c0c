"""Arrays of numbers in `.npy` and `.npz` files from outside.

NumPy's own reader guesses at damaged headers, in ways that have no one error, and makes room for whatever size they
claim. This one takes numbers only, and only as many as the file holds; nothing in it is ever unpickled.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check.plain import shown
from softdb.errors import BadInput

__all__ = ["numbers_in"]

_MAGIC = b"\x93NUMPY"
_LONGEST = 1 << 16  # bytes of a header: that of an array of numbers has some hundred
_MOST = 1 << 48  # in one dimension
_NUMBERS = re.compile(r"[<>|=]?(f[248]|f1[26]|[iu][1248])")
_FIELD = re.compile(r"""['"](descr|fortran_order|shape)['"]\s*:\s*('[^']*'|True|False|\([0-9,\s]*\))\s*(?:,\s*|$)""")
_KINDS = {"descr": "'", "fortran_order": "TF", "shape": "("}  # what a field begins with


class _Head(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    start: int  # of the numbers in the file

    @property
    def bytes(self) -> int:
        """What the numbers take."""
        total = self.dtype.itemsize
        for extent in self.shape:
            total *= extent
        return total


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
        head, size = _head(file), os.fstat(file.fileno()).st_size
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
            head = _head(file)
            if member.file_size != head.start + head.bytes:
                raise ValueError(f"{name} has {member.file_size} bytes, {head.start + head.bytes} expected")
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


def _head(file: BinaryIO | Any) -> _Head:
    """What a `.npy` file says of itself. Raises ValueError where that is no array of numbers."""
    begins = file.read(len(_MAGIC) + 2)
    if len(begins) < len(_MAGIC) + 2 or not begins.startswith(_MAGIC) or begins[-2] not in (1, 2, 3):
        raise ValueError("it does not begin as a .npy file")
    width = 2 if begins[-2] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    text = file.read(min(length, _LONGEST + 1))
    if len(text) < length or length > _LONGEST:
        raise ValueError(f"its header of {length} bytes is cut or too long")
    said = _said(text.decode("utf-8" if begins[-2] == 3 else "latin-1"))
    descr = said["descr"][1:-1]
    if not _NUMBERS.fullmatch(descr):
        raise ValueError(f"it holds {shown(descr)}, not numbers")
    shape = tuple(map(int, re.findall(r"[0-9]+", said["shape"])))
    if max(shape, default=0) >= _MOST or len(shape) > 32:
        raise ValueError(f"its shape is {shown(shape)}")
    return _Head(np.dtype(descr), shape, "F" if said["fortran_order"] == "True" else "C", len(begins) + width + length)


def _said(text: str) -> dict[str, str]:
    """A header's three fields as they stand there; it is Python's notation, but nothing is evaluated."""
    inside, found = text.strip(), dict[str, str]()
    if inside.startswith("{") and inside.endswith("}"):
        inside, at = inside[1:-1].strip(), 0
        while field := _FIELD.match(inside, at):
            found[field[1]], at = field[2], field.end()
        if at == len(inside) and set(found) == set(_KINDS) and all(found[name][0] in _KINDS[name] for name in found):
            return found
    raise ValueError(f"its header is {shown(text)}")
