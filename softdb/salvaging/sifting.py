"""Records of a damaged catalogue that can be trusted: the table of records is held against its checksums,
against the index of its ids, and against the tombstones.

An id has no checksum, but it is stored twice, in the table and in the index: where these differ, it is not known
which is right, and the record is not trusted. Where the index is lost, the id is the table's, and called unconfirmed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NoReturn
from zlib import crc32

import apsw

from softdb.salvaging.cells import Value
from softdb.salvaging.remains import Remains, is_dead

_AT_ONCE = 8192
_TWICE = "catalog.sqlite has two versions of it"

TABLES = """
CREATE TABLE found(row INTEGER PRIMARY KEY, id, payload TEXT, key_crc INTEGER, value_crc INTEGER, why TEXT, text TEXT,
                   keyless INTEGER NOT NULL DEFAULT 0,
                   sure INTEGER NOT NULL DEFAULT 0,
                   keys_file INTEGER, keys_slot INTEGER, values_file INTEGER, values_slot INTEGER);
CREATE TABLE known(row INTEGER, id, PRIMARY KEY(row, id)) WITHOUT ROWID;
"""


def sift(remains: Remains, scratch: apsw.Connection) -> None:
    """Fill the table `found` of an empty database with every record that there is a trace of.

    `why` says what is wrong with a record, NULL where nothing is; `sure` is 1 where the index confirms the id.
    """
    scratch.execute(TABLES)
    with scratch:
        _known(remains, scratch)
        _found(remains, scratch)
        _confirm(remains, scratch)


def _known(remains: Remains, scratch: apsw.Connection) -> None:
    """Rows and ids by the index."""
    sql = "INSERT OR IGNORE INTO known VALUES(?, ?)"
    for some in _batches((row, one) for row, one in remains.ids() if row >= 0):
        scratch.executemany(sql, some)


def _found(remains: Remains, scratch: apsw.Connection) -> None:
    """Records as the table has them."""
    sql = (
        "INSERT INTO found(row, id, payload, key_crc, value_crc, why, text, keyless) VALUES(?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT(row) DO UPDATE SET why = '{_TWICE}' "
        "WHERE found.id IS NOT excluded.id OR found.payload IS NOT excluded.payload OR found.why IS NOT excluded.why "
        "OR found.key_crc IS NOT excluded.key_crc OR found.value_crc IS NOT excluded.value_crc "
        "OR found.text IS NOT excluded.text"
    )
    rows = (_record(cell.row, cell.columns) for cell in remains.records() if cell.row >= 0)
    for some in _batches(rows):
        scratch.executemany(sql, some)


def _record(row: int, columns: tuple[Value, ...] | None) -> tuple[Value, ...]:
    """A line of `found`."""
    if columns is None:
        return _lost(row, None, "its bytes are no record")
    one, payload, key_crc, value_crc, payload_crc, text_crc, text = columns[1:]
    if not isinstance(one, str | int):
        return _lost(row, None, "its id is neither text nor a whole number")
    keyless = key_crc is None
    if not all(isinstance(crc, int) and 0 <= crc < 1 << 32 for crc in (key_crc, value_crc) if crc is not None) or (
        keyless and value_crc is not None
    ):
        return _lost(row, one, "its checksums are damaged")
    why = None if payload is None else _unsound(payload)
    for what, crc, part in (("text", text_crc, text), ("payload", payload_crc, payload)):
        if crc != (crc32(part.encode()) if isinstance(part, str) else None) or isinstance(part, int | float | bytes):
            why = f"catalog.sqlite: its {what} differs from its checksum"
    return row, one, None if why else payload, key_crc, value_crc, why, None if why else text, keyless


def _lost(row: int, one: Value, why: str) -> tuple[Value, ...]:
    return row, one, None, None, None, f"catalog.sqlite: {why}", None, False


def _unsound(payload: Value) -> str | None:
    try:
        if isinstance(payload, str):
            json.loads(payload, parse_constant=_refuse)
            return None
    except (ValueError, RecursionError):
        pass
    return "catalog.sqlite: its payload is not JSON"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and infinity, which JSON has no word for


def _confirm(remains: Remains, scratch: apsw.Connection) -> None:
    """Hold the records against the index and the tombstones."""
    scratch.execute(
        "UPDATE found SET sure = 1 FROM known WHERE known.row = found.row AND known.id IS found.id AND why IS NULL"
    )
    scratch.execute(
        "UPDATE found SET why = 'catalog.sqlite: its id is ' || substr(quote(found.id), 1, 80) || ' in the table, ' "
        "|| substr(quote(known.id), 1, 80) || ' in the index' "
        "FROM known WHERE known.row = found.row AND why IS NULL AND NOT sure"
    )
    scratch.execute(
        "INSERT INTO found(row, id, why) SELECT row, min(id), 'catalog.sqlite: the page that held it is damaged' "
        "FROM known WHERE row NOT IN (SELECT row FROM found) GROUP BY row"
    )
    scratch.execute(
        "UPDATE found SET id = known.id FROM known WHERE known.row = found.row AND (found.id IS NULL OR why = ?)",
        (_TWICE,),
    )
    _apply_tombstones(remains, scratch)
    scratch.execute("CREATE INDEX by_id ON found(id)")
    scratch.execute(
        "UPDATE found SET why = 'another record has its id' WHERE why IS NULL AND NOT sure AND id IN "
        "(SELECT id FROM found WHERE why IS NOT 'it is marked as deleted' GROUP BY id HAVING count(*) > 1)"
    )
    scratch.execute(
        "UPDATE found SET why = 'another record has its id' WHERE why IS NULL AND id IN "
        "(SELECT id FROM found WHERE why IS NULL GROUP BY id HAVING count(*) > 1)"
    )


def _apply_tombstones(remains: Remains, scratch: apsw.Connection) -> None:
    """Records with a tombstone are gone; where the index has them, they are doubtful: one of the two is wrong.

    Those without a key have one, too, while they live: of these the index alone can tell.
    """
    dead, low = remains.dead(), -1
    sql = "SELECT row FROM found WHERE why IS NULL AND NOT keyless AND row > ? ORDER BY row LIMIT ?"
    while rows := scratch.execute(sql, (low, _AT_ONCE)).fetchall():
        low = int(rows[-1][0])  # type: ignore[arg-type]
        gone = [row for row in rows if is_dead(dead, int(row[0]))]  # type: ignore[arg-type]
        scratch.executemany(
            "UPDATE found SET sure = 0, why = iif(sure, NULL, 'it is marked as deleted') WHERE row = ?", gone
        )


def _batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while some := list(itertools.islice(rows, _AT_ONCE)):
        yield some
