"""A directory renamed, replaced or stripped of its lock while open: no handle writes into another's."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softdb
from softdb.store import recovery
from softdb.store.catalog import Catalog
from softdb.store.segments import ColumnFiles

DIM, SECONDS = 4, 60.0  # SECONDS is the timeout of a hanging process


def put(db: softdb.SoftDB, first: int, count: int = 8, value: float = 1.0) -> None:
    db.insert(range(first, first + count), np.full((count, DIM), value))


def opened(path: Path, durability: Any = "full") -> softdb.SoftDB:
    db = softdb.open(path, dim=DIM, durability=durability)
    put(db, 0)
    db.flush()
    return db


def sound(path: Path) -> list[int]:
    """The ids of a database that opens, with every record as it was written."""
    with softdb.open(path, verify=True) as db:
        return sorted(int(one) for records in db.scan(100) for one in records.ids)


WRITES: dict[str, Callable[[softdb.SoftDB], Any]] = {
    "insert": lambda db: put(db, 100, 200),  # a new segment, too
    "delete": lambda db: db.delete([0]),
    "update": lambda db: db.update([1], payloads=[{"x": 1}]),
    "compact": lambda db: db.compact(),
    "index_field": lambda db: db.index_field("x"),
}


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_neither_a_renamed_directory_nor_its_successor_is_written_to(path: Path, verb: str, durability: str) -> None:
    old = opened(path, durability)
    old.delete([7])
    old.flush()
    moved = path.rename(path.with_name("moved"))
    new = opened(path)
    with pytest.raises(softdb.WriteFailed, match="renamed, removed or replaced since it was opened"):
        WRITES[verb](old)
    assert len(old) == 7
    assert old.get([1]).keys.tolist() == [[1.0] * DIM]
    put(new, 50, 200, 2.0)
    for db in (old, new):
        db.close()
    assert sound(path) == [*range(8), *range(50, 250)]
    assert sound(moved) == list(range(7))


def test_a_rename_between_two_relaxed_writes_keeps_flushed_records(path: Path) -> None:
    old = opened(path, "relaxed")
    put(old, 10)
    moved = path.rename(path.with_name("moved"))
    new = opened(path)
    with pytest.raises(softdb.WriteFailed, match=r"replaced since it was opened and .* \(1\) are rolled back"):
        old.flush()
    old.close()
    new.close()
    assert sound(path) == sound(moved) == list(range(8))


def test_a_rename_within_a_transaction_writes_to_the_opened_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Column files are opened by the directory's descriptor: no moment is left in which a path could lead elsewhere."""
    old, moved, real = opened(path), path.with_name("moved"), Catalog.begin
    before: list[dict[str, bytes]] = []

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.iterdir()}

    def begin(self: Catalog, write: bool) -> None:
        real(self, write)
        if write and not before:
            before.append({})  # another database is opened now, whose transactions begin, too
            path.rename(moved)
            opened(path).close()
            before.append(files())

    monkeypatch.setattr(Catalog, "begin", begin)
    with pytest.raises(softdb.WriteFailed, match="replaced"):
        put(old, 100, 200, 3.0)
    monkeypatch.undo()
    assert files() == before[1], "the other directory was written to"
    old.close()
    assert sound(path) == sound(moved) == list(range(8))


def test_a_reader_of_a_renamed_directory_reads_on_in_it(path: Path) -> None:
    opened(path).close()
    with softdb.open(path, mode="r") as reader:
        moved = path.rename(path.with_name("moved"))
        with opened(path) as new:
            put(new, 50, 200, 2.0)
        with softdb.open(moved) as writer:
            put(writer, 100, 200, 3.0)
        reader.refresh()
        assert len(reader) == 208
        assert reader.get([150]).keys.tolist() == [[3.0] * DIM]


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_directory_replaced_during_opening_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """SQLite opens its file by the path, the columns are those of the directory's descriptor."""
    for one in (path, path.with_name("other")):
        opened(one).close()
    real = Catalog.open

    def replaced(*args: Any) -> Any:
        path.rename(path.with_name("moved"))
        path.with_name("other").rename(path)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "open", replaced)
        with pytest.raises(softdb.NotADatabase, match="replaced since it was opened; open it again"):
            softdb.open(path, mode=mode)
    assert sound(path) == sound(path.with_name("moved")) == list(range(8))


def test_a_removed_directory_is_reported(path: Path) -> None:
    db = opened(path)
    shutil.rmtree(path)
    with pytest.raises(softdb.WriteFailed, match="removed"):
        put(db, 10)
    db.close()
    assert not path.exists()


@pytest.mark.parametrize("verb", WRITES)
def test_a_writer_without_its_lock_writes_nothing(path: Path, verb: str) -> None:
    first = opened(path)
    first.delete([7])
    (path / "lock").unlink()
    with softdb.open(path) as second:
        with pytest.raises(softdb.WriteFailed, match="lock was removed or replaced"):
            WRITES[verb](first)
        put(second, 50, 200, 2.0)
        first.close()
    assert sound(path) == [*range(7), *range(50, 250)]


@pytest.mark.parametrize("step", ["add", "put_segment", "advance", "commit"])
def test_a_second_writer_waits_for_the_transaction_of_one_that_lost_its_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Else it would clean away segments that the first has made and not yet committed."""
    first = opened(path)
    within, go, raised = threading.Event(), threading.Event(), list[BaseException]()
    real, waiting = getattr(Catalog, step), [True]

    def paused(*args: Any) -> Any:
        if waiting and waiting.pop():
            within.set()
            assert go.wait(SECONDS)
        return real(*args)

    def write() -> None:
        try:
            put(first, 100, 200, 3.0)
        except softdb.WriteFailed as error:
            raised.append(error)

    monkeypatch.setattr(Catalog, step, paused)
    writer = threading.Thread(target=write)
    writer.start()
    assert within.wait(SECONDS)
    (path / "lock").unlink()
    clean = recovery.clean

    def again(_: int) -> bool:
        go.set()
        return True

    def waits(catalog: Catalog, columns: ColumnFiles) -> None:
        catalog.connection.set_busy_handler(again)
        clean(catalog, columns)

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "clean", waits)
        with softdb.open(path) as second:
            assert go.is_set()
            put(second, 50, 10, 2.0)
    writer.join()
    first.close()
    kept = list(range(100, 300)) if not raised else []
    assert sound(path) == sorted([*range(8), *range(50, 60), *kept])
    assert bool(kept) == (step == "commit"), "it was committed though the lock was gone"


def test_a_compaction_that_lost_its_lock_replaces_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writer removes the temporary files of the first."""
    from softdb.store import compact

    first, real = opened(path), compact._write_aside
    first.delete([0, 3])

    def aside(*args: Any) -> Any:
        actual = real(*args)
        (path / "lock").unlink()
        softdb.open(path).close()
        return actual

    monkeypatch.setattr(compact, "_write_aside", aside)
    with pytest.raises(softdb.WriteFailed, match="lock was removed or replaced"):
        first.compact()
    first.close()
    assert sound(path) == [1, 2, 4, 5, 6, 7]


def hold(path: Path, line: Any) -> None:
    db = softdb.open(path)
    line.send("open")
    line.recv()
    try:
        put(db, 100)
        line.send("written")
    except softdb.WriteFailed as error:
        line.send(str(error))


def test_a_lock_taken_over_by_another_process_is_reported(path: Path) -> None:
    opened(path).close()
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(path, its))
    process.start()
    assert mine.poll(60)
    assert mine.recv() == "open"
    with pytest.raises(softdb.DatabaseLocked, match=str(process.pid)):
        softdb.open(path)
    (path / "lock").unlink()
    with softdb.open(path) as db:
        mine.send("go on")
        assert mine.poll(60)
        assert "another process may be writing" in mine.recv()
        put(db, 50)
    process.join(60)
    assert sound(path) == [*range(8), *range(50, 58)]
