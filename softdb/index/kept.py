"""What was measured of an index' records (`Reach`), as bytes that stand behind FAISS' in the index file.

Arrays in NumPy's own format, one after the other, in the order of `_FORM`. Whoever reads them has checked the file's
signature; that they are of the index beside them is checked all the same.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from softdb.index.contract import Index
from softdb.index.reach import Reach, words_of

__all__ = ["packed", "unpacked"]

# type and axes of each field; d, l, p: the index' width, lists and parts of a code; `is_apart` follows from `apart`
_FORM = {
    "apart": ("i8", "m"), "scales": ("f8", "m"), "mean_error": ("f8", ""), "errors": ("f8", "e"),
    "log_shares": ("f8", "e"), "means": ("f4", "ld"), "radii": ("f8", "l"), "mean_radii": ("f8", "l"),
    "extents": ("f4", "ld"), "part_errors": ("f8", "p"), "centre": ("f8", "v"), "value_radius": ("f8", ""),
    "root": ("f4", "dd"), "spread": ("f8", ""), "witnesses": ("i8", "w"), "checksums": ("u4", "w"),
}  # fmt: skip


def packed(reach: Reach) -> bytes:
    """As bytes."""
    file = io.BytesIO()
    for name, (dtype, _) in _FORM.items():
        np.save(file, np.asarray(getattr(reach, name), f"<{dtype}"), allow_pickle=False)
    return file.getvalue()


def unpacked(data: bytes | memoryview, index: Index) -> Reach:
    """From bytes. Raises ValueError where they are not of such an index."""
    file, found = io.BytesIO(data), dict[str, Any]()
    sizes = {"d": index.inner.d, "l": index.inner.nlist, "p": len(words_of(index.inner))}
    for name, (dtype, axes) in _FORM.items():
        try:
            array = np.load(file, allow_pickle=False)
        except (EOFError, MemoryError) as error:
            raise ValueError(f"{name} is cut off") from error
        shape = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes, array.shape, strict=False))
        if (array.dtype, array.shape, len(axes)) != (np.dtype(f"<{dtype}"), shape, array.ndim):
            raise ValueError(f"{name} is not that of such an index")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
        found[name] = array if axes else float(array)
    apart = found["apart"]
    if file.read(1) or (apart < 0).any() or (apart >= index.covered).any() or (np.diff(apart) <= 0).any():
        raise ValueError("there is more than an index tells of its records, or of records that it has not")
    is_apart = np.zeros(index.covered, np.bool_)
    is_apart[apart] = True
    return Reach(is_apart=is_apart, **found)
