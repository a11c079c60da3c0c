"""The database behind a module, which is neither a submodule of it nor a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from softdb.database import Verbs

D = TypeVar("D", bound=Verbs)


@dataclass(frozen=True)
class SharedHandle(Generic[D]):
    """The handle, which copies of the module share: a deep copy of it would be another database."""

    db: D

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedHandle[D]:
        return self
