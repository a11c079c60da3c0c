"""The shard of a record, by the hash of its id, and the rows of a table that a host reads to build a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Id
from softdb.cluster.truth import Truth
from softdb.errors import BadInput

MOST = 1 << 16  # largest number of shards


def shard_of(ids: Iterable[Id], shards: int) -> NDArray[np.int64]:
    """Return the shard (n,) of each id: blake2b-64 of type and id, modulo the number of shards, a power of two.

    Raises BadInput for a number beyond 64 bits.
    """
    hashes = b"".join([blake2b(_named(id), digest_size=8).digest() for id in ids])
    parts: NDArray[np.uint64] = np.frombuffer(hashes, "<u8") % np.uint64(shards)
    return parts.astype(np.int64)


def by_shard(ids: Iterable[Id]) -> NDArray[np.int64]:
    """Return an order (n,) in which the records of each shard are adjacent, for every number of shards."""
    parts, bits = shard_of(ids, MOST), MOST.bit_length() - 1
    reverse = np.zeros_like(parts)
    for bit in range(bits):  # the ids of shard s of P share their lowest bits
        reverse |= (parts >> bit & 1) << (bits - 1 - bit)
    return np.argsort(reverse, kind="stable")


def power_of_two(shards: object) -> int:
    """Return a checked number of shards. Raises BadInput unless it is a power of two, which `grow` can double."""
    count = check.integer(shards, "shards", 1, MOST)
    if count & (count - 1):
        near = 1 << (count.bit_length() - 1)
        raise BadInput(f"shards is {count}; expected a power of two, such as {near} or {2 * near}")
    return count


def _named(id: Id) -> bytes:
    if not isinstance(id, int):
        return b"s" + id.encode()
    try:
        return b"i" + id.to_bytes(8, "little", signed=True)
    except OverflowError:
        raise BadInput(f"id {id} is beyond 64 bits; expected a signed 64-bit integer or a text") from None


WINDOW = 1 << 20  # rows of a window
REQUEST = {True: 1 << 14, False: 1 << 20}  # cost of a request in bytes read meanwhile; True: in a folder
BATCH = 1 << 16  # ids read at once

Rows = NDArray[np.int64]


class RowWindow(NamedTuple):
    """Consecutive rows of a table and their shards, which take a few bytes a row.

    A host reads only its shards' rows if that costs less than reading all: adjacent rows come in one request, and a
    request costs the time to read REQUEST bytes. `ingest` writes the rows of a shard next to each other.
    """

    low: int  # position of the first row
    parts: Rows  # (n,) shard of each row

    def own(self, shard: int, after: int) -> Rows:
        """Return the positions of a shard's rows in the table from `after` on, ascending."""
        places = np.flatnonzero(self.parts == shard) + self.low
        return places[np.searchsorted(places, after) :]

    def taken(self, places: Rows, width: int, local: bool) -> bool:
        """Return True if reading the rows at `places` (m,), of `width` bytes each, costs less than reading all rows."""
        if not len(places):
            return True
        request = REQUEST[local]
        apart = np.diff(places, prepend=-np.inf) * width > request  # nearer rows come in one request
        runs = np.flatnonzero(apart)
        ends = np.append(runs[1:], len(places)) - 1
        read = float((places[ends] - places[runs] + 1).sum()) * width + len(runs) * request
        return read < len(self.parts) * width / 2  # a scan of all rows copies nothing, and costs half as much a byte


def parts_of(ids: list[Any], shards: int) -> Rows:
    """Return the shard (n,) of each id; a value that is not an id goes to the shard of id 0, which reports it."""
    return shard_of([id if is_id(id) else 0 for id in ids], shards)


def is_id(value: Any) -> TypeGuard[Id]:
    """Return True if a value can be an id: a text, or a signed 64-bit integer."""
    return isinstance(value, str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def windows(truth: Truth, dataset: Any, after: int) -> Iterator[RowWindow]:
    """Yield all rows from position `after` on in windows; reads only the ids."""
    name, rows = str(truth.fields.id), dataset.count_rows()
    for low in range(after, rows, WINDOW):
        scanner = dataset.scanner([name], offset=low or None, limit=WINDOW, batch_size=BATCH, scan_in_order=True)
        parts = list[Rows]()
        for batch in truth.read(scanner):
            parts.append(parts_of(batch.column(0).to_pylist(), truth.shards))
        yield RowWindow(low, np.concatenate(parts))
