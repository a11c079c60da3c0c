"""Layout of a catalogue, and the check that a file is a catalogue.

The format, as MUSTs:

* application_id MUST be `APPLICATION`, user_version the format version; any other MUST be refused.
* The schema MUST be exactly `TABLES`, to the letter, beside two optional kinds of objects, which may be dropped at any
  time. The index of a declared field is named `field_` + the hexadecimal UTF-8 of its path's names, joined by NUL, and
  indexes the two expressions of `paths.field_sql`. The text index is `text_index_sql` with one of `TOKENIZERS`, and the
  shadow tables of FTS5.
  Anything else (a trigger, a view, another table) MUST be refused: a trigger would run when softdb writes to the file.
* `records` holds exactly the live records. `key_crc`, `value_crc`, `payload_crc` and `text_crc` are the CRC-32 of the
  stored bytes of the key, of the value (NULL if the key serves as value), and of the UTF-8 of payload and text (NULL if
  the record has none).
* A bit set in `tombstones` (chunk c, bit i, low bits first: row c * CHUNK + i) marks a row as dead; a row below
  `state.next_row` without a tombstone is live, if a segment holds it. Compaction adds the rules of `softdb.store.gaps`.
* A record without a key has `key_crc` and `value_crc` NULL. Its row MUST have a tombstone, or no segment may hold it:
  its slot is never read. Every other record MUST lie in a segment, without a tombstone.
* `segments` states how many slots are `used`. Every commit that changes records raises
  `state.generation`; `state.crc` is the CRC-32 of "generation next_row" in decimal.
* Other settings name the origin of the keys, see `softdb.store.keyed`.
* The setting `next_id` is an integer above every id that the store has made; absent if it has made none. See `append`.
* The setting `source` is JSON that names the table and version from which the records were imported; absent otherwise.
  A commit that imports more of that table MUST set it in the same transaction.
* `settings.crc` is the CRC-32 of the JSON text of [name, value]. A commit that replaces payloads or texts in place MUST
  set `payloads_replaced` to the generation that it makes, which invalidates everything computed from them before.

Columns of int8 or bfloat16 would be a new format version: another `dtype` among the settings and in the `.npy` header.
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
CHUNK = 8192  # number of rows that one tombstone blob (1 KiB) covers
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
    """Return True if a file is a catalogue, and False if it is empty, as after an interrupted creation.

    Raises NotADatabase, FormatTooNew, and CorruptionError for another schema.
    """
    application, version = int(connection.pragma("application_id")), int(connection.pragma("user_version"))
    stored = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
    if application != APPLICATION and (application or version or stored):
        raise NotADatabase(f"{place} belongs to another program; choose another directory")
    if version > FORMAT:
        raise FormatTooNew(f"{place} has format version {version}, this softdb reads up to {FORMAT}; upgrade softdb")
    if not (application or stored):
        return False
    if version != FORMAT:
        raise damaged_catalog(f"has format version {version}, which never existed")
    _require_schema(stored)
    return True


def _require_schema(stored: list[Any]) -> None:
    indexed = [name for name in TOKENIZERS if ("table", "texts", "texts", text_index_sql(name)) in stored]
    expected = _schema(*indexed)
    actual = {(kind, name): (table, sql) for kind, name, table, sql in stored}
    strange = [f"{kind} {name!r}" for (kind, name), sql in actual.items() if not _is_ours(kind, name, sql, expected)]
    missing = [f"{kind} {name!r}" for kind, name in set(expected) - set(actual)]
    if strange or missing:
        has = [f"has {', '.join(strange)} that softdb does not write"] if strange else []
        lacks = [f"lacks {', '.join(missing)}"] if missing else []
        raise CorruptionError(
            f"catalog.sqlite {' and '.join(has + lacks)}: it was damaged or tampered with; "
            "restore the directory from a copy"
        )


def _is_ours(kind: str, name: str, definition: tuple[str, str | None], expected: dict[tuple[str, str], Any]) -> bool:
    if (kind, name) in expected:
        return bool(expected[kind, name] == definition)
    if kind != "index" or definition[0] != "records" or not name.startswith("field_"):
        return False
    fields = indexed_field(name)
    return bool(fields) and field_index_sql(fields[0]) == definition[1]


@cache
def _schema(tokenizer: str | None = None) -> dict[tuple[str, str], tuple[str, str | None]]:
    """Return the schema as SQLite stores softdb's statements: {(kind, name): (table, SQL)}."""
    with contextlib.closing(apsw.Connection(":memory:")) as connection:
        connection.execute(TABLES if tokenizer is None else TABLES + text_index_sql(tokenizer))
        rows: list[Any] = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema").fetchall()
        return {(kind, name): (table, sql) for kind, name, table, sql in rows}


def field_index(name: str) -> str:
    """Return the name of a field's index."""
    return f"field_{chr(0).join(parts_of(name)).encode().hex()}"  # hexadecimal: SQLite ignores the case of names


def indexed_field(index: str) -> tuple[str, ...]:
    """Return the field whose index has this name, in a tuple; an empty tuple if it is no name of a field's index."""
    with contextlib.suppress(ValueError, BadInput):
        names = field_names([spelled(bytes.fromhex(index.removeprefix("field_")).decode().split("\0"))])
        return names if field_index(names[0]) == index else ()
    return ()


def field_index_sql(name: str) -> str:
    """Return the statement that creates a field's index, exactly as SQLite stores it."""
    of_type, value = field_sql(parts_of(name))
    return f"CREATE INDEX {field_index(name)} ON records({of_type}, {value})"


def text_index_sql(tokenizer: str) -> str:
    """Return the statement that creates the text index. Its options let rows be deleted without their texts."""
    options = f"content='', contentless_delete=1, tokenize='{TOKENIZERS[tokenizer]}'"
    return f"CREATE VIRTUAL TABLE texts USING fts5(text, {options})"


def state_crc(generation: int, next_row: int) -> int:
    """Return the checksum of the table `state`."""
    return crc32(f"{generation} {next_row}".encode())


@lru_cache(256, typed=True)
def setting_crc(name: str, value: object) -> int:
    """Return the checksum of a setting."""
    return crc32(json.dumps([name, value]).encode())


def text_crc(text: str | None) -> int | None:
    """Return the checksum of a payload or a text; None if the record has none."""
    return None if text is None else crc32(text.encode())
