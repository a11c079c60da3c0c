"""Bringing a database of an older format up to date. Guarantee: one transaction, so it is old or new, never between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from softdb.errors import CorruptionError
from softdb.store import format
from softdb.store.catalog import Catalog
from softdb.store.connect import typed_errors
from softdb.store.snapshot import Segment
from softdb.store.soundness import AT_ONCE, checksums

__all__ = ["runs", "upgrade"]

_MOVED = ("settings", "state", "records")  # tables that have gained columns


def upgrade(catalog: Catalog, segments: Sequence[Segment]) -> None:
    """Rewrite a catalogue of version 1 as one of the present version, in one transaction.

    Cost: every byte is read twice and the catalogue is written once.

    Raises CorruptionError where a vector differs from its old checksum: a new one would hide it for ever.
    """
    with typed_errors():
        catalog.begin(write=True)
        try:
            _rewrite(catalog, segments)
            catalog.commit()
        finally:
            catalog.rollback()


def _rewrite(catalog: Catalog, segments: Sequence[Segment]) -> None:
    execute = catalog.connection.execute
    damage = runs(catalog, segments)
    if damage:
        raise CorruptionError("; ".join(damage) + ": restore them from a copy, or open it with mode='r'")
    settings, state, fields = catalog.settings(), catalog.state(), catalog.fields()
    for name in fields:
        catalog.drop_field(name)
    for table in _MOVED:
        execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    _make_tables(catalog)
    catalog.version = format.FORMAT
    for name, value in settings.items():
        catalog.put_setting(name, value)
    execute("INSERT INTO state VALUES(?, ?, ?)", (*state, format.state_crc(*state)))
    _move_records(catalog, segments)
    for table in (*(f"old_{table}" for table in _MOVED), "batches"):
        execute(f"DROP TABLE {table}")
    for name in fields:
        catalog.index_field(name)
    execute(f"PRAGMA user_version = {format.FORMAT}")


def _make_tables(catalog: Catalog) -> None:
    """Those of the present version that are not there."""
    there = {name for (name,) in catalog.all("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    for statement in filter(None, (part.strip() for part in format.tables(format.FORMAT).split(";"))):
        if statement.split("(")[0].removeprefix("CREATE TABLE ") not in there:
            catalog.connection.execute(statement)


def _move_records(catalog: Catalog, segments: Sequence[Segment]) -> None:
    for segment in segments:
        catalog.connection.executemany("INSERT INTO records VALUES(?, ?, ?, ?, ?, ?)", _records(catalog, segment))
    stored, moved = (catalog.one(f"SELECT count(*) FROM {table}")[0] for table in ("old_records", "records"))
    if stored != moved:
        raise CorruptionError(f"catalog.sqlite has {stored} records, {moved} of them in segments; restore a copy")


def _records(catalog: Catalog, segment: Segment) -> Iterator[tuple[Any, ...]]:
    """The records of a segment as they are in the present version."""
    for low in range(0, len(segment), AT_ONCE):
        high = min(low + AT_ONCE, len(segment))
        rows = segment.rows_of(slice(low, high)).tolist()
        keys = checksums(segment.keys[low:high])
        values: list[Any] = [None] * len(keys) if segment.values is None else checksums(segment.values[low:high])
        crcs = dict(zip(rows, zip(keys, values, strict=True), strict=True))
        sql = "SELECT row, id, payload FROM old_records WHERE row BETWEEN ? AND ? ORDER BY row"
        for row, one, text in catalog.all(sql, (rows[0], rows[-1])):
            if row in crcs:
                yield row, one, text, *crcs[row], None if text is None else crc32(text.encode())


def runs(catalog: Catalog, stored: Iterable[Segment]) -> list[str]:
    """Runs of slots whose bytes do not give the checksum that version 1 kept, and slots that none covers."""
    damage = []
    segments = {segment.number: segment for segment in stored}
    covered = dict.fromkeys(segments, 0)
    for number, slot, count, *expected in catalog.all("SELECT * FROM batches ORDER BY segment, slot"):
        segment = segments.get(number)
        if segment is None or slot != covered[number] or slot + count > len(segment):
            damage.append(f"catalog.sqlite: a checksum of slots {slot} to {slot + count - 1} of no segment, {number}")
            continue
        covered[number] = slot + count
        for name, column, crc in zip(("keys", "values"), (segment.keys, segment.values), expected, strict=True):
            if column is not None and crc32(column[slot : slot + count].data.cast("B")) != crc:
                first = segment.first_row + slot
                damage.append(
                    f"{name}-{number:08d}.npy: rows {first} to {first + count - 1} differ from their checksum"
                )
    damage += [
        f"catalog.sqlite: slots from {covered[number]} of segment {number} have no checksum"
        for number, segment in segments.items()
        if covered[number] != len(segment)
    ]
    return damage
