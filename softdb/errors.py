"""Every error and warning of softdb."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "BadFilter", "BadInput", "Cancelled", "Closed", "CorruptionError", "DatabaseLocked", "DeviceFailed",
    "DuplicateId", "EmptyDatabase", "EncoderWarning", "FormatTooNew", "MissingDependency", "NotADatabase", "ReadOnly",
    "RecallWarning", "ShardUnavailable", "SoftDBError", "StaleRead", "StorageUnavailable", "TrainingWarning",
    "UnknownField", "UnknownId", "WriteFailed",
]  # fmt: skip


class SoftDBError(Exception):
    """Base of every error that softdb raises on purpose."""


class BadInput(SoftDBError, ValueError):
    """An argument cannot be used; nothing was changed."""


class BadFilter(BadInput):
    """A `where` filter does not follow the grammar; nothing was read."""


class DuplicateId(BadInput):
    """An id is already stored, or occurs twice in one batch; nothing was written."""


class UnknownId(SoftDBError, KeyError):
    """An id that must exist is not stored; nothing was changed."""

    def __str__(self) -> str:
        # KeyError would show the message in quotes
        return str(self.args[0]) if self.args else ""


class Closed(SoftDBError):
    """The handle was closed; open the database again."""


class ReadOnly(SoftDBError):
    """A write on a handle that is open for reading only."""


class DatabaseLocked(SoftDBError):
    """Another process is writing to the database."""


class DeviceFailed(SoftDBError, RuntimeError):
    """A device that the database computes on is full, failed, or cannot be used by this process; no record is lost."""


class NotADatabase(SoftDBError):
    """The path holds no softdb database."""


class FormatTooNew(SoftDBError):
    """The database was written by a newer softdb."""


class CorruptionError(SoftDBError):
    """A file of the database is missing, short or damaged; the message names it."""


class WriteFailed(SoftDBError):
    """The disk refused a write. This handle refuses further writes; reopen the database to see what is on disk."""


class StaleRead(SoftDBError):
    """A record was deleted or replaced after the search that returned it."""


class ShardUnavailable(SoftDBError):
    """Shards of a cluster did not answer in time; nothing was changed. Call again, or accept a partial answer."""


class StorageUnavailable(SoftDBError):
    """The storage of a table cannot be reached. Acknowledged changes are safe; a later call tries again."""


class Cancelled(SoftDBError):
    """The build of an index was cancelled; the old index stays in use."""


class MissingDependency(SoftDBError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class UnknownField(UserWarning):
    """A filter names a field that no record has, so it matches nothing; the message names the most similar field."""


class EmptyDatabase(UserWarning):
    """A query to a database that this handle has just created, and that holds no records; check the path."""


class EncoderWarning(UserWarning):
    """The texts of a new database are embedded by n-grams, because no encoder was chosen."""


class RecallWarning(UserWarning):
    """The recall of the index has fallen below its target: searches miss more of the true nearest records."""


class TrainingWarning(UserWarning):
    """A trained projection is worse than the unprojected queries, by a measure that the message names."""


@contextlib.contextmanager
def named(verb: str) -> Iterator[None]:
    """Begin an error's message with the name of a public call, unless an inner call has done so. Also a decorator."""
    try:
        yield
    except SoftDBError as error:
        if not hasattr(error, "verb"):
            error.verb = verb  # type: ignore[attr-defined]
            error.args = (f"{verb}: {error.args[0]}", *error.args[1:])
        raise
