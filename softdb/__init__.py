"""softdb: a vector database you can backpropagate through."""

import importlib
from typing import TYPE_CHECKING, Any

from softdb.errors import (
    BadFilter,
    BadInput,
    Cancelled,
    Closed,
    CorruptionError,
    DatabaseLocked,
    DuplicateId,
    FormatTooNew,
    MissingDependency,
    NestedWrite,
    NotADatabase,
    ReadOnly,
    RecallWarning,
    SoftDBError,
    StaleRead,
    TrainingWarning,
    UnknownField,
    UnknownId,
    WriteFailed,
)

if TYPE_CHECKING:
    from softdb import nn, scores, train
    from softdb.answers import Estimate, Explanation, Hit, Hits, Pooled, QueryHits, Record, Records, Samples
    from softdb.database import SoftDB
    from softdb.functional import attention
    from softdb.index import Build
    from softdb.opening import open
    from softdb.store.salvage import salvage

__version__ = "0.1.0"

__all__ = [
    "BadFilter",
    "BadInput",
    "Build",
    "Cancelled",
    "Closed",
    "CorruptionError",
    "DatabaseLocked",
    "DuplicateId",
    "Estimate",
    "Explanation",
    "FormatTooNew",
    "Hit",
    "Hits",
    "MissingDependency",
    "NestedWrite",
    "NotADatabase",
    "Pooled",
    "QueryHits",
    "ReadOnly",
    "RecallWarning",
    "Record",
    "Records",
    "Samples",
    "SoftDB",
    "SoftDBError",
    "StaleRead",
    "TrainingWarning",
    "UnknownField",
    "UnknownId",
    "WriteFailed",
    "attention",
    "nn",
    "open",
    "salvage",
    "scores",
    "train",
]

_LAZY = {
    "Build": "index",
    "Estimate": "answers",
    "Explanation": "answers",
    "Hit": "answers",
    "Hits": "answers",
    "Pooled": "answers",
    "QueryHits": "answers",
    "Record": "answers",
    "Records": "answers",
    "Samples": "answers",
    "SoftDB": "database",
    "attention": "functional",
    "open": "opening",
    "salvage": "store.salvage",
}


if not TYPE_CHECKING:  # a type checker knows what there is

    def __getattr__(name: str) -> Any:
        """What needs torch is imported when it is first used: `softdb --help` must not wait for it."""
        if name in ("nn", "scores", "train"):
            return importlib.import_module(f"softdb.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module 'softdb' has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"softdb.{_LAZY[name]}"), name)
        return found
