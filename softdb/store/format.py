"""Layout of a catalogue, and the check that a file is one.

The format, as MUSTs:

* application_id MUST be `APPLICATION`, user_version the format version; any other MUST be refused.
* The schema MUST be exactly `TABLES`, to the letter, and indexes of declared fields: one named `field_` + the
  hexadecimal UTF-8 of the names that lead to it, with NUL between them, over the two expressions of `paths.field_sql`;
  and a text index, `text_index_sql` with one of `TOKENIZERS` and the shadow tables that FTS5 gives it. Any of those may
  be dropped at any time.
  Whatever else there is (a trigger, a view, a table more) MUST be refused: it would run in the writes of who opens it.
* `records` holds exactly the live records. `key_crc`, `value_crc`, `payload_crc` and `text_crc` are the CRC-32 of the
  stored bytes of the key, of the value (NULL where the key serves), and of the UTF-8 of payload and text (NULL where
  there is none).
* A bit set in `tombstones` (chunk c, bit i, low bits first: row c * CHUNK + i) marks a row as dead; a row below
  `state.next_row` without one is live, if a segment holds it; what compaction adds is in `softdb.store.gaps`.
* A record without a key has `key_crc` and `value_crc` NULL. Its row MUST have a tombstone, or no segment may hold it:
  whatever lies in its slot is never read. Every other record MUST lie in a segment, without a tombstone.
* `segments` say how many slots are `used` (the watermark). Every commit that changes records raises
  `state.generation`; `state.crc` is the CRC-32 of "generation next_row" in decimal.
* What made the keys stands in settings, too: `softdb.store.keyed`.
* The setting `source` is JSON: which version of which table the records were taken from, absent where they came in
  otherwise. A commit that takes in more of that table MUST set it in the same transaction.
* `settings.crc` is the CRC-32 of the JSON text of [name, value]. A commit that replaces payloads or texts in place MUST
  set `payloads_replaced` to the generation it makes: what was worked out from them before is void.

Room is left for what is to come; each is a new format version: columns of int8 or bfloat16 (a `dtype` among the
settings, and the `.npy` header of that).
"""

from __future__ import annotations

import contextlib
import json
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

import apsw

from softdb.errors import BadInput, CorruptionError, FormatTooNew, NotADatabase
from softdb.store.connect import damaged_catalog
from softdb.store.paths import field_names, field_sql, parts_of, spelled

APPLICATION = 0x736F6674  # "soft"
FORMAT = 1
CHUNK = 8192  # rows a tombstone blob covers: 1 KiB
TOKENIZERS = {"words": "unicode61 remove_diacritics 2", "trigram": "trigram remove_diacritics 1"}

TABLES = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value ANY, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE state(generation INTEGER NOT NULL, next_row INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT;
CREATE TABLE records(row INTEGER PRIMARY KEY, id ANY NOT NULL UNIQUE, payload TEXT, key_crc INTEGER,
                     value_crc INTEGER, payload_crc INTEGER, text_crc INTEGER, text TEXT) STRICT;
CREATE INDEX keyless ON records(key_crc, value_crc) WHERE key_crc IS NULL;
CREATE TABLE segments(segment INTEGER PRIMARY KEY, first_row INTEGER NOT NULL, capacity INTEGER NOT NULL,
                      used INTEGER NOT NULL) STRICT;
CREATE TABLE tombstones(chunk INTEGER PRIMARY KEY, dead BLOB NOT NULL) STRICT;
CREATE TABLE indexes(name TEXT PRIMARY KEY, entry TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE gaps(segment INTEGER PRIMARY KEY, rows_crc INTEGER NOT NULL) STRICT;
"""


def recognise(connection: apsw.Connection, place: str) -> bool:
    """Return True if a catalogue is laid out; not where its creation was cut short.

    Raises NotADatabase, FormatTooNew, and CorruptionError where the schema is not what it must be.
    """
    application, version = int(connection.pragma("application_id")), int(connection.pragma("user_version"))
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
    if application != APPLICATION and (application or version or found):
        raise NotADatabase(f"{place} belongs to another program; choose another directory")
    if version > FORMAT:
        raise FormatTooNew(f"{place} has format version {version}, this softdb reads up to {FORMAT}; upgrade softdb")
    if not (application or found):
        return False
    if version != FORMAT:
        raise damaged_catalog(f"has no format version {version}")
    _require_schema(found)
    return True


def _require_schema(found: list[Any]) -> None:
    indexed = [name for name in TOKENIZERS if ("table", "texts", "texts", text_index_sql(name)) in found]
    expected = _schema(*indexed)
    given = {(kind, name): (table, sql) for kind, name, table, sql in found}
    strange = [f"{kind} {name!r}" for (kind, name), what in given.items() if not _ours(kind, name, what, expected)]
    missing = [f"{kind} {name!r}" for kind, name in set(expected) - set(given)]
    if strange or missing:
        raise CorruptionError(
            f"catalog.sqlite has {', '.join(strange) or 'nothing'} that softdb does not write"
            + (f" and lacks {', '.join(missing)}" if missing else "")
            + "; it was damaged or tampered with: restore the directory from a copy"
        )


def _ours(kind: str, name: str, what: tuple[str, str | None], expected: dict[tuple[str, str], Any]) -> bool:
    if (kind, name) in expected:
        return bool(expected[kind, name] == what)
    if kind != "index" or what[0] != "records" or not name.startswith("field_"):
        return False
    fields = indexed_field(name)
    return bool(fields) and field_index_sql(fields[0]) == what[1]


@cache
def _schema(tokenizer: str | None = None) -> dict[tuple[str, str], tuple[str, str | None]]:
    """Schema as SQLite itself stores our statements."""
    connection = apsw.Connection(":memory:")
    try:
        connection.execute(TABLES if tokenizer is None else TABLES + text_index_sql(tokenizer))
        rows: list[Any] = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
        return {(kind, name): (table, sql) for kind, name, table, sql in rows}
    finally:
        connection.close()


def field_index(name: str) -> str:
    """The name of a field's index."""
    return f"field_{chr(0).join(parts_of(name)).encode().hex()}"  # SQLite's names are case-blind, a field's are not


def indexed_field(index: str) -> tuple[str, ...]:
    """The field that an index of that name is of, if it is of one."""
    with contextlib.suppress(ValueError, BadInput):
        names = field_names([spelled(bytes.fromhex(index.removeprefix("field_")).decode().split("\0"))])
        return names if field_index(names[0]) == index else ()
    return ()


def field_index_sql(name: str) -> str:
    """The statement that makes it, as SQLite remembers it."""
    of_type, value = field_sql(parts_of(name))
    return f"CREATE INDEX {field_index(name)} ON records({of_type}, {value})"


def text_index_sql(tokenizer: str) -> str:
    """The statement that makes the text index, as SQLite remembers it: what a row holds is forgotten by its number."""
    options = f"content='', contentless_delete=1, tokenize='{TOKENIZERS[tokenizer]}'"
    return f"CREATE VIRTUAL TABLE texts USING fts5(text, {options})"


def state_crc(generation: int, next_row: int) -> int:
    """The checksum of a state."""
    return crc32(f"{generation} {next_row}".encode())


@lru_cache(256, typed=True)
def setting_crc(name: str, value: object) -> int:
    """The checksum of a setting."""
    return crc32(json.dumps([name, value]).encode())


def text_crc(text: str | None) -> int | None:
    """The checksum of a payload or a text; None where there is none."""
    return None if text is None else crc32(text.encode())
