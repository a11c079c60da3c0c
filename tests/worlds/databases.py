"""Databases for tests, open and filled. Each test opens its own, unless it only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import softdb
from softdb.reports import IndexReport
from worlds.records import awkward, clusters

N, D, V = 40, 5, 3  # of `filled`


def holding(
    keys: Any = None,  # (n, d); ones by default, for tests of payloads
    values: Any = None,  # (n, v) or labels (n,)
    payloads: Sequence[Any] | None = None,
    *,
    ids: Any = None,  # 0 … n - 1 by default
    texts: Sequence[str | None] | None = None,
    path: Any = None,  # in memory by default
    **schema: Any,
) -> softdb.SoftDB:
    """Open a database of these records. The widths of its columns are those of `keys` and of vector `values`."""
    if keys is None:
        keys = np.ones((len(payloads or ()), 1))
    schema.setdefault("dim", len(keys[0]) if isinstance(keys, list) else np.shape(keys)[1])
    if np.ndim(values) == 2:
        schema.setdefault("value_dim", np.shape(values)[1])
    db = softdb.open(path, **schema)
    if len(keys):
        db.insert(range(len(keys)) if ids is None else ids, keys, values, payloads, texts=texts)
    return db


def filled(
    n: int = N,
    d: int = D,
    value_dim: int | None = V,  # None: the key serves as the value
    *,
    num_classes: int | None = None,  # labels in place of vectors
    seed: int = 0,
    **schema: Any,
) -> softdb.SoftDB:
    """Open a database of n `awkward` keys with ids 0 … n - 1 and the payload {"odd": true} or {"odd": false}."""
    random = np.random.default_rng(seed)
    keys = awkward(random, n, d)
    values: Any = None
    if num_classes:
        values, schema["num_classes"] = np.arange(n) % num_classes, num_classes
    elif value_dim:
        values, schema["value_dim"] = random.standard_normal((n, value_dim)), value_dim
    return holding(keys, values, [{"odd": i % 2 == 1} for i in range(n)], dim=d, **schema)


def labelled() -> softdb.SoftDB:
    """Open a database of three records with the ids "a", 7 and "c", the labels 0, 1 and 2, and unlike payloads."""
    keys, payloads = [[3, 0], [2, 0], [1, 0]], [{"x": 1}, None, "p" * 500]
    return holding(keys, [0, 1, 2], payloads, ids=["a", 7, "c"], num_classes=3)


def indexed(
    keys: NDArray[Any] | None = None,  # 20,000 in clusters by default
    values: Any = None,
    payloads: Sequence[Any] | None = None,
    *,
    kind: Any = "ivf",
    recall: float = 0.95,
    **schema: Any,
) -> softdb.SoftDB:
    """Open a database that answers by an index."""
    db = holding(clusters(np.random.default_rng(0)) if keys is None else keys, values, payloads, **schema)
    db.build_index(kind, recall=recall)
    return db


def index_report(db: softdb.SoftDB) -> IndexReport:
    """Return `db.stats().index`, which must not be None."""
    report = db.stats().index
    assert report is not None
    return report
