"""softdb: a vector database you can backpropagate through."""

import importlib
from typing import TYPE_CHECKING, Any

from softdb import errors
from softdb.errors import *  # noqa: F403 - the names in its __all__

if TYPE_CHECKING:
    from softdb import nn, scores, train
    from softdb.answers import Estimate, Explanation, Hit, Hits, Pooled, QueryHits, Record, Records, Samples
    from softdb.cross_entropy import linear_cross_entropy
    from softdb.database import SoftDB
    from softdb.functional import attention
    from softdb.index import Build
    from softdb.opening import open
    from softdb.salvaging import salvage

__version__ = "0.1.0"

__all__ = [
    "Build", "Estimate", "Explanation", "Hit", "Hits", "Pooled", "QueryHits", "Record", "Records", "Samples",
    "SoftDB", "attention", "linear_cross_entropy", "nn", "open", "salvage", "scores", "train",
]  # fmt: skip
__all__ += errors.__all__

_LAZY = {  # module: its public names, imported at their first use
    "answers": ("Estimate", "Explanation", "Hit", "Hits", "Pooled", "QueryHits", "Record", "Records", "Samples"),
    "cross_entropy": ("linear_cross_entropy",),
    "database": ("SoftDB",),
    "functional": ("attention",),
    "index": ("Build",),
    "opening": ("open",),
    "salvaging": ("salvage",),
}
_MODULES = ("cluster", "data", "formats", "nn", "plots", "pool", "scores", "text", "train", "weights")


if not TYPE_CHECKING:  # type checkers see the imports above, and report unknown names

    def __getattr__(name: str) -> Any:
        """Import a name that needs torch at its first use: `softdb --help` must not wait for torch."""
        if name in _MODULES:
            return importlib.import_module(f"softdb.{name}")
        module = next((module for module, names in _LAZY.items() if name in names), None)
        if module is None:
            from softdb.misnomers import CALLS, own_name

            raise AttributeError(f"module 'softdb' has no attribute {name!r}{own_name(name, CALLS, __all__)}")
        value = globals()[name] = getattr(importlib.import_module(f"softdb.{module}"), name)
        return value
