"""Load the native kernels, which are built for several instruction sets, and choose the set to use.

The kernels are C++ code in `native/`, compiled when softdb is installed. softdb uses torch instead if it was installed
without a compiler, or if the processor has none of the instruction sets.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from softdb.errors import BadInput, MissingDependency

__all__ = ["available", "in_use", "native"]

VARIABLE = "SOFTDB_SIMD_LEVEL"  # environment variable that selects the instruction set


@functools.cache
def loaded() -> ModuleType | None:
    """Load the kernels for the instruction set that VARIABLE names, else for the best one. None: no kernels."""
    try:
        from softdb.kernels import _native
    except ImportError:
        return None
    signatures = Path(__file__).with_name("_native.pyi")  # not in wheels, whose kernels and Python always agree
    if signatures.is_file() and hashlib.sha256(signatures.read_bytes()).hexdigest() != vars(_native).get("signatures"):
        reason = f"the kernels in {_native.__file__} are of another version than softdb's Python files beside them"
        raise MissingDependency(f"{reason}; run pip install again, or remove that file: then torch serves, slower")
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
    """Return True if native kernels can be used, False if torch has to compute."""
    return loaded() is not None


def native() -> ModuleType:
    """Return the module of kernels. Raises RuntimeError if there are none (see `available`)."""
    module = loaded()
    if module is None:
        raise RuntimeError("native kernels are missing; expected a check of `available` before")
    return module


def in_use() -> str:
    """Return the instruction set in use: "v4", "v3" or "v2" (x86-64) or "neon"; or "none: " and the reason."""
    module = loaded()
    if module is not None:
        return str(module.level())
    if importlib.util.find_spec("softdb.kernels._native") is not None:
        return "none: they need x86-64-v2 or NEON, which this processor lacks; torch serves"
    return "none: softdb was installed without a compiler; torch serves. Install g++ or clang++, then softdb again"
