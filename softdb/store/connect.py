"""Connecting to a catalogue: no link is followed, nothing in the file runs, and SQLite's errors become ours.

A reader that may not write the catalogue makes no file beside it: a writer of another user could not use such a file.
It shares the log and the log's index where they are, and takes locks as any reader. Where there is no log, nobody
writes: the catalogue is read without locks (`immutable`), and what reads it must compare `softdb.store.directory`'s
marks before each transaction, for a writer may come.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

import apsw

from softdb.errors import CorruptionError, DatabaseLocked, NotADatabase, SoftDBError, WriteFailed

_RESCUE = "copy the directory, then run `softdb verify` on the copy, which with --repair saves what is sound"

BUSY = 10_000  # milliseconds that another connection is waited for

_SUPER = bytes.fromhex("d9d505f920a163d7")  # the end of a rollback journal that belongs to several files


class UnreadableLog(NotADatabase):
    """The log has no index, and this process may make none. While a writer closes that is so for a moment."""


def connect(path: Path | None, write: bool, immutable: bool = False) -> apsw.Connection:
    """A connection to a catalogue; `None` is one in memory. Raises NotADatabase, CorruptionError, apsw.Error."""
    connection = _opened(path, write, immutable)
    try:
        connection.set_busy_timeout(BUSY)
        _harden(connection)
        connection.create_scalar_function("crc32", _crc32, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(path: Path | None, write: bool, immutable: bool) -> apsw.Connection:
    if path is None:
        return apsw.Connection(":memory:")
    for suffix in ("", "-wal", "-shm", "-journal"):
        _require_plain(path.with_name(path.name + suffix))
    if write:
        return apsw.Connection(str(path), apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    if not immutable:
        return apsw.Connection(str(path), apsw.SQLITE_OPEN_READONLY)
    return apsw.Connection(f"file:{quote(str(path))}?immutable=1", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def has_no_log(path: Path) -> bool:
    """Return True where a catalogue has no log and this process may make none: it is read as immutable then.

    Raises UnreadableLog where the log holds commits that nobody can read without writing to the directory.
    """
    if _may_write(path.parent) and _may_write(path):
        return False
    log, shared = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    try:
        filled = log.stat().st_size > 0
    except FileNotFoundError:
        return True
    if shared.exists():
        return False
    if filled and log.exists():
        raise UnreadableLog(
            f"{log} holds commits that cannot be read from a read-only directory; open it writable once"
        )
    return True


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _require_plain(path: Path) -> None:
    """SQLite follows links and waits for pipes, and a journal may name another file that it then deletes."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise NotADatabase(f"{path} is not a regular file; softdb follows no links, choose another directory")
    if path.name.endswith("-journal") and found.st_size > len(_SUPER):
        with path.open("rb") as file:
            file.seek(-len(_SUPER), os.SEEK_END)
            if file.read() == _SUPER:
                raise CorruptionError(f"{path.name} names another journal, which softdb does not write; remove it")


def _harden(connection: apsw.Connection) -> None:
    """Nothing in a file from elsewhere may run, and damaged pages are looked for as they are read."""
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.execute("PRAGMA cell_size_check = ON")


def _crc32(*data: Any) -> Any:
    return None if data[0] is None else crc32(data[0])


def typed(error: apsw.Error) -> SoftDBError:
    """SQLite's error as one of softdb's."""
    if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ReadOnlyError):  # the last: a log not set up yet
        return DatabaseLocked(f"another process keeps catalog.sqlite locked ({error}); try again")
    if isinstance(error, apsw.FullError):
        return WriteFailed(f"the disk is full ({error}); make room, then open the database again")
    if isinstance(error, apsw.IOError):
        return CorruptionError(f"catalog.sqlite or its log cannot be read ({error}); {_RESCUE}")
    if of_text_index(error):
        return damaged_text_index(f"cannot be read ({error})")
    return damaged_catalog(f"cannot be read ({error})")


def refused(error: Exception) -> str:
    """Words for an error of a write: what may be lost, where that is known, and what to do."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return f"catalog.sqlite or its log is damaged ({why}), and what was acknowledged may be lost; {_RESCUE}"
    if isinstance(error, apsw.IOError):
        return f"the disk failed ({why}), and what it holds of catalog.sqlite may be damaged; {_RESCUE}"
    return f"the disk refused a write ({why})"


def of_text_index(error: Exception) -> bool:
    """Return True if FTS5 has met what it does not write; no read or write was refused then."""
    known = isinstance(error, apsw.CorruptError | apsw.SQLError)
    return known and (getattr(error, "extendedresult", 0) == apsw.SQLITE_CORRUPT_VTAB or "fts5" in str(error))


def damaged_catalog(what: str) -> CorruptionError:
    """Something in the catalogue that softdb does not write."""
    return CorruptionError(f"catalog.sqlite {what}; restore the directory from a copy")


def damaged_text_index(what: str) -> CorruptionError:
    """Something in the text index that FTS5 does not write, or not for these texts."""
    return CorruptionError(
        f"catalog.sqlite has a text index that {what}; drop_text_index() and index_text() make it anew from the texts"
    )


def damaged_text(error: UnicodeDecodeError) -> CorruptionError:
    """A text in the catalogue that is not UTF-8."""
    return damaged_catalog(f"has a damaged text ({error})")


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Turn what SQLite raises while it reads into CorruptionError and DatabaseLocked."""
    try:
        yield
    except apsw.Error as error:
        raise typed(error) from error
    except UnicodeDecodeError as error:
        raise damaged_text(error) from None
