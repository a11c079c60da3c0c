"""The catalogue: one SQLite file in WAL mode, whose commit is the only commit point of a database.

The format, as MUSTs: application_id is `APPLICATION`, user_version is the format version (a reader MUST refuse a newer
one); the tables are those of `_TABLES`. `records` holds exactly the live records. A bit set in `tombstones` (chunk c,
bit i, low bits first: row c * CHUNK + i) marks a row as dead; a row below `state.next_row` without one is live, if a
segment holds it; what compaction adds is in `softdb.store.gaps`.
`segments` say how many slots are `used` (the watermark), `batches` carry the CRC-32 of consecutive slots. Every commit
that changes records raises `state.generation`. A commit that replaces payloads in place MUST set
`settings.payloads_replaced` to the generation it makes: what was worked out from payloads before is void. An index
`field_` + the hexadecimal UTF-8 of a name declares that field; it MUST be over the two expressions of
`filters.field_sql`, and any of them may be dropped at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Id, Metric, Schema
from softdb.errors import CorruptionError, FormatTooNew, NotADatabase
from softdb.store.filters import field_sql
from softdb.store.segments import SegmentEntry

__all__ = ["CHUNK", "Catalog", "State"]

APPLICATION = 0x736F6674  # "soft"
FORMAT = 1
CHUNK = 8192  # rows a tombstone blob covers: 1 KiB
BUSY = 10_000  # milliseconds that another connection is waited for
BATCH = 8192  # slots after which a CRC is closed and the next one begun: single inserts share one

_TABLES = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;
CREATE TABLE state(generation INTEGER NOT NULL, next_row INTEGER NOT NULL) STRICT;
CREATE TABLE records(row INTEGER PRIMARY KEY, id ANY NOT NULL UNIQUE, payload TEXT) STRICT;
CREATE TABLE segments(segment INTEGER PRIMARY KEY, first_row INTEGER NOT NULL, capacity INTEGER NOT NULL,
                      used INTEGER NOT NULL) STRICT;
CREATE TABLE batches(segment INTEGER, slot INTEGER, count INTEGER NOT NULL, keys_crc INTEGER NOT NULL,
                     values_crc INTEGER, PRIMARY KEY(segment, slot)) STRICT, WITHOUT ROWID;
CREATE TABLE tombstones(chunk INTEGER PRIMARY KEY, dead BLOB NOT NULL) STRICT;
CREATE TABLE indexes(name TEXT PRIMARY KEY, entry TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO state VALUES(0, 0);
"""


class State(NamedTuple):
    """What every commit moves."""

    generation: int
    next_row: int


class Catalog:
    """One connection to the catalogue. The caller keeps transactions and threads apart."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection

    @classmethod
    def open(cls, path: Path | None, write: bool) -> Catalog:
        """Connect to a catalogue; `None` is one in memory. Raises NotADatabase, FormatTooNew, CorruptionError."""
        try:
            connection = _connect(path, write)
            connection.set_busy_timeout(BUSY)
            if write:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
            catalog = cls(connection)
            catalog._recognise(path)
            return catalog
        except apsw.NotADBError:
            raise NotADatabase(f"{path} is not a softdb catalogue; choose another directory") from None
        except apsw.CantOpenError as error:
            raise NotADatabase(f"{path} cannot be opened ({error}); check the path and its permissions") from None
        except apsw.CorruptError as error:
            raise CorruptionError(f"catalog.sqlite is damaged ({error}); restore the directory from a copy") from error

    def _recognise(self, path: Path | None) -> None:
        application, version = self._pragma("application_id"), self._pragma("user_version")
        if application != APPLICATION and (application or version or self.tables()):
            raise NotADatabase(f"{path} belongs to another program; choose another directory")
        if version > FORMAT:
            raise FormatTooNew(f"{path} has format version {version}, this softdb reads up to {FORMAT}; upgrade softdb")

    def _pragma(self, name: str) -> int:
        return int(self.connection.pragma(name))

    def tables(self) -> int:
        """How many tables there are: none in a catalogue whose creation was cut short."""
        return int(self.one("SELECT count(*) FROM sqlite_schema WHERE type = 'table'")[0])

    def create(self, schema: Schema) -> None:
        """Lay out an empty catalogue, in one transaction."""
        settings = {
            "dim": schema.dim,
            "value_dim": schema.value_dim,
            "num_classes": schema.num_classes,
            "dtype": schema.dtype.name,
            "metric": schema.metric.value,
        }
        with self.connection:
            self.connection.execute(_TABLES)
            self.connection.executemany("INSERT INTO settings VALUES(?, ?)", settings.items())
            self.connection.execute(f"PRAGMA application_id = {APPLICATION}")
            self.connection.execute(f"PRAGMA user_version = {FORMAT}")

    def schema(self) -> Schema:
        """What the database stores. Raises CorruptionError where the settings are not what `create` wrote."""
        settings = dict(self.all("SELECT name, value FROM settings"))
        try:
            widths = [settings["dim"], settings["value_dim"], settings["num_classes"]]
            if type(widths[0]) is not int or not all(w is None or (type(w) is int and w > 0) for w in widths):
                raise ValueError(f"widths {widths}")
            dtype = np.dtype({"float32": np.float32, "float16": np.float16}[settings["dtype"]])
            return Schema(widths[0], widths[1], widths[2], dtype, Metric(settings["metric"]))
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptionError(
                f"catalog.sqlite has damaged settings ({error}); restore the directory from a copy"
            ) from None

    def close(self) -> None:
        """Let go of the file; the last connection folds the WAL into it."""
        self.connection.close()

    # -- transactions ----------------------------------------------------------------------------------------------

    def begin(self, write: bool) -> None:
        """Start a transaction; a reading one pins one generation until `commit`."""
        self.connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    def commit(self) -> None:
        """The commit point: after this, and only after this, a change has happened."""
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, if SQLite has not done so itself."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def all(self, sql: str, bindings: Sequence[Any] = ()) -> list[Any]:
        """Every row of a query."""
        return self.connection.execute(sql, bindings).fetchall()

    def one(self, sql: str, bindings: Sequence[Any] = ()) -> Any:
        """The one row of a query."""
        return self.connection.execute(sql, bindings).fetchone()

    # -- columns ---------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Generation and next row number."""
        found = self.one("SELECT generation, next_row FROM state")
        if found is None:
            raise CorruptionError("catalog.sqlite has lost its state row; restore the directory from a copy")
        return State(*found)

    def advance(self, rows: int) -> None:
        """One generation on, with that many rows assigned."""
        self.connection.execute("UPDATE state SET generation = generation + 1, next_row = next_row + ?", (rows,))

    def segments(self) -> list[SegmentEntry]:
        """All segments, in row order."""
        return [SegmentEntry(*row) for row in self.all("SELECT * FROM segments ORDER BY first_row, segment")]

    def put_segment(self, entry: SegmentEntry) -> None:
        """Record a new segment or a new watermark."""
        self.connection.execute("INSERT OR REPLACE INTO segments VALUES(?, ?, ?, ?)", entry)

    def last_batch(self, segment: int) -> tuple[int, int, int, int | None] | None:
        """(slot, count, keys_crc, values_crc) of a segment's last batch, if more may be added to it."""
        sql = "SELECT slot, count, keys_crc, values_crc FROM batches WHERE segment = ? ORDER BY slot DESC LIMIT 1"
        found = self.one(sql, (segment,))
        return found if found is not None and found[1] < BATCH else None

    def put_batch(self, segment: int, slot: int, count: int, keys_crc: int, values_crc: int | None) -> None:
        """Record the checksums of consecutive slots."""
        row = (segment, slot, count, keys_crc, values_crc)
        self.connection.execute("INSERT OR REPLACE INTO batches VALUES(?, ?, ?, ?, ?)", row)

    def bury(self, rows: NDArray[np.int64]) -> None:
        """Delete records and set their rows' tombstones."""
        self.connection.execute("DELETE FROM records WHERE row IN (SELECT value FROM json_each(?))", (_json(rows),))
        self._mark(rows, True)

    def forget(self, rows: NDArray[np.int64]) -> None:
        """Clear the tombstones of rows that no segment holds any more."""
        self._mark(rows, False)

    def _mark(self, rows: NDArray[np.int64], dead: bool) -> None:
        rows = np.sort(rows)
        chunks, starts = np.unique(rows // CHUNK, return_index=True)
        for chunk, part in zip(chunks.tolist(), np.split(rows, starts)[1:], strict=True):
            found = self.one("SELECT dead FROM tombstones WHERE chunk = ?", (chunk,))
            bits = np.zeros(CHUNK, np.bool_) if found is None else _bits(found[0]).copy()
            bits[part % CHUNK] = dead
            if bits.any():
                packed = np.packbits(bits, bitorder="little").tobytes()
                self.connection.execute("INSERT OR REPLACE INTO tombstones VALUES(?, ?)", (chunk, packed))
            else:
                self.connection.execute("DELETE FROM tombstones WHERE chunk = ?", (chunk,))

    def dead(self) -> NDArray[np.int64]:
        """The rows that have a tombstone, ascending."""
        found = self.all("SELECT chunk, dead FROM tombstones ORDER BY chunk")
        return np.concatenate(
            [np.empty(0, np.int64), *(chunk * CHUNK + np.flatnonzero(_bits(bits)) for chunk, bits in found)]
        )

    def live(self, rows: int) -> NDArray[np.bool_]:
        """Which of the rows 0 … rows - 1 have no tombstone."""
        live = np.ones(-(-rows // CHUNK) * CHUNK, np.bool_)
        for chunk, packed in self.connection.execute(
            "SELECT chunk, dead FROM tombstones WHERE chunk * ? < ?", (CHUNK, rows)
        ):
            live[chunk * CHUNK : (chunk + 1) * CHUNK] = ~_bits(packed)
        return live[:rows]

    # -- the whole file --------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Give free pages back, when they are many, and fold the WAL in; what is in use elsewhere waits."""
        self.connection.set_busy_timeout(0)
        try:
            # VACUUM needs room itself: on a full disk it waits, too
            with contextlib.suppress(apsw.BusyError, apsw.LockedError, apsw.FullError):
                if 4 * self._pragma("freelist_count") > self._pragma("page_count"):
                    self.connection.execute("VACUUM")
            with contextlib.suppress(apsw.BusyError, apsw.LockedError, apsw.FullError):
                self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            self.connection.set_busy_timeout(BUSY)

    def copy(self, path: Path) -> None:
        """The generation that this connection reads as a new file, on disk when this returns; its name may not be."""
        target = apsw.Connection(str(path))
        try:
            with target.backup("main", self.connection, "main") as backup:
                backup.step(-1)
        finally:
            target.close()

    # -- records ---------------------------------------------------------------------------------------------------

    def add(self, first_row: int, ids: Iterable[Id], payloads: Iterable[str | None]) -> None:
        """New records in consecutive rows. Raises apsw.ConstraintError when an id is stored already."""
        rows = ((first_row + i, one, text) for i, (one, text) in enumerate(zip(ids, payloads, strict=True)))
        self.connection.executemany("INSERT INTO records VALUES(?, ?, ?)", rows)

    def lookup(self, ids: Sequence[Id]) -> dict[Id, tuple[int, str | None]]:
        """Row and payload text of those ids that are stored."""
        with contextlib.suppress(TypeError):  # str and int mixed have no order
            ids = sorted(ids)  # neighbours share pages: twice as fast over a million records
        sql = "SELECT r.id, r.row, r.payload FROM json_each(?) j CROSS JOIN records r ON r.id = j.value"
        return {one: (row, text) for one, row, text in self.all(sql, (json.dumps(ids),))}

    def read(self, rows: NDArray[np.int64]) -> dict[int, tuple[Id, str | None]]:
        """Id and payload text of those rows that hold a record."""
        sql = "SELECT r.row, r.id, r.payload FROM json_each(?) j CROSS JOIN records r ON r.row = j.value"
        return {row: (one, text) for row, one, text in self.all(sql, (_json(rows),))}

    def set_payloads(self, rows: Iterable[int], payloads: Iterable[str | None]) -> None:
        """Replace the payloads of stored records."""
        pairs = zip(payloads, rows, strict=True)
        self.connection.executemany("UPDATE records SET payload = ? WHERE row = ?", pairs)
        self.connection.execute("INSERT OR REPLACE INTO settings SELECT 'payloads_replaced', generation + 1 FROM state")

    def payloads_replaced(self) -> int:
        """The generation that last replaced payloads in place, 0 if none has."""
        found = self.one("SELECT value FROM settings WHERE name = 'payloads_replaced'")
        return 0 if found is None else int(found[0])

    def matching(
        self,
        condition: str,
        bindings: Sequence[Any],
        *,
        among: NDArray[np.int64] | None = None,  # only these rows
        first: int = 0,  # only rows from this one on
    ) -> NDArray[np.int64]:
        """Rows whose record meets an SQL condition, in no order."""
        source, before = "records WHERE", list[Any]()
        if among is not None:  # NOT INDEXED: SQLite takes every index for selective, these rows are known to be few
            source, before = "records NOT INDEXED WHERE row IN (SELECT value FROM json_each(?)) AND", [_json(among)]
        elif first:
            source, before = "records NOT INDEXED WHERE row >= ? AND", [first]
        bound = [*before, *bindings]
        try:  # one text is three times as fast as a Python object a row
            text = self.one(f"SELECT group_concat(row) FROM {source} {condition}", bound)[0]
            return np.fromstring(text or "", np.int64, sep=",")
        except apsw.TooBigError:
            found = self.connection.execute(f"SELECT row FROM {source} {condition}", bound)
            return np.fromiter((row for (row,) in found), np.int64)

    # -- declared fields -------------------------------------------------------------------------------------------

    def fields(self) -> tuple[str, ...]:
        """The fields of the payload that have an index."""
        names = self.all("SELECT name FROM sqlite_schema WHERE type = 'index' AND name GLOB 'field_*'")
        return tuple(sorted(bytes.fromhex(name.removeprefix("field_")).decode() for (name,) in names))

    def index_field(self, name: str) -> None:
        """Index a field, if it is not. Cost: one pass over the payloads."""
        of_type, value = field_sql(name)
        self.connection.execute(f"CREATE INDEX IF NOT EXISTS {_field_index(name)} ON records({of_type}, {value})")

    def drop_field(self, name: str) -> None:
        """Drop a field's index, if it has one."""
        self.connection.execute(f"DROP INDEX IF EXISTS {_field_index(name)}")


def _connect(path: Path | None, write: bool) -> apsw.Connection:
    if path is None:
        return apsw.Connection(":memory:")
    if write:
        return apsw.Connection(str(path), apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    wal = path.with_name(path.name + "-wal")
    if os.access(path.parent, os.W_OK):
        return apsw.Connection(str(path), apsw.SQLITE_OPEN_READONLY)
    if wal.exists() and wal.stat().st_size:
        raise NotADatabase(f"{wal} holds commits that cannot be read from a read-only directory; open it writable once")
    return apsw.Connection(f"file:{quote(str(path))}?immutable=1", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _bits(packed: bytes) -> NDArray[np.bool_]:
    if len(packed) * 8 != CHUNK:
        raise CorruptionError("catalog.sqlite has a tombstone of the wrong size; restore the directory from a copy")
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(np.bool_)


def _field_index(name: str) -> str:
    return f"field_{name.encode().hex()}"  # SQLite's names are case-blind, a field's are not


def _json(rows: NDArray[np.int64]) -> str:
    return json.dumps(rows.tolist())
