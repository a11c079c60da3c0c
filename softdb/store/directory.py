"""Opening a directory. Guarantee: it is a database or may become one, and a writer is the only one."""

from __future__ import annotations

from pathlib import Path

from softdb.errors import CorruptionError, DatabaseLocked, NotADatabase
from softdb.store import files

__all__ = ["enter", "require_new"]

_OURS = {  # what a creation that was cut short may have left: after a power cut any of them without the others
    "catalog.sqlite", "catalog.sqlite-journal", "catalog.sqlite-shm", "catalog.sqlite-wal", "index", "lock",
}  # fmt: skip


def enter(path: Path, writing: bool, may_create: bool) -> files.Lock | None:
    """Check that the path is ours and make it if it may be made. A writer gets the lock.

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
    if not writing:
        return None
    lock = files.acquire(path / "lock")
    if lock is None:
        holder = (path / "lock").read_text(errors="replace").strip() or "unknown"
        raise DatabaseLocked(
            f"{path} is being written by process {holder}; close it there, or open this one with mode='r'"
        )
    return lock


def require_new(path: Path | None, acknowledged: int) -> None:
    """Raise CorruptionError where an empty catalogue stands beside data: a new one would have them removed."""
    if acknowledged >= 0 or (path is not None and any(path.glob("keys-*.npy"))):
        raise CorruptionError(f"{path}/catalog.sqlite is empty, the files beside it are not; restore it")
