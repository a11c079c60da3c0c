"""Catalogues that no softdb has written: made with SQLite itself, from one that softdb has."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import apsw
import numpy as np
from worlds import holding

import softdb

Craft = Callable[[Path], None]

WIDTH = 4
RECORDS: list[tuple[int | str, list[float], Any]] = [
    ("a", [1.0, 2.0, 3.0, 4.0], {"x": 1, "tags": ["t", "u"]}),
    ("b", [0.0, 1.0, 0.0, 1.0], {"x": 2.5, "name": "b\N{GRINNING FACE}"}),
    (3, [1.0, 1.0, 1.0, 1.0], None),
    ("gone", [9.0, 9.0, 9.0, 9.0], {"x": 9}),
    ("d", [-1.0, 0.5, 0.25, 0.0], ["x"]),
]


def good(path: Path) -> Path:
    """Make a valid database, closed, its log folded in: four records, one dead row, a declared field."""
    with softdb.open(path, dim=WIDTH, fields=["x"]) as db:
        ids, keys, payloads = zip(*RECORDS, strict=True)
        db.insert(list(ids), list(keys), payloads=list(payloads))
        db.delete(["gone"])
    return path


def compacted(path: Path) -> Path:
    """A valid database after a compaction: a segment whose rows have gaps."""
    with softdb.open(good(path)) as db:
        db.compact()
    return path


@contextlib.contextmanager
def opened(path: Path) -> Iterator[apsw.Connection]:
    """A connection to a catalogue that lets everything happen to it."""
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    try:
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
        connection.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        yield connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def sql(*statements: str) -> Craft:
    """Statements run on the catalogue, as far as they go."""

    def craft(path: Path) -> None:
        with opened(path) as connection:
            for statement in statements:
                connection.execute(statement)

    return craft


def loosened(table: str, *statements: str | tuple[str, tuple[Any, ...]]) -> Craft:
    """Statements run on a table while it has no types and no constraints; afterwards its schema claims to have them."""

    def craft(path: Path) -> None:
        with opened(path) as connection:
            (original,) = value_of(connection, "SELECT sql FROM sqlite_schema WHERE name = ?", table)
            loose = re.sub(r"\b(STRICT,?|NOT NULL|TEXT|BLOB|ANY|INTEGER(?! PRIMARY))", "", original)
            _rewrite(connection, table, loose)
            for statement in statements:
                connection.execute(*((statement,) if isinstance(statement, str) else statement))
            _rewrite(connection, table, original)

    return craft


def value_of(connection: apsw.Connection, text: str, *bindings: Any) -> Any:
    """The one row of a query."""
    found = connection.execute(text, bindings).fetchone()
    assert found is not None, f"{text} {bindings}"
    return found


def _rewrite(connection: apsw.Connection, table: str, text: str) -> None:
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (text, table))
    cookie = connection.pragma("schema_version")
    connection.pragma("schema_version", cookie + 1)  # invalidates SQLite's cache of the schema


def patched(offset: int, data: bytes) -> Craft:
    """Bytes of the catalogue overwritten."""

    def craft(path: Path) -> None:
        with (path / "catalog.sqlite").open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return craft


def crafted_by(*crafts: Craft) -> Craft:
    """One after the other."""

    def craft(path: Path) -> None:
        for each in crafts:
            each(path)

    return craft


def state(generation: int, next_row: int) -> Craft:
    """Another state with its right checksum, as an attacker can compute it."""
    crc = crc32(f"{generation} {next_row}".encode())
    return sql(f"UPDATE state SET generation = {generation}, next_row = {next_row}, crc = {crc}")


def setting(name: str, value: int | str | float | None) -> Craft:
    """Another setting, with its checksum."""

    def craft(path: Path) -> None:
        with opened(path) as connection:
            crc = crc32(json.dumps([name, value]).encode())
            connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?, ?)", (name, value, crc))

    return craft


def payload(text: str | bytes | float) -> Craft:
    """Another payload of the record "a", with its checksum; no field is declared then, whose index would refuse it."""

    def craft(path: Path) -> None:
        sql("DROP INDEX IF EXISTS field_78")(path)
        crc = crc32(text.encode() if isinstance(text, str) else str(text).encode() if isinstance(text, float) else text)
        loosened("records", ("UPDATE records SET payload = ?, payload_crc = ? WHERE id = 'a'", (text, crc)))(path)

    return craft


def sparse(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Craft:
    """A column file of a shape, all holes."""

    def craft(path: Path) -> None:
        from softdb.store.segments import header

        head = header(np.dtype(dtype), shape)
        with (path / name).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize)

    return craft


def page_of(path: Path, table: str) -> tuple[int, int]:
    """Page size, and the number of a table's root page."""
    with opened(path) as connection:
        (root,) = value_of(connection, "SELECT rootpage FROM sqlite_schema WHERE name = ?", table)
        return int(connection.pragma("page_size")), int(root)


def tower(table: str, claimed: int = 0) -> Craft:
    """A table of eight levels of pages, each the child of the next 400 times over; the file may claim to be larger."""

    def craft(path: Path) -> None:
        size, root = page_of(path, table)
        file = path / "catalog.sqlite"
        data = bytearray(file.read_bytes())
        leaf = data[(root - 1) * size : root * size]
        pages = len(data) // size
        data += leaf  # becomes page pages + 1
        children = pages + 1
        for _ in range(8):
            data += _interior(size, children, 400)
            children = len(data) // size
        data[(root - 1) * size : root * size] = _interior(size, children, 400)
        data[28:32] = struct.pack(">I", max(len(data), claimed) // size)
        file.write_bytes(data)
        os.truncate(file, max(len(data), claimed))

    return craft


def _interior(size: int, child: int, count: int) -> bytes:
    cells = [struct.pack(">I", child) + bytes([1]) for _ in range(count)]
    page, at, pointers = bytearray(size), size, []
    for cell in cells:
        at -= len(cell)
        page[at : at + len(cell)] = cell
        pointers.append(at)
    page[:12] = struct.pack(">BHHHBI", 5, 0, count, at, 0, child)
    page[12 : 12 + 2 * count] = struct.pack(f">{count}H", *pointers)
    return bytes(page)


def journal(victim: str | None, pages: bool = False) -> Craft:
    """A hot rollback journal; it may claim to be part of a larger one, `victim`, which SQLite then would delete."""

    def craft(path: Path) -> None:
        data = (path / "catalog.sqlite").read_bytes()
        size = struct.unpack(">H", data[16:18])[0]
        magic, nonce = bytes.fromhex("d9d505f920a163d7"), 12345
        head = magic + struct.pack(">IIIII", int(pages), nonce, len(data) // size, 512, size)
        text = head.ljust(512, b"\0")
        if pages:
            page = bytes(size)
            total = (nonce + sum(page[size - 200 :: -200])) & 0xFFFFFFFF
            text += struct.pack(">I", 2) + page + struct.pack(">I", total)
        if victim is not None:
            name = os.fsencode(victim)
            total = sum(byte - 256 * (byte > 127) for byte in name) & 0xFFFFFFFF
            text += struct.pack(">I", (1 << 30) // size + 1) + name + struct.pack(">II", len(name), total) + magic
        (path / "catalog.sqlite-journal").write_bytes(text)

    return craft


def foreign_log(path: Path) -> None:
    """The log of another database beside this one."""
    other = path.with_name(path.name + " other")
    with holding([[7.0] * WIDTH], ids=["z"], path=other):
        shutil.copy(other / "catalog.sqlite-wal", path / "catalog.sqlite-wal")
    shutil.rmtree(other)
