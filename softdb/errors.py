"""Every error and warning of softdb."""

from __future__ import annotations

__all__ = [
    "BadFilter",
    "BadInput",
    "Cancelled",
    "Closed",
    "CorruptionError",
    "DatabaseLocked",
    "DeviceFailed",
    "DuplicateId",
    "FormatTooNew",
    "MissingDependency",
    "NotADatabase",
    "ReadOnly",
    "RecallWarning",
    "ShardUnavailable",
    "SoftDBError",
    "StaleRead",
    "StorageUnavailable",
    "TrainingWarning",
    "UnknownField",
    "UnknownId",
    "WriteFailed",
]


class SoftDBError(Exception):
    """Base of every error that softdb raises on purpose."""


class BadInput(SoftDBError, ValueError):
    """An argument cannot be used; nothing was changed."""


class BadFilter(BadInput):
    """A `where` filter is not of the grammar; nothing was read."""


class DuplicateId(BadInput):
    """An id is already stored, or stands twice in one batch; nothing was written."""


class UnknownId(SoftDBError, KeyError):
    """An id that must exist is not stored; nothing was changed."""

    def __str__(self) -> str:
        # KeyError would show the message as a quoted repr
        return str(self.args[0]) if self.args else ""


class Closed(SoftDBError):
    """The handle was closed; open the database again."""


class ReadOnly(SoftDBError):
    """A write was asked of a handle opened for reading."""


class DatabaseLocked(SoftDBError):
    """Another writer holds the database."""


class DeviceFailed(SoftDBError, RuntimeError):
    """A device that the database computes on is full, was lost, or cannot be used by this process; nothing is lost."""


class NotADatabase(SoftDBError):
    """The path holds no softdb database."""


class FormatTooNew(SoftDBError):
    """The database was written by a newer softdb."""


class CorruptionError(SoftDBError):
    """A file of the database is missing, short or damaged; the message names it."""


class WriteFailed(SoftDBError):
    """The disk refused a write; this handle takes no more of them, reopening shows what is durable."""


class StaleRead(SoftDBError):
    """A record was deleted or replaced between the search and the question about it."""


class ShardUnavailable(SoftDBError):
    """Shards of a cluster did not answer in time; nothing was changed, ask again or take a partial answer."""


class StorageUnavailable(SoftDBError):
    """The storage of a table cannot be reached; what was acknowledged is kept, and a later call goes on."""


class Cancelled(SoftDBError):
    """The build of an index was cancelled before its end; the old index serves on."""


class MissingDependency(SoftDBError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class UnknownField(UserWarning):
    """A filter on a field that no record has matched nothing; the message names the nearest field that there is."""


class RecallWarning(UserWarning):
    """The index finds less of the true nearest than it did when it was measured; the answers lack the others."""


class TrainingWarning(UserWarning):
    """A trained projection is worse than the queries as they are, by a measure that the message names."""
