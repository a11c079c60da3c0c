"""The column files: plain `.npy` arrays of a fixed size, filled from the front, never changed in used slots.

The format, as MUSTs:

* A segment `N` (eight digits) MUST be `keys-N.npy`, shape (capacity, d), and, where records carry values,
  `values-N.npy`, shape (capacity, v) or (capacity,); if rows have gaps, also `rows-N.npy`, see `softdb.store.gaps`.
* A file MUST start with exactly the bytes of `header(dtype, shape)`, a version 1.0 `.npy` header, little-endian and in
  C order, and MUST have exactly the size which that header implies, as long as it exists.
* Slots below the segment's `used` in the catalogue MUST NOT be written again; the content of the others is undefined.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Schema
from softdb.errors import CorruptionError, SoftDBError
from softdb.store import files
from softdb.store.directory import Displaced
from softdb.store.soundness import AT_ONCE

FIRST_ROWS = 64  # slots of the smallest segment: small databases must not allocate megabytes
MAX_ROWS = 1 << 20  # slots of the largest segment: larger files gain nothing

BACKGROUND_BYTES = 1 << 20  # bytes; smaller writes take less time without a second thread

_NAME = re.compile(r"(keys|values|rows)-\d{8,}\.npy")


def capacity_for(stored: int, coming: int) -> int:
    """Return the slots of the next segment: the least power of two ≥ max(stored, coming), within the limits."""
    wanted = max(FIRST_ROWS, stored, coming)
    return min(MAX_ROWS, 1 << (wanted - 1).bit_length())


@cache
def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the `.npy` header of an array; its length is a multiple of 64."""
    buffer = io.BytesIO()
    description = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


class SegmentEntry(NamedTuple):
    """Entry of a segment in the catalogue. `capacity` and `used` count slots."""

    number: int
    first_row: int
    capacity: int
    used: int


class Piece(NamedTuple):
    """Consecutive records of a batch, and the entry of their segment as it was before they are appended."""

    entry: SegmentEntry
    keys: Array  # (n, d)
    values: Array | None  # (n, v) or labels (n,)


class SegmentPart(NamedTuple):
    """Consecutive slots of a new segment, which is written part by part."""

    keys: Array  # (n, d)
    values: Array | None  # (n, v) or labels (n,)
    rows: NDArray[np.int64] | None  # (n,), if rows have gaps


class NewSegment(NamedTuple):
    """A segment on disk that the catalogue does not name yet."""

    entry: SegmentEntry
    rows_crc: int | None  # None: the rows have no gaps


class _Exposed:
    """A read-only memory map that claims to be writable, because torch warns of read-only arrays."""

    def __init__(self, mapped: np.memmap[Any, Any]) -> None:
        self.mapped = mapped  # keeps the map alive as long as the array
        self.__array_interface__ = {**mapped.__array_interface__, "data": (mapped.ctypes.data, False)}


class ColumnFiles:
    """The column files of one database directory; with `directory=None`, arrays in memory instead."""

    def __init__(
        self, directory: Path | None, schema: Schema, relaxed: bool = False, folder: int | None = None
    ) -> None:
        """`relaxed`: appended slots are on disk only after `sync`; `folder`: see `softdb.store.files`."""
        self.directory, self.relaxed, self._folder = directory, relaxed, folder
        self._unsynced: set[Path] = set()  # files with bytes that are not on disk
        self._unnamed = False  # True if names of new files are not on disk
        self._arrays: dict[tuple[str, int], Array] = {}  # (column, segment number) → its slots, mapped or in memory
        self.marks: dict[str, files.Mark] = {}  # file name → mark, when the file was mapped or last written to
        self._written: set[Path] = set()  # files written to since `require_unchanged`
        self.reshape(schema)

    def reshape(self, schema: Schema) -> None:
        """Use this schema for the columns that are opened or created from now on."""
        self._shapes = shapes_of(schema)
        self._all = {**self._shapes, "rows": (np.dtype(np.int64), ())}

    def create(self, number: int, capacity: int, gaps: bool = False, *, aside: bool = False) -> None:
        """Create a segment's files at their final size, and sync their names, before any row refers to them.

        `aside`: sync the names now, even if relaxed, because another thread may write meanwhile.
        """
        named = aside or not self.relaxed
        for column, (dtype, width) in (self._all if gaps else self._shapes).items():
            shape = (capacity, *width)
            if self.directory is None:
                self._arrays[column, number] = np.zeros(shape, dtype)
            else:
                head = header(dtype, shape)
                files.remove(self._path(column, number), self._folder)  # an orphan of an append that did not commit
                self._unnamed = self._unnamed or not named
                files.create(self._path(column, number), head, len(head) + _bytes(dtype, shape), named, self._folder)
                if not aside:
                    self._mark(self._path(column, number))

    @contextlib.contextmanager
    def appending(self, pieces: list[Piece]) -> Iterator[None]:
        """Write pieces to free slots while the caller's block runs; on disk at the end or, if relaxed, at `sync`."""
        if sum(piece.keys.nbytes for piece in pieces) < BACKGROUND_BYTES or self.directory is None:
            for piece in pieces:
                self.write(piece)
            yield
            return
        with ThreadPoolExecutor(1, "softdb-write") as thread:  # on any exit, waits for the thread
            writes = [thread.submit(self.write, piece) for piece in pieces]
            yield
            for write in writes:
                write.result()

    def write(self, piece: Piece) -> None:
        """Write a piece to free slots; on disk when this returns, unless relaxed."""
        entry = piece.entry
        for column, data in (("keys", piece.keys), ("values", piece.values)):
            if data is None:
                continue
            if self.directory is None:
                self._arrays[column, entry.number][entry.used : entry.used + len(data)] = data
            else:
                path = self._path(column, entry.number)
                self.require_unchanged(path)
                start = self._offset(column, entry.capacity, entry.used)
                files.write_at(path, _raw(data), start, not self.relaxed, self._folder)
                self._mark(path)
                self._written.add(path)
                if self.relaxed:
                    self._unsynced.add(path)

    def _mark(self, path: Path) -> None:
        now = files.mark(path.name, self._folder) if self._folder is not None else None
        if now is not None:
            self.marks[path.name] = now

    def require_unchanged(self, *paths: Path) -> None:
        """Raise Displaced if another program has changed files; without `paths`, check all that this handle wrote."""
        for path in paths or self._written:
            before = self.marks.get(path.name)
            now = None if before is None else files.mark(path.name, self._folder)
            if now is not None and now != before:
                raise Displaced(f"{path} was overwritten by another program", path.name)
        if not paths:
            self._written.clear()

    def sync(self) -> None:
        """Bring relaxed writes and the names of new files to disk."""
        while self._unsynced:
            path = min(self._unsynced)
            files.sync(path, self._folder)
            self._unsynced.discard(path)
        if self._unnamed and self.directory is not None:
            files.sync_directory(self.directory, self._folder)
        self._unnamed = False

    def build(
        self, number: int, rows: NDArray[np.int64], read: Callable[[slice], tuple[Array, Array | None]]
    ) -> NewSegment:
        """Write a segment of rows (m,), ascending; on disk when this returns. `read`: returns keys and values of slots.

        Other threads may read and write meanwhile.
        """
        count = len(rows)
        has_gaps = int(rows[-1] - rows[0]) + 1 != count
        self.create(number, count, has_gaps, aside=True)
        slots = (slice(low, low + AT_ONCE) for low in range(0, count, AT_ONCE))
        self.fill(number, count, (SegmentPart(*read(own), rows[own] if has_gaps else None) for own in slots))
        return NewSegment(SegmentEntry(number, int(rows[0]), count, count), checksum(rows) if has_gaps else None)

    def fill(self, number: int, capacity: int, parts: Iterable[SegmentPart]) -> None:
        """Write all slots of a new segment, part by part; on disk when this returns."""
        done, paths = 0, set[Path]()  # not `_unsynced`, because another thread may write meanwhile
        for chunk in parts:
            for column, data in chunk._asdict().items():
                if data is not None and self.directory is None:
                    self._arrays[column, number][done : done + len(data)] = data
                elif data is not None:
                    paths.add(path := self._path(column, number))
                    files.write_at(path, _raw(data), self._offset(column, capacity, done), False, self._folder)
            done += len(chunk.keys)
        for path in sorted(paths):
            files.sync(path, self._folder)

    def like(self, schema: Schema) -> ColumnFiles:
        """Return the column files of the same directory for another schema, to write segments beside the old ones."""
        return ColumnFiles(self.directory, schema, folder=self._folder)

    def take(self, other: ColumnFiles) -> None:
        """Take over the arrays of `other`, in a database in memory."""
        if self.directory is None:
            self._arrays |= other._arrays

    def rows(self, number: int, capacity: int) -> NDArray[np.int64]:
        """Map a segment's rows column, (capacity,). Raises FileNotFoundError, CorruptionError."""
        return self._column("rows", number, capacity)

    def remove(self, numbers: Iterable[int]) -> None:
        """Unlink the files of segments that the catalogue no longer names; memory maps of them stay valid."""
        if self.directory is not None:
            for number in numbers:
                for column in self._all:
                    self.marks.pop(f"{column}-{number:08d}.npy", None)
                    files.remove(self._path(column, number), self._folder)

    def open(self, number: int, capacity: int) -> tuple[Array, Array | None]:
        """Map a segment's keys and values, `capacity` slots each. Raises FileNotFoundError, CorruptionError."""
        keys = self._column("keys", number, capacity)
        return keys, self._column("values", number, capacity) if "values" in self._shapes else None

    def keep_only(self, keep: set[int]) -> None:
        """Drop the arrays and maps of all segments but those to `keep`."""
        for column, number in list(self._arrays):
            if number not in keep:
                self._arrays.pop((column, number), None)
                self.marks.pop(f"{column}-{number:08d}.npy", None)

    def clean(self, keep: set[int]) -> None:
        """Remove the files of all segments but those to `keep`: appends or compactions without a commit left them."""
        if self.directory is None:
            return
        for name in os.listdir(self.directory if self._folder is None else self._folder):
            if _NAME.fullmatch(name) and int(name.split("-")[1].removesuffix(".npy")) not in keep:
                with contextlib.suppress(IsADirectoryError, PermissionError):  # macOS raises EPERM for a directory
                    files.remove(self.directory / name, self._folder)

    def _column(self, column: str, number: int, capacity: int) -> Array:
        array = self._arrays.get((column, number))
        if array is None:
            dtype, width = self._all[column]
            path = self._path(column, number)
            array = self._arrays[column, number] = _map_file(path, dtype, (capacity, *width), self._folder)
            if path.name not in self.marks:
                self._mark(path)
        return array

    def _offset(self, column: str, capacity: int, slot: int) -> int:
        dtype, width = self._all[column]
        return len(header(dtype, (capacity, *width))) + _bytes(dtype, (slot, *width))

    def _path(self, column: str, number: int) -> Path:
        assert self.directory is not None  # in memory there are no files
        return file_of(self.directory, column, number)


def checksum(data: Array) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(_raw(data))


def shapes_of(schema: Schema) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return dtype and width of the columns of a schema, by name: keys, and values if records have them."""
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {"keys": (schema.dtype, (schema.dim,))}
    if schema.has_values:
        shapes["values"] = schema.value_dtype, () if schema.value_dim is None else (schema.value_dim,)
    return shapes


@lru_cache(64)
def file_of(directory: Path, column: str, number: int) -> Path:
    """Return the path of a segment's column file."""
    return directory / f"{column}-{number:08d}.npy"


def _raw(data: Array) -> memoryview:
    return np.ascontiguousarray(data).data.cast("B")


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return math.prod(shape, start=dtype.itemsize)


def _map_file(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], folder: int | None) -> Array:
    head = header(dtype, shape)
    expected = len(head) + _bytes(dtype, shape)
    try:
        opened = files.open_regular(path, folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise SoftDBError(f"{path.name} cannot be opened ({error}); raise the limit by `ulimit -n`") from error
        raise CorruptionError(
            f"{path.name} cannot be read ({error}); fix the cause, or restore it from a copy"
        ) from error
    with opened as file:
        start = file.read(len(head))
        size = file.seek(0, io.SEEK_END)
        if size != expected:
            raise CorruptionError(
                f"{path.name} has {size} bytes, {expected} expected: it was cut or replaced; restore it from a copy"
            )
        if start != head:
            raise CorruptionError(
                f"{path.name} does not have the header of a {dtype} array of shape {shape}; restore it from a copy"
            )
        return np.asarray(_Exposed(np.memmap(file, dtype, "r", len(head), shape)))
