"""Read the remains of a damaged catalogue without opening it as a database.

The root pages of b-trees are found by name in SQLite's schema table, or assumed to be those of a new catalogue. Leaves
that no tree reaches, because a page above them is damaged, are searched for (orphans); not so if the list of free pages
is damaged, too, because free pages hold deleted records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from softdb.errors import NotADatabase
from softdb.salvaging.cells import Value
from softdb.salvaging.log import Log
from softdb.salvaging.pages import PAGE, Cell, Pages
from softdb.store import files, format
from softdb.store.catalog import CatalogState
from softdb.store.segments import MAX_ROWS, SegmentEntry

_IDS = "sqlite_autoindex_records_1"  # SQLite's index of the records' ids
_SORTED = {"settings", "indexes", _IDS}  # tables and an index that SQLite stores as index b-trees
_TREES = {"segments", "tombstones", "gaps", "state", "records", *_SORTED}
_TABLE = (5, 13)  # types of a table's pages
_WIDTH = 8  # columns of the table of records
_SMALL = 1 << 24  # maximum bytes of an entry of the tables other than records
_MAGIC = b"SQLite format 3\0"


class Remains:
    """The remains of a damaged catalogue, whose files are open, read-only, until `close`."""

    def __init__(self, path: Path) -> None:
        """Open a catalogue and its log. Raises NotADatabase if the catalogue cannot be opened."""
        with contextlib.ExitStack() as opened:
            try:
                file = _open_catalogue(path)
            except (OSError, apsw.Error) as error:
                raise NotADatabase(
                    f"{path} cannot be read ({error}), and only it held ids and payloads; restore it from a copy. "
                    "The vectors alone are in keys-*.npy: numpy.load reads them"
                ) from None
            opened.callback(file.xClose)
            self._extents = _extents(path)
            self._file = file
            log = None
            with contextlib.suppress(OSError):
                log = Log(opened.enter_context(files.open_regular(path.with_name(path.name + "-wal"))))
            self._pages(file, log)
            self.log_cut = log is not None and log.cut
            self.checkpointed = False  # True if a damaged WAL seems to have been checkpointed completely
            if self.log_cut:  # the valid part of the log may be older than the file
                before = self._generation()
                self._pages(file, None)
                self.checkpointed = self._generation() > before and self._adds_up()
                if not self.checkpointed:
                    self._pages(file, log)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def _pages(self, file: apsw.VFSFile, log: Log | None) -> None:
        """Find the trees; if records are not found with the default page size, try other sizes."""
        stored = b""
        with contextlib.suppress(apsw.Error):
            stored = file.xRead(2, 16)
        sizes = [PAGE, int.from_bytes(stored, "big"), 65536, 0 if log is None else log.size]
        for size in [*(size for size in sizes if 512 <= size <= 65536 and not size & (size - 1)), PAGE]:
            self.pages = Pages(file, log, size, self._extents)
            self._find()
            if self._named:
                return

    def _find(self) -> None:
        """Find the root page of each b-tree: read SQLite's schema table, or assume the usual page."""
        self.tokenizer: str | None = None  # tokenizer of the text index, None if there is none
        self.fields, self._roots, self._strange = list[str](), dict[str, int](), list[int]()
        for cell in self.pages.walk(1, limit=_SMALL):
            if cell.columns is None or len(cell.columns) != 5:
                continue
            kind, name, _, root, sql = cell.columns
            if name == "texts":
                self.tokenizer = next((key for key in format.TOKENIZERS if format.text_index_sql(key) == sql), None)
            if name in _TREES and kind in ("table", "index") and isinstance(root, int):
                self._roots.setdefault(str(name), root)
            elif isinstance(root, int) and root and kind == "table":  # root 0: a virtual table, without pages
                self._strange.append(root)
            elif isinstance(name, str) and kind == "index":
                self.fields += format.indexed_field(name)
        self._named = "records" in self._roots
        with contextlib.closing(apsw.Connection(":memory:")) as usual:  # the roots of a new or a vacuumed catalogue
            usual.execute(format.TABLES)
            roots: list[Any] = usual.execute("SELECT name, rootpage FROM sqlite_schema").fetchall()
        self._roots = {**dict(roots), **self._roots}

    def _generation(self) -> int:
        state = self.state()
        return -1 if state is None else state.generation

    def _adds_up(self) -> bool:
        """Return True if the number of records is as expected: if a checkpoint was interrupted, it is not."""
        seen = self.pages.seen.copy()
        try:
            keyless = [cell.columns is not None and cell.columns[3] is None for cell in self.records()]
            return keyless.count(False) == self.expected() and len(keyless) == sum(1 for _ in self.ids())
        finally:
            self.pages.seen = seen

    @property
    def damaged(self) -> list[int]:
        """Numbers of the pages read so far that could not be read completely."""
        return sorted(self.pages.damaged)

    @property
    def has_records(self) -> bool:
        """True if the schema names the table of records, or if some record is found."""
        if self._named:
            return True
        seen = self.pages.seen.copy()
        try:
            return next(self.records(), None) is not None
        finally:
            self.pages.seen = seen

    def expected(self) -> int:
        """Return the expected number of records with a key, from rows and tombstones; 0 if the counts are lost."""
        state, gone = self.state(), self.settings().get("gone", 0)
        if state is None or not isinstance(gone, int):
            return 0
        return state.next_row - gone - sum(int.from_bytes(packed, "big").bit_count() for packed in self.dead().values())

    def _cells(self, name: str) -> Iterator[Cell]:
        if name in self._roots:
            limit = None if name in ("records", _IDS) else _SMALL
            yield from self.pages.walk(self._roots[name], name not in _SORTED, limit)

    def _rows(self, name: str) -> Iterator[tuple[Value, ...]]:
        return (cell.columns for cell in self._cells(name) if cell.columns is not None)

    # -- the small tables ------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Value]:
        """Return the settings that match their checksums."""
        settings = {}
        for name, value, crc in (row for row in self._rows("settings") if len(row) == 3):
            plain = isinstance(value, int | str | None) and isinstance(name, str)
            if plain and crc == format.setting_crc(str(name), value):
                settings[str(name)] = value
        return settings

    def state(self) -> CatalogState | None:
        """Return the generation and the next row number, None if they are lost."""
        for row in self._rows("state"):
            numbers = _numbers(row)
            if len(numbers) == 3 and numbers[2] == format.state_crc(*numbers[:2]):
                return CatalogState(*numbers[:2])
        return None

    def segments(self) -> list[SegmentEntry]:
        """Return the segments in row order, unchecked, because their entries have no checksums."""
        entries = []
        for cell in self._cells("segments"):
            numbers = _numbers((cell.row, *(cell.columns or ())[1:]))
            if len(numbers) == 4 and numbers[3] <= numbers[2] <= MAX_ROWS and numbers[1] < 1 << 62:
                entries.append(SegmentEntry(*numbers))
        return sorted(entries, key=lambda entry: (entry.first_row, entry.number))

    def gaps(self) -> dict[int, Value]:
        """Return {segment: checksum of its row column}."""
        return {c.row: c.columns[1] for c in self._cells("gaps") if c.columns is not None and len(c.columns) == 2}

    def dead(self) -> dict[int, bytes]:
        """Return {chunk: its tombstones}."""
        tombstones = {}
        for cell in self._cells("tombstones"):
            packed = cell.columns[-1] if cell.columns else None
            if isinstance(packed, bytes) and len(packed) * 8 == format.CHUNK and cell.row >= 0:
                tombstones[cell.row] = packed
        return tombstones

    # -- the records -----------------------------------------------------------------------------------------------

    def ids(self) -> Iterator[tuple[int, str | int]]:
        """Yield (row, id) for each entry of SQLite's index of ids."""
        for cell in self._with_orphans(_IDS, 10):
            if cell.columns is not None and len(cell.columns) == 2:
                name, row = cell.columns
                if type(row) is int and (type(name) is str or type(name) is int):
                    yield row, name

    def records(self) -> Iterator[Cell]:
        """Yield the entries of the table of records, also damaged ones. Call it last: unseen pages count as orphans."""
        for cell in self._with_orphans("records", 13):
            if cell.columns is None or (len(cell.columns) == _WIDTH and cell.columns[0] is None):
                yield cell

    def _with_orphans(self, name: str, leaf: int) -> Iterator[Cell]:
        table = name not in _SORTED
        yield from self._cells(name)
        first, free = self.pages.page(1), self.pages.free()
        if first is None or not first.startswith(_MAGIC) or free is None:
            return
        for root in self._strange:  # mark the leaves of other tables as seen
            for _ in self.pages.walk(root, self.pages.kind(root) in _TABLE):
                pass
        for number in self.pages.written():
            if number not in self.pages.seen and number not in free and self.pages.kind(number) == leaf:
                yield from (cell for cell in self.pages.leaf(number, table) if cell.columns is not None)


def is_dead(dead: dict[int, bytes], row: int) -> bool:
    """Return True if a row has a tombstone."""
    packed = dead.get(row // format.CHUNK)
    bit = row % format.CHUNK
    return packed is not None and bool(packed[bit // 8] >> bit % 8 & 1)


def _open_catalogue(path: Path) -> apsw.VFSFile:
    """Open a catalogue's file by SQLite: if Python opened and closed it, SQLite's locks in this process would end."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("it is not a regular file")
    return apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])


def _extents(path: Path) -> list[tuple[int, int]] | None:
    """Return the ranges of a sparse file that are no holes; None if it has no holes, or the system cannot tell."""
    status = path.stat()
    if status.st_blocks * 512 >= status.st_size or not hasattr(os, "SEEK_DATA"):
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # never closed: that would end SQLite's locks on the file
    extents, end = list[tuple[int, int]](), 0
    try:
        while end < status.st_size:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
            extents.append((begin, end))
    except OSError as error:
        return extents if error.errno == errno.ENXIO else None  # ENXIO: no data follows
    return extents


def _numbers(row: tuple[Value, ...]) -> list[int]:
    """Return the integers of a row that are not negative."""
    return [value for value in row if isinstance(value, int) and value >= 0]
