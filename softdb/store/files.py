"""Every change to a file other than the catalogue's own passes through here, so that tests can watch and fail them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "acquire",
    "copy",
    "create",
    "filling",
    "occupied",
    "publish",
    "remove",
    "sync_directory",
    "write_at",
    "write_whole",
]


def create(path: Path, head: bytes, size: int) -> None:
    """Make a file at its final size, its head written and both it and its name on disk. The rest reads as zeros."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, memoryview(head), 0)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def write_at(path: Path, data: bytes | memoryview, offset: int) -> None:
    """Overwrite part of an existing file, on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        _write(descriptor, memoryview(data), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def filling(path: Path, offset: int) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Overwrite an existing file piece after piece from an offset on; on disk when this ends well."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def put(data: bytes | memoryview) -> None:
        nonlocal offset
        _write(descriptor, memoryview(data), offset)
        offset += len(data)

    try:
        yield put
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: BinaryIO, path: Path) -> None:
    """A new file with all that is read from another, on disk when this returns; its name may not be."""
    with path.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def publish(fresh: Path, path: Path) -> None:
    """Bring a finished file to disk and give it its name, which nothing has."""
    descriptor = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(fresh, path)
    sync_directory(path.parent)


def occupied(path: Path) -> int:
    """Bytes on disk of everything in a directory; files that vanish meanwhile count nothing."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replace a file by new content, so that any moment shows the old one or the new one whole."""
    fresh = path.with_name(path.name + ".tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, memoryview(data), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(fresh, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Unlink a file that may be gone already; whoever has it mapped keeps it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def acquire(path: Path) -> int | None:
    """An exclusive lock on a file until its descriptor is closed or the process ends; None while another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)  # for the message of whoever comes second, nothing else
    return descriptor


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
