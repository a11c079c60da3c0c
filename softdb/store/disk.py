"""The thin layer under every change to a file other than the catalogue's own: one function a system call, no more.

Tests put themselves in place of these functions (and of SQLite's VFS) to watch, to fail, to kill, or to cut the power.
Nothing else in softdb may change a file of a database.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from pathlib import Path

__all__ = ["close", "link", "make", "open", "remove_directory", "rename", "sync", "truncate", "unlink", "write"]

_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW  # a link in a database from elsewhere may lead anywhere


def open(path: Path, flags: int, mode: int = 0o644, folder: int | None = None) -> int:
    """A descriptor, to be closed. With the descriptor of the file's folder, by its name there, wherever that is now."""
    return os.open(path if folder is None else path.name, flags | _ALWAYS, mode, dir_fd=folder)


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write at an offset as much as is possible, and return how many bytes that was."""
    return os.pwrite(descriptor, data, offset)


def truncate(descriptor: int, size: int) -> None:
    """Cut or extend a file; what it is extended by reads as zeros."""
    os.ftruncate(descriptor, size)


def sync(descriptor: int) -> None:
    """Bring a file's bytes and size, or a directory's entries, to disk. After a failure it is never tried again."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache there
    elif stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)  # all but the times


def rename(old: Path, new: Path) -> None:
    """Rename a file, replacing whatever has the name."""
    os.replace(old, new)


def link(old: Path, new: Path) -> None:
    """Make a hard link; nothing may have the new name."""
    os.link(old, new)


def unlink(path: Path, folder: int | None = None) -> None:
    """Remove a file's name; `folder` as for `open`."""
    os.unlink(path if folder is None else path.name, dir_fd=folder)


def make(path: Path, mode: int = 0o777) -> None:
    """Make a directory."""
    os.mkdir(path, mode)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    os.rmdir(path)
