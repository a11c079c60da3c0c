"""The cost of opening a hostile directory is bounded by its size, not by its claims."""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import hostile_catalog
import pytest
from hostile_catalog import sparse, sql, state, tower
from worlds import holding

import softdb
from softdb.store.generation import SnapshotLoader

SECONDS, MEGABYTES = 60.0, 200  # of the CPU: what a hostile one could ask for takes minutes, a refusal one or two s
HUGE = 64 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return hostile_catalog.good(tmp_path / "db")


def bounded(work: Callable[[], Any]) -> float:
    """The CPU seconds of something; asserts that it took little memory."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    work()
    seconds = time.process_time() - begun
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert megabytes < MEGABYTES, f"{megabytes:.0f} MB"
    assert seconds < SECONDS, f"{seconds:.1f} s"
    return seconds


def refused(path: Path, mode: Any) -> None:
    with pytest.raises(softdb.SoftDBError):
        softdb.open(path, mode=mode)


def opened_or_refused(path: Path, mode: Any) -> None:
    try:
        with softdb.open(path, mode=mode) as db:
            len(db)
    except softdb.SoftDBError:
        pass


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_empty_segments_are_refused_unread(path: Path, mode: str) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 100 UNION ALL SELECT i + 1 FROM n WHERE i < 300100)"
    sql(f"INSERT INTO segments {many} SELECT i, 0, 64, 0 FROM n")(path)
    bounded(lambda: refused(path, mode))


def test_rows_of_files_that_are_all_holes_are_refused(path: Path) -> None:
    """More of them than a catalogue of this size can tell the live from the dead."""
    rows, count = 1 << 20, 600
    for number in range(1, count + 1):
        sparse(f"keys-{number:08d}.npy", (rows, hostile_catalog.WIDTH))(path)
    many = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
    sql("DELETE FROM segments", f"INSERT INTO segments {many} SELECT i, (i - 1) * {rows}, {rows}, {rows} FROM n")(path)
    state(3, rows * count)(path)
    bounded(lambda: refused(path, "r"))


def test_a_missing_file_is_looked_for_at_most_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time, since a compaction may have replaced it; then only where the generation has moved on."""
    loads, real = [0], SnapshotLoader.load

    def load(*args: Any) -> None:
        loads[0] += 1
        real(*args)

    monkeypatch.setattr(SnapshotLoader, "load", load)
    (path / "keys-00000000.npy").unlink()
    with pytest.raises(softdb.CorruptionError, match=r"keys-00000000\.npy is missing"):
        softdb.open(path, mode="r")
    assert loads[0] <= 2


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.parametrize("table", ["segments", "tombstones", "settings", "state", "records", "indexes", "gaps"])
def test_pages_in_a_circle_in_a_sparse_catalogue(path: Path, mode: str, table: str) -> None:
    """The steps that a query may take follow from the bytes on disk: the header claims 64 GB."""
    file = path / "catalog.sqlite"
    connection = apsw.Connection(str(file))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    actual: Any = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchall()
    root = int(actual[0][0])
    size = int(connection.pragma("page_size"))
    connection.close()
    leaf = 13 if table in ("segments", "tombstones", "state", "records", "gaps") else 10
    with file.open("r+b") as raw:
        raw.truncate(HUGE)
        raw.seek(28)
        raw.write(struct.pack(">I", HUGE // size))
        raw.seek((root - 1) * size)  # an inner page whose children are all itself
        page = bytearray(size)
        struct.pack_into(">BHHHBI", page, 0, leaf - 8, 0, 200, size - 2000, 0, root)
        for i in range(200):
            at = size - 2000 + 10 * i
            struct.pack_into(">H", page, 12 + 2 * i, at)
            page[at : at + 10] = struct.pack(">I", root) + bytes([5, 2, 1, 1, 1, 1])
        raw.write(page)
    bounded(lambda: opened_or_refused(path, mode))


@pytest.mark.parametrize("claimed", [0, HUGE])
@pytest.mark.parametrize("table", ["segments", "tombstones", "state", "records", "gaps"])
def test_pages_that_are_each_others_children(path: Path, table: str, claimed: int) -> None:
    with softdb.open(path) as db:
        db.compact()
    tower(table, claimed)(path)
    bounded(lambda: opened_or_refused(path, "r"))


def test_a_snapshot_copies_no_sparse_catalogue(path: Path, tmp_path: Path) -> None:
    claimed = 2 << 30
    with apsw.Connection(str(path / "catalog.sqlite")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = claimed // int(connection.pragma("page_size"))
    with (path / "catalog.sqlite").open("r+b") as raw:
        raw.truncate(claimed)
        raw.seek(28)
        raw.write(struct.pack(">I", pages))
    with softdb.open(path, mode="r") as db, pytest.raises(softdb.CorruptionError, match=f"claims {claimed} bytes"):
        bounded(lambda: db.snapshot(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_a_snapshot_copies_no_sparse_index(tmp_path: Path) -> None:
    with holding([[float(i % 7)] * 8 for i in range(2000)], path=tmp_path / "db") as db:
        db.build_index("ivf")
    (index,) = (tmp_path / "db" / "index").iterdir()
    os.truncate(index, HUGE)
    with apsw.Connection(str(tmp_path / "db" / "catalog.sqlite")) as connection:
        connection.execute("UPDATE indexes SET entry = json_set(entry, '$.bytes', ?)", (HUGE,))
    with softdb.open(tmp_path / "db", mode="r") as db:
        bounded(lambda: db.snapshot(tmp_path / "copy"))
    assert sum(file.stat().st_size for file in (tmp_path / "copy").rglob("*")) < MEGABYTES << 20
    with softdb.open(tmp_path / "copy", verify=True) as db:
        assert len(db) == 2000
