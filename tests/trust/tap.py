"""Every change that softdb and SQLite make to files, seen one by one, and stopped, failed or killed where a test likes.

softdb changes files through `softdb.store.disk` alone, SQLite through its VFS: `tapped` stands in both. The wal-index
(`-shm`) is shared memory, not a file that has to survive anything, and is not seen.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from softdb.store import disk

_names = itertools.count()
_kept: list[apsw.VFS] = []  # SQLite uses a VFS for as long as a connection is open


class Op(NamedTuple):
    """One change of a file. `link`, `rename`: from `path` to `target`."""

    name: str  # create write truncate sync sync_directory rename link unlink make remove_directory
    path: Path
    offset: int = 0  # of a write; the size of a truncate
    data: bytes = b""
    target: Path | None = None

    @property
    def kind(self) -> str:
        """The file without its numbers: keys, values, rows, catalog.sqlite-wal, index, lock, directory …

        "gathered keys" and so on where it lies in a folder of keys that are to be.
        """
        path = self.target or self.path
        before = "gathered " if any(one.name.startswith("reembed-") for one in (path, path.parent)) else ""
        if self.name in ("sync_directory", "make", "remove_directory"):
            return f"{before}directory"
        if path.suffix in (".faiss", ".lists") or (path.parent.name == "index" and path.name.startswith(".softdb-")):
            return "index"
        if path.name.startswith(".softdb-"):
            return before + ".softdb"  # the rest of the name is random
        return before + (path.name.split("-")[0] if path.name.endswith(".npy") else path.name)

    @property
    def point(self) -> str:
        """The name of this step: two of one name do the same thing for the protocol."""
        return f"{self.name} {self.kind}"


class Tap:
    """Hooks of a test at each change; if `before` raises OSError, the change does not happen."""

    def before(self, op: Op) -> None:
        """Called before the change is made."""

    def after(self, op: Op) -> None:
        """Called once it is made."""


class Failing(Tap):
    """A disk that fails changes: those for which `fails`, given the change and its number from 1 on, is true."""

    def __init__(self, fails: Callable[[Op, int], bool], error: int = errno.EIO) -> None:
        self.fails, self.error, self.seen = fails, error, 0

    def before(self, op: Op) -> None:
        self.seen += 1
        if self.fails(op, self.seen):
            raise OSError(self.error, os.strerror(self.error))


def step(*points: str) -> Callable[[Op, int], bool]:
    """Return whether a change is one of these steps; False without steps."""
    return lambda op, _: op.point in points


@contextlib.contextmanager
def tapped(tap: Tap, inside: Path | None = None) -> Iterator[None]:
    """Send every change to files (those in a directory alone, if one is given) past a tap."""
    lock = threading.RLock()  # one change at a time, so that there is an order

    def pass_by(op: Op, change: Callable[[], Any]) -> Any:
        if inside is not None and not op.path.is_relative_to(inside):
            return change()
        with lock:
            tap.before(op)
            result = change()
            tap.after(op)
            return result

    vfs = _Vfs(pass_by)
    _kept.append(vfs)
    real = {name: getattr(disk, name) for name in disk.__all__}
    for name, replacement in _replacements(pass_by, real).items():
        setattr(disk, name, replacement)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(disk, name, function)
        vfs.unregister()


def _replacements(pass_by: Callable[..., Any], real: dict[str, Any]) -> dict[str, Any]:
    paths: dict[int, Path] = {}  # of open descriptors

    def open(path: Path, flags: int, mode: int = 0o644, folder: int | None = None) -> int:
        creates = flags & os.O_CREAT and not path.exists()
        cuts = flags & os.O_TRUNC and not creates
        steps = [Op("create", path)] if creates else [Op("truncate", path)] if cuts else []

        def opened() -> int:
            return int(real["open"](path, flags, mode, folder))

        descriptor = pass_by(steps[0], opened) if steps else opened()
        paths[descriptor] = path
        return int(descriptor)

    def close(descriptor: int) -> None:
        paths.pop(descriptor, None)
        real["close"](descriptor)

    def write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        op = Op("write", paths[descriptor], offset, bytes(data))
        return int(pass_by(op, lambda: real["write"](descriptor, data, offset)))

    def truncate(descriptor: int, size: int) -> None:
        pass_by(Op("truncate", paths[descriptor], size), lambda: real["truncate"](descriptor, size))

    def sync(descriptor: int) -> None:
        path = paths.get(descriptor) or Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # one opened before
        name = "sync_directory" if path.is_dir() else "sync"
        pass_by(Op(name, path), lambda: real["sync"](descriptor))

    def two(name: str) -> Callable[[Path, Path], None]:
        return lambda old, new: pass_by(Op(name, old, target=new), lambda: real[name](old, new))

    def one(name: str) -> Callable[..., None]:
        return lambda path, *more: pass_by(Op(name, path), lambda: real[name](path, *more))

    return {
        "open": open, "close": close, "write": write, "truncate": truncate, "sync": sync,
        "rename": two("rename"), "link": two("link"),
        "unlink": one("unlink"), "make": one("make"), "remove_directory": one("remove_directory"),
    }  # fmt: skip


class _Vfs(apsw.VFS):
    """The system's VFS behind a tap. It is the default one while it is registered."""

    def __init__(self, pass_by: Callable[..., Any]) -> None:
        self.pass_by = pass_by
        super().__init__(f"tapped-{next(_names)}", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        creates = bool(flags[0] & apsw.SQLITE_OPEN_CREATE) and not path.exists()
        if not creates:
            return _File(name, flags, path, self.pass_by, False)
        file = _translated(
            lambda: self.pass_by(Op("create", path), lambda: _File(name, flags, path, self.pass_by, True))
        )
        assert isinstance(file, _File)
        return file

    def xDelete(self, name: str, sync: bool) -> None:
        path = Path(name)
        _translated(lambda: self.pass_by(Op("unlink", path), lambda: super(_Vfs, self).xDelete(name, False)))
        if sync:
            _translated(lambda: self.pass_by(Op("sync_directory", path.parent), lambda: _sync(path.parent)))


class _File(apsw.VFSFile):
    """A file of SQLite's behind a tap."""

    def __init__(self, name: Any, flags: list[int], path: Path, pass_by: Callable[..., Any], created: bool) -> None:
        self.path, self.pass_by = path, pass_by
        self.names = created and not flags[0] & apsw.SQLITE_OPEN_MAIN_DB  # its first sync brings its name to disk, too
        super().__init__("unix", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        op = Op("write", self.path, offset, bytes(data))
        _translated(lambda: self.pass_by(op, lambda: super(_File, self).xWrite(data, offset)))

    def xTruncate(self, size: int) -> None:
        _translated(lambda: self.pass_by(Op("truncate", self.path, size), lambda: super(_File, self).xTruncate(size)))

    def xSync(self, flags: int) -> None:
        _translated(lambda: self.pass_by(Op("sync", self.path), lambda: super(_File, self).xSync(flags)))
        if self.names:
            _translated(lambda: self.pass_by(Op("sync_directory", self.path.parent), lambda: None))
            self.names = False


def _translated(change: Callable[[], Any]) -> Any:
    """An error of a test in the form that SQLite raises."""
    try:
        return change()
    except OSError as error:
        name = "disk is full" if error.errno == errno.ENOSPC else "disk I/O error"
        raise (apsw.FullError if error.errno == errno.ENOSPC else apsw.IOError)(name) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
