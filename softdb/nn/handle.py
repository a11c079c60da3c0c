"""Wrapper through which copies of a torch module share one open database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from softdb.database import Verbs

D = TypeVar("D", bound=Verbs)


@dataclass(frozen=True)
class SharedHandle(Generic[D]):
    """Wrapper around an open database; a deep copy of the wrapper shares the database instead of copying it."""

    db: D

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedHandle[D]:
        return self
