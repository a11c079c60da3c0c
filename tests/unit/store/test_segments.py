"""The column files: their sizes, their bytes, and what is left of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from softdb.check import schema
from softdb.store.segments import ColumnFiles


def columns_in(directory: Path) -> ColumnFiles:
    return ColumnFiles(directory, schema(3, 2, None, "float32", "cosine", None))


def test_an_orphan_gives_way_to_a_new_segment_of_its_number(tmp_path: Path) -> None:
    for name in ("keys", "values", "rows"):
        (tmp_path / f"{name}-00000007.npy").write_bytes(b"of an append that did not commit" * 100)
    columns_in(tmp_path).create(7, 64, gaps=True)
    for name, shape in (("keys", (64, 3)), ("values", (64, 2)), ("rows", (64,))):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}-00000007.npy"), np.zeros(shape))
