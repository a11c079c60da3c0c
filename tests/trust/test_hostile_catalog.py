"""A hostile catalogue is refused by name or answered; it runs no code, ends, and changes nothing outside."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hostile_catalog import (
    Craft,
    crafted_by,
    foreign_log,
    journal,
    loosened,
    patched,
    payload,
    setting,
    sparse,
    sql,
    state,
    tower,
)
from hostile_child import SECONDS, Ended, Nursery

from softdb.store.format import field_index_sql

ENDLESS = "WITH RECURSIVE c(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
TABLES = ("settings", "state", "records", "segments", "tombstones", "indexes", "gaps")
NO_INDEX = "DROP INDEX field_78"


pytest_plugins = ["hostile_world"]

MODES = [pytest.param(("rw", True), id="rw"), pytest.param(("r", False), id="r", marks=pytest.mark.exhaustive)]


def tried(
    asked: Nursery,
    source: Path,
    place: Path,
    craft: Craft,
    mode: tuple[str, bool],
    tally: Counter[str],
    seconds: float = SECONDS,
) -> Ended:
    """Open a damaged copy; no file outside it may change."""
    path, victim = place / "db", place / "victim"
    shutil.copytree(source, path)
    victim.write_text("precious")
    craft(path)
    ended = asked.run("hostile_child:explore", path, *mode, seconds=seconds)
    tally["hostile: directories tried"] += 1
    tally["hostile: code runs"] += (place / "mark").exists()
    assert ended.decent, f"{mode[0]}: {ended}"
    assert victim.read_text() == "precious"
    assert {path.name for path in place.iterdir()} <= {"db", "victim", "db copy"}
    return ended


# -- foreign code and files --------------------------------------------------------------------------------------------

TAMPERED: dict[str, Craft] = {
    "a trigger on records": sql("CREATE TRIGGER e AFTER INSERT ON records BEGIN DELETE FROM records; END"),
    "a trigger on state": sql("CREATE TRIGGER e AFTER UPDATE ON state BEGIN DELETE FROM tombstones; END"),
    "a trigger on settings": sql("CREATE TRIGGER e BEFORE INSERT ON settings BEGIN SELECT RAISE(IGNORE); END"),
    "an endless trigger": sql(f"CREATE TRIGGER e AFTER INSERT ON records BEGIN INSERT INTO gaps {ENDLESS}; END"),
    "a view more": sql(f"CREATE VIEW endless AS {ENDLESS}"),
    "a view for segments": sql("DROP TABLE segments", f"CREATE VIEW segments AS SELECT x, x, x, x FROM ({ENDLESS})"),
    "a view for records": sql(
        "ALTER TABLE records RENAME TO r", "CREATE VIEW records AS SELECT * FROM r WHERE json_valid(payload)"
    ),
    "a view for settings": sql("ALTER TABLE settings RENAME TO s", "CREATE VIEW settings AS SELECT * FROM s"),
    "a table more": sql("CREATE TABLE more(x)"),
    "a virtual table": sql("DROP TABLE indexes", "CREATE VIRTUAL TABLE indexes USING fts5(name, entry)"),
    "a virtual table more": sql("CREATE VIRTUAL TABLE more USING rtree(id, a, b)"),
    "an index on an expression": sql(
        "CREATE INDEX e ON records(json_extract(payload, '$.x') || hex(zeroblob(100000)))"
    ),
    "a field's index on something else": sql("CREATE INDEX field_79 ON records(length(payload), row)"),
    "a field's index of no name": sql("CREATE INDEX field_zz ON records(json_type(payload, '$.\"x\"'))"),
    "a field's index that leaves out": sql(
        NO_INDEX,
        "CREATE INDEX field_78 ON records(json_type(payload, '$.\"x\"'), json_extract(payload, '$.\"x\"')) "
        "WHERE row > 1",
    ),
    **{
        f"a path's index {what}": sql(f"CREATE INDEX field_{name.encode().hex()} ON records({over})")
        for what, name, over in [
            ("on another field", "x\0y", field_index_sql("x.z").partition("(")[2][:-1]),
            ("over one name", "x\0y", field_index_sql(r"x\.y").partition("(")[2][:-1]),
            ("with an empty part", "x\0", field_index_sql("x").partition("(")[2][:-1]),
            ("of 20 numbers", "x" + "\0" + "\0".join("0" * 20), field_index_sql("x.0").partition("(")[2][:-1]),
        ]
    },
    "a unique index": sql("CREATE UNIQUE INDEX field_7a ON records(payload)"),
    "a heavy CHECK": sql(
        "DROP TABLE gaps",
        "CREATE TABLE gaps(segment INTEGER PRIMARY KEY, rows_crc INTEGER NOT NULL CHECK(length(zeroblob(900000000))))",
    ),
    "a generated column": sql(
        "DROP TABLE indexes",
        "CREATE TABLE indexes(name TEXT PRIMARY KEY, entry TEXT AS (hex(zeroblob(400000000)))) WITHOUT ROWID",
    ),
    "a column more": sql("ALTER TABLE records ADD COLUMN more TEXT DEFAULT 'x'"),
    "another collation": sql("DROP TABLE indexes", "CREATE TABLE indexes(name TEXT PRIMARY KEY COLLATE NOCASE, entry)"),
    "a foreign key": sql(
        "DROP TABLE gaps", "CREATE TABLE gaps(segment INTEGER PRIMARY KEY REFERENCES records ON DELETE CASCADE)"
    ),
    "a table without types": sql("DROP TABLE gaps", "CREATE TABLE gaps(segment, rows_crc)"),
    "a table less": sql("DROP TABLE tombstones"),
    "no tables": sql(NO_INDEX, *(f"DROP TABLE {t}" for t in TABLES)),
    "a schema of nonsense": sql("UPDATE sqlite_schema SET sql = 'CREATE TABLE x(' WHERE name = 'segments'"),
    "a schema without text": sql("UPDATE sqlite_schema SET sql = NULL WHERE name = 'segments'"),
    "a schema of numbers": sql("UPDATE sqlite_schema SET name = 5 WHERE name = 'segments'"),
    "a schema that is no text": sql("UPDATE sqlite_schema SET name = CAST(x'ff' AS TEXT) WHERE name = 'gaps'"),
    "a schema twice": sql("INSERT INTO sqlite_schema SELECT * FROM sqlite_schema WHERE name = 'segments'"),
    "version 0": sql("PRAGMA user_version = 0"),
    "version -1": sql("PRAGMA user_version = -1"),
    "version 99": sql("PRAGMA user_version = 99"),
    "another program's": sql("PRAGMA application_id = 7"),
    "nobody's": sql("PRAGMA application_id = 0"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TAMPERED)
def test_a_foreign_schema_is_refused_at_opening(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    ended = tried(asked, goods["good"], tmp_path, TAMPERED[name], mode, tally)
    assert ended.how in ("CorruptionError", "NotADatabase", "FormatTooNew"), ended
    assert "catalog.sqlite" in str(ended.told) or "format version" in str(ended.told)


# -- invalid numbers ---------------------------------------------------------------------------------------------------


def million_segments(path: Path) -> None:
    sql(
        "WITH RECURSIVE c(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM c LIMIT 100000) "
        "INSERT INTO segments SELECT x, 5, 1, 0 FROM c"
    )(path)


IMPOSSIBLE: dict[str, Craft] = {
    "next_row 2^62": state(2, 1 << 62),
    "next_row below the segments": state(2, 3),
    "next_row -1": state(2, -1),
    "generation -5": state(-5, 5),
    "generation 2^63 - 1": state((1 << 63) - 1, 6),
    "a state of another checksum": sql("UPDATE state SET generation = generation + 1"),
    "no state": sql("DELETE FROM state"),
    "a state of text": loosened("state", "UPDATE state SET next_row = 'many'"),
    "a state of a real": loosened("state", "UPDATE state SET next_row = 5.0"),
    "a state of null": loosened("state", "UPDATE state SET generation = NULL"),
    "used beyond capacity": sql("UPDATE segments SET used = capacity + 1"),
    "used negative": sql("UPDATE segments SET used = -1"),
    "capacity 2^39": crafted_by(
        sparse("keys-00000000.npy", (1 << 39, 4)), sql("UPDATE segments SET capacity = 1 << 39")
    ),
    "capacity and used 2^36": crafted_by(
        sparse("keys-00000000.npy", (1 << 36, 4)),
        sql("UPDATE segments SET capacity = 1 << 36, used = 1 << 36"),
        state(2, 1 << 36),
    ),
    "capacity negative": sql("UPDATE segments SET capacity = -64, used = -64"),
    "capacity 2^62": sql("UPDATE segments SET capacity = 1 << 62"),
    "first_row negative": sql("UPDATE segments SET first_row = -5"),
    "first_row 2^62": sql("UPDATE segments SET first_row = 1 << 62"),
    "a segment's number that leads out": loosened("segments", "UPDATE segments SET used = '../../x'"),
    "a segment of number -1": sql("UPDATE segments SET segment = -1"),
    "a segment of number 2^62": sql("UPDATE segments SET segment = 1 << 62"),
    "capacity of text": loosened("segments", "UPDATE segments SET capacity = '../../../etc/passwd'"),
    "first_row of a blob": loosened("segments", "UPDATE segments SET first_row = zeroblob(1000000)"),
    "used a real": loosened("segments", "UPDATE segments SET used = 5.0"),
    "a segment of nothing": sql("INSERT INTO segments VALUES(7, 5, 64, 64)"),
    "two segments of the same rows": sql("INSERT INTO segments VALUES(7, 0, 64, 5)"),
    "segments without files": million_segments,
    "gone 2^62": setting("gone", 1 << 62),
    "gone negative": setting("gone", -5),
    "gone of text": setting("gone", "5"),
    "a setting of another checksum": sql("UPDATE settings SET value = 'l2' WHERE name = 'metric'"),
    "dim 0": setting("dim", 0),
    "dim 2^40": setting("dim", 1 << 40),
    "dim of text": setting("dim", "4"),
    "dim of a real": setting("dim", 4.0),
    "dim null": setting("dim", None),
    "value_dim 2^62": setting("value_dim", 1 << 62),
    "num_classes 2^40": setting("num_classes", 1 << 40),
    "values and classes": crafted_by(setting("value_dim", 4), setting("num_classes", 4)),
    "a dtype of objects": setting("dtype", "object"),
    "a metric of ours no more": setting("metric", "manhattan"),
    "no settings": sql("DELETE FROM settings"),
    "settings that are blobs": loosened("settings", "UPDATE settings SET value = zeroblob(10)"),
    "settings of no Unicode": loosened("settings", "UPDATE settings SET value = CAST(x'ff' AS TEXT)"),
    "payloads_replaced of text": setting("payloads_replaced", "x"),
    "a tombstone at 2^50": sql("INSERT INTO tombstones VALUES(1 << 50, zeroblob(1024))"),
    "a tombstone at 2^62": sql("INSERT INTO tombstones VALUES(1 << 62, zeroblob(1024))"),
    "a tombstone at -1": sql("INSERT INTO tombstones VALUES(-1, zeroblob(1024))"),
    "a tombstone of 200 MB": sql("UPDATE tombstones SET dead = zeroblob(200000000)"),
    "a tombstone of text": loosened("tombstones", "UPDATE tombstones SET dead = 'dead'"),
    "a tombstone of null": loosened("tombstones", "UPDATE tombstones SET dead = NULL"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_cannot_be_are_refused(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    ended = tried(asked, goods["good"], tmp_path, IMPOSSIBLE[name], mode, tally)
    assert ended.how == "CorruptionError" or not ended.told["sound"], ended


GAPPED: dict[str, Craft] = {
    "gone 0": setting("gone", 0),
    "gone 2^62 and next_row with it": crafted_by(setting("gone", (1 << 62) - 4), state(3, 1 << 62)),
    "no gaps": sql("DELETE FROM gaps"),
    "gaps of text": loosened("gaps", "UPDATE gaps SET rows_crc = 'x'"),
    "last_segment 2^62": setting("last_segment", 1 << 62),
    "last_segment 2^63 - 1": setting("last_segment", (1 << 63) - 1),
    "last_segment of text": setting("last_segment", "x"),
    "rows that descend": lambda path: rows_of(path, [4, 2, 1, 0]),
    "rows beyond all": lambda path: rows_of(path, [0, 1, 2, 1 << 62]),
    "rows negative": lambda path: rows_of(path, [-(1 << 62), 1, 2, 4]),
}


def rows_of(path: Path, rows: list[int]) -> None:
    """Other rows in a column of gaps, its checksum right."""
    from zlib import crc32

    (file,) = path.glob("rows-*.npy")
    column = np.load(file, mmap_mode="r+")
    column[: len(rows)] = rows
    column.flush()
    sql(f"UPDATE gaps SET rows_crc = {crc32(np.array(rows, np.int64).tobytes())}")(path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GAPPED)
def test_gaps_that_cannot_be_end_decently(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    tried(asked, goods["compacted"], tmp_path, GAPPED[name], mode, tally)


# -- invalid records ---------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000
RECORDS: dict[str, Craft] = {
    "an id that is a real": loosened("records", "UPDATE records SET id = 1.5 WHERE id = 'a'"),
    "an id that is null": loosened("records", "UPDATE records SET id = NULL WHERE id = 'a'"),
    "an id that is a blob": loosened("records", "UPDATE records SET id = x'00ff' WHERE id = 'a'"),
    "an id of no Unicode": sql("UPDATE records SET id = CAST(x'ff61' AS TEXT) WHERE id = 'a'"),
    "an id of a lone surrogate": sql("UPDATE records SET id = CAST(x'eda080' AS TEXT) WHERE id = 'a'"),
    "a payload that is not JSON": payload("{nope"),
    "a payload of two": payload("1,2"),
    "a payload that opens a list": payload("[1"),
    "a payload that ends with a comma": payload('{"x":1},'),
    "an empty payload": payload(""),
    "a payload 100,000 deep": payload(DEEP + "]" * 100_000),
    "a payload that only opens": payload(DEEP),
    "a payload of NaN": payload('{"x":NaN}'),
    "a payload of 1e999": payload('{"x":1e999}'),
    "a payload of -Infinity": payload("-Infinity"),
    "a payload of 10,000 digits": payload('{"x":' + "9" * 10_000 + "}"),
    "a payload of JSON5": payload("{x:1,}"),
    "a payload that is a blob": payload(b'{"x":1}'),
    "a payload that is binary JSON": payload(bytes([0x7C]) + b"\x17x\x131" + b"\xff" * 8),
    "a payload that is a real": payload(1.5),
    "a payload of no Unicode": sql(NO_INDEX, "UPDATE records SET payload = CAST(x'22ff22' AS TEXT) WHERE id = 'a'"),
    "a payload of a lone surrogate": sql(
        NO_INDEX, "UPDATE records SET payload = CAST(x'22eda08022' AS TEXT) WHERE id = 'a'"
    ),
    "a payload of another checksum": sql("UPDATE records SET payload = '{\"x\":1}' WHERE id = 'a'"),
    "a key's checksum of text": loosened("records", "UPDATE records SET key_crc = 'x'"),
    "a key's checksum of null": loosened("records", "UPDATE records SET key_crc = NULL"),
    "a record in a dead row": sql("INSERT INTO records VALUES(3, 'back', NULL, 0, NULL, NULL, NULL, NULL)", "ANALYZE"),
    "a record back from the dead": sql("INSERT INTO records VALUES(3, 'back', NULL, 0, NULL, NULL, NULL, NULL)"),
    "a record of row 2^62": sql("INSERT INTO records VALUES(1 << 62, 'far', NULL, 0, NULL, NULL, NULL, NULL)"),
    "a record of row -1": sql("INSERT INTO records VALUES(-1, 'far', NULL, 0, NULL, NULL, NULL, NULL)"),
    "a record less": sql("DELETE FROM records WHERE id = 'a'"),
    "no records": sql("DELETE FROM records"),
    "no tombstones": sql("DELETE FROM tombstones"),
    "ids' index at odds": sql("UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema "
                              "WHERE name = 'field_78') WHERE name = 'sqlite_autoindex_records_1'"),
    "a table at another's root": sql("UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema "
                                     "WHERE name = 'segments') WHERE name = 'tombstones'"),
    "records at the schema's root": sql("UPDATE sqlite_schema SET rootpage = 1 WHERE name = 'records'"),
    "records at no root": sql("UPDATE sqlite_schema SET rootpage = 99999 WHERE name = 'records'"),
}  # fmt: skip
HARMLESS = {"a payload of 1e999"}  # JSON allows it and reads it as infinity, so the stored value comes back


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECORDS)
def test_impossible_records_are_detected(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    ended = tried(asked, goods["good"], tmp_path, RECORDS[name], mode, tally)
    assert ended.how == "CorruptionError" or not ended.told["sound"] or name in HARMLESS, ended


def test_a_record_in_the_row_that_comes_next_is_named_by_insert(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, tally: Counter[str]
) -> None:
    taken = sql("INSERT INTO records VALUES(5, 'far', NULL, 0, NULL, NULL, NULL, NULL)")
    tried(asked, goods["good"], tmp_path, taken, ("rw", True), tally)


# -- pages and logs ----------------------------------------------------------------------------------------------------


def written(name: str, data: bytes) -> Craft:
    def craft(path: Path) -> None:
        (path / name).write_bytes(data)

    return craft


def truncated(path: Path) -> None:
    file = path / "catalog.sqlite"
    file.write_bytes(file.read_bytes()[:5000])


PAGES: dict[str, Craft] = {
    "page size 512": patched(16, b"\x02\x00"),
    "page size 65536": patched(16, b"\x00\x01"),
    "page size 3": patched(16, b"\x00\x03"),
    "a reserve of 255 bytes": patched(20, b"\xff"),
    "UTF-16": patched(56, b"\x00\x00\x00\x02"),
    "encoding 7": patched(56, b"\x00\x00\x00\x07"),
    "schema format 99": patched(44, b"\x00\x00\x00\x63"),
    "auto-vacuum": patched(52, b"\x00\x00\x00\x05"),
    "2^32 - 1 pages": patched(28, b"\xff\xff\xff\xff"),
    "a free list that leads nowhere": patched(32, b"\x00\x00\x00\x02\x00\xff\xff\xff"),
    "write version 9": patched(18, b"\x09\x09"),
    "not in WAL mode": patched(18, b"\x01\x01"),
    "cut short": truncated,
    "only zeros": written("catalog.sqlite", bytes(40_000)),
    "text": written("catalog.sqlite", b"no database"),
    "a hot journal": journal(None),
    "a hot journal with a page": journal(None, pages=True),
    "a journal that is noise": written("catalog.sqlite-journal", b"x" * 5000),
    "a log that is noise": written("catalog.sqlite-wal", b"7\x7f\x06\x82" * 5000),
    "another database's log": foreign_log,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_pages_and_logs_that_cannot_be_end_decently(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    tried(asked, goods["good"], tmp_path, PAGES[name], mode, tally)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", ["segments", "records", "state", "tombstones", "gaps"])
def test_a_cyclic_table_ends(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, table: str, mode: tuple[str, bool], tally: Counter[str]
) -> None:
    """A few pages that are each other's children are 400^8 leaves to a naive reader."""
    tried(asked, goods["compacted"], tmp_path, tower(table), mode, tally, seconds=120)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "beside"])
def test_a_journal_that_names_another_file_deletes_nothing(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, mode: tuple[str, bool], inside: bool, tally: Counter[str]
) -> None:
    def craft(path: Path) -> None:
        name = "db/catalog.sqlite-mj1234569AB" if inside else "victim"
        (tmp_path / name).write_text("precious")
        journal(str(tmp_path / name))(path)

    ended = tried(asked, goods["good"], tmp_path, craft, mode, tally)
    assert ended.how == "CorruptionError", ended


@pytest.mark.parametrize("name", ["good", "compacted"])
def test_a_valid_catalogue_is_answered(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, name: str, tally: Counter[str]
) -> None:
    ended = tried(asked, goods[name], tmp_path, lambda path: None, ("rw", True), tally)
    assert ended.how == "fine", ended
    assert ended.told["refused"] == {}
    assert [one for one, _, _ in ended.told["held"]] == ["a", "b", 3, "d"]


def test_another_programs_database_is_not_changed(asked: Nursery, tmp_path: Path) -> None:
    import apsw

    (tmp_path / "db").mkdir()
    file = tmp_path / "db" / "catalog.sqlite"
    with contextlib.closing(apsw.Connection(str(file))) as connection:
        connection.execute("CREATE TABLE theirs(x)")
    before = file.read_bytes()
    assert asked.run("hostile_child:explore", tmp_path / "db", "rw").how == "NotADatabase"
    assert file.read_bytes() == before
