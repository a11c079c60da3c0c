"""Native kernels, one build for each instruction set: which of them are here, and which are in use.

They are C++ (`native/`), compiled when softdb is installed. Where no compiler was there, or none of their instruction
sets is the processor's, torch serves in their place.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

from softdb.errors import BadInput

__all__ = ["available", "level", "native"]

VARIABLE = "SOFTDB_SIMD_LEVEL"  # forces one of the levels


@functools.cache
def loaded() -> ModuleType | None:
    """The kernels, at the level that the environment asks for or else the best; None where there are none."""
    try:
        from softdb.kernels import _native
    except ImportError:
        return None
    levels = _native.levels()
    if not levels:
        return None
    asked = os.environ.get(VARIABLE) or levels[0]
    if not _native.use(asked):
        raise BadInput(
            f"{VARIABLE} is {asked!r}, but this processor and this build of softdb have {', '.join(levels)}; "
            "set one of these, or leave it unset for the first of them"
        )
    return _native


def available() -> bool:
    """Whether there are kernels; else torch serves."""
    return loaded() is not None


def native() -> ModuleType:
    """The kernels, where `available`."""
    found = loaded()
    if found is None:
        raise RuntimeError("there are no kernels; `available` says so")
    return found


def level() -> str | None:
    """The instruction set of the kernels in use: "v4", "v3", "v2" of x86-64, or "neon"; None where torch serves."""
    found = loaded()
    return None if found is None else str(found.level())
