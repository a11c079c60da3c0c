"""Find the trustworthy records of a damaged catalogue: compare the table of records with its checksums, with the index
of ids, and with the tombstones.

An id has no checksum, but it is stored twice, in the table and in the index. If they differ, either may be wrong, and
the record is not trusted. If the index is lost, the table's id is used, and reported as unconfirmed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import apsw

from softdb.salvaging.cells import Value
from softdb.salvaging.remains import Remains, is_dead

_AT_ONCE = 8192  # rows written or read at once
_TWICE = "catalog.sqlite has two versions of it"

TABLES = """
CREATE TABLE records(row INTEGER PRIMARY KEY, id, payload TEXT, key_crc INTEGER, value_crc INTEGER, why TEXT, text TEXT,
                     keyless INTEGER NOT NULL DEFAULT 0,
                     confirmed INTEGER NOT NULL DEFAULT 0,
                     keys_file INTEGER, keys_slot INTEGER, values_file INTEGER, values_slot INTEGER);
CREATE TABLE indexed(row INTEGER, id, PRIMARY KEY(row, id)) WITHOUT ROWID;
"""


def sift(remains: Remains, scratch: apsw.Connection) -> None:
    """Fill the table `records` of an empty database with every record of which there is a trace.

    The column `why` says why a record is lost (NULL: it is intact); `confirmed` is 1 if the index of ids agrees.
    """
    scratch.execute(TABLES)
    with scratch:
        for batch in _batches((row, name) for row, name in remains.ids() if row >= 0):
            scratch.executemany("INSERT OR IGNORE INTO indexed VALUES(?, ?)", batch)
        _add_records(remains, scratch)
        _confirm(remains, scratch)


def _add_records(remains: Remains, scratch: apsw.Connection) -> None:
    sql = (
        "INSERT INTO records(row, id, payload, key_crc, value_crc, why, text, keyless) VALUES(?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT(row) DO UPDATE SET why = '{_TWICE}' WHERE records.id IS NOT excluded.id "
        "OR records.payload IS NOT excluded.payload OR records.why IS NOT excluded.why "
        "OR records.key_crc IS NOT excluded.key_crc OR records.value_crc IS NOT excluded.value_crc "
        "OR records.text IS NOT excluded.text"
    )
    rows = (_record(cell.row, cell.columns) for cell in remains.records() if cell.row >= 0)
    for batch in _batches(rows):
        scratch.executemany(sql, batch)


def _record(row: int, columns: tuple[Value, ...] | None) -> tuple[Value, ...]:
    """Return one row of `records`, from column row to keyless, for an entry of the damaged table."""
    if columns is None:
        return _lost(row, None, "its bytes are no record")
    name, payload, key_crc, value_crc, payload_crc, text_crc, text = columns[1:]
    if not isinstance(name, str | int):
        return _lost(row, None, "its id is neither text nor a whole number")
    keyless = key_crc is None
    if not all(isinstance(crc, int) and 0 <= crc < 1 << 32 for crc in (key_crc, value_crc) if crc is not None) or (
        keyless and value_crc is not None
    ):
        return _lost(row, name, "its checksums are damaged")
    why = None if payload is None else _payload_error(payload)
    for noun, crc, value in (("text", text_crc, text), ("payload", payload_crc, payload)):
        if crc != (crc32(value.encode()) if isinstance(value, str) else None) or isinstance(value, int | float | bytes):
            why = f"catalog.sqlite: its {noun} differs from its checksum"
    return row, name, None if why else payload, key_crc, value_crc, why, None if why else text, keyless


def _lost(row: int, name: Value, why: str) -> tuple[Value, ...]:
    return row, name, None, None, None, f"catalog.sqlite: {why}", None, False


def _payload_error(payload: Value) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(payload, str):
            json.loads(payload, parse_constant=int)  # `int` refuses NaN and infinity, which JSON lacks
            return None
    return "catalog.sqlite: its payload is not JSON"


def _confirm(remains: Remains, scratch: apsw.Connection) -> None:
    """Compare the records with the index of ids and the tombstones, and set `why` and `confirmed`."""
    scratch.execute(
        "UPDATE records SET confirmed = 1 FROM indexed "
        "WHERE indexed.row = records.row AND indexed.id IS records.id AND why IS NULL"
    )
    scratch.execute(
        "UPDATE records SET why = 'catalog.sqlite: its id is ' || substr(quote(records.id), 1, 80) || ' in the table, '"
        " || substr(quote(indexed.id), 1, 80) || ' in the index' "
        "FROM indexed WHERE indexed.row = records.row AND why IS NULL AND NOT confirmed"
    )
    scratch.execute(
        "INSERT INTO records(row, id, why) SELECT row, min(id), 'catalog.sqlite: the page that held it is damaged' "
        "FROM indexed WHERE row NOT IN (SELECT row FROM records) GROUP BY row"
    )
    scratch.execute(
        "UPDATE records SET id = indexed.id FROM indexed "
        "WHERE indexed.row = records.row AND (records.id IS NULL OR why = ?)",
        (_TWICE,),
    )
    _apply_tombstones(remains, scratch)
    scratch.execute("CREATE INDEX by_id ON records(id)")
    scratch.execute(
        "UPDATE records SET why = 'another record has its id' WHERE why IS NULL AND NOT confirmed AND id IN "
        "(SELECT id FROM records WHERE why IS NOT 'it is marked as deleted' GROUP BY id HAVING count(*) > 1)"
    )
    scratch.execute(
        "UPDATE records SET why = 'another record has its id' WHERE why IS NULL AND id IN "
        "(SELECT id FROM records WHERE why IS NULL GROUP BY id HAVING count(*) > 1)"
    )


def _apply_tombstones(remains: Remains, scratch: apsw.Connection) -> None:
    """Mark records with a tombstone as lost; or as not confirmed if the index has them: then one of the two is wrong.

    Records without a key have a tombstone although they live, so only the index counts for them.
    """
    dead, low = remains.dead(), -1
    sql = "SELECT row FROM records WHERE why IS NULL AND NOT keyless AND row > ? ORDER BY row LIMIT ?"
    while rows := scratch.execute(sql, (low, _AT_ONCE)).fetchall():
        low = int(rows[-1][0])  # type: ignore[arg-type]
        deleted = [row for row in rows if is_dead(dead, int(row[0]))]  # type: ignore[arg-type]
        scratch.executemany(
            "UPDATE records SET confirmed = 0, why = iif(confirmed, NULL, 'it is marked as deleted') WHERE row = ?",
            deleted,
        )


def _batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(rows, _AT_ONCE)):
        yield batch
