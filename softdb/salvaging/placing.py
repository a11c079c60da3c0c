"""Places of the records' vectors in column files whose catalogue, names or headers may be damaged.

A record's checksums tell: its key lies in the slot whose bytes give the key's checksum, and its value likewise. First
each file is held against what the catalogue says of its segment. A file that then holds little of what it should, or
that the catalogue does not know, is searched: records lie in it in the order of their rows, so chance hits of a 32-bit
checksum do not fit in.
"""

from __future__ import annotations

import bisect
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Schema
from softdb.salvaging.remains import Remains
from softdb.store import files
from softdb.store.segments import MAX_ROWS, header

_AT_ONCE = 8192  # rows or slots at most
_BYTES = 1 << 26  # at once at most
HEAD = len(header(np.dtype(np.float32), (MAX_ROWS, 1)))  # of every column file that softdb makes
_CHANCE = 1e-5  # what is not expected to happen in a search
_NAME = re.compile(r"(keys|values)-(\d{8,18})\.npy")

Numbers = NDArray[np.int64]


class ColumnSpec(NamedTuple):
    """The keys of all segments, or the values."""

    name: str  # keys or values
    dtype: np.dtype[Any]
    width: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of a slot."""
        return int(self.dtype.itemsize * np.prod(self.width, dtype=np.int64))


def columns(schema: Schema) -> list[ColumnSpec]:
    """Columns that a schema's records have."""
    found = [ColumnSpec("keys", schema.dtype, (schema.dim,))]
    if schema.has_values:
        found.append(ColumnSpec("values", schema.value_dtype, () if schema.value_dim is None else (schema.value_dim,)))
    return found


def file_of(directory: Path, column: str, number: int) -> Path:
    """A segment's file."""
    return directory / f"{column}-{number:08d}.npy"


# -- reading ---------------------------------------------------------------------------------------------------------


def at_once(size: int) -> int:
    """Number of slots of so many bytes that are read at once."""
    return max(1, min(_AT_ONCE, _BYTES // size))


def read_slots(file: BinaryIO, size: int, low: int, high: int) -> Iterator[bytes]:
    """The bytes of slots low … high - 1; nothing of those that are not there, or that the disk does not give."""
    at, whole = HEAD + low * size, (high - low) * size
    data = _read(file, at, whole)
    if data is None:  # find those that it gives
        alone = (_read(file, at + i * size, size) for i in range(high - low))
        yield from (b"" if one is None or len(one) < size else one for one in alone)
        return
    for i in range(high - low):
        one = data[i * size : (i + 1) * size]
        yield one if len(one) == size else b""


def _read(file: BinaryIO, offset: int, size: int) -> bytes | None:
    try:
        return os.pread(file.fileno(), size, offset)
    except OSError:
        return None


def crcs_in(path: Path, size: int) -> Numbers:
    """The CRC-32 of each slot of a file, -1 of those that cannot be read; nothing where there is no file."""
    try:
        with files.open_regular(path) as file:
            slots = min(-(-max(file.seek(0, io.SEEK_END) - HEAD, 0) // size), MAX_ROWS)
            found = np.empty(slots, np.int64)
            for low in range(0, slots, at_once(size)):
                high = min(low + at_once(size), slots)
                found[low:high] = [crc32(slot) if slot else -1 for slot in read_slots(file, size, low, high)]
            return found
    except OSError:
        return np.empty(0, np.int64)


def rows_in(directory: Path, number: int) -> Numbers | None:
    """Rows by a segment's column of rows, -1 where it cannot be read; None where there is none."""
    try:
        with files.open_regular(file_of(directory, "rows", number)) as file:
            slots = min(max(file.seek(0, io.SEEK_END) - HEAD, 0) // 8, MAX_ROWS)
            said = [int.from_bytes(slot, "little", signed=True) for slot in read_slots(file, 8, 0, slots)]
            return np.array([row if row >= 0 else -1 for row in said], np.int64)
    except OSError:
        return None


# -- placing ---------------------------------------------------------------------------------------------------------


def place(remains: Remains, directory: Path, which: list[ColumnSpec], scratch: apsw.Connection) -> None:
    """Fill in where the records of the table `found` lie, by the checksums that they carry."""
    said = _Said(remains, directory)
    for column in which:
        numbers = sorted({*said.entries, *_numbers(directory, column.name)})
        for number in numbers:
            file = _File(scratch, directory, column, number)
            for claim in (*said.claims(number), file.beside()):
                file.trust(claim)
        doubtful = [n for n in numbers if said.is_doubtful(n) or _mostly_not(scratch, column.name, n)]
        for number in doubtful:
            file = _File(scratch, directory, column, number)
            for other in numbers:  # files may have changed places
                for claim in said.claims(other) if other != number and len(file.crcs) else ():
                    file.trust(claim)
            file.search()


def _numbers(directory: Path, column: str) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [int(name[2]) for name in names if name and name[1] == column]


def _mostly_not(scratch: apsw.Connection, column: str, number: int) -> bool:
    """Return True if the records that should lie in a file mostly do not."""
    sql = f"SELECT count({column}_slot), count(*) FROM found WHERE {column}_file = ?"
    counts: list[Any] = scratch.execute(sql, (number,)).fetchall()
    return bool(2 * counts[0][0] < counts[0][1])


class Claim(NamedTuple):
    """Rows and their slots by one source; one that is wrong does no harm."""

    rows: Numbers  # (m,) ascending
    slots: Numbers  # (m,)


class _Said:
    """Places of rows by the catalogue and by columns of rows."""

    def __init__(self, remains: Remains, directory: Path) -> None:
        self.entries = {entry.number: entry for entry in remains.segments()}
        self.gaps = remains.gaps()
        self.directory = directory

    def claims(self, number: int) -> Iterator[Claim]:
        """Places of a segment's rows."""
        rows, entry = rows_in(self.directory, number), self.entries.get(number)
        if rows is not None:
            kept = np.flatnonzero(rows >= 0)
            order = kept[np.argsort(rows[kept], kind="stable")]
            yield Claim(rows[order], order)
        if entry is not None and number not in self.gaps:
            slots = np.arange(entry.capacity)
            yield Claim(entry.first_row + slots, slots)

    def is_doubtful(self, number: int) -> bool:
        """Return True if the catalogue does not know a segment, or its column of rows is not as it was written."""
        crc = self.gaps.get(number)
        if number not in self.entries or crc is None:
            return number not in self.entries
        rows = rows_in(self.directory, number)
        return rows is None or crc32(rows.astype("<i8").tobytes()) != crc


class _File:
    """The checksums of one file's slots, and the records that may lie in it."""

    def __init__(self, scratch: apsw.Connection, directory: Path, column: ColumnSpec, number: int) -> None:
        self.scratch, self.column, self.number = scratch, column.name, number
        self.crcs = crcs_in(file_of(directory, column.name, number), column.bytes)
        self.crc = {"keys": "key_crc", "values": "value_crc"}[column.name]
        self.open = f"why IS NULL AND {self.column}_slot IS NULL AND {self.crc} IS NOT NULL"

    def trust(self, claim: Claim) -> None:
        """Place the records that lie where they should."""
        rows, slots = claim
        if not len(rows):
            return
        for found, crcs in self._open_rows(int(rows[0]), int(rows[-1])):
            at = np.minimum(np.searchsorted(rows, found), len(rows) - 1)
            claims = rows[at] == found
            found, crcs, at = found[claims], crcs[claims], slots[at[claims]]
            inside = at < len(self.crcs)
            good = np.zeros(len(found), np.bool_)
            good[inside] = self.crcs[at[inside]] == crcs[inside]
            self._put(found[good], at[good])
            claimed = f"UPDATE found SET {self.column}_file = ? WHERE row = ?"
            self.scratch.executemany(claimed, [(self.number, row) for row in found[~good].tolist()])

    def beside(self) -> Claim:
        """The slots of the records whose keys lie in the segment of this number."""
        return self._claim(f"SELECT row, keys_slot FROM found WHERE {self.open} AND keys_file = ? AND keys_slot >= 0")

    def search(self) -> None:
        """Place records of which nothing says where they lie."""
        rows, slots = self._pairs()
        if not len(rows):
            return
        (shift, votes), *_ = Counter((rows - slots).tolist()).most_common(1)
        if self._sure(votes):
            every = np.arange(len(self.crcs))
            self.trust(Claim(shift + every, every))
        placed = self._placed()
        rows, slots = (np.concatenate(both) for both in zip(placed, self._pairs(), strict=True))
        order = np.argsort(slots, kind="stable")
        chain = order[_chain(rows[order])]
        if self._sure(len(chain)) and 8 * len(chain) >= len(np.unique(self.crcs)):
            new = chain[chain >= len(placed.rows)]
            self._put(rows[new], slots[new])

    def _placed(self) -> Claim:
        """The records that have their place here."""
        column = self.column
        return self._claim(f"SELECT row, {column}_slot FROM found WHERE {column}_file = ? AND {column}_slot >= 0")

    def _claim(self, sql: str) -> Claim:
        pairs = self.scratch.execute(f"{sql} ORDER BY row", (self.number,)).fetchall()
        return Claim(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def _sure(self, hits: int) -> bool:
        """Return True if so many hits in one line are none of chance.

        A checksum is met by chance in one of the slots with probability c / 2³², so hits do so on about
        u (c / 2³²)^hits of the u lines.
        """
        missing: list[Any] = self.scratch.execute(f"SELECT count(*) FROM found WHERE {self.open}").fetchall()
        return bool(missing[0][0] * (len(self.crcs) / 2**32) ** hits < _CHANCE)

    def _pairs(self) -> tuple[Numbers, Numbers]:
        """Rows without a place, and slots of the same checksum in which none lies, in the order of slots.

        Where several are alike, the first goes with the first, and so on.
        """
        free = np.ones(len(self.crcs), np.bool_)
        free[self._placed().slots] = False
        slots = [(int(self.crcs[slot]), slot) for slot in np.flatnonzero(free & (self.crcs >= 0)).tolist()]
        self.scratch.execute(f"CREATE INDEX IF NOT EXISTS by_{self.crc} ON found({self.crc})")
        self.scratch.execute("CREATE TEMP TABLE slots(crc INTEGER, slot INTEGER)")
        self.scratch.executemany("INSERT INTO slots VALUES(?, ?)", slots)
        found = self.scratch.execute(
            f"""WITH a AS (SELECT row, {self.crc} AS crc,
                                  row_number() OVER (PARTITION BY {self.crc} ORDER BY row) AS nth
                           FROM found WHERE {self.open} AND {self.crc} IN (SELECT crc FROM slots)),
                     b AS (SELECT slot, crc, row_number() OVER (PARTITION BY crc ORDER BY slot) AS nth FROM slots)
                SELECT row, slot FROM a JOIN b USING(crc, nth) ORDER BY slot"""
        ).fetchall()
        self.scratch.execute("DROP TABLE slots")
        rows, places = np.array(found, np.int64).reshape(-1, 2).T
        return rows, places

    def _open_rows(self, low: int, high: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Rows and checksums of records from low to high that have no place yet, some at a time."""
        sql = f"SELECT row, {self.crc} FROM found WHERE row BETWEEN ? AND ? AND {self.open} ORDER BY row LIMIT ?"
        while some := self.scratch.execute(sql, (low, high, _AT_ONCE)).fetchall():
            found, crcs = np.array(some, np.int64).T
            low = int(found[-1]) + 1
            yield found, crcs

    def _put(self, rows: Numbers, slots: Numbers) -> None:
        sql = f"UPDATE found SET {self.column}_file = ?, {self.column}_slot = ? WHERE row = ?"
        places = zip(rows.tolist(), slots.tolist(), strict=True)
        self.scratch.executemany(sql, [(self.number, slot, row) for row, slot in places])


def _chain(rows: Numbers) -> list[int]:
    """The places of a longest ascending run of rows (m,)."""
    ends, places, before = list[int](), list[int](), list[int]()
    for i, row in enumerate(rows.tolist()):
        at = bisect.bisect_left(ends, row)
        before.append(places[at - 1] if at else -1)
        ends[at : at + 1], places[at : at + 1] = [row], [i]
    chain, last = list[int](), places[-1] if places else -1
    while last >= 0:
        chain.append(last)
        last = before[last]
    return chain[::-1]
