"""Irregular files in place of a database's files, and files whose contents contradict their names."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from softdb import BadInput
from softdb.formats import read_records

Put = Callable[[Path, Path], None]  # puts something in place of a file, perhaps leading to the folder outside


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_to_copy(path: Path, outside: Path) -> None:
    """A link to a file outside that is just what should stand here: followed, all would seem well."""
    target = outside / f"copy of {path.name}"
    if path.is_dir():
        shutil.copytree(path, target)
    elif path.exists():
        shutil.copy(path, target)
    else:
        target.write_text("precious")
    removed(path)
    path.symlink_to(target)


def link_to_nothing(path: Path, outside: Path) -> None:
    """A link to a free name: a creation through it would write outside."""
    removed(path)
    path.symlink_to(outside / "made through a link")


def link_to_zeros(path: Path, outside: Path) -> None:
    """A link to a file without end."""
    removed(path)
    path.symlink_to("/dev/zero")


def pipe(path: Path, outside: Path) -> None:
    """A pipe without a writer: opening it to read would wait for ever."""
    removed(path)
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    """A directory with something in it."""
    removed(path)
    path.mkdir()
    (path / "something").write_text("in it")


def plug(path: Path, outside: Path) -> None:
    """A socket."""
    removed(path)
    before = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def vast(path: Path, outside: Path) -> None:
    """A file of 4 TB, all holes."""
    removed(path)
    with path.open("wb") as file:
        file.truncate(4 << 40)


PUTS: tuple[Put, ...] = (link_to_copy, link_to_nothing, link_to_zeros, pipe, folder, plug, vast)


class Marker:
    """Unpickled, it makes a file: the mark that code has run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(mark: Path) -> bytes:
    """A pickle that leaves a mark."""
    return pickle.dumps([Marker(mark)], 2)  # the protocol that torch.load knows best


def npy(header: str, body: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    """A `.npy` file with any header; `length` is the header length that it claims."""
    text = header.encode("latin-1")
    size = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + body


def npz(**members: bytes) -> bytes:
    """An archive of arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def arrays(mark: Path) -> dict[str, bytes]:
    """`.npy` files with false claims."""
    code, zeros = pickled(mark), bytes(24)
    shape = FLOATS.replace
    return {
        "objects": npy(FLOATS.replace("<f4", "|O"), code),
        "objects in a record": npy(FLOATS.replace("'<f4'", "[('x', '|O')]"), code),
        "a bare pickle": code,
        "code for a header": npy(f"__import__('pathlib').Path({str(mark)!r}).touch()"),
        "code for a shape": npy(shape("(2, 3)", f"(__import__('pathlib').Path({str(mark)!r}).touch(), 3)")),
        "2^62 rows": npy(shape("2, 3", f"{1 << 62}, 3"), zeros),
        "2^70 rows": npy(shape("2, 3", f"{1 << 70}, 3"), zeros),
        "rows that overflow": npy(shape("2, 3", f"{1 << 33}, {1 << 31}"), zeros),
        "a tebibyte": npy(shape("2, 3", f"{1 << 30}, 256"), zeros),
        "-1 rows": npy(shape("2, 3", "-1, 3"), zeros),
        "true rows": npy(shape("2, 3", "True, 3"), zeros),
        "10,000 dimensions": npy(shape("2, 3", "1, " * 10_000), zeros),
        "5,000 digits": npy(shape("2, 3", "9" * 5000), zeros),
        "cut short": npy(FLOATS, zeros[:-1]),
        "a header of 1 GB": npy(FLOATS, zeros, 2, 1 << 30),
        "a header of 4 GB": npy(FLOATS, zeros, 3, (1 << 32) - 1),
        "a header of 100 KB": npy(FLOATS + " " * 100_000, zeros, 2),
        "a header of nothing": npy("", zeros),
        "a header 30,000 deep": npy("(" * 30_000),
        "a header that does not end": npy("{'descr': '''"),
        "a header of a set": npy("{'descr', 'fortran_order', 'shape'}"),
        "a header with more": npy(FLOATS.replace("}", "'more': 1}"), zeros),
        "a header with less": npy("{'descr': '<f4', 'fortran_order': False}", zeros),
        "a type of nonsense": npy(FLOATS.replace("<f4", "<f99999"), zeros),
        "texts": npy(FLOATS.replace("<f4", "<U1"), zeros),
        "complex numbers": npy(FLOATS.replace("<f4", "<c8"), bytes(48)),
        "times": npy(FLOATS.replace("<f4", "<M8[s]"), bytes(48)),
        "version 9": npy(FLOATS, zeros, 9),
        "nothing": b"",
        "a magic alone": b"\x93NUMPY",
    }


def refused(path: Path, match: str) -> None:
    """BadInput, and no record before it."""
    with pytest.raises(BadInput, match=match):
        assert not list(read_records(path))


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
