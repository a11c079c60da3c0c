"""The column files: plain `.npy` arrays of a fixed size, filled from the front, never changed behind the watermark.

The format, as MUSTs:

* A segment `N` (eight digits) MUST be `keys-N.npy`, shape (capacity, d), and, where records carry values,
  `values-N.npy`, shape (capacity, v) or (capacity,); where rows have gaps, `rows-N.npy`, see `softdb.store.gaps`.
* A file MUST start with exactly the bytes of `header(dtype, shape)`, a version 1.0 `.npy` header, little-endian and in
  C order, and MUST have exactly the size which that header implies, from its creation to its end.
* Slots below the segment's `used` in the catalogue MUST NOT be written again; those from it on hold anything.
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

FIRST_ROWS = 64  # a phone book must not allocate megabytes
MAX_ROWS = 1 << 20  # beyond this many slots, files get unwieldy and gain nothing

BACKGROUND_BYTES = 1 << 20  # below this a thread costs more than it hides

_NAME = re.compile(r"(keys|values|rows)-\d{8,}\.npy")


def capacity_for(stored: int, coming: int) -> int:
    """Slots of the next segment: as many as are stored or coming, so that capacities double, within the limits."""
    wanted = max(FIRST_ROWS, stored, coming)
    return min(MAX_ROWS, 1 << (wanted - 1).bit_length())


@cache
def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The `.npy` header of an array; its length is a multiple of 64."""
    buffer = io.BytesIO()
    description = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


class SegmentEntry(NamedTuple):
    """A segment as the catalogue knows it."""

    number: int
    first_row: int
    capacity: int
    used: int


class Piece(NamedTuple):
    """SegmentPart of a batch and the segment, as it is before, that takes it."""

    entry: SegmentEntry
    keys: Array  # (n, d)
    values: Array | None  # (n, v) or labels (n,)


class SegmentPart(NamedTuple):
    """Consecutive slots of a segment that is written as a whole."""

    keys: Array  # (n, d)
    values: Array | None  # (n, v) or labels (n,)
    rows: NDArray[np.int64] | None  # (n,), where rows have gaps


class _Exposed:
    """A read-only map as an array that does not say so: torch warns of arrays that it may not write to."""

    def __init__(self, mapped: np.memmap[Any, Any]) -> None:
        self.mapped = mapped  # keeps the map alive as long as the array
        self.__array_interface__ = {**mapped.__array_interface__, "data": (mapped.ctypes.data, False)}


class ColumnFiles:
    """The column files of one database directory; with `directory=None`, arrays in memory that behave alike."""

    def __init__(
        self, directory: Path | None, schema: Schema, relaxed: bool = False, folder: int | None = None
    ) -> None:
        """`relaxed`: appended slots come to disk at `sync`, not before; `folder`: see `softdb.store.files`."""
        self.directory, self.relaxed, self._folder = directory, relaxed, folder
        self._unsynced: set[Path] = set()  # files that hold something which is not on disk
        self._unnamed = False  # whether there are files whose names are not
        self._arrays: dict[tuple[str, int], Array] = {}  # whole columns, mapped or held
        self.marks: dict[str, files.Mark] = {}  # files by name, as they were when mapped or last written to
        self._written: set[Path] = set()  # since `require_unchanged`
        self.reshape(schema)

    def reshape(self, schema: Schema) -> None:
        """Open and make columns of this schema from now on."""
        self._shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {"keys": (schema.dtype, (schema.dim,))}
        if schema.has_values:
            width = () if schema.value_dim is None else (schema.value_dim,)
            self._shapes["values"] = (schema.value_dtype, width)
        self._all = {**self._shapes, "rows": (np.dtype(np.int64), ())}

    def create(self, number: int, capacity: int, gaps: bool = False, *, aside: bool = False) -> None:
        """Make a segment's files at their final size, their names on disk, before any row refers to them.

        `aside`: other threads may write meanwhile; what comes to disk does not wait for `sync`.
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
        """Fill slots behind the watermark while the caller does something else; on disk when this ends, or `sync`."""
        if sum(piece.keys.nbytes for piece in pieces) < BACKGROUND_BYTES or self.directory is None:
            for piece in pieces:
                self._write(piece)
            yield
            return
        with ThreadPoolExecutor(1, "softdb-write") as thread:  # leaving waits for it, whatever happens
            done = [thread.submit(self._write, piece) for piece in pieces]
            yield
            for future in done:
                future.result()

    def _write(self, piece: Piece) -> None:
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
        """Raise Displaced where another program has written to files since this one did; none: to what it wrote."""
        for path in paths or self._written:
            before = self.marks.get(path.name)
            now = None if before is None else files.mark(path.name, self._folder)
            if now is not None and now != before:
                raise Displaced(f"{path} was overwritten by another program", path.name)
        if not paths:
            self._written.clear()

    def sync(self) -> None:
        """Bring what was written relaxed, and the names of new files, to disk."""
        while self._unsynced:
            path = min(self._unsynced)
            files.sync(path, self._folder)
            self._unsynced.discard(path)
        if self._unnamed and self.directory is not None:
            files.sync_directory(self.directory, self._folder)
        self._unnamed = False

    def fill(self, number: int, capacity: int, parts: Iterable[SegmentPart]) -> None:
        """Write a new segment's slots from the first on, part by part; on disk when this returns."""
        with contextlib.ExitStack() as open_files:
            put: dict[str, Callable[[bytes | memoryview], None]] = {}
            done = 0
            for part in parts:
                for column, data in part._asdict().items():
                    if data is None:
                        continue
                    if self.directory is None:
                        self._arrays[column, number][done : done + len(data)] = data
                        continue
                    if column not in put:
                        filling = files.filling(
                            self._path(column, number), self._offset(column, capacity), self._folder
                        )
                        put[column] = open_files.enter_context(filling)
                    put[column](_raw(data))
                done += len(part.keys)

    def overwrite(self, number: int, capacity: int, slot: int, keys: Array) -> None:
        """Replace keys of a segment that is not committed yet, from a slot on; on disk when this returns."""
        if self.directory is None:
            self._arrays["keys", number][slot : slot + len(keys)] = keys
            return
        start = self._offset("keys", capacity, slot)
        files.write_at(self._path("keys", number), _raw(keys), start, folder=self._folder)

    def like(self, schema: Schema) -> ColumnFiles:
        """The same directory's, for columns of another schema that are written aside."""
        return ColumnFiles(self.directory, schema, folder=self._folder)

    def take(self, other: ColumnFiles) -> None:
        """In memory: hold what another holds, too."""
        if self.directory is None:
            self._arrays |= other._arrays

    def rows(self, number: int, capacity: int) -> NDArray[np.int64]:
        """A segment's whole rows column, mapped; raises as `open`."""
        return self._column("rows", number, capacity)

    def remove(self, numbers: Iterable[int]) -> None:
        """Unlink the files of segments that the catalogue no longer knows; who has them mapped keeps them."""
        if self.directory is not None:
            for number in numbers:
                for column in self._all:
                    self.marks.pop(f"{column}-{number:08d}.npy", None)
                    files.remove(self._path(column, number), self._folder)

    def open(self, number: int, capacity: int) -> tuple[Array, Array | None]:
        """A segment's whole keys and values columns, mapped. Raises FileNotFoundError, CorruptionError."""
        keys = self._column("keys", number, capacity)
        return keys, self._column("values", number, capacity) if "values" in self._shapes else None

    def keep_only(self, keep: set[int]) -> None:
        """Drop the maps of other segments."""
        for column, number in list(self._arrays):
            if number not in keep:
                self._arrays.pop((column, number), None)
                self.marks.pop(f"{column}-{number:08d}.npy", None)

    def clean(self, keep: set[int]) -> None:
        """Remove files of segments that the catalogue does not know: appends or compactions that did not commit."""
        if self.directory is None:
            return
        for name in os.listdir(self.directory if self._folder is None else self._folder):
            if _NAME.fullmatch(name) and int(name.split("-")[1].removesuffix(".npy")) not in keep:
                with contextlib.suppress(IsADirectoryError, PermissionError):  # macOS says EPERM of a directory
                    files.remove(self.directory / name, self._folder)

    def _column(self, column: str, number: int, capacity: int) -> Array:
        known = self._arrays.get((column, number))
        if known is None:
            dtype, width = self._all[column]
            path = self._path(column, number)
            known = self._arrays[column, number] = _mapped(path, dtype, (capacity, *width), self._folder)
            if path.name not in self.marks:
                self._mark(path)
        return known

    def _offset(self, column: str, capacity: int, slot: int = 0) -> int:
        dtype, width = self._all[column]
        return len(header(dtype, (capacity, *width))) + _bytes(dtype, (slot, *width))

    def _path(self, column: str, number: int) -> Path:
        assert self.directory is not None  # in memory there are no files
        return _file(self.directory, column, number)


def checksum(data: Array) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(_raw(data))


@lru_cache(64)
def _file(directory: Path, column: str, number: int) -> Path:
    return directory / f"{column}-{number:08d}.npy"


def _raw(data: Array) -> memoryview:
    return np.ascontiguousarray(data).data.cast("B")


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return math.prod(shape, start=dtype.itemsize)


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], folder: int | None) -> Array:
    head = header(dtype, shape)
    expected = len(head) + _bytes(dtype, shape)
    try:
        opened = files.open_regular(path, folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise SoftDBError(f"{path.name} cannot be opened ({error}); raise the limit, or close something") from error
        raise CorruptionError(
            f"{path.name} cannot be read ({error}); mend the cause, or restore it from a copy"
        ) from error
    with opened as file:
        begins = file.read(len(head))
        size = file.seek(0, io.SEEK_END)
        if size != expected:
            raise CorruptionError(
                f"{path.name} has {size} bytes, {expected} expected; restore it from a copy, it was cut or replaced"
            )
        if begins != head:
            raise CorruptionError(
                f"{path.name} does not start as a {dtype} array of shape {shape} must; restore it from a copy"
            )
        return np.asarray(_Exposed(np.memmap(file, dtype, "r", len(head), shape)))
