"""Keys and snapshots for tests: records that break things, records in clusters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from softdb.store.snapshot import Segment, Snapshot

Array = NDArray[Any]


def awkward(random: np.random.Generator, n: int = 40, d: int = 5) -> Array:
    """Keys (n, d) with ties, duplicates, near duplicates and a zero vector, as far as n goes."""
    keys = random.standard_normal((n, d)).astype(np.float32)
    keys[1:2] = keys[: n > 1]
    keys[2:3] = -keys[: n > 2]
    keys[3:4] = 0
    if n > 7:
        keys[4] = keys[5] + np.float32(1e-4)
        keys[6] = 3 * keys[7]
    return keys


def clusters(
    random: np.random.Generator,
    n: int = 20_000,
    d: int = 16,
    count: int = 60,  # of clusters
    spread: float = 0.7,  # standard deviation within a cluster
    apart: float = 1.0,  # standard deviation of the centres
) -> Array:
    """Keys (n, d), normally distributed around normally distributed centres."""
    centres = apart * random.standard_normal((count, d))
    keys: Array = centres[random.integers(0, count, n)] + spread * random.standard_normal((n, d))
    return keys


def near(random: np.random.Generator, keys: Array, q: int, noise: float = 0.5) -> Array:
    """Queries (q, d) beside the first keys."""
    queries: Array = keys[:q] + noise * random.standard_normal((q, keys.shape[1]))
    return queries


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
