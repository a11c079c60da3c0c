"""The database behind a module, which is neither a submodule of it nor a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from softdb.database import SoftDB

__all__ = ["SharedHandle"]


@dataclass(frozen=True)
class SharedHandle:
    """The handle, which copies of the module share: a deep copy of it would be another database."""

    db: SoftDB

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedHandle:
        return self
