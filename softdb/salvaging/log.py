"""An SQLite write-ahead log, read without SQLite: the pages as of the last commit whose frames are whole.

Each frame carries the checksum of all before it, so a log is good up to its first damaged byte, and no further.
The format: https://sqlite.org/fileformat2.html, section 4.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_MAGIC = 0x377F0682  # its last bit says whether checksums are of big-endian words
_HEADER, _FRAME = 32, 24  # bytes

Sums = tuple[int, int]


class Log:
    """A log's good part."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offsets: dict[int, int] = {}  # of each page's newest committed bytes
        self.size = 0  # of a page; 0: there is no good part
        self.pages = 0  # of the database, as of the last commit
        self.cut = False  # whether there is more, of this round, that cannot be used
        head = _read(self._file.fileno(), 0, _HEADER)
        if len(head) == _HEADER:
            self._replay(head)

    @property
    def numbers(self) -> list[int]:
        """The pages that are in the log, ascending."""
        return sorted(self._offsets)

    def page(self, number: int) -> bytes | None:
        """The newest bytes of a page, None where they are not in the log."""
        offset = self._offsets.get(number)
        if offset is None:
            return None
        data = _read(self._file.fileno(), offset, self.size)
        return data if len(data) == self.size else None

    def _replay(self, head: bytes) -> None:
        magic, _, size = struct.unpack_from(">III", head)
        salts, expected = head[16:24], struct.unpack_from(">II", head, 24)
        order = ">u4" if magic & 1 else "<u4"
        sums = _summed(head[:24], order, (0, 0))
        if magic & ~1 != _MAGIC or size & (size - 1) or not 512 <= size <= 65536 or sums != expected:
            self.cut = True
            return
        waiting: dict[int, int] = {}
        offset = _HEADER
        while True:
            frame = _read(self._file.fileno(), offset, _FRAME + size)
            if len(frame) < _FRAME + size:
                self.cut = bool(waiting or frame)
                return
            number, commit = struct.unpack_from(">II", frame)
            sums = _summed(frame[:8] + frame[_FRAME:], order, sums)
            good = number and sums == struct.unpack_from(">II", frame, 16)
            if frame[8:16] != salts:  # of an older round; or a damaged frame of this one, whose checksum leads on
                self.cut = bool(waiting or good)
                return
            if not good:
                self.cut = True
                return
            waiting[number] = offset + _FRAME
            if commit:
                self._offsets |= waiting
                self.size, self.pages, waiting = size, commit, {}
            offset += len(frame)


def _read(descriptor: int, offset: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError:
        return b""


def _summed(data: bytes, order: str, before: Sums) -> Sums:
    """SQLite's checksum, continued: a ← a + x + b, b ← b + y + a for each two words x, y, modulo 2³².

    That is linear: n steps are Mⁿ (a, b) + Σ Mⁿ⁻¹⁻ⁱ (xᵢ, xᵢ + yᵢ) with M = (1 1; 1 2).
    """
    words = np.frombuffer(data, order).astype(np.uint32).reshape(-1, 2)
    powers, last = _powers(len(words))
    steps = np.stack([words[:, 0], words[:, 0] + words[:, 1]], 1)
    added = np.einsum("nij,nj->i", powers, steps)  # wraps round, as it should
    a, b = (sum(int(last[i, j]) * before[j] for j in (0, 1)) + int(added[i]) for i in (0, 1))
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF


@cache
def _powers(count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mⁿ⁻¹, …, M⁰ (n, 2, 2), and Mⁿ."""
    step = np.array([[1, 1], [1, 2]], np.uint32)
    powers = [np.eye(2, dtype=np.uint32)]
    for _ in range(count):
        powers.append(powers[-1] @ step)
    return np.stack(powers[count - 1 :: -1]), powers[count]
