"""The shard of a record, by the hash of its id; and which rows of a table a host reads to make a shard."""

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

MOST = 1 << 16  # shards


def shard_of(ids: Iterable[Id], shards: int) -> NDArray[np.int64]:
    """The shard (n,) of each id: blake2b-64 of its type and itself, modulo the number of shards, a power of two.

    Raises BadInput for a number beyond 64 bits.
    """
    hashes = b"".join([blake2b(_named(one), digest_size=8).digest() for one in ids])
    parts: NDArray[np.uint64] = np.frombuffer(hashes, "<u8") % np.uint64(shards)
    return parts.astype(np.int64)


def by_shard(ids: Iterable[Id]) -> NDArray[np.int64]:
    """An order (n,) in which the records of each shard stand side by side, whatever the number of shards."""
    parts, bits = shard_of(ids, MOST), MOST.bit_length() - 1
    reverse = np.zeros_like(parts)
    for bit in range(bits):  # shard s of P has the lowest bits in common
        reverse |= (parts >> bit & 1) << (bits - 1 - bit)
    return np.argsort(reverse, kind="stable")


def power_of_two(shards: object) -> int:
    """A number of shards. Raises BadInput: it doubles when a cluster grows, so it is a power of two."""
    found = check.integer(shards, "shards", 1, MOST)
    if found & (found - 1):
        near = 1 << (found.bit_length() - 1)
        raise BadInput(f"shards is {found}; expected a power of two, such as {near} or {2 * near}")
    return found


def _named(one: Id) -> bytes:
    if not isinstance(one, int):
        return b"s" + one.encode()
    try:
        return b"i" + one.to_bytes(8, "little", signed=True)
    except OverflowError:
        raise BadInput(f"id {one} is beyond 64 bits with a sign; make it a smaller number, or a text") from None


WINDOW = 1 << 20  # rows whose shards are held at once
REQUEST = {True: 1 << 14, False: 1 << 20}  # bytes that could be read while a request is waited for; True: in a folder
BATCH = 1 << 16  # ids at once

Rows = NDArray[np.int64]


class RowWindow(NamedTuple):
    """Consecutive rows of a table, and their shards, which a host knows by the ids: a few bytes a row.

    It takes the rows of its own shards if that costs less than to read all of them: rows that lie close together come
    in one request, and in the time of a request so many bytes could be read. `ingest` writes a shard's side by side.
    """

    low: int  # the first
    parts: Rows  # (n,) the shard of each

    def own(self, shard: int, after: int) -> Rows:
        """Positions of a shard's rows in the table, from a row on, ascending."""
        places = np.flatnonzero(self.parts == shard) + self.low
        return places[np.searchsorted(places, after) :]

    def taken(self, places: Rows, width: int, local: bool) -> bool:
        """Return True if it costs less to take some rows (m,) of so many bytes each than to read all of them."""
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
    """Return True if a record can have this id: a text, or a whole number of 64 bits."""
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
