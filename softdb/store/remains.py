"""What can still be read of a damaged catalogue, of either format, without opening it as a database.

Trees are found by their names in the schema, or else where SQLite puts them when it lays a catalogue out. Leaves that
no tree reaches any more, because a page above them is damaged, are looked for, unless the list of freed pages is
damaged, too: on those lie records that were deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from softdb.errors import BadInput, NotADatabase
from softdb.store import files, format
from softdb.store.catalog import State
from softdb.store.cells import Value
from softdb.store.filters import field_names
from softdb.store.log import Log
from softdb.store.pages import PAGE, Cell, Pages
from softdb.store.segments import MAX_ROWS, SegmentEntry

__all__ = ["Remains", "Run", "is_dead"]

_IDS = "sqlite_autoindex_records_1"  # SQLite's own index of the records' ids
_SORTED = {"settings", "indexes", "batches", _IDS}  # kept in index trees
_MAGIC = b"SQLite format 3\0"


class Run(NamedTuple):
    """Slots that version 1 has one checksum for."""

    segment: int
    slot: int
    length: int
    keys_crc: int
    values_crc: int | None


class Remains:
    """A catalogue's remains; its files stay open until `close`, and are only read."""

    def __init__(self, path: Path) -> None:
        """Raises NotADatabase where there is no catalogue, or another program's."""
        self.fields: list[str] = []
        self._roots: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(files.reading(path))
            except OSError as error:
                raise NotADatabase(
                    f"{path} cannot be read ({error}): ids and payloads were in it and nowhere else; restore it from a "
                    "copy. The vectors alone are in keys-*.npy: numpy.load reads them"
                ) from None
            log = None
            with contextlib.suppress(OSError):
                log = Log(opened.enter_context(files.reading(path.with_name(path.name + "-wal"))))
            self._pages(file, log)
            self.log_cut = log is not None and log.cut
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Let go of the files."""
        self._opened.close()

    def _pages(self, file: Any, log: Log | None) -> None:
        """Find the trees; the size of a page is SQLite's default unless that finds no records."""
        said = int.from_bytes(file.read(18)[16:18])
        sizes = [PAGE, said if said > 1 else 65536, *([log.size] if log is not None and log.size else [])]
        for size in dict.fromkeys(size for size in sizes if 512 <= size <= 65536 and not size & (size - 1)):
            self.pages = Pages(file, log, size)
            self.fields, self._roots = [], {}
            self.version = self._find()
            if "records" in self._roots:
                return

    def _find(self) -> int:
        """Find each tree's root, and return the format's version."""
        for cell in self.pages.walk(1):
            if cell.columns is None or len(cell.columns) != 5:
                continue
            kind, name, _, root, _ = cell.columns
            if not isinstance(name, str) or not isinstance(root, int):
                continue
            if (kind == "table" or name == _IDS) and self.pages.kind(root) in ((2, 10) if name in _SORTED else (5, 13)):
                self._roots.setdefault(name, root)
            elif kind == "index":
                self.fields += _field(name)
        first = self.pages.page(1)
        said = 0 if first is None else int.from_bytes(first[60:64])
        version = 1 if "batches" in self._roots or (said == 1 and "records" not in self._roots) else format.FORMAT
        for name, root in _laid_out(version):
            free = root not in self._roots.values()
            if free and self.pages.kind(root) in ((2, 10) if name in _SORTED else (5, 13)):
                self._roots.setdefault(name, root)
        return version

    @property
    def damaged(self) -> list[int]:
        """Pages that could not be read whole, as far as was looked."""
        return sorted(self.pages.damaged)

    def _cells(self, name: str) -> Iterator[Cell]:
        if name in self._roots:
            yield from self.pages.walk(self._roots[name], name not in _SORTED)

    def _rows(self, name: str) -> Iterator[tuple[Value, ...]]:
        return (cell.columns for cell in self._cells(name) if cell.columns is not None)

    # -- the small tables ------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Value]:
        """The settings that are as they were written; version 1 cannot tell."""
        found = {}
        for name, value, *crc in (row for row in self._rows("settings") if len(row) == 1 + self.version):
            plain = isinstance(value, int | str | None) and isinstance(name, str)
            if plain and (self.version == 1 or crc == [format.setting_crc(str(name), value)]):
                found[str(name)] = value
        return found

    def state(self) -> State | None:
        """Generation and next row number, None where they are lost."""
        for row in self._rows("state"):
            numbers = _numbers(row)
            if len(numbers) == 1 + self.version and (self.version == 1 or numbers[2] == format.state_crc(*numbers[:2])):
                return State(*numbers[:2])
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

    def runs(self) -> list[Run]:
        """Version 1's checksums."""
        found = []
        for row in self._rows("batches"):
            numbers = _numbers(row[:4])
            if len(row) == 5 and len(numbers) == 4 and (row[4] is None or isinstance(row[4], int)):
                found.append(Run(*numbers, row[4]))
        return sorted(found)

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
        width = 3 if self.version == 1 else 6
        for cell in self._with_orphans("records", 13):
            if cell.columns is None or (len(cell.columns) == width and cell.columns[0] is None):
                yield cell

    def _with_orphans(self, name: str, leaf: int) -> Iterator[Cell]:
        table = name not in _SORTED
        yield from self._cells(name)
        first, free = self.pages.page(1), self.pages.free()
        if first is None or not first.startswith(_MAGIC) or free is None:
            return
        for number in range(1, self.pages.count + 1):
            if number not in self.pages.seen and number not in free and self.pages.kind(number) == leaf:
                yield from (cell for cell in self.pages.leaf(number, table) if cell.columns is not None)


def is_dead(dead: dict[int, bytes], row: int) -> bool:
    """Whether a row has a tombstone."""
    packed = dead.get(row // format.CHUNK)
    bit = row % format.CHUNK
    return packed is not None and bool(packed[bit // 8] >> bit % 8 & 1)


def _numbers(row: tuple[Value, ...]) -> list[int]:
    """The whole numbers of a row that are none below zero."""
    return [one for one in row if isinstance(one, int) and one >= 0]


def _field(index: str) -> list[str]:
    """The field that an index of that name is of, if it is of one."""
    with contextlib.suppress(ValueError, BadInput):
        return [name for name in field_names([bytes.fromhex(index[6:]).decode()]) if format.field_index(name) == index]
    return []


def _laid_out(version: int) -> list[tuple[str, int]]:
    """Where SQLite puts the trees of a new catalogue, and of one that it has vacuumed."""
    connection = apsw.Connection(":memory:")
    try:
        connection.execute(format.tables(version))
        rows: list[Any] = connection.execute("SELECT name, rootpage FROM sqlite_schema").fetchall()
        return rows
    finally:
        connection.close()
