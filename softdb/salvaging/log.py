"""Read an SQLite write-ahead log without SQLite: its pages as of the last commit whose frames are undamaged.

Each frame carries a checksum of all frames before it, so a log is valid only up to its first damaged byte.
The format: https://sqlite.org/fileformat2.html, section 4.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_MAGIC = 0x377F0682  # begins a log; its last bit is set if checksums are computed from big-endian words
_HEADER, _FRAME = 32, 24  # bytes of the log's header, and of each frame's header

Sums = tuple[int, int]


class Log:
    """The valid frames of a log. SQLite writes a log in rounds: a new round overwrites it from the beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offsets: dict[int, int] = {}  # page number → offset of its newest committed bytes
        self.size = 0  # bytes of a page; 0: no commit is valid
        self.pages = 0  # number of pages of the database, as of the last valid commit
        self.cut = False  # True if damaged or uncommitted frames of the current round follow
        head = read(self._file.fileno(), 0, _HEADER)
        if len(head) == _HEADER:
            self._replay(head)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the pages in the log, ascending."""
        return sorted(self._offsets)

    def page(self, number: int) -> bytes | None:
        """Return the newest bytes of a page, None if the log does not hold it."""
        offset = self._offsets.get(number)
        if offset is None:
            return None
        data = read(self._file.fileno(), offset, self.size)
        return data if len(data) == self.size else None

    def _replay(self, head: bytes) -> None:
        magic, _, size = struct.unpack_from(">III", head)
        salts, expected = head[16:24], struct.unpack_from(">II", head, 24)
        order = ">u4" if magic & 1 else "<u4"
        sums = _checksum(head[:24], order, (0, 0))
        if magic & ~1 != _MAGIC or size & (size - 1) or not 512 <= size <= 65536 or sums != expected:
            self.cut = True
            return
        waiting: dict[int, int] = {}
        offset = _HEADER
        while True:
            frame = read(self._file.fileno(), offset, _FRAME + size)
            if len(frame) < _FRAME + size:
                self.cut = bool(waiting or frame)
                return
            number, commit = struct.unpack_from(">II", frame)
            sums = _checksum(frame[:8] + frame[_FRAME:], order, sums)
            valid = number and sums == struct.unpack_from(">II", frame, 16)
            if frame[8:16] != salts:  # an older round; or, if the checksum is valid, this round with damaged salts
                self.cut = bool(waiting or valid)
                return
            if not valid:
                self.cut = True
                return
            waiting[number] = offset + _FRAME
            if commit:
                self._offsets |= waiting
                self.size, self.pages, waiting = size, commit, {}
            offset += len(frame)


def read(descriptor: int, offset: int, size: int) -> bytes:
    """Read at most `size` bytes of a file; b"" if the disk cannot read them."""
    try:
        return os.pread(descriptor, size, offset)
    except OSError:
        return b""


def _checksum(data: bytes, order: str, before: Sums) -> Sums:
    """Continue SQLite's checksum: a ← a + x + b, b ← b + y + a for each two words x, y, modulo 2³².

    The recurrence is linear: n steps give Mⁿ (a, b) + Σ Mⁿ⁻¹⁻ⁱ (xᵢ, xᵢ + yᵢ) with M = (1 1; 1 2).
    """
    words = np.frombuffer(data, order).astype(np.uint32).reshape(-1, 2)
    powers, last = _powers(len(words))
    steps = np.stack([words[:, 0], words[:, 0] + words[:, 1]], 1)
    added = np.einsum("nij,nj->i", powers, steps)  # uint32: wraps modulo 2³²
    a, b = (sum(int(last[i, j]) * before[j] for j in (0, 1)) + int(added[i]) for i in (0, 1))
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF


@cache
def _powers(count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the powers Mⁿ⁻¹, …, M⁰ (n, 2, 2) and Mⁿ of the matrix M of `_checksum`, modulo 2³²; n = `count`."""
    step = np.array([[1, 1], [1, 2]], np.uint32)
    powers = [np.eye(2, dtype=np.uint32)]
    for _ in range(count):
        powers.append(powers[-1] @ step)
    return np.stack(powers[count - 1 :: -1]), powers[count]
