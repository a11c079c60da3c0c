"""The catalogue: one SQLite file in WAL mode. Changes take effect when SQLite commits. `format.py` has its format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Id, Schema, shown
from softdb.errors import CorruptionError, NotADatabase
from softdb.store import format
from softdb.store.budget import DENSEST, occupied, step_limit
from softdb.store.connect import BUSY, connect, damaged_catalog, has_no_log, typed
from softdb.store.entry import RecordEntry, plain
from softdb.store.format import CHUNK, FORMAT
from softdb.store.retired import Retired
from softdb.store.segments import MAX_ROWS, SegmentEntry
from softdb.store.snapshot import Rows

# the last two pragmas are for macOS, where fsync does not flush the drive's cache
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON")
_LIMIT = 1 << 62  # upper bound of generations and row numbers, far below int64's limit
_SETTINGS = "SELECT name, value, crc FROM settings"
Entries = dict[int, RecordEntry]
_GROUP = 256  # records in one statement: threads wait for Python's lock after each statement
_RECORD = ",(?, ?, ?, ?, ?, ?, ?, ?)"


class CatalogState(NamedTuple):
    """Counters in the catalogue, which commits advance."""

    generation: int
    next_row: int


class Catalog:
    """One connection to the catalogue. The caller serialises transactions and threads."""

    def __init__(self, connection: apsw.Connection, laid_out: bool, immutable: bool = False) -> None:
        self.connection, self.immutable = connection, immutable  # True: read without locks until a writer opens it
        self.laid_out = laid_out  # False if the file has no tables: its creation was not begun or was interrupted
        self._state: CatalogState | None = None  # the state as last read or written in the open transaction
        self.retired = Retired(connection)

    @classmethod
    def open(cls, path: Path | None, write: bool) -> Catalog:
        """Connect to a catalogue; path None: create one in memory. Raises SoftDBError, apsw.Error."""
        connection = None
        immutable = path is not None and not write and has_no_log(path)
        try:
            connection = connect(path, write, immutable)
            laid_out = format.recognise(connection, str(path))
            if write:
                if connection.readonly("main"):  # else only the first write would fail
                    raise CorruptionError(
                        f"{path} is read-only by its permissions or a damaged header; correct the permissions, "
                        "restore it from a copy, or open it with mode='r'"
                    )
                for pragma in _PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}")
            return cls(connection, laid_out, immutable)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, apsw.NotADBError):
                raise NotADatabase(f"{path} is not a softdb catalogue; choose another directory") from None
            if isinstance(error, apsw.CorruptError | apsw.FormatError | apsw.SQLError | UnicodeDecodeError):
                raise typed(error) from error
            raise

    def create(self, schema: Schema) -> None:
        """Create the tables and settings of an empty catalogue, in one transaction."""
        with self.connection:
            self.connection.execute(format.TABLES)
            self.connection.execute("INSERT INTO state VALUES(0, 0, ?)", (format.state_crc(0, 0),))
            for name, value in schema.described.items():
                self.put_setting(name, value)
            self.connection.execute(f"PRAGMA application_id = {format.APPLICATION}")
            self.connection.execute(f"PRAGMA user_version = {FORMAT}")
        self.laid_out = True

    def close(self) -> None:
        """Close the connection; if no other one is open, SQLite checkpoints the WAL."""
        self.connection.close()

    # -- transactions ----------------------------------------------------------------------------------------------

    def begin(self, write: bool) -> None:
        """Start a transaction; a read transaction sees one generation until it ends."""
        self._state = None
        self.connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    def commit(self) -> None:
        """Commit the transaction, so that its changes take effect."""
        self.connection.execute("COMMIT")

    def rollback(self, savepoint: str | None = None) -> None:
        """Roll back the transaction, or only to `savepoint`; do nothing if SQLite has rolled it back already."""
        self._state = None
        if self.connection.in_transaction:
            undo = "ROLLBACK" if savepoint is None else f"ROLLBACK TO {savepoint}; RELEASE {savepoint}"
            self.connection.execute(undo)

    def all(self, sql: str, bindings: Sequence[Any] = ()) -> list[Any]:
        """Return every row of a query."""
        rows: list[Any] = self._run_bounded(apsw.Cursor.fetchall, sql, bindings)
        return rows

    def one(self, sql: str, bindings: Sequence[Any] = ()) -> Any:
        """Return the first row of a query, or None."""
        return self._run_bounded(apsw.Cursor.fetchone, sql, bindings)

    def _run_bounded(self, fetch: Callable[[apsw.Cursor], Any], sql: str, bindings: Sequence[Any]) -> Any:
        """Run a query; raise CorruptionError if it takes more steps than a sound file of this size can need."""
        self.connection.set_progress_handler(step_limit(self._bytes()), 1000)
        try:
            return fetch(self.connection.execute(sql, bindings))
        except apsw.InterruptError as error:
            raise damaged_catalog("has a cycle of pages") from error
        finally:
            self.connection.set_progress_handler(None)

    def _bytes(self) -> int:
        """Return the bytes that the catalogue occupies, on disk or in memory: a damaged header may claim more."""
        files = (self.connection.filename, self.connection.filename_wal)
        return sum(map(occupied, files)) if files[0] else self._pages()

    # -- columns ---------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return all settings. Raises CorruptionError if one differs from its checksum."""
        return {name: self._require_sound(name, value, crc) for name, value, crc in self.all(_SETTINGS)}

    def setting(self, name: str, default: int = 0) -> int:
        """Return an integer setting, or the default if absent. Raises CorruptionError if below the default."""
        row = self.one(f"{_SETTINGS} WHERE name = ?", (name,))
        value = default if row is None else self._require_sound(*row)
        if type(value) is not int or value < default:
            raise damaged_catalog(f"has a damaged setting {name!r}")
        return value

    def _require_sound(self, name: str, value: Any, crc: int | None) -> Any:
        if isinstance(value, bytes) or crc != format.setting_crc(name, value):
            raise damaged_catalog(f"has a damaged setting, {shown(name)}")
        return value

    def put_setting(self, name: str, value: int | str | None) -> None:
        """Write a setting and its checksum."""
        row = (name, value, format.setting_crc(name, value))
        self.connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?, ?)", row)

    def state(self) -> CatalogState:
        """Return the generation and the next row number. Raises CorruptionError."""
        if self._state is not None and self.connection.in_transaction:
            return self._state
        rows: list[Any] = self.connection.execute("SELECT generation, next_row, crc FROM state LIMIT 2").fetchall()
        if len(rows) != 1:  # LIMIT 2, because damaged pages may form an endless cycle of rows
            raise damaged_catalog("has lost its state row" if not rows else "has several state rows")
        generation, next_row, crc = rows[0]
        sound = type(generation) is type(next_row) is int and 0 <= generation < _LIMIT and 0 <= next_row < _LIMIT
        if not sound or crc != format.state_crc(generation, next_row):
            raise damaged_catalog("has a damaged state")
        self._state = CatalogState(generation, next_row)
        return self._state

    def advance(self, rows: int) -> CatalogState:
        """Raise the generation by 1 and the next row number by `rows`, and return the new state."""
        state = self.state()
        new = CatalogState(state.generation + 1, state.next_row + rows)
        self.connection.execute(
            "UPDATE state SET generation = ?, next_row = ?, crc = ?", (*new, format.state_crc(*new))
        )
        self._state = new
        return new

    def segments(self) -> list[SegmentEntry]:
        """Return all segments, in row order. Raises CorruptionError."""
        entries = [SegmentEntry(*row) for row in self.all("SELECT * FROM segments ORDER BY first_row, segment")]
        for entry in entries:
            numbers = all(type(number) is int and number >= 0 for number in entry)
            if not numbers or not 0 < entry.used <= entry.capacity <= MAX_ROWS:
                raise damaged_catalog(f"has an impossible segment {entry}")
        return entries

    def put_segment(self, entry: SegmentEntry) -> None:
        """Write the entry of a new segment, or replace that of a segment whose number of used slots changed."""
        self.connection.execute("INSERT OR REPLACE INTO segments VALUES(?, ?, ?, ?)", entry)

    def delete(self, rows: NDArray[np.int64], in_slots: NDArray[np.int64]) -> None:
        """Delete the records of `rows`, and set the tombstones of `in_slots`: those of `rows` that segments hold."""
        self.retired.keep(_json(rows), self.state().generation + 1)
        self.connection.execute("DELETE FROM records WHERE row IN (SELECT value FROM json_each(?))", (_json(rows),))
        self.set_tombstones(in_slots)

    def set_tombstones(self, rows: NDArray[np.int64], dead: bool = True) -> None:
        """Set the tombstones of rows; with `dead` False clear them, for rows that no segment holds any more."""
        rows = np.sort(rows)
        chunks, starts = np.unique(rows // CHUNK, return_index=True)
        for chunk, chunk_rows in zip(chunks.tolist(), np.split(rows, starts)[1:], strict=True):
            stored = self.one("SELECT dead FROM tombstones WHERE chunk = ?", (chunk,))
            bits = np.zeros(CHUNK, np.bool_) if stored is None else _bits(stored[0]).copy()
            bits[chunk_rows % CHUNK] = dead
            if bits.any():
                packed = np.packbits(bits, bitorder="little").tobytes()
                self.connection.execute("INSERT OR REPLACE INTO tombstones VALUES(?, ?)", (chunk, packed))
            else:
                self.connection.execute("DELETE FROM tombstones WHERE chunk = ?", (chunk,))

    def dead(self) -> NDArray[np.int64]:
        """Return the rows that have a tombstone, ascending."""
        bitmaps = self._tombstones(self.state().next_row)
        return np.concatenate([np.empty(0, np.int64), *(i * CHUNK + np.flatnonzero(bits) for i, bits in bitmaps)])

    def live(self, rows: int) -> NDArray[np.bool_]:
        """Return a mask (rows,), True for each of the rows 0 … rows - 1 without a tombstone."""
        live = np.ones(-(-rows // CHUNK) * CHUNK, np.bool_)
        for chunk, bits in self._tombstones(rows):
            live[chunk * CHUNK : (chunk + 1) * CHUNK] = ~bits
        return live[:rows]

    def _tombstones(self, rows: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        sql = "SELECT chunk, CASE length(dead) WHEN ? THEN dead END FROM tombstones ORDER BY chunk"
        last = -1
        for chunk, packed in self.connection.execute(sql, (CHUNK // 8,)):
            if not last < chunk < -(-rows // CHUNK):
                raise damaged_catalog(f"has tombstones of rows from {chunk * CHUNK} on, but only {rows} rows")
            last = chunk
            yield chunk, _bits(packed)

    def capacity(self) -> int:
        """Return an upper bound of the number of rows: each takes at least one bit of the uncompressed file."""
        return min(8 * self._pages(), DENSEST * self._bytes())

    def _pragma(self, name: str) -> int:
        return int(self.connection.pragma(name))

    def _pages(self) -> int:  # bytes
        return self._pragma("page_count") * self._pragma("page_size")

    # -- the whole file --------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Free unused pages if there are many, then checkpoint; skip what a full disk or other connections prevent."""
        with self._without_waiting(apsw.FullError):
            if 4 * self._pragma("freelist_count") > self._pragma("page_count"):
                self.connection.execute("VACUUM")
        with self._without_waiting(apsw.FullError):
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def checkpoint(self) -> None:
        """Checkpoint, unless another connection uses the file. Raises apsw.Error, such as FullError.

        Called before anything is appended to the WAL: if an earlier sync failed, bytes in the WAL may not be on disk.
        """
        with self._without_waiting():
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    @contextlib.contextmanager
    def _without_waiting(self, *also: type[apsw.Error]) -> Iterator[None]:
        """Run a block without waiting for other connections; suppress busy errors, and errors of the types `also`."""
        try:
            self.connection.set_busy_timeout(0)
            with contextlib.suppress(apsw.BusyError, apsw.LockedError, *also):
                yield
        finally:
            self.connection.set_busy_timeout(BUSY)

    # -- records ---------------------------------------------------------------------------------------------------

    def add(
        self, first_row: int, ids: Iterable[Id], payloads: list[str | None], texts: list[str | None],
        key_crcs: Iterable[int | None], value_crcs: Iterable[int | None],
    ) -> None:  # fmt: skip
        """Insert records in consecutive rows. Raises apsw.ConstraintError if an id is stored already."""
        rows, crcs = range(first_row, first_row + len(payloads)), [map(format.text_crc, x) for x in (payloads, texts)]
        records = zip(rows, ids, payloads, key_crcs, value_crcs, *crcs, texts, strict=True)
        groups = (tuple(chain.from_iterable(islice(records, _GROUP))) for _ in range(len(rows) // _GROUP))
        self.connection.executemany(f"INSERT INTO records VALUES{(_GROUP * _RECORD)[1:]}", groups)
        self.connection.executemany(f"INSERT INTO records VALUES{_RECORD[1:]}", records)

    def lookup(self, ids: Sequence[Id], whole: bool = False, source: str = "records") -> dict[Id, RecordEntry]:
        """Return {id: entry} for the ids that are stored; `whole`: entries have payload and text."""
        with contextlib.suppress(TypeError):  # a mix of str and int cannot be sorted
            ids = sorted(ids)  # neighbours share pages: twice as fast over a million records
        columns = "r.payload, r.text" if whole else "NULL, NULL"
        sql = f"SELECT r.row, r.id, {columns} FROM json_each(?) j CROSS JOIN {source} r ON r.id = j.value"
        return {record.id: record for record in plain(self.connection.execute(sql, (json.dumps(ids),)).fetchall())}

    def read(self, rows: Rows, payloads: bool = True, texts: bool = False, *, source: str = "records") -> Entries:
        """Return {row: entry} for the rows that hold a record, with the requested columns. Raises CorruptionError."""
        columns = f"{'r.payload' if payloads else 'NULL'}, {'r.text' if texts else 'NULL'}"
        sql = f"SELECT r.row, r.id, {columns} FROM json_each(?) j CROSS JOIN {source} r ON r.row = j.value"
        return {record.row: record for record in plain(self.connection.execute(sql, (_json(rows),)).fetchall())}

    def keyless(self) -> NDArray[np.int64]:
        """Return the rows of records without a key, ascending. Cost: a scan of the SQL index `keyless`."""
        return np.sort(self.rows("SELECT row FROM records WHERE key_crc IS NULL"))

    def checksums(self, first: int, last: int) -> list[tuple[int, int, int | None]]:
        """Return (row, key_crc, value_crc) of each record with a key in rows first … last, in the order of rows."""
        where = "row BETWEEN ? AND ? AND key_crc NOTNULL ORDER BY row"
        return self.all(f"SELECT row, key_crc, value_crc FROM records WHERE {where}", (first, last))

    def damaged_texts(self, column: str, among: NDArray[np.int64] | None = None) -> list[int]:
        """Return the rows, of all or `among` some, whose `column` (payload or text) fails its checksum, ascending."""
        where, bound = ("", ()) if among is None else ("row IN (SELECT value FROM json_each(?)) AND", (_json(among),))
        differs = f"crc32(CAST({column} AS BLOB)) IS NOT {column}_crc"
        return [row for (row,) in self.all(f"SELECT row FROM records WHERE {where} {differs} ORDER BY row", bound)]

    def replace_texts(self, column: str, rows: Iterable[int], texts: Iterable[str | None]) -> None:
        """Replace the `column` ("payload" or "text") of stored records."""
        new = ((text, format.text_crc(text), row) for text, row in zip(texts, rows, strict=True))
        self.connection.executemany(f"UPDATE records SET {column} = ?, {column}_crc = ? WHERE row = ?", new)
        self.put_setting("payloads_replaced", self.state().generation + 1)

    def payloads_replaced(self) -> int:
        """Return the generation that last replaced payloads or texts in place, 0 if none did."""
        return self.setting("payloads_replaced")

    def matching(
        self,
        condition: str,
        bindings: Sequence[Any],
        *,
        among: NDArray[np.int64] | None = None,  # only these rows
        first: int = 0,  # only rows from this one on
    ) -> NDArray[np.int64]:
        """Return the rows whose record meets an SQL condition, in any order."""
        source, before = "records WHERE", list[Any]()
        if among is not None:  # NOT INDEXED: SQLite assumes that any index is selective, but these rows are few
            source, before = "records NOT INDEXED WHERE row IN (SELECT value FROM json_each(?)) AND", [_json(among)]
        elif first:
            source, before = "records NOT INDEXED WHERE row >= ? AND", [first]
        return self.rows(f"SELECT row FROM {source} {condition}", [*before, *bindings])

    def rows(self, sql: str, bindings: Sequence[Any] = (), kind: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
        """Return the rows that a query lists, joined by SQLite into a text: three times as fast as one object each."""
        try:
            return np.fromstring(self.one(f"SELECT group_concat(row) FROM ({sql})", bindings)[0] or "", kind, sep=",")
        except apsw.TooBigError:
            return np.fromiter((row for (row,) in self.connection.execute(sql, bindings)), kind)

    # -- declared fields -------------------------------------------------------------------------------------------

    def fields(self) -> tuple[str, ...]:
        """Return the payload fields that have an index, sorted."""
        indexes = self.all("SELECT name FROM sqlite_schema WHERE type = 'index' AND name GLOB 'field_*'")
        return tuple(sorted(field for (name,) in indexes for field in format.indexed_field(name)))

    def index_field(self, name: str) -> None:
        """Index a field, unless it is indexed already. Cost: one pass over the payloads."""
        if name not in self.fields():
            self.connection.execute(format.field_index_sql(name))

    def drop_field(self, name: str) -> None:
        """Drop a field's index, if it has one."""
        self.connection.execute(f"DROP INDEX IF EXISTS {format.field_index(name)}")


def _bits(packed: bytes) -> NDArray[np.bool_]:
    if not isinstance(packed, bytes) or len(packed) * 8 != CHUNK:
        raise damaged_catalog("has a tombstone of the wrong size")
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(np.bool_)


def _json(rows: NDArray[np.int64]) -> str:
    return json.dumps(rows.tolist())
