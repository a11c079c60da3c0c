"""Native kernels, one build for each instruction set: which of them are here, and which are in use.

They are C++ (`native/`), compiled when softdb is installed. Where no compiler was there, or none of their instruction
sets is the processor's, torch serves in their place.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

from softdb.errors import BadInput

__all__ = ["available", "in_use", "native"]

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
    """Return True if there are kernels; else torch serves."""
    return loaded() is not None


def native() -> ModuleType:
    """The kernels, where `available`."""
    found = loaded()
    if found is None:
        raise RuntimeError("there are no kernels; `available` says so")
    return found


def in_use() -> str:
    """The instruction set of the kernels in use: "v4", "v3" or "v2" of x86-64, or "neon"; else why there are none."""
    found = loaded()
    if found is not None:
        return str(found.level())
    if importlib.util.find_spec("softdb.kernels._native") is not None:
        return "none: they need x86-64-v2 or NEON, which this processor lacks; torch serves"
    return "none: softdb was installed without a compiler; torch serves. Install g++ or clang++, then softdb again"
