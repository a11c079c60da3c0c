"""Operations on files other than the catalogue's. Guarantee: each step is on disk when it returns.

`folder`: the descriptor of a file's directory; then what is meant is the file of that name there, even where the
directory was renamed and another has taken its path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from softdb.store import disk

_COPIED = 1 << 20  # bytes at once
_PROCESS = re.compile(rb"\d{0,20}\n?")  # what a lock's file holds
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)  # of a file system without hard links


class Mark(NamedTuple):
    """A file and its state: another program's change of it gives another mark."""

    device: int
    inode: int
    size: int  # bytes
    modified: int  # nanoseconds

    def is_of(self, other: Mark | None) -> bool:
        """Return True where both are marks of the same file, whatever its content."""
        return other is not None and self[:2] == other[:2]


def mark(place: str | int, folder: int | None = None) -> Mark | None:
    """Mark of the file that a path or a descriptor leads to, no link at its end followed in a folder; None: no file."""
    try:
        found = os.stat(place, dir_fd=folder, follow_symlinks=folder is None)
    except OSError:
        return None
    return Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def create(path: Path, head: bytes, size: int, named: bool = True, folder: int | None = None) -> None:
    """Make a file at its final size, its name on disk; head and size come to disk when it is first filled.

    The rest reads as zeros. Without `named`, the name comes to disk with the next `sync_directory`.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=folder) as descriptor:
        _write(descriptor, memoryview(head), 0)
        disk.truncate(descriptor, size)
    if named:
        sync_directory(path.parent, folder)


def write_at(path: Path, data: bytes | memoryview, offset: int, synced: bool = True, folder: int | None = None) -> None:
    """Overwrite part of an existing file, on disk when this returns, unless `sync` follows."""
    descriptor = disk.open(path, os.O_WRONLY, folder=folder)
    try:
        _write(descriptor, memoryview(data), offset)
        if synced:
            disk.sync(descriptor)
    finally:
        disk.close(descriptor)


@contextlib.contextmanager
def filling(path: Path, offset: int, folder: int | None = None) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Overwrite an existing file piece after piece from an offset on; on disk when this ends well."""
    with _opened(path, os.O_WRONLY, folder=folder) as descriptor:

        def put(data: bytes | memoryview) -> None:
            nonlocal offset
            _write(descriptor, memoryview(data), offset)
            offset += len(data)

        yield put
        disk.sync(descriptor)


def copy(source: BinaryIO, path: Path) -> None:
    """A new file with all that is read from another, on disk when this returns; its name may not be."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        offset = 0
        while data := source.read(_COPIED):
            _write(descriptor, memoryview(data), offset)
            offset += len(data)
        disk.sync(descriptor)


def publish(fresh: Path, path: Path) -> None:
    """Bring a finished file to disk and give it its name, which nothing has."""
    with _opened(fresh, os.O_RDONLY) as descriptor:
        disk.sync(descriptor)
    disk.rename(fresh, path)
    sync_directory(path.parent)


def temporary(folder: Path) -> Path:
    """A random name in a folder, for what is made there exclusively, by O_EXCL or mkdir: nothing else has it."""
    return folder / f".softdb-{os.urandom(8).hex()}"


def write_whole(path: Path, *data: bytes | memoryview) -> None:
    """Replace a file by new content, piece after piece, so that any moment shows the old one or the new one whole."""
    with _fresh(path, data) as fresh:
        disk.rename(fresh, path)
    sync_directory(path.parent)


def make_once(path: Path, data: bytes) -> None:
    """Make a private file, unless it is there; whoever reads it sees it whole."""
    make_directory(path.parent, 0o700)
    with _fresh(path, (data,), 0o600) as fresh:
        with contextlib.suppress(FileExistsError):
            disk.link(fresh, path)
        disk.unlink(fresh)
    sync_directory(path.parent)


@contextlib.contextmanager
def _fresh(path: Path, data: Iterable[bytes | memoryview], mode: int = 0o644) -> Iterator[Path]:
    """A new file beside a path, written and synced, removed where anything fails."""
    fresh = temporary(path.parent)
    with _opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
        try:
            offset = 0
            for piece in data:
                _write(descriptor, memoryview(piece), offset)
                offset += len(piece)
            disk.sync(descriptor)
            yield fresh
        except BaseException:
            with contextlib.suppress(OSError):
                remove(fresh)  # a full disk has no room for it
            raise


@contextlib.contextmanager
def aside(directory: Path) -> Iterator[Path]:
    """A new folder of a random name in a directory, removed at the end with all that is in it."""
    folder = temporary(directory)
    disk.make(folder, 0o700)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            clear(folder)
            disk.remove_directory(folder)


@contextlib.contextmanager
def building(directory: Path, last: str) -> Iterator[Path]:
    """A folder aside whose files, synced, get their names in a directory at the end, `last` after all others.

    The directory is made where it is missing. Whatever fails, nothing of it is left, and nothing else has changed;
    FileExistsError where something has come to have one of the names.
    """
    there = directory.is_dir()
    try:
        make_directory(directory)
        with aside(directory) as folder:
            yield folder
            _place(folder, directory, last)
    except BaseException:
        if not there:
            with contextlib.suppress(OSError):  # somebody else has put something there
                disk.remove_directory(directory)
        raise


def _place(folder: Path, directory: Path, last: str) -> None:
    """Give the files of a folder the same names in a directory, where nothing may have them."""
    placed = list[Path]()
    try:
        for fresh in sorted(folder.rglob("*"), key=lambda file: (file.name == last, file)):
            if fresh.name == last:
                for holding in [directory, *filter(Path.is_dir, placed)]:
                    sync_directory(holding)
            path = directory / fresh.relative_to(folder)
            disk.make(path) if fresh.is_dir() else _name(fresh, path)
            placed.append(path)
    except BaseException:
        with contextlib.suppress(OSError):
            for path in reversed(placed):
                disk.remove_directory(path) if path.is_dir() else remove(path)
        raise
    sync_directory(directory)


def _name(fresh: Path, path: Path) -> None:
    """Give a file another name, which nothing may have: unlike a renaming, a link replaces nothing."""
    try:
        disk.link(fresh, path)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(path):
            raise
        disk.rename(fresh, path)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and those that it lies in, where they are missing; the names of all are on disk then."""
    if path.is_dir():
        _sync_names_above(path)
        return
    make_directory(path.parent, mode)
    with contextlib.suppress(FileExistsError):
        disk.make(path, mode)
    sync_directory(path.parent)


def _sync_names_above(path: Path) -> None:
    """Sync the names of an existing directory and of those above it: whoever made them may not have."""
    path = path.resolve()
    device = path.stat().st_dev
    with contextlib.suppress(PermissionError):  # what we may not read, such as /home, was not made for us
        for above in path.parents:
            if above.stat().st_dev != device:
                return
            sync_directory(above)


def sync_directory(path: Path, folder: int | None = None) -> None:
    """Bring a directory's entries to disk. The path may be a link: it is the user's."""
    if folder is not None:
        disk.sync(folder)
        return
    with _opened(path.resolve(), os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        disk.sync(descriptor)


def sync(path: Path, folder: int | None = None) -> None:
    """Bring to disk what was written to a file and not synced; there need not be one."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError), _opened(path, flags, folder=folder) as descriptor:
        disk.sync(descriptor)


def remove(path: Path, folder: int | None = None) -> None:
    """Unlink a file that may be gone already; maps of it stay valid."""
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(path, folder)


def clear(path: Path) -> None:
    """Remove everything in a directory."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            clear(entry)
            disk.remove_directory(entry)
        else:
            remove(entry)


def open_regular(path: Path, folder: int | None = None) -> BinaryIO:
    """A regular file, opened to be read: no link (it may lead anywhere) and no pipe (it may never answer).

    Raises OSError, FileNotFoundError where there is none.
    """
    name = path if folder is None else path.name
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return io.open(descriptor, "rb")  # noqa: UP020 - `open` reads as a path


def occupied(path: Path) -> int:
    """Bytes on disk of everything in a directory; files that vanish meanwhile count nothing."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


def acquire(path: Path, folder: int | None = None) -> Lock | None:
    """An exclusive lock on a file until it is released or the process ends; None while another holds it."""
    lock = Lock()
    lock.descriptor = descriptor = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, folder=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _PROCESS.fullmatch(os.pread(descriptor, 32, 0)):  # else it is another's file
            disk.truncate(descriptor, 0)
            disk.write(descriptor, f"{os.getpid()}\n".encode(), 0)  # only for the error message of a second writer
    except BlockingIOError:
        lock.close()
        return None
    except BaseException:
        lock.release()
        raise
    return lock


class Lock:
    """A lock on a file, for as long as its descriptor is open anywhere."""

    descriptor = -1  # when it is closed

    def release(self) -> None:
        """Unlock and close, even if a forked child has the descriptor, too; an interrupt leaves no lock."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptor without unlocking, as a child must; safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            disk.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0o644, folder: int | None = None) -> Iterator[int]:
    descriptor = disk.open(path, flags, mode, folder)
    try:
        yield descriptor
    finally:
        disk.close(descriptor)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = disk.write(descriptor, data, offset)
        data, offset = data[written:], offset + written
