"""Cells and records on a page of an SQLite file, as bytes from elsewhere: what keeps to the format, and nothing else.

The format: https://sqlite.org/fileformat2.html, section 1.6 and 2.1.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

Value: TypeAlias = int | float | str | bytes | None

_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # bytes of a serial type
_SHORTEST = 4  # bytes of a cell, and of a block that is free


class Damaged(Exception):
    """Bytes that are no page, cell or record."""


class Spot(NamedTuple):
    """A cell's place in its page, and what its beginning says."""

    start: int
    stop: int
    child: int  # on an inner page; else 0
    row: int  # in a table; else -1
    size: int  # of the record; -1: it has none
    body: int  # where the record begins


def spot(data: bytes, at: int, inner: bool, table: bool) -> Spot:
    """The cell that begins there. Raises Damaged."""
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
    """Number of bytes of a record on its own page."""
    most = page - 35 if table else (page - 12) * 64 // 255 - 23
    if size <= most:
        return size
    least = (page - 12) * 32 // 255 - 23
    wanted = least + (size - least) % (page - 4)
    return wanted if wanted <= most else least


def freed(data: bytes, first: int) -> list[tuple[int, int]]:
    """The blocks of a page that are free, as far as their chain can be followed."""
    found, last = list[tuple[int, int]](), 0
    while last < first <= len(data) - _SHORTEST:
        following, size = struct.unpack_from(">HH", data, first)
        found.append((first, min(first + max(size, _SHORTEST), len(data))))
        last, first = first, following
    return found


def record(data: bytes) -> tuple[Value, ...]:
    """The columns of a record. Raises Damaged."""
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
    part = data[at : at + size]
    if len(part) < size:
        raise Damaged
    if kind in _INTEGERS:
        return int.from_bytes(part, "big", signed=True), at + size
    if kind == 7:
        return float(struct.unpack(">d", part)[0]), at + size
    if kind % 2 == 0:
        return part, at + size
    try:
        return part.decode(), at + size
    except UnicodeDecodeError:
        raise Damaged from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(9):
        if at + i >= len(data):
            raise Damaged
        byte = data[at + i]
        if i == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + i + 1
    raise Damaged
