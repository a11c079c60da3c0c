"""The b-trees of an SQLite file and its write-ahead log, read without SQLite: damage is stepped around, nothing is run.

Read are trees of a UTF-8 database without reserved bytes, as softdb makes them; https://sqlite.org/fileformat2.html is
their format. A page or a cell that does not keep to it is left out and noted, and so is what only looks like a cell:
the bytes of a record that was deleted lie in freed space, and must not come back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from heapq import merge
from itertools import chain
from typing import NamedTuple

import apsw

from softdb.salvaging.cells import Damaged, Spot, Value, freed, local_size, record, spot
from softdb.salvaging.log import Log

PAGE = 4096  # bytes, unless SQLite was built otherwise

_HEADER = 100  # bytes of the file's header, on page 1 before everything else
_TABLE, _INDEX = (5, 13), (2, 10)  # types of an inner page and a leaf


class Cell(NamedTuple):
    """An entry of a tree."""

    row: int  # -1 in an index
    columns: tuple[Value, ...] | None  # None: its bytes are no record


class Pages:
    """The pages of a catalogue as of the last commit that is whole in its log."""

    def __init__(
        self, file: apsw.VFSFile, log: Log | None, size: int = PAGE, extents: list[tuple[int, int]] | None = None
    ) -> None:
        """`extents`: the ranges of the file that are no holes, ascending; None: it has none."""
        self._file, self.log, self.size = file, log if log is not None and log.size == size else None, size
        self.count = -(-file.xFileSize() // size)
        if self.log is not None:  # no page beyond both can be read, whatever the log says of their number
            self.count = min(self.log.pages, max(self.count, *self.log.numbers[-1:]))
        self._extents = [(0, self.count * size)] if extents is None else extents
        self.damaged: set[int] = set()  # pages with something on them that could not be read
        self.seen: set[int] = set()  # pages of the trees that were walked

    def page(self, number: int) -> bytes | None:
        """The bytes of a page, from 1 on; None where they cannot be read."""
        if not 0 < number <= self.count:
            return None
        if self.log is not None and (found := self.log.page(number)) is not None:
            return found
        try:
            data = self._file.xRead(self.size, (number - 1) * self.size)
        except apsw.Error:
            return None
        return data if len(data) == self.size else None

    def written(self) -> Iterator[int]:
        """The pages that lie in the log, or in the file outside of its holes, ascending; some twice."""
        runs = (range(low // self.size + 1, -(-high // self.size) + 1) for low, high in self._extents)
        yield from merge([] if self.log is None else self.log.numbers, chain.from_iterable(runs))

    def kind(self, number: int) -> int:
        """The type of a page, 0 where there is none."""
        data = self.page(number)
        return 0 if data is None else data[_start(number)]

    def walk(self, root: int, table: bool = True, most: int | None = None) -> Iterator[Cell]:
        """The entries of a tree, in its order; those of more than `most` bytes are taken for damaged."""
        seen = set[int]()
        waiting: list[int | Spot] = [root]
        data = b""
        while waiting:
            item = waiting.pop()
            if isinstance(item, Spot):
                yield self._cell(data, item, table, most)  # of a leaf: nothing comes between
            elif item in seen:
                self.damaged.add(item)
            else:
                seen.add(item)
                data = self.page(item) or b""
                below, spots = self._open(item, data, table)
                yield from (self._cell(data, one, table, most) for one in spots if below)
                waiting += reversed(below or spots)
        self.seen |= seen

    def leaf(self, number: int, table: bool = True) -> Iterator[Cell]:
        """The entries of one leaf."""
        self.seen.add(number)
        data = self.page(number) or b""
        for one in self._open(number, data, table)[1]:
            yield self._cell(data, one, table)

    def free(self) -> set[int] | None:
        """Pages that nothing uses; None where their list is damaged."""
        first = self.page(1)
        if first is None:
            return None
        trunk, count = struct.unpack_from(">II", first, 32)
        found = set[int]()
        while trunk:
            data = self.page(trunk)
            if data is None or trunk in found or len(found) >= count:
                return None
            found.add(trunk)
            trunk, leaves = struct.unpack_from(">II", data)
            if leaves > self.size // 4 - 2:
                return None
            found.update(struct.unpack_from(f">{leaves}I", data, 8))
        return found if len(found) == count else None

    def _open(self, number: int, data: bytes, table: bool) -> tuple[list[int], list[Spot]]:
        """The pages below a page and its cells, each in order."""
        start, (inner, leaf) = _start(number), _TABLE if table else _INDEX
        if not data or data[start] not in (inner, leaf):
            self.damaged.add(number)
            return [], []
        is_inner = data[start] == inner
        block, count, top = struct.unpack_from(">HHH", data, start + 1)
        pointers = start + (12 if is_inner else 8)
        if pointers + 2 * count > len(data):
            self.damaged.add(number)
            return [], []
        places = struct.unpack_from(f">{count}H", data, pointers)
        spots = []
        for place in dict.fromkeys(places):
            try:
                if place < max(top or 65536, pointers + 2 * count):
                    raise Damaged  # freed space
                spots.append(spot(data, place, is_inner, table))
            except Damaged:
                continue
        spots = _apart(spots, freed(data, block))
        if len(spots) < count:
            self.damaged.add(number)
        below = [one.child for one in spots] + [int.from_bytes(data[start + 8 : start + 12], "big")] if is_inner else []
        return below, [one for one in spots if one.size >= 0]

    def _cell(self, data: bytes, at: Spot, table: bool, most: int | None = None) -> Cell:
        try:
            if most is not None and at.size > most:
                raise Damaged
            return Cell(at.row, record(self._whole(data, at, table)))
        except Damaged:
            return Cell(at.row, None)

    def _whole(self, data: bytes, at: Spot, table: bool) -> bytes:
        """A record with what lies on pages of its own."""
        local = local_size(at.size, self.size, table)
        parts, missing = [data[at.body : at.body + local]], at.size - local
        if missing > self.count * self.size:
            raise Damaged
        following, seen = int.from_bytes(data[at.stop - 4 : at.stop], "big"), set[int]()
        while missing > 0:
            more = self.page(following)
            if more is None or following in seen:
                raise Damaged
            seen.add(following)
            parts.append(more[4 : 4 + missing])
            missing -= len(parts[-1])
            following = int.from_bytes(more[:4], "big")
        return b"".join(parts)


def _start(number: int) -> int:
    return _HEADER if number == 1 else 0


def _apart(spots: list[Spot], blocks: list[tuple[int, int]]) -> list[Spot]:
    """The cells that share no byte with another, or with a block that is free."""
    taken = sorted([(one.start, one.stop) for one in spots] + blocks)
    clash = set[tuple[int, int]]()
    reach = (0, 0)
    for one in taken:
        if one[0] < reach[1]:
            clash |= {one, reach}
        reach = max(reach, one, key=lambda span: span[1])
    return [one for one in spots if (one.start, one.stop) not in clash]
