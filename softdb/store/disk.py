"""Thin wrappers of system calls: every change to a file is made here, except SQLite's changes to the catalogue.

Tests replace these functions (and SQLite's VFS) to observe calls, to make them fail, to kill the process, or to
simulate a power cut. Nothing else in softdb may change a file of a database.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from pathlib import Path

__all__ = ["close", "link", "make", "open", "remove_directory", "rename", "sync", "truncate", "unlink", "write"]

_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW  # a database made by a stranger may hold links to any file


def open(path: Path, flags: int, mode: int = 0o644, folder: int | None = None) -> int:
    """Open a file, and return its descriptor; `folder`: descriptor of the directory in which to open `path.name`."""
    return os.open(path if folder is None else path.name, flags | _ALWAYS, mode, dir_fd=folder)


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write bytes at an offset, and return how many were written."""
    return os.pwrite(descriptor, data, offset)


def truncate(descriptor: int, size: int) -> None:
    """Cut a file, or extend it by zeros."""
    os.ftruncate(descriptor, size)


def sync(descriptor: int) -> None:
    """Bring a file's bytes and size, or a directory's entries, to disk. Callers never retry after a failure."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync does not flush the drive's cache there
    elif stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)  # everything but the timestamps


def rename(old: Path, new: Path) -> None:
    """Rename a file, replacing any file of the new name."""
    os.replace(old, new)


def link(old: Path, new: Path) -> None:
    """Create a hard link. Raises FileExistsError if the new name is taken."""
    os.link(old, new)


def unlink(path: Path, folder: int | None = None) -> None:
    """Remove a file's name; `folder`: descriptor of its directory, see `open`."""
    os.unlink(path if folder is None else path.name, dir_fd=folder)


def make(path: Path, mode: int = 0o777) -> None:
    """Create a directory."""
    os.mkdir(path, mode)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    os.rmdir(path)
