"""Find the slots of the records' vectors in column files, even if catalogue, file names or headers are damaged.

A record's key lies in a slot whose bytes have the checksum of the key, and its value likewise. First each file is
compared with the rows that the catalogue claims for its segment. A file with few of its claimed records, or one that
the catalogue does not name, is searched for any record. True matches of the 32-bit checksums ascend by row and slot
together, as records are stored in the order of their rows; matches by chance do not.
"""

from __future__ import annotations

import bisect
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.salvaging.log import read
from softdb.salvaging.remains import Remains
from softdb.store import files
from softdb.store.segments import MAX_ROWS, file_of, header

_AT_ONCE = 8192  # maximum rows or slots read at once
_BYTES = 1 << 26  # maximum bytes read at once
HEAD = len(header(np.dtype(np.float32), (MAX_ROWS, 1)))  # bytes of the header of every column file
_CHANCE = 1e-5  # matches are trusted if fewer are expected by chance
_NAME = re.compile(r"(keys|values)-(\d{8,18})\.npy")

Numbers = NDArray[np.int64]


class ColumnSpec(NamedTuple):
    """Name and data type of the column of keys or of values, the same in all segments."""

    name: str  # "keys" or "values"
    dtype: np.dtype[Any]
    width: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a slot."""
        return int(self.dtype.itemsize * np.prod(self.width, dtype=np.int64))


# -- reading ---------------------------------------------------------------------------------------------------------


def at_once(size: int) -> int:
    """Return the number of slots of `size` bytes to read at once."""
    return max(1, min(_AT_ONCE, _BYTES // max(1, size)))


def read_slots(file: BinaryIO, size: int, low: int, high: int) -> Iterator[bytes]:
    """Yield the bytes of slots low … high - 1; b"" for slots beyond the file, or that the disk cannot read."""
    start, descriptor = HEAD + low * size, file.fileno()
    data = read(descriptor, start, (high - low) * size)
    for i in range(high - low):  # if not readable as a whole, read slot by slot
        slot = data[i * size : (i + 1) * size] if data else read(descriptor, start + i * size, size)
        yield slot if len(slot) == size else b""


def crcs_in(path: Path, size: int) -> Numbers:
    """Return the CRC-32 of each slot of a file, (slots,); -1 if a slot is unreadable; empty if there is no file."""
    try:
        with files.open_regular(path) as file:
            slots = min(-(-max(file.seek(0, io.SEEK_END) - HEAD, 0) // size), MAX_ROWS)
            crcs = np.empty(slots, np.int64)
            for low in range(0, slots, at_once(size)):
                high = min(low + at_once(size), slots)
                crcs[low:high] = [crc32(slot) if slot else -1 for slot in read_slots(file, size, low, high)]
            return crcs
    except OSError:
        return np.empty(0, np.int64)


def rows_in(directory: Path, number: int) -> Numbers | None:
    """Return the rows (slots,) in a segment's row column, -1 for unreadable slots; None if there is no file."""
    try:
        with files.open_regular(file_of(directory, "rows", number)) as file:
            slots = min(max(file.seek(0, io.SEEK_END) - HEAD, 0) // 8, MAX_ROWS)
            rows = [int.from_bytes(slot, "little", signed=True) for slot in read_slots(file, 8, 0, slots)]
            return np.array([row if row >= 0 else -1 for row in rows], np.int64)
    except OSError:
        return None


# -- placing ---------------------------------------------------------------------------------------------------------


def place(remains: Remains, directory: Path, which: list[ColumnSpec], scratch: apsw.Connection) -> None:
    """Find each record's slots in the columns `which` by its checksums; write file and slot to the table `records`."""
    claimed = _Claimed(remains, directory)
    for column in which:
        numbers = sorted({*claimed.entries, *_numbers(directory, column.name)})
        for number in numbers:
            file = _File(scratch, directory, column, number)
            for claim in (*claimed.claims(number), file.beside()):
                file.check(claim)
        doubtful = [n for n in numbers if claimed.is_doubtful(n) or _is_mostly_wrong(scratch, column.name, n)]
        for number in doubtful:
            file = _File(scratch, directory, column, number)
            for other in numbers:  # files may have been swapped
                for claim in claimed.claims(other) if other != number and len(file.crcs) else ():
                    file.check(claim)
            file.search()


def _numbers(directory: Path, column: str) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [int(name[2]) for name in names if name and name[1] == column]


def _is_mostly_wrong(scratch: apsw.Connection, column: str, number: int) -> bool:
    """Return True if most records that were claimed to lie in a file were not found in it."""
    sql = f"SELECT count({column}_slot), count(*) FROM records WHERE {column}_file = ?"
    counts: list[Any] = scratch.execute(sql, (number,)).fetchall()
    return bool(2 * counts[0][0] < counts[0][1])


class Claim(NamedTuple):
    """Rows, and the slots that one source states for them. A wrong claim does no harm: checksums are compared."""

    rows: Numbers  # (m,) ascending
    slots: Numbers  # (m,)


class _Claimed:
    """The claims of a damaged database: slots that its catalogue and its row columns state for rows."""

    def __init__(self, remains: Remains, directory: Path) -> None:
        self.entries = {entry.number: entry for entry in remains.segments()}
        self.gaps = remains.gaps()
        self.directory = directory

    def claims(self, number: int) -> Iterator[Claim]:
        """Yield the claims about a segment's rows."""
        rows, entry = rows_in(self.directory, number), self.entries.get(number)
        if rows is not None:
            readable = np.flatnonzero(rows >= 0)
            order = readable[np.argsort(rows[readable], kind="stable")]
            yield Claim(rows[order], order)
        if entry is not None and number not in self.gaps:
            slots = np.arange(entry.capacity)
            yield Claim(entry.first_row + slots, slots)

    def is_doubtful(self, number: int) -> bool:
        """Return True if the catalogue does not name a segment, or its row column is damaged."""
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
        self.open = f"why IS NULL AND {self.column}_slot IS NULL AND {self.crc} IS NOT NULL"  # SQL: not placed yet

    def check(self, claim: Claim) -> None:
        """Place records whose checksum is that of the claimed slot; for other claimed records, store only the file."""
        rows, slots = claim
        if not len(rows):
            return
        for unplaced, crcs in self._open_rows(int(rows[0]), int(rows[-1])):
            at = np.minimum(np.searchsorted(rows, unplaced), len(rows) - 1)
            claims = rows[at] == unplaced
            unplaced, crcs, at = unplaced[claims], crcs[claims], slots[at[claims]]
            inside = at < len(self.crcs)
            good = np.zeros(len(unplaced), np.bool_)
            good[inside] = self.crcs[at[inside]] == crcs[inside]
            self._put(unplaced[good], at[good])
            claimed = f"UPDATE records SET {self.column}_file = ? WHERE row = ?"
            self.scratch.executemany(claimed, [(self.number, row) for row in unplaced[~good].tolist()])

    def beside(self) -> Claim:
        """Return the claim that each value lies in the same segment and slot as its key."""
        return self._claim(f"SELECT row, keys_slot FROM records WHERE {self.open} AND keys_file = ? AND keys_slot >= 0")

    def search(self) -> None:
        """Place records that no claim placed: match their checksums to slots, so that slots ascend with rows."""
        rows, slots = self._pairs()
        if not len(rows):
            return
        (shift, votes), *_ = Counter((rows - slots).tolist()).most_common(1)
        if self._is_no_chance(votes):
            every = np.arange(len(self.crcs))
            self.check(Claim(shift + every, every))
        placed = self._placed()
        rows, slots = (np.concatenate(both) for both in zip(placed, self._pairs(), strict=True))
        order = np.argsort(slots, kind="stable")
        chain = order[_chain(rows[order])]
        if self._is_no_chance(len(chain)) and 8 * len(chain) >= len(np.unique(self.crcs)):
            new = chain[chain >= len(placed.rows)]
            self._put(rows[new], slots[new])

    def _placed(self) -> Claim:
        """Return rows and slots of the records that are placed in this file."""
        column = self.column
        return self._claim(f"SELECT row, {column}_slot FROM records WHERE {column}_file = ? AND {column}_slot >= 0")

    def _claim(self, sql: str) -> Claim:
        pairs = self.scratch.execute(f"{sql} ORDER BY row", (self.number,)).fetchall()
        return Claim(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def _is_no_chance(self, hits: int) -> bool:
        """Return True if a sequence with `hits` matches hardly arises by chance.

        A checksum matches one of c slots by chance with probability c / 2³², so of u sequences, one for each unplaced
        record, about u (c / 2³²)^hits have `hits` matches by chance.
        """
        missing: list[Any] = self.scratch.execute(f"SELECT count(*) FROM records WHERE {self.open}").fetchall()
        return bool(missing[0][0] * (len(self.crcs) / 2**32) ** hits < _CHANCE)

    def _pairs(self) -> tuple[Numbers, Numbers]:
        """Return pairs of unplaced rows and free slots of the same checksum, in the order of slots.

        If several rows and slots have one checksum, the first row is paired with the first slot, and so on.
        """
        free = np.ones(len(self.crcs), np.bool_)
        free[self._placed().slots] = False
        slots = [(int(self.crcs[slot]), slot) for slot in np.flatnonzero(free & (self.crcs >= 0)).tolist()]
        self.scratch.execute(f"CREATE INDEX IF NOT EXISTS by_{self.crc} ON records({self.crc})")
        self.scratch.execute("CREATE TEMP TABLE slots(crc INTEGER, slot INTEGER)")
        self.scratch.executemany("INSERT INTO slots VALUES(?, ?)", slots)
        pairs = self.scratch.execute(
            f"""WITH a AS (SELECT row, {self.crc} AS crc,
                                  row_number() OVER (PARTITION BY {self.crc} ORDER BY row) AS nth
                           FROM records WHERE {self.open} AND {self.crc} IN (SELECT crc FROM slots)),
                     b AS (SELECT slot, crc, row_number() OVER (PARTITION BY crc ORDER BY slot) AS nth FROM slots)
                SELECT row, slot FROM a JOIN b USING(crc, nth) ORDER BY slot"""
        ).fetchall()
        self.scratch.execute("DROP TABLE slots")
        rows, paired_slots = np.array(pairs, np.int64).reshape(-1, 2).T
        return rows, paired_slots

    def _open_rows(self, low: int, high: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield chunks of rows and checksums of unplaced records in rows low … high."""
        sql = f"SELECT row, {self.crc} FROM records WHERE row BETWEEN ? AND ? AND {self.open} ORDER BY row LIMIT ?"
        while chunk := self.scratch.execute(sql, (low, high, _AT_ONCE)).fetchall():
            rows, crcs = np.array(chunk, np.int64).T
            low = int(rows[-1]) + 1
            yield rows, crcs

    def _put(self, rows: Numbers, slots: Numbers) -> None:
        sql = f"UPDATE records SET {self.column}_file = ?, {self.column}_slot = ? WHERE row = ?"
        places = zip(rows.tolist(), slots.tolist(), strict=True)
        self.scratch.executemany(sql, [(self.number, slot, row) for row, slot in places])


def _chain(rows: Numbers) -> list[int]:
    """Return the indices of a longest increasing subsequence of rows (m,), by patience sorting."""
    ends, indices, before = list[int](), list[int](), list[int]()
    for i, row in enumerate(rows.tolist()):
        at = bisect.bisect_left(ends, row)
        before.append(indices[at - 1] if at else -1)
        ends[at : at + 1], indices[at : at + 1] = [row], [i]
    chain, last = list[int](), indices[-1] if indices else -1
    while last >= 0:
        chain.append(last)
        last = before[last]
    return chain[::-1]
