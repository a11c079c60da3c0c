"""A database's directory. Guarantee: it is a database or may become one; a writer is the only one, and stays it.

A directory may be renamed while it is open, and another made at its path; the file `lock` may be deleted, and a second
writer begin. So column files are opened by the directory's descriptor, never by its path, and before each commit the
path and the lock must still be those that were opened. A second writer cleans up within a transaction of its own, which
waits for the first one's: either the first sees that its lock is gone, or the second sees what the first committed.
"""

from __future__ import annotations

import os
from pathlib import Path

from softdb.errors import CorruptionError, DatabaseLocked, NotADatabase
from softdb.store import files

__all__ = ["Directory", "Displaced", "enter", "require_new"]

_OURS = {  # what a creation that was cut short may have left: after a power cut any of them without the others
    "catalog.sqlite", "catalog.sqlite-journal", "catalog.sqlite-shm", "catalog.sqlite-wal", "index", "lock",
}  # fmt: skip


class Displaced(Exception):
    """The path leads elsewhere now, or the lock is another's."""


class Directory:
    """A database's directory, open; a writer holds its lock."""

    def __init__(self, path: Path, writing: bool) -> None:
        """Raises NotADatabase, and DatabaseLocked where another process writes."""
        self.path, self._place, self.lock = path, str(path), None
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._identity = _identity(self.descriptor)
        if writing:
            try:
                self.lock = self._locked()
                self._lock_identity = _identity(self.lock.descriptor)
            except BaseException:
                self.close()
                raise

    def _locked(self) -> files.Lock:
        lock = files.acquire(self.path / "lock", self.descriptor)
        if lock is None:
            holder = (self.path / "lock").read_text(errors="replace").strip() or "unknown"
            raise DatabaseLocked(
                f"{self.path} is being written by process {holder}; close it there, or open this one with mode='r'"
            )
        return lock

    def require_ours(self) -> None:
        """Raise Displaced unless the path leads here and the lock that is held is the directory's. Cost: two stats."""
        if _identity(self._place) != self._identity:
            raise Displaced(f"{self.path} was renamed, removed or replaced since it was opened")
        if self.lock is not None and _identity("lock", self.descriptor) != self._lock_identity:
            raise Displaced(f"{self.path}/lock was removed or replaced: another process may be writing")

    def require_opened(self) -> None:
        """Raise NotADatabase where it was replaced while its files were opened, some by the path."""
        try:
            self.require_ours()
        except Displaced as error:
            raise NotADatabase(f"{error}; open it again") from None

    def close(self) -> None:
        """Close the descriptor, and release the lock; safe to call twice."""
        lock, self.lock = self.lock, None
        descriptor, self.descriptor = self.descriptor, -1
        try:
            if lock is not None:
                lock.release()
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)  # the lock closes itself


def _identity(place: str | int, folder: int | None = None) -> tuple[int, int] | None:
    """What a path or a descriptor leads to, no link at its end followed in a folder; None: nowhere."""
    try:
        found = os.stat(place, dir_fd=folder, follow_symlinks=folder is None)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def enter(path: Path, writing: bool, may_create: bool) -> Directory:
    """Check that the path is ours, make it if it may be made, and open it.

    Raises NotADatabase, and DatabaseLocked where another process writes.
    """
    if path.exists() and not path.is_dir():
        raise NotADatabase(f"{path} is a file; a database is a directory, choose another path")
    inside = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if "catalog.sqlite" not in inside:
        if "committed" in inside:
            raise CorruptionError(f"{path} has lost its catalog.sqlite; restore it from a copy")
        if inside - _OURS:
            raise NotADatabase(f"{path} is another program's directory (no catalog.sqlite in it); choose another path")
        if not (writing and may_create):
            how = "give dim= to make one" if writing else 'open it once with mode="rw" and dim='
            raise NotADatabase(f"{path} holds no database; {how}")
        files.make_directory(path)
    return Directory(path, writing)


def require_new(path: Path | None, acknowledged: int) -> None:
    """Raise CorruptionError where an empty catalogue stands beside data: a new one would have them removed."""
    if acknowledged >= 0 or (path is not None and any(path.glob("keys-*.npy"))):
        raise CorruptionError(f"{path}/catalog.sqlite is empty, the files beside it are not; restore it")
