"""Native kernels, one build for each instruction set, and the choice of the one in use.

They are C++ (`native/`), compiled when softdb is installed. Without a compiler, or if the processor has none of their
instruction sets, torch is used instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

from softdb.errors import BadInput

__all__ = ["available", "in_use", "native"]

VARIABLE = "SOFTDB_SIMD_LEVEL"  # environment variable that forces a level


@functools.cache
def loaded() -> ModuleType | None:
    """The kernels, at the level that the environment names, else the best; None if there are none."""
    try:
        from softdb.kernels import _native
    except ImportError:
        return None
    levels = _native.levels()
    if not levels:
        return None
    level = os.environ.get(VARIABLE) or levels[0]
    if not _native.use(level):
        raise BadInput(
            f"{VARIABLE} is {level!r}, but this processor and this build of softdb have {', '.join(levels)}; "
            "set one of these, or leave it unset for the first of them"
        )
    return _native


def available() -> bool:
    """Return True if there are kernels; else torch is used."""
    return loaded() is not None


def native() -> ModuleType:
    """The kernels. Raises RuntimeError unless `available`."""
    module = loaded()
    if module is None:
        raise RuntimeError("there are no kernels; `available` says so")
    return module


def in_use() -> str:
    """The instruction set in use: "v4", "v3" or "v2" of x86-64, or "neon"; else "none" and the reason."""
    module = loaded()
    if module is not None:
        return str(module.level())
    if importlib.util.find_spec("softdb.kernels._native") is not None:
        return "none: they need x86-64-v2 or NEON, which this processor lacks; torch serves"
    return "none: softdb was installed without a compiler; torch serves. Install g++ or clang++, then softdb again"
