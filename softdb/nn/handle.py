"""Holder of a module's database, which torch does not register as a submodule or parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from softdb.database import Verbs

D = TypeVar("D", bound=Verbs)


@dataclass(frozen=True)
class SharedHandle(Generic[D]):
    """Keeps copies of a module on the same handle: a deep copy of a handle would be another database."""

    db: D

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedHandle[D]:
        return self
