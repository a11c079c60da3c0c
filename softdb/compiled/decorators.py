"""How the loops are compiled, and where the result is kept.

numba keeps compiled code beside its source and drops it when that one file changes. These loops take constants and
tiles from each other's files, and stale ones would write beside their arrays. So they are kept in a folder named after
the contents of all of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit

__all__ = ["compiled", "inlined", "summed"]

# no reassociation, which would undo a rounding by addition
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}}


@functools.cache
def _version() -> str:
    """A name for the present contents of these files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled when first called, kept on disk, and run without the GIL, so that threads share the work."""
    before = numba.config.CACHE_DIR
    folder = Path(before or Path(__file__).parent / "__pycache__")
    numba.config.CACHE_DIR = str(folder / _version())  # where it cannot be written numba uses the user's own cache
    try:
        return njit(nogil=True, cache=True, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Any:
    """For what stands in an innermost loop, which a call would keep from running on whole vectors."""
    return njit(inline="always", **_OPTIONS)(function)


def summed(function: Callable[..., Any]) -> Any:
    """For sums whose order does not matter, which then run on whole vectors."""
    return njit(inline="never", error_model="numpy", fastmath={"contract", "nsz", "reassoc"})(function)
