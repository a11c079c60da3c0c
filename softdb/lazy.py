"""Cached properties without a lock.

Before Python 3.12, `functools.cached_property` takes one lock for all objects of a class. Threads would wait for each
other's objects, and a fork while a thread holds the lock would block the child for ever.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property"]

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property(functools.cached_property):
        """Property computed at its first use, then stored. If two threads compute it at once, the later value stays."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
