"""Assign records to shards by hashing their ids, and choose the rows of a table that a host reads for its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Id
from softdb.cluster.truth import Truth
from softdb.errors import BadInput
from softdb.index.contract import Rows

MOST = 1 << 16  # largest number of shards
HASH = "splitmix64"  # name of the hash; a directory whose records were placed by another one is rebuilt
_GOLDEN, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BEGINNING = np.array([(1 << 8 * size) - 1 for size in range(8)], np.uint64)  # masks of a word's first bytes
_REVERSED = sum((np.arange(MOST) >> bit & 1) << (15 - bit) for bit in range(16)).astype(np.uint16)  # type: ignore[union-attr]

Hashes = NDArray[np.uint64]


def shard_of(ids: Any, shards: int) -> Rows:
    """Return the shard (n,) of each id: its 64-bit hash modulo the number of shards, a power of two.

    `ids` is a list, an array of integers, or a column of Arrow. A value that is not an id (null, an integer beyond 64
    bits) goes to id 0's shard, which leaves the row out. An integer's hash is the finaliser of SplitMix64 (Steele, Lea
    and Flood 2014, figure 14); a text's is that of the sum of the finalisers of its words of 8 bytes and their places.
    Cost: about 10 ns for an integer, 20 ns and 10 ns for each word of a text.
    """
    parts: Rows = (_hashes(ids) & np.uint64(shards - 1)).astype(np.int64)
    return parts


def by_shard(ids: Any) -> Rows:
    """Return indices (n,) that sort ids so that each shard's ids are adjacent, whatever the number of shards."""
    return np.argsort(_REVERSED[shard_of(ids, MOST)], kind="stable")  # the ids of shard s of P share their lowest bits


def is_id(value: Any) -> TypeGuard[Id]:
    """Return True if a value can be an id: a text, or a signed 64-bit integer."""
    return isinstance(value, str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def _hashes(ids: Any) -> Hashes:
    if hasattr(ids, "chunks"):
        return np.concatenate([np.empty(0, np.uint64), *map(_hashes, ids.chunks)])
    if len(ids) > BATCH:  # a batch's words stay in the processor's cache
        return np.concatenate([_hashes(ids[low : low + BATCH]) for low in range(0, len(ids), BATCH)])
    if isinstance(ids, np.ndarray):
        return _of_integers(ids)
    return _of_column(ids) if hasattr(ids, "buffers") else _of_list(ids)


def _of_integers(ids: NDArray[Any]) -> Hashes:
    if ids.dtype == np.uint64:
        ids = np.where(ids >> np.uint64(63), np.uint64(0), ids)
    return _finalised(ids.astype(np.int64).view(np.uint64) + _GOLDEN)


def _of_column(column: Any) -> Hashes:
    """Return the hashes of an Arrow array of integers or texts, read from its buffers."""
    kind = str(column.type)
    if "string" not in kind:
        return _of_integers(column.fill_null(0).to_numpy(zero_copy_only=False))
    _, places, data = column.buffers()
    if not len(column):
        return np.empty(0, np.uint64)
    width = np.int64 if kind == "large_string" else np.int32
    ends = np.frombuffer(places, width, len(column) + 1, column.offset * np.dtype(width).itemsize).astype(np.int64)
    content = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    hashes = _of_texts(content, ends - ends[0])
    if column.null_count:
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = _of_integers(np.zeros(1, np.int64))
    return hashes


def _of_list(ids: Sequence[Any]) -> Hashes:
    is_text = np.array([isinstance(id, str) for id in ids], np.bool_)
    hashes = _of_integers(np.array([id if is_id(id) and not isinstance(id, str) else 0 for id in ids], np.int64))
    texts = [id.encode() for id in ids if isinstance(id, str)]
    hashes[is_text] = _of_texts(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]))
    return hashes


def _of_texts(content: NDArray[np.uint8], ends: Rows) -> Hashes:
    """Return the hash of each text: text i is `content[ends[i]:ends[i + 1]]` in UTF-8.

    Each text has length // 8 + 1 words. Bytes of its last word that follow the text count as 0, and the length is
    added, so that texts that differ by zero bytes have different hashes.
    """
    sizes = np.diff(ends)
    counts = sizes // 8 + 1
    starts = np.cumsum(counts) - counts
    if not len(sizes):
        return np.empty(0, np.uint64)
    padded = np.concatenate([content, np.zeros(8, np.uint8)])
    every = np.ndarray(len(content) + 1, "<u8", padded, strides=(1,))  # the word that begins at each byte
    places = np.arange(0, 8 * counts.sum(), 8) - np.repeat(8 * starts, counts)
    words = every[places + np.repeat(ends[:-1], counts)].astype(np.uint64)
    words[starts + counts - 1] &= _BEGINNING[sizes & 7]
    sums = np.add.reduceat(_finalised(words + places.view(np.uint64) * _GOLDEN), starts)
    return _finalised(sums + sizes.view(np.uint64) * _FIRST)


def _finalised(numbers: Hashes) -> Hashes:
    """Mix 64-bit numbers in place so that each bit depends on all bits."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= factor
    numbers ^= numbers >> np.uint64(31)
    return numbers


def power_of_two(shards: object) -> int:
    """Check a number of shards, and return it as int. Raises BadInput unless it is a power of two up to MOST."""
    count = check.integer(shards, "shards", 1, MOST)
    if count & (count - 1):
        near = 1 << (count.bit_length() - 1)
        raise BadInput(f"shards is {count}; expected a power of two, such as {near} or {2 * near}")
    return count


WINDOW = 1 << 20  # number of rows in a window
REQUEST = {True: 1 << 14, False: 1 << 20}  # cost of one request in bytes read; True: table in a folder
BATCH = 1 << 15  # number of ids read at once


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
