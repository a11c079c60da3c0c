"""A database as a directory: reopening, readers beside a writer, the lock, forks, damaged files."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from worlds import holding

import softdb
from softdb.store import disk, files
from softdb.store.catalog import Catalog
from softdb.store.committed import Committed
from softdb.store.format import FORMAT


def make(path: Path, n: int = 300, **extra: Any) -> np.ndarray:
    keys = np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)
    with softdb.open(path, dim=4, **extra) as db:
        for start in range(0, n, 100):
            stop = min(n, start + 100)
            db.insert(list(range(start, stop)), keys[start:stop], payloads=[{"n": i} for i in range(start, stop)])
    return keys


def test_reopening_shows_everything(path: Path) -> None:
    keys = make(path)
    for mode in ("rw", "r"):
        with softdb.open(path, mode=mode, verify=True) as db:
            assert len(db) == 300
            np.testing.assert_array_equal(db.get(list(range(300))).keys.numpy(), keys)
            assert db[299].payload == {"n": 299}


def test_a_lost_handle_frees_the_lock_at_once(path: Path) -> None:
    make(path)
    gc.collect()
    gc.disable()
    try:
        for mode in ("rw", "r", "rw"):
            db = softdb.open(path, mode=mode)
            assert db.search([1, 0, 0, 0]).ids == softdb.open(path, mode="r").search([1, 0, 0, 0]).ids
            if mode == "rw":
                db.delete([0])
                db.insert([0], [[1, 0, 0, 0]])
            with pytest.raises(AttributeError):
                db.add(1)  # type: ignore[attr-defined]
            del db
    finally:
        gc.enable()
    with softdb.open(path) as db:
        assert db.verify() == 300


def test_deleted_records_stay_deleted(path: Path) -> None:
    make(path)
    with softdb.open(path) as db:
        db.delete(list(range(0, 300, 2)))
    with softdb.open(path) as db:
        assert len(db) == 150
        assert 0 not in db
        assert 0 not in {i for hit in db.search(np.eye(4), k=150).ids for i in hit}
        db.insert([0], np.ones((1, 4)))
        assert db.verify() == 151


def test_segments_open_with_plain_numpy(path: Path) -> None:
    keys = make(path)
    pieces = [np.load(file, mmap_mode="r") for file in sorted(path.glob("keys-*.npy"))]
    np.testing.assert_array_equal(np.concatenate(pieces)[:64], keys[:64])
    assert all(piece.shape[1] == 4 and piece.dtype == np.float32 for piece in pieces)


def test_a_reader_sees_later_commits_after_refresh(path: Path) -> None:
    make(path)
    with softdb.open(path) as writer, softdb.open(path, mode="r") as reader:
        writer.insert(["new"], np.ones((1, 4)), payloads=[{"n": -1}])
        assert len(reader) == 300
        assert "new" not in reader
        with pytest.raises(softdb.UnknownId, match=r"refresh\(\) shows it"):
            reader.get("new")
        assert reader.refresh() == writer.stats().generation
        assert len(reader) == 301
        assert reader["new"].payload == {"n": -1}


def test_a_filter_refreshes_a_reader_that_fell_behind(path: Path) -> None:
    make(path)
    with softdb.open(path) as writer, softdb.open(path, mode="r") as reader:
        writer.upsert([5], np.ones((1, 4)), payloads=[{"n": 5, "x": True}])
        hits = reader.search(np.ones((1, 4)), k=3, where={"n": 5})
        assert hits.ids[0][0] == 5
        assert len(reader) == 300


def test_hits_of_deleted_records_are_a_stale_read(path: Path) -> None:
    make(path)
    with softdb.open(path) as writer, softdb.open(path, mode="r") as reader:
        hits = reader.search(np.ones((1, 4)), k=300)
        writer.delete([7])
        with pytest.raises(softdb.StaleRead, match="1 of 300 hits"):
            _ = hits.ids


def test_a_second_writer_is_refused_by_name(path: Path) -> None:
    make(path)
    with softdb.open(path), pytest.raises(softdb.DatabaseLocked, match=f"written by process {os.getpid()}, this one"):
        softdb.open(path)
    softdb.open(path).close()


CHILD = """
import sys, numpy as np, softdb
db = softdb.open(sys.argv[1])
db.insert(["child"], np.ones((1, 4)))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_leaves_no_lock_and_no_loss(path: Path) -> None:
    make(path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(softdb.DatabaseLocked, match=f"process {child.pid}"):
        softdb.open(path)
    with softdb.open(path, mode="r") as reader:
        assert "child" in reader
    child.kill()
    child.communicate()
    with softdb.open(path, verify=True) as db:
        assert "child" in db
        assert len(db) == 301


def test_a_handle_travels_as_its_path(path: Path) -> None:
    make(path)
    with softdb.open(path) as db, pickle.loads(pickle.dumps(db)) as copy:
        assert copy.stats().mode == "r"
        assert len(copy) == 300


def test_orphans_of_a_cut_append_are_removed_and_overwritten(path: Path) -> None:
    keys = make(path, 300)
    orphan = path / "keys-00000099.npy"
    orphan.write_bytes(b"half a header")
    with softdb.open(path) as db:
        assert not orphan.exists()
        db.insert(["more"], np.ones((1, 4)))
        np.testing.assert_array_equal(db.get(list(range(300))).keys.numpy(), keys)


def test_bytes_behind_the_watermark_are_never_read(path: Path) -> None:
    make(path, 70)
    file = max(path.glob("keys-*.npy"))
    with file.open("r+b") as f:
        f.seek(-16, os.SEEK_END)
        f.write(b"\xff" * 16)
    with softdb.open(path, verify=True) as db:
        assert len(db) == 70
        assert db.search(np.ones((1, 4)), k=70).live.all()


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "header"])
def test_a_damaged_segment_is_named(path: Path, damage: str) -> None:
    make(path)
    file = min(path.glob("keys-*.npy"))
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "longer":
        os.truncate(file, file.stat().st_size + 1)
    else:
        with file.open("r+b") as f:
            f.write(b"\x93NUMPZ")
    for mode in ("r", "rw"):
        with pytest.raises(softdb.CorruptionError, match=file.name):
            softdb.open(path, mode=mode)


def test_verify_names_the_rows_of_a_flipped_bit(path: Path) -> None:
    make(path, value_dim=None)
    file = sorted(path.glob("keys-*.npy"))[1]
    with file.open("r+b") as f:
        f.seek(200)
        byte = f.read(1)[0]
        f.seek(200)
        f.write(bytes([byte ^ 1]))
    with softdb.open(path) as db, pytest.raises(softdb.CorruptionError, match=rf"{file.name}: row \d+ differs"):
        db.verify()
    with pytest.raises(softdb.CorruptionError, match=file.name):
        softdb.open(path, verify=True)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM records WHERE row = 5",
        "UPDATE records SET key_crc = 1 WHERE row = 5",
        "UPDATE records SET payload_crc = 1 WHERE row = 5",
        "UPDATE records SET payload = 'null' WHERE row = 5",
    ],
)
def test_verify_finds_a_catalogue_at_odds_with_itself(path: Path, statement: str) -> None:
    make(path)
    with softdb.open(path) as db:
        with db._store.writer.rewriting():
            db._store.catalog.connection.execute(statement)
        with pytest.raises(softdb.CorruptionError, match=r"catalog\.sqlite|keys-"):
            db.verify()


def test_a_newer_format_is_refused(path: Path) -> None:
    make(path)
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    with pytest.raises(softdb.FormatTooNew, match="upgrade softdb"):
        softdb.open(path)


def test_foreign_paths_are_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(softdb.NotADatabase, match="is a file"):
        softdb.open(file, dim=2)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(softdb.NotADatabase, match="another program's directory"):
        softdb.open(folder, dim=2)
    assert os.listdir(folder) == ["notes.txt"]
    (folder / "catalog.sqlite").write_text("not SQLite at all, but long enough to look like a file " * 20)
    with pytest.raises(softdb.NotADatabase, match="not a softdb catalogue"):
        softdb.open(folder, dim=2)
    (folder / "catalog.sqlite").unlink()
    connection = apsw.Connection(str(folder / "catalog.sqlite"))
    connection.execute("CREATE TABLE theirs(x)")
    connection.close()
    with pytest.raises(softdb.NotADatabase, match="another program"):
        softdb.open(folder, dim=2)
    with pytest.raises(softdb.NotADatabase, match="holds no database"):
        softdb.open(tmp_path / "nothing", mode="r")
    assert not (tmp_path / "nothing").exists()


def test_a_creation_cut_short_is_finished(path: Path) -> None:
    path.mkdir()
    (path / "lock").write_text("1\n")
    apsw.Connection(str(path / "catalog.sqlite")).execute("PRAGMA journal_mode = WAL")
    holding([[1, 2]], ids=["a"], path=path).close()
    assert len(softdb.open(path, mode="r")) == 1


def test_a_copy_made_with_all_its_files_opens(path: Path, tmp_path: Path) -> None:
    make(path)
    shutil.copytree(path, tmp_path / "copy")
    with softdb.open(tmp_path / "copy", mode="r", verify=True) as db:
        assert len(db) == 300


def test_a_full_disk_keeps_acknowledged_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    with softdb.open(path) as db:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(softdb.WriteFailed, match="No space left"):
                db.insert(["x"], np.ones((1, 4)))
        assert len(db) == 300
        assert "x" not in db
        with pytest.raises(softdb.WriteFailed, match="open the database again"):
            db.insert(["x"], np.ones((1, 4)))
    with softdb.open(path, verify=True) as db:
        db.insert(["x"], np.ones((1, 4)))
        assert len(db) == 301


@pytest.mark.parametrize("shift", [1, -1])
def test_segments_that_overlap_or_leave_rows_out_are_corruption(path: Path, shift: int) -> None:
    make(path)  # three segments
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    connection.execute("UPDATE segments SET first_row = first_row + ? WHERE segment = 1", (shift,))
    connection.close()
    with pytest.raises(softdb.CorruptionError, match="impossible segment"):
        softdb.open(path)


def test_a_writer_settles_the_log_that_a_reader_keeps_from_folding(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, synced = tmp_path / "found", list[int]()
    make(path)
    with softdb.open(path) as db:
        db.insert(["last"], np.ones((1, 4)))
        shutil.copytree(path, results)  # as a kill leaves it
    log = (results / "catalog.sqlite-wal").stat().st_ino
    with softdb.open(results, mode="r") as reader, reader._store.read_transaction():
        monkeypatch.setattr(disk, "sync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
        softdb.open(results).close()
    assert log in synced


@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError])
def test_the_first_write_checkpoints_a_log_that_opening_could_not(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[apsw.Error]
) -> None:
    """On a full disk: what a sync has failed on may only look as if on disk, and nothing may come after it."""
    make(path)
    with softdb.open(path) as db:
        db.insert(["last"], np.ones((1, 4)))
        shutil.copytree(path, tmp_path / "found")  # as a kill leaves it
    log, real, full = tmp_path / "found" / "catalog.sqlite-wal", Catalog.checkpoint, [True]

    def checkpoint(catalog: Catalog) -> None:
        if full and full.pop():
            raise error("database or disk is full")
        real(catalog)
        assert not log.stat().st_size
        full.append(False)

    monkeypatch.setattr(Catalog, "checkpoint", checkpoint)
    with softdb.open(tmp_path / "found") as db:
        assert log.stat().st_size
        db.insert(["next"], np.ones((1, 4)))
        assert full == [False], "the first write has not tried again"


def test_a_log_is_checkpointed_once_at_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    calls, real = list[Catalog](), Catalog.checkpoint

    def checkpoint(catalog: Catalog) -> None:
        calls.append(catalog)
        real(catalog)

    monkeypatch.setattr(Catalog, "checkpoint", checkpoint)
    with softdb.open(path) as db:
        db.insert(["next"], np.ones((1, 4)))
        assert calls == [db._store.catalog]


def test_a_catalogue_locked_during_opening_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    real = Catalog.begin

    def begin(catalog: Catalog, write: bool) -> None:
        if write:  # to clean up
            raise apsw.BusyError("database is locked")
        real(catalog, write)

    monkeypatch.setattr(Catalog, "begin", begin)
    with pytest.raises(softdb.DatabaseLocked, match=r"keeps catalog\.sqlite locked"):
        softdb.open(path)


def test_a_mark_that_cannot_be_written_fails_no_insert(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make(path)
    with softdb.open(path) as db:
        monkeypatch.setattr(Committed, "put", full)
        db.insert(["next"], np.ones((1, 4)))
    with softdb.open(path, mode="r") as db:
        assert "next" in db


def test_a_transaction_larger_than_sqlite_s_cache_is_committed(path: Path) -> None:
    """SQLite writes pages of it to the log before the commit."""
    with holding(np.ones((60, 4)), payloads=["x" * 200_000] * 60, path=path) as db:
        db.insert(["next"], np.ones((1, 4)))
        assert len(db) == 61


def test_too_many_open_files_are_no_corruption(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with softdb.open(path, dim=2) as db, softdb.open(path, mode="r") as reader:
        db.insert(["a"], [[1, 2]])
        with monkeypatch.context() as patch:
            patch.setattr(files, "open_regular", crowded)
            with pytest.raises(softdb.SoftDBError, match=r"Too many open files.*raise the limit") as raised:
                reader.refresh()
        assert not isinstance(raised.value, softdb.CorruptionError)
        reader.refresh()
        assert "a" in reader
