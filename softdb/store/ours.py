"""The files that softdb makes in a database's directory. Nothing else there is ever removed."""

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
_UNFINISHED = tuple("unfinished.sqlite" + end for end in ("", "-journal", "-wal", "-shm"))  # of a copy that was killed


def entries(path: Path, *more: str) -> tuple[list[Path], list[Path]]:
    """Return softdb's entries of a directory, or files of further names, contents before folders; and all others."""
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
    """Raise BadInput where something is there that softdb does not make, or a link or a file is in its place."""
    others = [path] if path.is_symlink() or not path.is_dir() else entries(path, *more)[1]
    if others:
        raise BadInput(f"{others[0]} is not softdb's and in the way; expected nothing of others, so move it away")


def remove_database(path: Path, *more: str, itself: bool = True) -> None:
    """Remove what softdb makes in a directory, and the directory, if asked and nothing else is in it."""
    for entry in entries(path, *more)[0] + [path] * itself:
        if not entry.is_dir():
            disk.unlink(entry)
        elif not any(entry.iterdir()):
            disk.remove_directory(entry)
