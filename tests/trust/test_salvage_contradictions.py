"""Salvage and verify of databases whose parts contradict each other or claim too much."""

from __future__ import annotations

import contextlib
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from hostile_catalog import sql

import softdb
from softdb.formats import numbers_in
from softdb.salvaging.log import Log
from softdb.salvaging.pages import Pages
from softdb.salvaging.remains import Remains
from softdb.store import files

GOLDEN = Path(__file__).parent.parent / "golden"
DIM, PAGE = 4, 4096
FRAME = 24 + PAGE  # bytes, of a log


def numbered(path: Path, count: int = 20) -> softdb.SoftDB:
    db = softdb.open(path, dim=DIM)
    for i in range(count):
        db.insert([f"r{i}"], np.full((1, DIM), i), payloads=[{"i": i}])
    return db


def saved(report: dict[str, Any]) -> set[str]:
    """Ids of the salvaged records."""
    with softdb.open(report["path"], mode="r", verify=True) as db:
        return {str(one) for records in db.scan(10**6) for one in records.ids}


def flipped(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def killed(path: Path, count: int = 20, folded: bool = False) -> Path:
    """A database as a kill leaves it, with a log, which may have been folded in before."""
    db, left = numbered(path, count), path.with_name("killed")
    if folded:
        other = apsw.Connection(str(path / "catalog.sqlite"))
        other.execute("SELECT count(*) FROM records").fetchall()
        with db._store.writer.rewriting():  # another program's checkpoint would look like overwriting
            frames, done = other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        assert frames == done > 20
    shutil.copytree(path, left)
    (left / "catalog.sqlite-shm").unlink()
    if folded:
        other.close()
    db.close()
    return left


def test_a_record_with_a_tombstone_is_saved_and_listed(path: Path, tmp_path: Path) -> None:
    with numbered(path) as db:
        db.delete(["r3"])
    bits = np.zeros(8192, np.bool_)
    bits[[3, 5]] = True
    sql(f"UPDATE tombstones SET dead = x'{np.packbits(bits, bitorder='little').tobytes().hex()}'")(path)
    report = softdb.salvage(path, tmp_path / "saved")
    assert saved(report) == {f"r{i}" for i in range(20)} - {"r3"}
    assert report["unconfirmed"] == ["r5"]
    assert report["notes"] == ["catalog.sqlite counts 1 fewer records; some saved ones may have been deleted"]


def test_one_entry_of_the_index_of_ids_costs_no_other_record(path: Path, tmp_path: Path) -> None:
    numbered(path).close()
    file = path / "catalog.sqlite"
    data = file.read_bytes()
    assert data.count(b"r6\x06") == 1
    file.write_bytes(data.replace(b"r6\x06", b"r6\x07"))
    report = softdb.salvage(path, tmp_path / "saved")
    assert saved(report) == {f"r{i}" for i in range(20)}
    assert report["unconfirmed"] == ["r6"]


def test_damage_in_a_checkpointed_log_costs_no_record(path: Path, tmp_path: Path) -> None:
    left = killed(path, folded=True)
    flipped(left / "catalog.sqlite-wal", 32 + 10 * FRAME + 100)
    report = softdb.salvage(left, tmp_path / "saved")
    assert saved(report) == {f"r{i}" for i in range(20)}
    assert report["notes"] == []
    (left / "committed").unlink()  # then it is unknown whether there was more
    assert "catalog.sqlite-wal does not end" in softdb.salvage(left, tmp_path / "again")["notes"][0]


def test_a_catalogue_that_was_folded_in_half_is_not_taken_for_newer(path: Path) -> None:
    left = killed(path)
    log = left / "catalog.sqlite-wal"
    data = log.read_bytes()
    newest = {data[at + 3]: data[at + 24 : at + FRAME] for at in range(32, len(data) - FRAME + 1, FRAME)}
    with (left / "catalog.sqlite").open("r+b") as file:  # what a checkpoint does first: the state, not yet the records
        for number in (one for one in sorted(newest) if one < 4):
            file.seek((number - 1) * PAGE)
            file.write(newest[number])
    flipped(log, 32 + 30 * FRAME + 100)
    with contextlib.closing(Remains(left / "catalog.sqlite")) as remains:
        state = remains.state()
        assert not remains.checkpointed
        assert state is not None
        assert state.generation < 20


@pytest.mark.parametrize("at", [8, 12])
def test_a_damaged_salt_is_damage(path: Path, tmp_path: Path, at: int) -> None:
    left = killed(path)
    log = left / "catalog.sqlite-wal"
    data = log.read_bytes()
    frames = range((len(data) - 32) // FRAME)
    commits = [i for i in frames if data[32 + i * FRAME + 4 : 32 + i * FRAME + 8] != bytes(4)]
    flipped(log, 32 + (commits[-3] + 1) * FRAME + at)
    (left / "committed").unlink()
    report = softdb.salvage(left, tmp_path / "saved")
    assert saved(report) < {f"r{i}" for i in range(20)}
    assert "catalog.sqlite-wal does not end in a commit" in report["notes"][0]


def test_verify_reports_every_fault(path: Path) -> None:
    numbered(path).close()
    with softdb.open(path, mode="r") as db:
        sql("UPDATE settings SET crc = crc + 1 WHERE name = 'metric'")(path)
        flipped(path / "keys-00000000.npy", 128 + 5 * DIM * 4)
        with pytest.raises(softdb.CorruptionError, match=r"2 damaged: .*'metric'.*row 5 differs"):
            db.verify()


def test_a_catalogue_with_unreadable_records_is_not_taken_for_empty(path: Path, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "format-1" / "compacted" / "db", path)
    with contextlib.closing(apsw.Connection(str(path / "catalog.sqlite"))) as connection:
        connection.execute("CREATE TABLE moved AS SELECT * FROM records; DROP TABLE records")
        connection.execute("ALTER TABLE moved RENAME TO records")  # in another tree
    with (path / "catalog.sqlite").open("r+b") as file:
        file.write(bytes(PAGE))
    with pytest.raises(softdb.CorruptionError, match="holds no records that can be found"):
        softdb.salvage(path, tmp_path / "saved", metric="l2", num_classes=5)


@contextlib.contextmanager
def pages(path: Path, log: Any = None) -> Iterator[Pages]:
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
    try:
        yield Pages(file, log)
    finally:
        file.xClose()


def test_a_value_whose_pages_lead_to_themselves_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "one"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE t(row INTEGER PRIMARY KEY, a)")
    connection.execute("INSERT INTO t VALUES(1, ?)", (bytes(40_000),))
    connection.close()
    with pages(path) as sound:
        assert [cell.columns is not None for cell in sound.walk(2)] == [True]
    with path.open("r+b") as file:  # the second page of the value says that the first one follows
        file.seek(3 * PAGE)
        file.write(struct.pack(">I", 3))
    with pages(path) as damaged:
        assert [cell.columns for cell in damaged.walk(2)] == [None]


def test_a_log_that_claims_pages_which_are_nowhere_is_not_believed(path: Path) -> None:
    left = killed(path)
    with files.open_regular(left / "catalog.sqlite-wal") as file:
        log = Log(file)
        known = log.pages
        log.pages = 2**32 - 1
        with pages(left / "catalog.sqlite", log) as found:
            assert found.count == known


def test_an_archive_that_numpy_does_not_write_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", np.zeros((1000, 4), np.float32))
    with zipfile.ZipFile(tmp_path / "keys.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.write(tmp_path / "keys.npy", "keys.npy")
    with pytest.raises(softdb.BadInput, match="compressed in a way that NumPy does not write"):
        numbers_in(tmp_path / "keys.npz")
    np.savez_compressed(tmp_path / "good.npz", keys=np.ones((3, 4)))
    assert numbers_in(tmp_path / "good.npz").shape == (3, 4)
