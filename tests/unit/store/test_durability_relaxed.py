"""Relaxed durability: verbs share a transaction that is committed a second later, at flush and at close."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from worlds import holding

import softdb
from softdb.store import disk
from softdb.store import writer as writing


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flush of its own accord."""
    monkeypatch.setattr(writing, "DELAY", 1e6)


def relaxed(path: Path) -> softdb.SoftDB:
    return softdb.open(path, dim=2, value_dim=1, durability="relaxed")


def put(db: softdb.SoftDB, *ids: str) -> None:
    db.insert(list(ids), np.ones((len(ids), 2)), np.ones((len(ids), 1)))


def flushed(path: Path) -> set[str]:
    """Records that another reader sees."""
    with softdb.open(path, mode="r") as reader:
        reader.verify()
        return {str(one) for records in reader.scan(100) for one in records.ids}


@pytest.mark.usefixtures("never")
def test_changes_are_seen_by_readers_only_after_a_flush(path: Path) -> None:
    with relaxed(path) as db:
        put(db, "a", "b")
        db.delete(["a"])
        db.update(["b"], payloads=[{"n": 1}])
        assert db.stats().unflushed == 3
        assert db.get(["b"]).payloads == [{"n": 1}]
        assert db.count({"n": 1}) == len(db) == 1
        assert db.search([[1.0, 1.0]], k=1).ids == [["b"]]
        assert flushed(path) == set()
        db.flush()
        assert db.stats().unflushed == 0
        assert flushed(path) == {"b"}
        put(db, "c")
        db.flush()
        db.flush()
    assert flushed(path) == {"b", "c"}


@pytest.mark.usefixtures("never")
def test_no_verb_waits_for_the_disk_and_flush_does_once_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = disk.sync

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    with relaxed(path) as db:
        put(db, "first")
        db.flush()
        monkeypatch.setattr(disk, "sync", sync)
        for i in range(20):
            put(db, f"r{i}")
        assert synced == []
        db.flush()
        assert len(synced) == 2  # keys, values


def test_changes_reach_the_disk_without_a_flush(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "DELAY", 0.05)
    with relaxed(path) as db:
        for one in ("a", "b"):
            put(db, one)
            deadline = time.monotonic() + 60
            while db.stats().unflushed and time.monotonic() < deadline:
                time.sleep(0.01)
            assert one in flushed(path)


@pytest.mark.usefixtures("never")
def test_closing_flushes(path: Path) -> None:
    with relaxed(path) as db:
        put(db, "a")
    assert flushed(path) == {"a"}


SCRIPT = """
import sys, softdb
from softdb.store import writer as writing
writing.DELAY = 1e6
db = softdb.open(sys.argv[1], dim=2, value_dim=1, durability="relaxed")
db.insert(["kept"], [[1, 2]], [[3]])
db.flush()
db.insert(["late"], [[1, 2]], [[3]])
db.upsert(["kept"], [[5, 6]], [[3]])
"""


def test_an_interpreter_that_ends_flushes_a_handle_that_is_never_collected(path: Path) -> None:
    kept = "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))"
    subprocess.run([sys.executable, "-c", SCRIPT + kept, str(path)], check=True)
    assert flushed(path) == {"kept", "late"}


@pytest.mark.slow
def test_a_killed_process_leaves_the_last_flush_complete(path: Path) -> None:
    code = SCRIPT + f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    assert flushed(path) == {"kept"}
    with softdb.open(path) as db:
        assert db.get(["kept"]).keys.tolist() == [[1, 2]]
        put(db, "late")
    assert flushed(path) == {"kept", "late"}


@pytest.mark.usefixtures("never")
def test_a_verb_that_fails_undoes_itself_alone(path: Path) -> None:
    with relaxed(path) as db:
        put(db, "a")
        with pytest.raises(softdb.DuplicateId, match="'a' is stored already"):
            put(db, "b", "a")
        with pytest.raises(softdb.BadInput, match="holds a set"):
            db.insert(["c"], [[1, 2]], [[3]], [{"a": {1, 2}}])
        with pytest.raises(softdb.UnknownId, match="'x'"):
            db.update(["x"], payloads=[1])
        put(db, "b")
        assert len(db) == 2
    assert flushed(path) == {"a", "b"}


@pytest.mark.usefixtures("never")
def test_the_first_verb_may_fail_too(path: Path) -> None:
    with relaxed(path) as db:
        with pytest.raises(softdb.BadInput, match="holds a set"):
            db.insert(["c"], [[1, 2]], [[3]], [{"a": {1, 2}}])
        put(db, "a")
    assert flushed(path) == {"a"}


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("verb", ["compact", "snapshot", "index_field", "drop_field"])
def test_dependencies_are_flushed_first(path: Path, tmp_path: Path, verb: str) -> None:
    with relaxed(path) as db:
        db.index_field("m")
        put(db, *(f"r{i}" for i in range(100)))
        db.delete([f"r{i}" for i in range(50)])
        expected = {f"r{i}" for i in range(50, 100)}
        if verb == "snapshot":
            db.snapshot(tmp_path / "copy")
            assert flushed(tmp_path / "copy") == expected
        elif verb == "compact":
            db.compact()
        else:
            getattr(db, verb)("m")
        assert flushed(path) == expected


@pytest.mark.usefixtures("never")
def test_an_index_never_knows_more_than_the_disk(path: Path) -> None:
    with holding(np.random.default_rng(0).standard_normal((1200, 4)), path=path, durability="relaxed") as db:
        db.build_index(kind="ivf")
        with softdb.open(path, mode="r") as reader:
            assert len(reader) == 1200


@pytest.mark.usefixtures("never")
def test_a_failed_flush_rolls_back_and_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with relaxed(path) as db:
        put(db, "a")
        db.flush()
        put(db, "b")
        db.delete(["a"])

        with monkeypatch.context() as patch:
            patch.setattr(disk, "sync", refuse)
            with pytest.raises(softdb.WriteFailed, match=r"since the last flush \(2\)"):
                db.flush()
        with pytest.raises(softdb.WriteFailed, match="an earlier write failed"):
            put(db, "c")
        assert "a" in db
        assert "b" not in db
    assert flushed(path) == {"a"}


@pytest.mark.usefixtures("never")
def test_a_close_that_cannot_flush_raises_and_releases_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = relaxed(path)
    put(db, "a")
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", refuse)
        with pytest.raises(softdb.WriteFailed, match=r"since the last flush \(1\)"):
            db.close()
    with relaxed(path) as again:
        assert len(again) == 0


def refuse(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("teller", ["close", "insert", "flush"])
def test_losses_of_a_background_flush_are_raised(path: Path, monkeypatch: pytest.MonkeyPatch, teller: str) -> None:
    monkeypatch.setattr(writing, "DELAY", 0.05)
    db = relaxed(path)
    put(db, "a")
    db.flush()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", refuse)
        put(db, "b", "c")
        deadline = time.monotonic() + 60
        while db.stats().unflushed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(db) == db.count({}) == 1, "what is lost is seen on"
        assert db.search([[1.0, 1.0]], k=3).ids == [["a"]]
    verbs = {"close": db.close, "insert": lambda: put(db, "d"), "flush": db.flush}
    with pytest.raises(softdb.WriteFailed, match=r"since the last flush \(1\)"):
        verbs[teller]()
    db.close()
    assert flushed(path) == {"a"}


@pytest.mark.usefixtures("never")
def test_a_handle_that_is_forgotten_flushes(path: Path) -> None:
    db = relaxed(path)
    put(db, "a")
    del db
    gc.collect()
    assert flushed(path) == {"a"}


def test_writes_during_interpreter_exit_reach_the_disk(path: Path) -> None:
    late = "import atexit; atexit.register(lambda: db.insert(['last'], [[1, 2]], [[3]]))"  # before softdb's: runs after
    subprocess.run([sys.executable, "-c", late + SCRIPT, str(path)], check=True)
    assert flushed(path) == {"kept", "late", "last"}


@pytest.mark.usefixtures("never")
def test_a_snapshot_while_another_thread_writes(path: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            put(db, f"r{number}")
            number += 1

    with relaxed(path) as db:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for turn in range(10):
                before = len(db)
                assert db.snapshot(tmp_path / str(turn)).records >= before
                assert len(flushed(tmp_path / str(turn))) >= before
        finally:
            stop.set()
            thread.join()


def test_opening_fails_if_no_thread_can_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(softdb.SoftDBError, match="needs a thread of its own"):
            relaxed(path)
    relaxed(path).close()


def test_memory_and_full_durability_have_nothing_to_flush(path: Path) -> None:
    with softdb.open(None, dim=2, value_dim=1, durability="relaxed") as db:
        put(db, "a")
        db.flush()
        assert db.stats().unflushed == 0
    with softdb.open(path, dim=2, value_dim=1) as db:
        put(db, "a")
        assert db.stats().unflushed == 0
        db.flush()
    with softdb.open(path, mode="r") as reader, pytest.raises(softdb.ReadOnly, match="read-only"):
        reader.flush()


def test_another_word_is_refused(path: Path) -> None:
    with pytest.raises(softdb.BadInput, match="choose one of 'full', 'relaxed'"):
        softdb.open(path, dim=2, durability="none")  # type: ignore[arg-type]
    assert not path.exists()
