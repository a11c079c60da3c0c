"""The catalogue's format: exact schema, checksums of every record, the mark of acknowledged commits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import apsw
import numpy as np
import pytest
from worlds import holding

import softdb
from softdb.store import committed, format
from softdb.store.soundness import Damage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "db"
    ids, payloads = [f"r{i}" for i in range(20)], [{"n": i} for i in range(20)]
    with holding(np.eye(20, 3), np.eye(20, 2), payloads, ids=ids, path=path, fields=["n"]) as db:
        db.delete(["r3"])
    return path


def changed(path: Path, *statements: str) -> None:
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_version_that_never_was_is_corruption(path: Path) -> None:
    changed(path, "PRAGMA user_version = 0")
    with pytest.raises(softdb.CorruptionError, match="format version 0, which never existed"):
        softdb.open(path)


@pytest.mark.parametrize("file", ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-journal"])
def test_links_in_the_catalogues_place_are_not_followed(path: Path, tmp_path: Path, file: str) -> None:
    if (path / file).exists():
        (path / file).rename(tmp_path / "elsewhere")
    (path / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(softdb.NotADatabase, match="not a regular file"):
        softdb.open(path)


def test_a_pipe_in_the_catalogues_place_does_not_hang(path: Path) -> None:
    (path / "catalog.sqlite").unlink()
    os.mkfifo(path / "catalog.sqlite")
    with pytest.raises(softdb.NotADatabase, match="not a regular file"):
        softdb.open(path, mode="r")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE settings SET value = 4 WHERE name = 'dim'", "damaged setting, 'dim'"),
        ("UPDATE state SET generation = generation + 1", "damaged state"),
        ("UPDATE segments SET capacity = 1 << 40", "impossible segment"),
        ("UPDATE segments SET first_row = -1", "impossible segment"),
        ("INSERT INTO tombstones VALUES(1 << 50, zeroblob(1024))", "tombstones of rows"),
        ("UPDATE tombstones SET dead = zeroblob(1 << 20)", "tombstone of the wrong size"),
    ],
)
def test_an_impossible_catalogue_is_named(path: Path, statement: str, named: str) -> None:
    changed(path, statement)
    with pytest.raises(softdb.CorruptionError, match=named):
        softdb.open(path)


def test_verify_names_one_row(path: Path) -> None:
    flip(path / "keys-00000000.npy", 128 + 5 * 12)
    flip(path / "values-00000000.npy", 128 + 7 * 8)
    changed(path, "UPDATE records SET payload = '{\"n\":10}' WHERE row = 9")
    with softdb.open(path) as db, pytest.raises(softdb.CorruptionError) as caught:
        db.verify()
    actual = str(caught.value)
    assert "3 damaged" in actual
    assert "keys-00000000.npy: row 5 differs from its checksum" in actual
    assert "values-00000000.npy: row 7 differs from its checksum" in actual
    assert "catalog.sqlite: payload of row 9 differs from its checksum" in actual


def test_a_deleted_record_may_rot(path: Path) -> None:
    flip(path / "keys-00000000.npy", 128 + 3 * 12)
    with softdb.open(path) as db:
        assert db.verify() == 19


def test_an_update_does_not_give_rot_a_new_checksum(path: Path) -> None:
    flip(path / "keys-00000000.npy", 128 + 5 * 12)
    with softdb.open(path) as db:
        with pytest.raises(softdb.CorruptionError, match="row 5 differs"):
            db.update(["r5"], values=[[1, 1]])
        db.update(["r6"], values=[[1, 1]])
        db.upsert(["r5"], [[1, 2, 3]], [[1, 1]])
        assert db.verify() == 19


def test_damaged_rows_are_reported_as_ranges() -> None:
    assert str(Damage("keys-1.npy", [4])) == "keys-1.npy: row 4 differs from its checksum"
    assert str(Damage("keys-1.npy", [4, 5, 6, 9])) == "keys-1.npy: rows 4 to 6, 9 differ from their checksums"
    assert str(Damage("k", list(range(0, 40, 2)))).endswith("14 and 12 more spans differ from their checksums")


def test_a_lost_log_is_noticed(path: Path, tmp_path: Path) -> None:
    """Without a mark, SQLite would answer from before the last commits without a word."""
    copy = tmp_path / "copy"
    with softdb.open(path) as db:
        db.insert(["late"], [[1, 2, 3]], [[1, 2]])
        shutil.copytree(path, copy)
    (copy / "catalog.sqlite-wal").unlink()
    (copy / "catalog.sqlite-shm").unlink()
    for mode in ("r", "rw"):
        with pytest.raises(softdb.CorruptionError, match="put that file back"):
            softdb.open(copy, mode=mode)
    (copy / committed.NAME).unlink()
    with softdb.open(copy) as db:
        assert "late" not in db
        assert db.verify() == 19


def test_a_flipped_bit_in_the_log_is_noticed(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with softdb.open(path) as db:
        db.insert(["late"], [[1, 2, 3]], [[1, 2]])
        shutil.copytree(path, copy)
    (copy / "catalog.sqlite-shm").unlink()
    flip(copy / "catalog.sqlite-wal", 1000)
    with pytest.raises(softdb.CorruptionError, match="was acknowledged"):
        softdb.open(copy)


@pytest.mark.parametrize("content", [b"", b"\0" * 30, b"00000000000000000099 00000000\n", b"9" * 100])
def test_an_invalid_mark_is_ignored_and_rewritten(path: Path, content: bytes) -> None:
    (path / committed.NAME).write_bytes(content)
    assert len(softdb.open(path, mode="r")) == 19
    with softdb.open(path) as db:
        assert committed.last(path) == db.stats().generation
        db.delete(["r0"])
        assert committed.last(path) == db.stats().generation


def test_a_header_that_forbids_writing_is_reported_to_a_writer(path: Path) -> None:
    flip(path / "catalog.sqlite", 18)  # its write version: 3 is one that SQLite does not know
    with pytest.raises(softdb.CorruptionError, match="is read-only by its permissions"):
        softdb.open(path)
    with softdb.open(path, mode="r") as db:
        assert len(db) == 19


def test_an_emptied_catalogue_beside_data_is_no_new_database(path: Path) -> None:
    (path / "catalog.sqlite").write_bytes(b"")
    files = sorted(path.glob("*.npy"))
    with pytest.raises(softdb.CorruptionError, match="is empty"):
        softdb.open(path, dim=3)
    (path / committed.NAME).unlink()
    with pytest.raises(softdb.CorruptionError, match="is empty"):
        softdb.open(path, dim=3)
    assert sorted(path.glob("*.npy")) == files
    (path / "catalog.sqlite").unlink()
    (path / committed.NAME).touch()
    with pytest.raises(softdb.CorruptionError, match=r"lost its catalog\.sqlite"):
        softdb.open(path, dim=3)


def test_payload_texts_are_read_alone(path: Path) -> None:
    """Joined by commas, `1,2` would shift all payloads after it to other records."""
    changed(path, "DROP INDEX field_6e", "UPDATE records SET payload = '1,2' WHERE row = 4")
    with softdb.open(path) as db:
        with pytest.raises(softdb.CorruptionError, match="not JSON"):
            _ = db.get(["r4", "r5"]).payloads
        assert db.get(["r5"]).payloads == [{"n": 5}]
        with pytest.raises(softdb.CorruptionError, match="not text or JSON, rows 4"):
            db.verify()


def test_the_schema_text_is_what_sqlite_remembers() -> None:
    assert format.field_index_sql('a "b"'.replace('"', "'")).startswith("CREATE INDEX field_")
    connection = apsw.Connection(":memory:")
    connection.execute(format.TABLES)
    connection.execute(format.field_index_sql("it's"))
    connection.execute(f"PRAGMA application_id = {format.APPLICATION}")
    connection.execute(f"PRAGMA user_version = {format.FORMAT}")
    assert format.recognise(connection, "here") == format.FORMAT
