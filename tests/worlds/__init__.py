"""Small worlds for tests: snapshots held in memory, and the sets of records that break things."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from softdb.store.snapshot import Segment, Snapshot

Array = NDArray[Any]


def snapshot(
    keys: ArrayLike,  # (n, d)
    values: ArrayLike | None = None,  # (n, v), labels (n,), or None: the key serves
    live: ArrayLike | None = None,  # (n,) bool; None: all
    dtype: str = "float32",
    cuts: Sequence[int] = (),  # where one segment ends and the next begins
) -> Snapshot:
    """Records as a database would show them, in one segment or several."""
    stored = np.asarray(keys, dtype)
    if values is not None:
        values = np.asarray(values)
        values = values.astype(np.int32 if values.dtype.kind in "iu" else dtype)
    edges = [0, *cuts, len(stored)]
    segments = tuple(
        Segment(number, low, None, stored[low:high], None if values is None else values[low:high])
        for number, (low, high) in enumerate(itertools.pairwise(edges))
    )
    return Snapshot.of(1, segments, np.ones(len(stored), np.bool_) if live is None else np.asarray(live, np.bool_))


def awkward(rng: np.random.Generator, n: int = 40, d: int = 5) -> Array:
    """Keys (n, d) with ties, duplicates, near duplicates and a zero vector. n is at least 8."""
    keys = rng.standard_normal((n, d)).astype(np.float32)
    keys[1] = keys[0]
    keys[2] = -keys[0]
    keys[3] = 0
    keys[4] = keys[5] + np.float32(1e-4)
    keys[6] = 3 * keys[7]
    return keys
