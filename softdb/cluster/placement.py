"""Assign records to shards by hashing their ids, and choose the rows of a table that a host reads for its shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from softdb import check
from softdb.check import Id
from softdb.errors import BadInput
from softdb.index.contract import Rows
from softdb.lance_table.truth import Truth
from softdb.tables.hashing import hashes

MOST = 1 << 16  # largest number of shards
_BITS = np.unpackbits(np.arange(MOST, dtype="<u2").view(np.uint8), bitorder="little")  # of each number, lowest first
_REVERSED = np.packbits(_BITS).view(">u2").astype(np.uint16)  # each number with the order of its bits reversed


def shard_of(ids: Any, shards: int) -> Rows:
    """Return the shard (n,) of each id of a list, array or column: its hash modulo `shards`, a power of two.

    A value that is not an id goes to id 0's shard, which leaves the row out.
    """
    parts: Rows = (hashes(ids) & np.uint64(shards - 1)).astype(np.int64)
    return parts


def by_shard(ids: Any) -> Rows:
    """Return indices (n,) that sort ids so that each shard's ids are adjacent, whatever the number of shards."""
    return np.argsort(_REVERSED[shard_of(ids, MOST)], kind="stable")  # the ids of shard s of P share their lowest bits


def is_id(value: Any) -> TypeGuard[Id]:
    """Return True if a value can be an id: a text, or a signed 64-bit integer."""
    return isinstance(value, str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def power_of_two(shards: object) -> int:
    """Check a number of shards, and return it as int. Raises BadInput unless it is a power of two up to MOST."""
    count = check.integer(shards, "shards", 1, MOST)
    if count & (count - 1):
        near = 1 << (count.bit_length() - 1)
        raise BadInput(f"shards is {count}; expected a power of two, such as {near} or {2 * near}")
    return count


WINDOW = 1 << 20  # number of rows in a window
REQUEST = {True: 1 << 14, False: 1 << 20}  # cost of one request in bytes read; True: table in a folder
BATCH = 1 << 16  # number of ids read at once


class RowWindow(NamedTuple):
    """Shard numbers for up to WINDOW consecutive rows of a table.

    A host reads either all rows of a window or only its own shards' rows, whichever costs less. One request reads
    adjacent rows, and costs the time to read REQUEST bytes. `ingest` writes the rows of a shard next to each other.
    """

    low: int  # position of the first row
    parts: Rows  # (n,) shard of each row

    def own(self, shard: int, after: int) -> Rows:
        """Return the positions in the table, at least `after` and ascending, of a shard's rows."""
        places = np.flatnonzero(self.parts == shard) + self.low
        return places[np.searchsorted(places, after) :]

    def taken(self, places: Rows, width: int, local: bool) -> bool:
        """Return True if reading the rows at `places` (m,), of `width` bytes each, costs less than reading all rows."""
        if not len(places):
            return True
        request = REQUEST[local]
        apart = np.diff(places, prepend=-np.inf) * width > request  # rows at smaller distances are read in one request
        runs = np.flatnonzero(apart)
        ends = np.append(runs[1:], len(places)) - 1
        read = float((places[ends] - places[runs] + 1).sum()) * width + len(runs) * request
        return read < len(self.parts) * width / 2  # a scan of all rows costs half as much for each byte


def windows(truth: Truth, dataset: Any, after: int) -> Iterator[RowWindow]:
    """Yield windows of the rows from position `after` to the end. Reads only the column of ids."""
    name, rows = str(truth.fields.id), dataset.count_rows()
    for low in range(after, rows, WINDOW):
        scanner = dataset.scanner([name], offset=low or None, limit=WINDOW, batch_size=BATCH, scan_in_order=True)
        parts = list[Rows]()
        for batch in truth.read(scanner):
            parts.append(shard_of(batch.column(0), truth.shards))
        yield RowWindow(low, np.concatenate(parts))
