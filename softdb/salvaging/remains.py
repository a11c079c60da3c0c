"""Contents that can still be read of a damaged catalogue without opening it as a database.

Trees are found by their names in the schema, or else where SQLite puts them when it lays a catalogue out. Leaves that
no tree reaches any more, because a page above them is damaged, are looked for, unless the list of freed pages is
damaged, too: on those lie records that were deleted.
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

_IDS = "sqlite_autoindex_records_1"  # SQLite's own index of the records' ids
_SORTED = {"settings", "indexes", _IDS}  # kept in index trees
_TREES = {"segments", "tombstones", "gaps", "state", "records", *_SORTED}
_TABLE = (5, 13)  # types of a table's pages
_WIDTH = 8  # columns of a record
_SMALL = 1 << 24  # bytes at most of an entry of the other tables: settings, segments, tombstones
_MAGIC = b"SQLite format 3\0"


class Remains:
    """A catalogue's remains; its files stay open until `close`, and are only read."""

    def __init__(self, path: Path) -> None:
        """Raises NotADatabase where there is no catalogue, or another program's."""
        with contextlib.ExitStack() as opened:
            try:
                file = _opened(path)
            except (OSError, apsw.Error) as error:
                raise NotADatabase(
                    f"{path} cannot be read ({error}): ids and payloads were in it and nowhere else; restore it from a "
                    "copy. The vectors alone are in keys-*.npy: numpy.load reads them"
                ) from None
            opened.callback(file.xClose)
            self._extents = _extents(path)
            self._file = file
            log = None
            with contextlib.suppress(OSError):
                log = Log(opened.enter_context(files.open_regular(path.with_name(path.name + "-wal"))))
            self._pages(file, log)
            self.log_cut = log is not None and log.cut
            self.checkpointed = False  # whether a WAL that is cut had been checkpointed, as far as can be seen
            if self.log_cut:  # then its good part may be older than the file
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
        """Find the trees. A page has the size that SQLite gives it, unless the records are found by another."""
        said = b""
        with contextlib.suppress(apsw.Error):
            said = file.xRead(2, 16)
        sizes = [PAGE, int.from_bytes(said, "big"), 65536, 0 if log is None else log.size]
        for size in [*(size for size in sizes if 512 <= size <= 65536 and not size & (size - 1)), PAGE]:
            self.pages = Pages(file, log, size, self._extents)
            self._find()
            if self._named:
                return

    def _find(self) -> None:
        """Find each tree's root."""
        self.tokenizer: str | None = None  # of the text index
        self.fields, self._roots, self._strange = list[str](), dict[str, int](), list[int]()
        for cell in self.pages.walk(1, most=_SMALL):
            if cell.columns is None or len(cell.columns) != 5:
                continue
            kind, name, _, root, sql = cell.columns
            if name == "texts":
                self.tokenizer = next((one for one in format.TOKENIZERS if format.text_index_sql(one) == sql), None)
            if name in _TREES and kind in ("table", "index") and isinstance(root, int):
                self._roots.setdefault(str(name), root)
            elif isinstance(root, int) and root and kind == "table":  # a virtual one has no pages of its own
                self._strange.append(root)
            elif isinstance(name, str) and kind == "index":
                self.fields += format.indexed_field(name)
        self._named = "records" in self._roots
        self._roots = {**dict(_laid_out()), **self._roots}

    def _generation(self) -> int:
        state = self.state()
        return -1 if state is None else state.generation

    def _adds_up(self) -> bool:
        """Return True if there are as many records as there should be: after half a checkpoint there are others."""
        seen = self.pages.seen.copy()
        try:
            keyless = [cell.columns is not None and cell.columns[3] is None for cell in self.records()]
            return keyless.count(False) == self.expected() and len(keyless) == sum(1 for _ in self.ids())
        finally:
            self.pages.seen = seen

    @property
    def damaged(self) -> list[int]:
        """Pages that could not be read whole, as far as was looked."""
        return sorted(self.pages.damaged)

    @property
    def found(self) -> bool:
        """True if there is a table of records: the schema says so, or there is an entry of one."""
        if self._named:
            return True
        seen = self.pages.seen.copy()
        try:
            return next(self.records(), None) is not None
        finally:
            self.pages.seen = seen

    def expected(self) -> int:
        """Expected number of records with a key, by rows and tombstones; 0 where these are lost."""
        state, gone = self.state(), self.settings().get("gone", 0)
        if state is None or not isinstance(gone, int):
            return 0
        return state.next_row - gone - sum(int.from_bytes(packed, "big").bit_count() for packed in self.dead().values())

    def _cells(self, name: str) -> Iterator[Cell]:
        if name in self._roots:
            most = None if name in ("records", _IDS) else _SMALL
            yield from self.pages.walk(self._roots[name], name not in _SORTED, most)

    def _rows(self, name: str) -> Iterator[tuple[Value, ...]]:
        return (cell.columns for cell in self._cells(name) if cell.columns is not None)

    # -- the small tables ------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Value]:
        """The settings that are as they were written."""
        found = {}
        for name, value, crc in (row for row in self._rows("settings") if len(row) == 3):
            plain = isinstance(value, int | str | None) and isinstance(name, str)
            if plain and crc == format.setting_crc(str(name), value):
                found[str(name)] = value
        return found

    def state(self) -> CatalogState | None:
        """Generation and next row number, None where they are lost."""
        for row in self._rows("state"):
            numbers = _numbers(row)
            if len(numbers) == 3 and numbers[2] == format.state_crc(*numbers[:2]):
                return CatalogState(*numbers[:2])
        return None

    def segments(self) -> list[SegmentEntry]:
        """Segments as they stand there; they may be wrong."""
        found = []
        for cell in self._cells("segments"):
            numbers = _numbers((cell.row, *(cell.columns or ())[1:]))
            if len(numbers) == 4 and numbers[3] <= numbers[2] <= MAX_ROWS and numbers[1] < 1 << 62:
                found.append(SegmentEntry(*numbers))
        return sorted(found, key=lambda entry: (entry.first_row, entry.number))

    def gaps(self) -> dict[int, Value]:
        """Segments that have a column of rows, and its checksum."""
        return {c.row: c.columns[1] for c in self._cells("gaps") if c.columns is not None and len(c.columns) == 2}

    def dead(self) -> dict[int, bytes]:
        """Tombstones, by chunk."""
        found = {}
        for cell in self._cells("tombstones"):
            packed = cell.columns[-1] if cell.columns else None
            if isinstance(packed, bytes) and len(packed) * 8 == format.CHUNK and cell.row >= 0:
                found[cell.row] = packed
        return found

    # -- the records -----------------------------------------------------------------------------------------------

    def ids(self) -> Iterator[tuple[int, str | int]]:
        """Rows and ids as the index of ids has them."""
        for cell in self._with_orphans(_IDS, 10):
            if cell.columns is not None and len(cell.columns) == 2:
                one, row = cell.columns
                if type(row) is int and (type(one) is str or type(one) is int):
                    yield row, one

    def records(self) -> Iterator[Cell]:
        """Entries of the table of records, damaged ones among them. Ask for everything else first."""
        for cell in self._with_orphans("records", 13):
            if cell.columns is None or (len(cell.columns) == _WIDTH and cell.columns[0] is None):
                yield cell

    def _with_orphans(self, name: str, leaf: int) -> Iterator[Cell]:
        table = name not in _SORTED
        yield from self._cells(name)
        first, free = self.pages.page(1), self.pages.free()
        if first is None or not first.startswith(_MAGIC) or free is None:
            return
        for root in self._strange:  # whatever their leaves look like
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


def _opened(path: Path) -> apsw.VFSFile:
    """A catalogue's file, by SQLite's own hand: closed by ours, it would lose the locks of connections to it."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("it is not a regular file")
    return apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])


def _extents(path: Path) -> list[tuple[int, int]] | None:
    """The ranges of a sparse file that are no holes; None where it is not sparse, or the system tells none."""
    found = path.stat()
    if found.st_blocks * 512 >= found.st_size or not hasattr(os, "SEEK_DATA"):
        return None
    descriptor = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC
    )  # stays open: closing it would end SQLite's locks on the file
    extents, end = list[tuple[int, int]](), 0
    try:
        while end < found.st_size:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
            extents.append((begin, end))
    except OSError as error:
        return extents if error.errno == errno.ENXIO else None  # ENXIO: no data any more
    return extents


def _numbers(row: tuple[Value, ...]) -> list[int]:
    """The whole numbers of a row that are none below zero."""
    return [one for one in row if isinstance(one, int) and one >= 0]


def _laid_out() -> list[tuple[str, int]]:
    """Pages where SQLite puts the trees of a new catalogue, and of one that it has vacuumed."""
    connection = apsw.Connection(":memory:")
    try:
        connection.execute(format.TABLES)
        rows: list[Any] = connection.execute("SELECT name, rootpage FROM sqlite_schema").fetchall()
        return rows
    finally:
        connection.close()
