"""Read the b-trees of an SQLite file and its write-ahead log without SQLite: skip damage, run nothing.

It reads UTF-8 databases without reserved bytes, as softdb makes them; https://sqlite.org/fileformat2.html is the
format. Pages and cells that violate it are skipped and recorded as damaged. So are cells in freed space: their bytes
belong to deleted records, which must not come back.
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

_HEADER = 100  # bytes of the file's header, at the beginning of page 1
_TABLE, _INDEX = (5, 13), (2, 10)  # types of an inner page and a leaf


class Cell(NamedTuple):
    """An entry of a b-tree: a record of a table or of an index."""

    row: int  # -1 in an index
    columns: tuple[Value, ...] | None  # None: the entry is damaged


class Pages:
    """The pages of a catalogue, as of the last valid commit in its log."""

    def __init__(
        self, file: apsw.VFSFile, log: Log | None, size: int = PAGE, extents: list[tuple[int, int]] | None = None
    ) -> None:
        """`size`: bytes of a page; `extents`: the ranges of a sparse file that are no holes, ascending."""
        self._file, self.log, self.size = file, log if log is not None and log.size == size else None, size
        self.count = -(-file.xFileSize() // size)
        if self.log is not None:  # the log may claim more pages than log and file hold
            self.count = min(self.log.pages, max(self.count, *self.log.numbers[-1:]))
        self._extents = [(0, self.count * size)] if extents is None else extents
        self.damaged: set[int] = set()  # numbers of pages that could not be read completely
        self.seen: set[int] = set()  # numbers of the pages of trees that were walked

    def page(self, number: int) -> bytes | None:
        """Return the bytes of a page, counted from 1; None if they cannot be read."""
        if not 0 < number <= self.count:
            return None
        if self.log is not None and (newest := self.log.page(number)) is not None:
            return newest
        try:
            data = self._file.xRead(self.size, (number - 1) * self.size)
        except apsw.Error:
            return None
        return data if len(data) == self.size else None

    def written(self) -> Iterator[int]:
        """Yield the numbers of pages in the log or in the file (but for holes), ascending; some numbers come twice."""
        runs = (range(low // self.size + 1, -(-high // self.size) + 1) for low, high in self._extents)
        yield from merge([] if self.log is None else self.log.numbers, chain.from_iterable(runs))

    def kind(self, number: int) -> int:
        """Return the type byte of a b-tree page; 0 if the page cannot be read."""
        data = self.page(number)
        return 0 if data is None else data[_start(number)]

    def walk(self, root: int, table: bool = True, limit: int | None = None) -> Iterator[Cell]:
        """Yield the entries of a tree in order; treat entries of more than `limit` bytes as damaged."""
        seen = set[int]()
        waiting: list[int | Spot] = [root]
        data = b""
        while waiting:
            item = waiting.pop()
            if isinstance(item, Spot):
                yield self._cell(data, item, table, limit)  # a cell of the leaf whose bytes are still in `data`
            elif item in seen:
                self.damaged.add(item)
            else:
                seen.add(item)
                data = self.page(item) or b""
                children, spots = self._parse(item, data, table)
                yield from (self._cell(data, at, table, limit) for at in spots if children)
                waiting += reversed(children or spots)
        self.seen |= seen

    def leaf(self, number: int, table: bool = True) -> Iterator[Cell]:
        """Yield the entries of one leaf page."""
        self.seen.add(number)
        data = self.page(number) or b""
        for at in self._parse(number, data, table)[1]:
            yield self._cell(data, at, table)

    def free(self) -> set[int] | None:
        """Return the numbers of free pages; None if their list is damaged."""
        first = self.page(1)
        if first is None:
            return None
        trunk, count = struct.unpack_from(">II", first, 32)
        numbers = set[int]()
        while trunk:
            data = self.page(trunk)
            if data is None or trunk in numbers or len(numbers) >= count:
                return None
            numbers.add(trunk)
            trunk, leaves = struct.unpack_from(">II", data)
            if leaves > self.size // 4 - 2:
                return None
            numbers.update(struct.unpack_from(f">{leaves}I", data, 8))
        return numbers if len(numbers) == count else None

    def _parse(self, number: int, data: bytes, table: bool) -> tuple[list[int], list[Spot]]:
        """Return the numbers of a page's child pages, and its cells that have a record, both in order."""
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
        offsets = struct.unpack_from(f">{count}H", data, pointers)
        spots = []
        for offset in dict.fromkeys(offsets):
            try:
                if offset < max(top or 65536, pointers + 2 * count):
                    raise Damaged  # the cell lies in freed space
                spots.append(spot(data, offset, is_inner, table))
            except Damaged:
                continue
        spots = _drop_overlapping(spots, freed(data, block))
        if len(spots) < count:
            self.damaged.add(number)
        last = int.from_bytes(data[start + 8 : start + 12], "big")
        children = [*(at.child for at in spots), last] if is_inner else []
        return children, [at for at in spots if at.size >= 0]

    def _cell(self, data: bytes, at: Spot, table: bool, limit: int | None = None) -> Cell:
        try:
            if limit is not None and at.size > limit:
                raise Damaged
            return Cell(at.row, record(self._record_bytes(data, at, table)))
        except Damaged:
            return Cell(at.row, None)

    def _record_bytes(self, data: bytes, at: Spot, table: bool) -> bytes:
        """Return the bytes of a record, including its overflow pages. Raises Damaged."""
        local = local_size(at.size, self.size, table)
        chunks, missing = [data[at.body : at.body + local]], at.size - local
        if missing > self.count * self.size:
            raise Damaged
        following, seen = int.from_bytes(data[at.stop - 4 : at.stop], "big"), set[int]()
        while missing > 0:
            overflow = self.page(following)
            if overflow is None or following in seen:
                raise Damaged
            seen.add(following)
            chunks.append(overflow[4 : 4 + missing])
            missing -= len(chunks[-1])
            following = int.from_bytes(overflow[:4], "big")
        return b"".join(chunks)


def _start(number: int) -> int:
    return _HEADER if number == 1 else 0


def _drop_overlapping(spots: list[Spot], blocks: list[tuple[int, int]]) -> list[Spot]:
    """Return the cells that overlap neither another cell nor a free block."""
    spans = sorted([(at.start, at.stop) for at in spots] + blocks)
    overlapping = set[tuple[int, int]]()
    farthest = (0, 0)
    for span in spans:
        if span[0] < farthest[1]:
            overlapping |= {span, farthest}
        farthest = max(farthest, span, key=lambda s: s[1])
    return [at for at in spots if (at.start, at.stop) not in overlapping]
