"""Operations on files other than the catalogue's. A change is on disk when its call returns, but for stated exceptions.

`folder`: the descriptor of a file's directory. With it, a path means the file of that name in the open directory, even
if that directory was renamed and another one is now at its old path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from softdb.store import disk

_COPIED = 1 << 20  # bytes copied at once
_PROCESS = re.compile(rb"\d{0,20}\n?")  # content of a lock file: the holder's process id
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)  # errors of file systems without hard links


class Mark(NamedTuple):
    """Identity (device, inode) and state (size, time) of a file; if its content is changed, its mark differs."""

    device: int
    inode: int
    size: int  # bytes
    modified: int  # nanoseconds

    def is_of(self, other: Mark | None) -> bool:
        """Return True if both are marks of the same file, whatever its content."""
        return other is not None and self[:2] == other[:2]


def mark(place: str | int, folder: int | None = None) -> Mark | None:
    """Return device, inode, size and times of a file; None if there is none. With `folder`, links are not followed."""
    try:
        status = os.stat(place, dir_fd=folder, follow_symlinks=folder is None)
    except OSError:
        return None
    return Mark(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def create(path: Path, head: bytes, size: int, named: bool = True, folder: int | None = None) -> None:
    """Create a file of `size` bytes: `head`, then zeros. Sync its name, or leave that to the caller if not `named`.

    The content is not synced: the first synced `write_at`, or `sync`, brings head and size to disk.
    """
    with _open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=folder) as descriptor:
        _write(descriptor, memoryview(head), 0)
        disk.truncate(descriptor, size)
    if named:
        sync_directory(path.parent, folder)


def write_at(path: Path, data: bytes | memoryview, offset: int, synced: bool = True, folder: int | None = None) -> None:
    """Overwrite bytes of an existing file; on disk when this returns, unless `synced` is False."""
    with _open_descriptor(path, os.O_WRONLY, folder=folder) as descriptor:
        _write(descriptor, memoryview(data), offset)
        if synced:
            disk.sync(descriptor)


def copy(source: BinaryIO, path: Path) -> None:
    """Copy an open file to a new file, and sync the new file's content, but not its name."""
    with _temporary_file(path, iter(lambda: source.read(_COPIED), b"")) as fresh:
        disk.rename(fresh, path)


def publish(fresh: Path, path: Path) -> None:
    """Sync a finished file, rename it to `path`, which must be free, and sync the name."""
    with _open_descriptor(fresh, os.O_RDONLY) as descriptor:
        disk.sync(descriptor)
    disk.rename(fresh, path)
    sync_directory(path.parent)


def temporary(folder: Path) -> Path:
    """Return a random path in a folder. The caller creates a file or folder there, and fails if one exists."""
    return folder / f".softdb-{os.urandom(8).hex()}"


def write_whole(path: Path, *data: bytes | memoryview) -> None:
    """Replace a file's content atomically by the concatenation of `data`."""
    with _temporary_file(path, data) as fresh:
        disk.rename(fresh, path)
    sync_directory(path.parent)


def make_once(path: Path, data: bytes) -> None:
    """Create a file with `data` that only its owner can read, atomically; leave an existing file as it is."""
    make_directory(path.parent, 0o700)
    with _temporary_file(path, (data,), 0o600) as fresh:
        with contextlib.suppress(FileExistsError):
            disk.link(fresh, path)
        disk.unlink(fresh)
    sync_directory(path.parent)


@contextlib.contextmanager
def _temporary_file(path: Path, data: Iterable[bytes | memoryview], mode: int = 0o644) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, written and synced; remove it on an error."""
    fresh = temporary(path.parent)
    with _open_descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
        try:
            offset = 0
            for piece in data:
                _write(descriptor, memoryview(piece), offset)
                offset += len(piece)
            disk.sync(descriptor)
            yield fresh
        except BaseException:
            with contextlib.suppress(OSError):
                remove(fresh)  # an unfinished file must not take room on a full disk
            raise


@contextlib.contextmanager
def aside(directory: Path) -> Iterator[Path]:
    """Yield a new folder with a random name in a directory; at the end remove the folder and its content."""
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
    """Yield a temporary folder; at the end move its synced files into `directory`, the file `last` as the last one.

    The directory is created if missing. On an error, everything that this call created is removed, and nothing else.
    Raises FileExistsError if the directory meanwhile has a file of the same name.
    """
    existed = directory.is_dir()
    try:
        make_directory(directory)
        with aside(directory) as folder:
            yield folder
            _place(folder, directory, last)
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # another program may have put a file into the directory
                disk.remove_directory(directory)
        raise


def _place(folder: Path, directory: Path, last: str) -> None:
    """Move a folder's files into a directory, under the same names, which must be free; on an error, move them back."""
    placed = list[Path]()
    try:
        for fresh in sorted(folder.rglob("*"), key=lambda file: (file.name == last, file)):
            if fresh.name == last:
                for holding in [directory, *filter(Path.is_dir, placed)]:
                    sync_directory(holding)
            path = directory / fresh.relative_to(folder)
            disk.make(path) if fresh.is_dir() else _link_or_rename(fresh, path)
            placed.append(path)
    except BaseException:
        with contextlib.suppress(OSError):
            for path in reversed(placed):
                disk.remove_directory(path) if path.is_dir() else remove(path)
        raise
    sync_directory(directory)


def _link_or_rename(fresh: Path, path: Path) -> None:
    """Move a file to a path that must be free: unlike a rename, a hard link replaces nothing."""
    try:
        disk.link(fresh, path)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(path):
            raise
        disk.rename(fresh, path)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, and sync their names."""
    if path.is_dir():
        _sync_names_above(path)
        return
    make_directory(path.parent, mode)
    with contextlib.suppress(FileExistsError):
        disk.make(path, mode)
    sync_directory(path.parent)


def _sync_names_above(path: Path) -> None:
    """Sync the names of an existing directory and its parents: whoever created them may not have synced them."""
    path = path.resolve()
    device = path.stat().st_dev
    with contextlib.suppress(PermissionError):  # a parent that cannot be opened, such as /home, was there long before
        for above in path.parents:
            if above.stat().st_dev != device:
                return
            sync_directory(above)


def sync_directory(path: Path, folder: int | None = None) -> None:
    """Bring a directory's entries to disk. The path may be a link, because users choose it."""
    if folder is not None:
        disk.sync(folder)
        return
    with _open_descriptor(path.resolve(), os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        disk.sync(descriptor)


def sync(path: Path, folder: int | None = None) -> None:
    """Sync a file that was written to; do nothing if it does not exist."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError), _open_descriptor(path, flags, folder=folder) as descriptor:
        disk.sync(descriptor)


def remove(path: Path, folder: int | None = None) -> None:
    """Unlink a file, if it exists; memory maps of it stay valid."""
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
    """Open a regular file for reading. Raises FileNotFoundError, and OSError for a link, a pipe or a directory."""
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
    """Return the bytes that the files of a directory occupy on disk, ignoring files that are removed meanwhile."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


def acquire(path: Path, folder: int | None = None) -> Lock | None:
    """Lock a file exclusively until `release` or the end of the process; None if another process holds the lock."""
    lock = Lock()
    lock.descriptor = descriptor = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, folder=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _PROCESS.fullmatch(os.pread(descriptor, 32, 0)):  # never overwrite another program's file
            disk.truncate(descriptor, 0)
            disk.write(descriptor, f"{os.getpid()}\n".encode(), 0)  # for the error message of a second writer
    except BlockingIOError:
        lock.close()
        return None
    except BaseException:
        lock.release()
        raise
    return lock


class Descriptor:
    """An open file, closed at the latest when this object is deleted."""

    descriptor = -1  # -1: closed

    def close(self) -> None:
        """Close the descriptor without unlocking the file, as a forked child must; safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            disk.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class Lock(Descriptor):
    """A lock on a file, held while any process has its descriptor open."""

    def release(self) -> None:
        """Unlock and close, even if a forked child also has the descriptor open."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()


@contextlib.contextmanager
def _open_descriptor(path: Path, flags: int, mode: int = 0o644, folder: int | None = None) -> Iterator[int]:
    descriptor = disk.open(path, flags, mode, folder)
    try:
        yield descriptor
    finally:
        disk.close(descriptor)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = disk.write(descriptor, data, offset)
        data, offset = data[written:], offset + written
