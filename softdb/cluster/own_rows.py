"""Which rows of a table are a shard's, and reading those alone.

A host reads the ids of all rows, a few bytes each, and works out in which shard each lies. Then it takes the rows of
its own shards, if that costs less than to read all of them: rows that lie close together come in one request, and in
the time that a request takes, so many bytes could be read. `softdb.cluster.ingest` writes the rows of a shard side by
side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from softdb.check import Id
from softdb.cluster.placement import shard_of
from softdb.cluster.truth import Truth

__all__ = ["RowWindow", "is_id", "parts_of", "windows"]

WINDOW = 1 << 20  # rows whose shards are held at once
REQUEST = {True: 1 << 14, False: 1 << 20}  # bytes that could be read while a request is waited for; True: in a folder
BATCH = 1 << 16  # ids at once

Rows = NDArray[np.int64]


class RowWindow(NamedTuple):
    """Some consecutive rows of a table."""

    low: int  # the first
    parts: Rows  # (n,) the shard of each

    def own(self, shard: int, after: int) -> Rows:
        """Where the rows of a shard are in the table, from a row on, ascending."""
        places = np.flatnonzero(self.parts == shard) + self.low
        return places[np.searchsorted(places, after) :]

    def taken(self, places: Rows, width: int, local: bool) -> bool:
        """Whether it costs less to take some rows (m,) of so many bytes each than to read all of them."""
        if not len(places):
            return True
        request = REQUEST[local]
        apart = np.diff(places, prepend=-np.inf) * width > request  # those that are nearer come in one request
        runs = np.flatnonzero(apart)
        ends = np.append(runs[1:], len(places)) - 1
        read = float((places[ends] - places[runs] + 1).sum()) * width + len(runs) * request
        return read < len(self.parts) * width / 2  # for what is read in passing needs no copying


def parts_of(ids: list[Any], shards: int) -> Rows:
    """The shard (n,) of each id; what is no id goes with the id 0, so that one shard reports it."""
    return shard_of([one if is_id(one) else 0 for one in ids], shards)


def is_id(one: Any) -> TypeGuard[Id]:
    """Whether a record can have this id: a text, or a whole number of 64 bits."""
    return isinstance(one, str) or (isinstance(one, int) and -(1 << 63) <= one < 1 << 63)


def windows(truth: Truth, dataset: Any, after: int) -> Iterator[RowWindow]:
    """All rows from a place on, window by window, by their ids alone."""
    name, whole = str(truth.fields.id), dataset.count_rows()
    for low in range(after, whole, WINDOW):
        scanner = dataset.scanner([name], offset=low or None, limit=WINDOW, batch_size=BATCH, scan_in_order=True)
        parts = list[Rows]()
        for batch in truth.read(scanner):
            parts.append(parts_of(batch.column(0).to_pylist(), truth.shards))
        yield RowWindow(low, np.concatenate(parts))
