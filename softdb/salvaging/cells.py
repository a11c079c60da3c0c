"""Parse cells and records on a page of an SQLite file, strictly, because the bytes may be damaged.

The format: https://sqlite.org/fileformat2.html, sections 1.6 and 2.1.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

Value: TypeAlias = int | float | str | bytes | None

_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # serial type → bytes of the integer
_SHORTEST = 4  # minimum bytes of a cell or a free block


class Damaged(Exception):
    """The bytes are not a valid page, cell or record."""


class Spot(NamedTuple):
    """Offsets of a cell in its page, and the fields of its header."""

    start: int
    stop: int
    child: int  # page number, on an inner page; else 0
    row: int  # the row, in a table; else -1
    size: int  # bytes of the record; -1: the cell has none
    body: int  # offset of the record


def spot(data: bytes, at: int, inner: bool, table: bool) -> Spot:
    """Parse the header of the cell at an offset of a page. Raises Damaged."""
    start, child, size, row = at, 0, -1, -1
    if inner:
        child, at = int.from_bytes(data[at : at + 4], "big"), at + 4
    if not (inner and table):
        size, at = _varint(data, at)
    if table:
        row, at = _varint(data, at)
        row -= (row >> 63) << 64
    local = 0 if size < 0 else local_size(size, len(data), table)
    stop = max(at + local + (4 if local < size else 0), start + _SHORTEST)
    if stop > len(data):
        raise Damaged
    return Spot(start, stop, child, row, size, at)


def local_size(size: int, page: int, table: bool) -> int:
    """Return the bytes of a record that lie on its cell's page; overflow pages hold the remaining bytes."""
    largest = page - 35 if table else (page - 12) * 64 // 255 - 23
    if size <= largest:
        return size
    smallest = (page - 12) * 32 // 255 - 23
    local = smallest + (size - smallest) % (page - 4)
    return local if local <= largest else smallest


def freed(data: bytes, first: int) -> list[tuple[int, int]]:
    """Return (start, stop) of a page's free blocks: follow their chain from the offset `first` until it is damaged."""
    blocks, last = list[tuple[int, int]](), 0
    while last < first <= len(data) - _SHORTEST:
        following, size = struct.unpack_from(">HH", data, first)
        blocks.append((first, min(first + max(size, _SHORTEST), len(data))))
        last, first = first, following
    return blocks


def record(data: bytes) -> tuple[Value, ...]:
    """Parse the bytes of a record into its columns. Raises Damaged."""
    stop, at = _varint(data, 0)
    if stop > len(data):
        raise Damaged
    kinds = []
    while at < stop:
        kind, at = _varint(data, at)
        kinds.append(kind)
    if at != stop:
        raise Damaged
    columns: list[Value] = []
    for kind in kinds:
        value, at = _value(data, at, kind)
        columns.append(value)
    if at != len(data):
        raise Damaged
    return tuple(columns)


def _value(data: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind in (0, 8, 9):
        return (None if kind == 0 else kind - 8), at
    if kind in (10, 11):
        raise Damaged
    size = _INTEGERS.get(kind) or (8 if kind == 7 else (kind - 12) // 2)
    raw = data[at : at + size]
    if len(raw) < size:
        raise Damaged
    if kind in _INTEGERS:
        return int.from_bytes(raw, "big", signed=True), at + size
    if kind == 7:
        return float(struct.unpack(">d", raw)[0]), at + size
    if kind % 2 == 0:
        return raw, at + size
    try:
        return raw.decode(), at + size
    except UnicodeDecodeError:
        raise Damaged from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + 9]):
        if i == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + i + 1
    raise Damaged
