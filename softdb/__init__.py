"""softdb: a vector database you can backpropagate through."""

from softdb.answers import Hits, Pooled, Record, Records
from softdb.database import SoftDB
from softdb.errors import (
    BadFilter,
    BadInput,
    Closed,
    CorruptionError,
    DatabaseLocked,
    DuplicateId,
    FormatTooNew,
    MissingDependency,
    NotADatabase,
    ReadOnly,
    SoftDBError,
    StaleRead,
    UnknownId,
    WriteFailed,
)
from softdb.opening import open

__version__ = "0.1.0"

__all__ = [
    "BadFilter",
    "BadInput",
    "Closed",
    "CorruptionError",
    "DatabaseLocked",
    "DuplicateId",
    "FormatTooNew",
    "Hits",
    "MissingDependency",
    "NotADatabase",
    "Pooled",
    "ReadOnly",
    "Record",
    "Records",
    "SoftDB",
    "SoftDBError",
    "StaleRead",
    "UnknownId",
    "WriteFailed",
    "open",
]
