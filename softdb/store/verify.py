"""Verify a database: the catalogue must be consistent, and every record must match its checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator

import apsw
import numpy as np

from softdb.errors import CorruptionError
from softdb.store import gaps, textindex
from softdb.store.catalog import Catalog
from softdb.store.segments import checksum
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import damaged, damaged_texts
from softdb.store.store import Store

_LONG = 4000  # characters; longer JSON may hold an integer that is too long for Python (over 4300 digits)


def verify(store: Store) -> int:
    """Check a whole database, and return its number of records.

    Raises CorruptionError that lists all damage by file and rows. Cost: every byte is read once.
    """
    return store.run(_verify, store)


def _verify(store: Store) -> int:
    with store.read_transaction() as snapshot:
        damage: list[str] = []
        for check in (_check_catalogue, _check_row_columns, _check_records):
            try:
                damage += check(store, snapshot)
            except (apsw.CorruptError, apsw.IOError, CorruptionError) as error:
                damage.append(f"catalog.sqlite: {error}" if isinstance(error, apsw.Error) else str(error))
        damage = list(dict.fromkeys(damage))
        if damage:
            raise CorruptionError(f"{len(damage)} damaged: " + "; ".join(damage) + ": restore them from a copy")
        return snapshot.records


def _check_records(store: Store, snapshot: Snapshot) -> Iterator[str]:
    for segment in snapshot.segments:
        yield from map(str, damaged(store.checksums, segment))
    yield from map(str, damaged_texts(store.catalog.damaged_texts))


def _check_catalogue(store: Store, snapshot: Snapshot) -> list[str]:
    """Check the catalogue by SQLite, compare records with tombstones, check the text index; return messages."""
    damage = [f"catalog.sqlite: {row[0]}" for row in store.catalog.all("PRAGMA integrity_check") if row[0] != "ok"]
    if damage:
        return damage  # the results of queries on damaged pages mean nothing
    live = np.zeros(snapshot.size, np.bool_)
    keyed = "SELECT row FROM records WHERE key_crc NOTNULL"
    rows = np.fromiter((row for (row,) in store.catalog.connection.execute(keyed)), np.int64)
    positions = snapshot.positions(rows)
    inside = positions >= 0
    live[positions[inside]] = True
    wrong = int(np.count_nonzero(live != snapshot.live)) + int(np.count_nonzero(~inside))
    if wrong:
        damage.append(f"catalog.sqlite: {wrong} rows are live in one table and dead in the other")
    keyless = "SELECT row FROM records NOT INDEXED WHERE key_crc IS NULL ORDER BY row"
    if [row for (row,) in store.catalog.all(keyless)] != snapshot.keyless.tolist():  # SQLite misses surplus entries
        damage.append("catalog.sqlite: the index of records without a key does not match the records")
    valued = store.catalog.one("SELECT count(*) FROM records WHERE key_crc IS NULL AND value_crc NOTNULL")[0]
    if valued:
        damage.append(f"catalog.sqlite: {valued} records have a value and no key")
    unplaced = int(np.count_nonzero(snapshot.positions(store.catalog.dead()) < 0))
    if unplaced:
        damage.append(f"catalog.sqlite: {unplaced} rows that no segment holds are marked dead")
    if textindex.unlike(store.catalog.connection):
        damage.append("catalog.sqlite: the text index does not match the texts (drop_text_index(), then index_text())")
    return damage + _check_texts(store.catalog)


def _check_texts(catalog: Catalog) -> list[str]:
    """Check settings, ids, payloads and texts for content that softdb never writes, even if checksums match."""
    catalog.settings()  # raises CorruptionError
    catalog.payloads_replaced()  # raises CorruptionError
    wrong = "typeof(id) NOT IN ('integer', 'text') OR NOT (payload IS NULL OR json_valid(payload))"
    bad = [str(row) for (row,) in catalog.all(f"SELECT row FROM records WHERE {wrong} LIMIT 9")]
    for row, id_bytes, payload, text in catalog.connection.execute(
        "SELECT row, CAST(id AS BLOB), CAST(payload AS BLOB), CAST(text AS BLOB) FROM records "
        "WHERE typeof(id) = 'text' OR payload NOTNULL OR text NOTNULL"
    ):
        try:
            _, _, json_text = ("" if data is None else data.decode() for data in (id_bytes, text, payload))
            if len(json_text) > _LONG:
                json.loads(json_text)
        except (ValueError, RecursionError):
            bad.append(str(row))
    rows = ", ".join([*dict.fromkeys(bad)][:9])
    return [f"catalog.sqlite: ids, payloads or texts that are not text or JSON, rows {rows}"] if bad else []


def _check_row_columns(store: Store, snapshot: Snapshot) -> list[str]:
    """Return messages about row columns that differ from their checksum or do not ascend."""
    damage, missing = [], gaps.read(store.catalog)
    for number, column in ((segment.number, segment.rows) for segment in snapshot.segments):
        if column is not None and checksum(column) != missing.checksums.get(number):
            damage.append(f"rows-{number:08d}.npy differs from its checksum")
        elif column is not None and (np.diff(column) <= 0).any():
            damage.append(f"rows-{number:08d}.npy does not ascend")
    return damage
