"""A database's directory. Guarantee: it holds a database or may become one, and has at most one writer.

While a directory is open, it may be renamed and another created at its path; another program may rename, delete,
replace or overwrite any file in it; the file `lock` may be deleted, so that a second writer begins. So column files
are opened by the directory's descriptor, never by its path. Before and after each commit, the path must lead to the
directory that was opened, and the names in it to the files that this writer opened or created: a commit is
acknowledged only if the next reader will find it. Files are compared by device and inode, and only when the change
time of the directory says that some name in it has changed.

A file overwritten in place keeps its inode. So the catalogue and its log must have, at the beginning of an operation,
the size and the modification time that this writer left; the catalogue also before a commit. Two changes go unseen:
one within a tick of the file system's clock (a few milliseconds), and one after the last of these checks.

A second writer removes orphaned files in a transaction of its own, which waits for the first writer's transaction. So
either the first writer sees that its lock is gone, or the second sees the commits of the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from softdb.errors import CorruptionError, DatabaseLocked, NotADatabase
from softdb.store import files
from softdb.store.files import Mark, mark

CATALOG, LOG = "catalog.sqlite", "catalog.sqlite-wal"

_SHARED = "catalog.sqlite-shm"  # index of the log
_CATALOG_FILES = (CATALOG, LOG, _SHARED)
NO_DATABASE = "holds no database; make one: softdb.open with mode='rw', or on a shell softdb import"
_CLOCK_STEP = 2 * 10**9  # nanoseconds: changes this far apart have different times on every file system

_OURS = {  # files that an interrupted creation may leave, in any combination after a power cut
    "catalog.sqlite", "catalog.sqlite-journal", "catalog.sqlite-shm", "catalog.sqlite-wal", "index", "lock",
}  # fmt: skip


class Displaced(Exception):
    """The directory or a file in it was renamed, removed, replaced or overwritten."""

    def __init__(self, message: str, overwritten: str | None = None) -> None:
        super().__init__(message)
        self.overwritten = overwritten  # name of the file that was overwritten in place, if one was


class Directory:
    """An open database directory, and its lock if opened for writing."""

    def __init__(self, path: Path, writing: bool) -> None:
        """Open a directory, and with `writing` lock it. Raises DatabaseLocked if another process has locked it."""
        self.path, self._place, self.lock = path, str(path), None
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mark = mark(self.descriptor)
        self._opened: dict[str, Mark] = {}  # marks of the catalogue's files when SQLite opened them
        self._left: dict[str, Mark | None] = {}  # marks of the catalogue and its log after this writer's last change
        self._compared = 0  # change time of the directory when all names were last compared, ns
        if writing:
            try:
                self.lock = self._acquire_lock()
                self._lock = mark(self.lock.descriptor)
            except BaseException:
                self.close()
                raise

    def _acquire_lock(self) -> files.Lock:
        lock = files.acquire(self.path / "lock", self.descriptor)
        if lock is None:
            holder = (self.path / "lock").read_text(errors="replace").strip() or "unknown"
            own = ", this one, through another handle" if holder == str(os.getpid()) else ""
            raise DatabaseLocked(
                f"{self.path} is being written by process {holder}{own}; close it there, or open this one with mode='r'"
            )
        return lock

    # -- the catalogue's files -------------------------------------------------------------------------------------

    def catalog_mark(self) -> Mark | None:
        """Return the catalogue's current mark."""
        return mark(CATALOG, self.descriptor)

    def watch_catalog(self, before: Mark | None, immutable: bool) -> None:
        """Record marks of the files that SQLite has opened; `before`: the catalogue's mark before it was opened."""
        marks = {name: mark(name, self.descriptor) for name in ((CATALOG,) if immutable else _CATALOG_FILES)}
        if before is not None:
            marks[CATALOG] = before
        self._opened = {name: current for name, current in marks.items() if current is not None}
        self._compared = 0

    def note_state(self) -> None:
        """Record the current marks of the catalogue and its log, after a change by this writer."""
        self._left = {name: mark(name, self.descriptor) for name in (CATALOG, LOG)}

    # -- comparing -------------------------------------------------------------------------------------------------

    def require_ours(self, columns: Mapping[str, Mark] | None = None, unchanged: tuple[str, ...] = ()) -> None:
        """Raise Displaced unless `require_in_place` holds, this writer has the lock, and no other program has written.

        `unchanged`: names of files whose marks must be those that `note_state` recorded. Cost: one stat for each file.
        """
        self.require_in_place(columns)
        if self.lock is not None and not _is_same(mark("lock", self.descriptor), self._lock):
            raise Displaced(f"{self.path}/lock was removed or replaced: another process may be writing")
        for name in unchanged:
            if name in self._left and mark(name, self.descriptor) != self._left[name]:
                raise Displaced(f"{self.path}/{name} was overwritten by another program", name)

    def require_in_place(self, columns: Mapping[str, Mark] | None = None) -> None:
        """Raise Displaced if the path or a name in the directory no longer leads to the file that was opened.

        `columns`: marks of the column files by name. Cost: two stats, and one for each file during the seconds after a
        name in the directory has changed.
        """
        if not _is_same(mark(self._place), self._mark):
            raise Displaced(f"{self.path} was renamed, removed or replaced since it was opened")
        changed = os.fstat(self.descriptor).st_ctime_ns
        if changed != self._compared:
            for name, opened in {**self._opened, **(columns or {})}.items():
                if not opened.is_of(mark(name, self.descriptor)):
                    raise Displaced(f"{self.path}/{name} was removed or replaced since it was opened")
            self._compared = changed if time.time_ns() - changed > _CLOCK_STEP else 0

    def require_opened(self) -> None:
        """Raise NotADatabase if the directory or a file was replaced after it was opened."""
        try:
            self.require_ours()
        except Displaced as error:
            raise NotADatabase(f"{error}; open it again") from None

    def require_followed(self) -> None:
        """Raise NotADatabase if the catalogue or its log, which a reader shares with writers, was replaced."""
        for name, opened in self._opened.items():
            if not opened.is_of(mark(name, self.descriptor)):
                raise NotADatabase(f"{self.path}/{name} was removed or replaced since it was opened; open it again")

    def overtaken(self) -> bool:
        """Return True if a writer has opened the database since this handle opened the catalogue as immutable."""
        log = mark(LOG, self.descriptor)
        logged = log is not None and (log.size > 0 or mark(_SHARED, self.descriptor) is not None)
        return logged or self.rewritten()

    def rewritten(self) -> bool:
        """Return True if the catalogue was written to since it was opened: reads may mix two states."""
        return self.catalog_mark() != self._opened[CATALOG]

    def close(self) -> None:
        """Close the descriptor and release the lock; safe to call twice."""
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
            os.close(self.descriptor)  # the lock closes its own descriptor


def _is_same(now: Mark | None, opened: Mark | None) -> bool:
    return now is not None and now.is_of(opened)


def enter(path: Path, writing: bool, may_create: bool) -> Directory:
    """Open a path that holds a database or may hold a new one; create the directory if `may_create`.

    Raises NotADatabase, CorruptionError if the catalogue is gone, and DatabaseLocked if another process writes.
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
            raise NotADatabase(f"{path} {NO_DATABASE}")
        files.make_directory(path)
    return Directory(path, writing)


def require_new(path: Path | None, acknowledged: int) -> None:
    """Raise CorruptionError if an empty catalogue lies beside data: the data would be removed as unused."""
    if acknowledged >= 0 or (path is not None and any(path.glob("keys-*.npy"))):
        raise CorruptionError(f"{path}/catalog.sqlite is empty, but files beside it are not; restore it from a copy")
