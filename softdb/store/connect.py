"""Connect to a catalogue: follow no links, run nothing from the file, and turn SQLite's errors into softdb's.

A reader that may not write the catalogue creates no file beside it: a writer of another user could not use such a file.
If a log and its index exist, this reader shares them and takes locks like other readers. Without a log nobody writes,
and the catalogue is read without locks (`immutable`). A writer may open the catalogue later, so such a reader must
check by `Directory.overtaken` whether one has.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from zlib import crc32

import apsw

from softdb.errors import CorruptionError, DatabaseLocked, NotADatabase, SoftDBError, WriteFailed

_RESCUE = "copy the directory, then save what is intact by `softdb verify COPY --repair DESTINATION`"

BUSY = 10_000  # milliseconds to wait for another connection's lock

_SUPER = bytes.fromhex("d9d505f920a163d7")  # last bytes of a rollback journal that names a super-journal


class UnreadableLog(NotADatabase):
    """The log has no index file (-shm), and this process may not create one. Also raised while a writer closes."""


def connect(path: Path | None, write: bool, immutable: bool = False) -> apsw.Connection:
    """Connect to a catalogue; path None: in memory. Raises NotADatabase, CorruptionError, apsw.Error."""
    connection = _open(path, write, immutable)
    try:
        connection.set_busy_timeout(BUSY)
        _harden(connection)
        connection.create_scalar_function("crc32", lambda *data: None if data[0] is None else crc32(data[0]), 1)
        connection.create_scalar_function("casefold", lambda *text: text[0] and str(text[0]).casefold(), 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _open(path: Path | None, write: bool, immutable: bool) -> apsw.Connection:
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
    """Return True if a catalogue has no log and this process may not create one, so must read it as immutable.

    Raises UnreadableLog if the log holds commits that cannot be read without writing to the directory.
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
            f"{log} holds commits that cannot be read from a read-only directory; open the database once for writing"
        )
    return True


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _require_plain(path: Path) -> None:
    """Raise for links and pipes, and for super-journals: SQLite would delete files that they name."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise NotADatabase(f"{path} is not a regular file; softdb follows no links, choose another directory")
    if path.name.endswith("-journal") and status.st_size > len(_SUPER):
        with path.open("rb") as file:
            file.seek(-len(_SUPER), os.SEEK_END)
            if file.read() == _SUPER:
                raise CorruptionError(f"{path.name} names a journal that softdb does not write; remove {path.name}")


def _harden(connection: apsw.Connection) -> None:
    """Forbid SQLite to run triggers, views or functions from the file, and let it check pages as it reads them."""
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.execute("PRAGMA cell_size_check = ON")


def typed(error: apsw.Error | UnicodeDecodeError) -> SoftDBError:
    """Return the error of softdb that stands for an error of SQLite, or for a stored text that is not UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return damaged_catalog(f"has a damaged text ({error})")
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
    """Return a message for an error of a write: its cause, possible losses, and what to do."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return f"catalog.sqlite or its log is damaged ({why}), and acknowledged changes may be lost; {_RESCUE}"
    if isinstance(error, apsw.IOError):
        return f"the disk failed ({why}), and catalog.sqlite may be damaged; {_RESCUE}"
    return f"the disk refused a write ({why})"


def of_text_index(error: Exception) -> bool:
    """Return True if the error means that the FTS5 index is damaged, not that the disk refused to read or write."""
    known = isinstance(error, apsw.CorruptError | apsw.SQLError)
    return known and (getattr(error, "extendedresult", 0) == apsw.SQLITE_CORRUPT_VTAB or "fts5" in str(error))


def damaged_catalog(what: str) -> CorruptionError:
    """Return the error for a damaged catalogue; `what` says the damage, as in "has a damaged state"."""
    return CorruptionError(f"catalog.sqlite {what}; restore the directory from a copy")


def damaged_text_index(what: str) -> CorruptionError:
    """Return the error for a damaged text index; `what` says the damage, as in "cannot be read"."""
    return CorruptionError(
        f"catalog.sqlite has a text index that {what}; rebuild it by drop_text_index(), then index_text()"
    )


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Run a block that reads; raise softdb's errors instead of SQLite's, see `typed`."""
    try:
        yield
    except (apsw.Error, UnicodeDecodeError) as error:
        raise typed(error) from error
