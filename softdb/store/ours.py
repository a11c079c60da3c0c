"""The files that softdb creates in a database's directory. No other file there is ever removed."""

from __future__ import annotations

import re
from pathlib import Path

from softdb.errors import BadInput
from softdb.store import disk

_FILE = re.compile(
    r"catalog\.sqlite(-wal|-shm|-journal)?|lock|committed|(keys|values|rows)-\d{8,}\.npy|"
    r"[a-z0-9-]+-[0-9a-f]{16}\.(faiss|lists)(\.tmp)?|\.softdb-[0-9a-f]{16}"
)
_FOLDER = re.compile(r"index|reembed-\d{1,20}|\.softdb-[0-9a-f]{16}")
_UNFINISHED = tuple("unfinished.sqlite" + end for end in ("", "-journal", "-wal", "-shm"))  # left by a killed backup


def entries(path: Path, *more: str) -> tuple[list[Path], list[Path]]:
    """Return two lists of a directory's entries: those of softdb or named in `more`, and all others."""
    ours, others = list[Path](), list[Path]()
    if path.name.startswith(".softdb-"):
        more += _UNFINISHED
    for entry in path.iterdir():
        if entry.is_symlink():
            others.append(entry)
        elif entry.is_dir() and _FOLDER.fullmatch(entry.name):
            inner, strange = entries(entry)
            ours += [*inner, entry]
            others += strange
        else:
            is_ours = entry.is_file() and (entry.name in more or _FILE.fullmatch(entry.name))
            (ours if is_ours else others).append(entry)
    return ours, others


def require_ours(path: Path, *more: str) -> None:
    """Raise BadInput if a path is no directory, or holds entries that softdb does not create."""
    others = [path] if path.is_symlink() or not path.is_dir() else entries(path, *more)[1]
    if others:
        raise BadInput(f"{others[0]} was not created by softdb; expected only softdb's files there; move it away")


def remove_database(path: Path, *more: str, itself: bool = True) -> None:
    """Remove softdb's files from a directory, and with `itself` the directory, if nothing else is in it."""
    for entry in entries(path, *more)[0] + [path] * itself:
        if not entry.is_dir():
            disk.unlink(entry)
        elif not any(entry.iterdir()):
            disk.remove_directory(entry)
