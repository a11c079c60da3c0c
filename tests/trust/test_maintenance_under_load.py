"""Copies, compactions, checks and builds beside writes; space that a compaction frees and needs."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import apsw
import crowd_batches as batches
import numpy as np
import pytest
from crowd_process import SECONDS, other
from tap import Op, Tap, tapped

import softdb
from softdb.store import compact as compacting
from softdb.store import files, segments

ROWS = 8192  # of the largest segment, in the tests of what a compaction takes
DIM = 32


class Writers:
    """Two threads that insert, replace and delete whole batches, until the block ends."""

    def __init__(self, db: softdb.SoftDB) -> None:
        self.db, self.stop, self.errors = db, threading.Event(), list[BaseException]()
        self.lasting = set(range(70))  # enough for an index
        for batch in self.lasting:
            batches.write(db, batch)
        self.threads = [threading.Thread(target=self.run, args=(first,)) for first in (1000, 100_000)]

    def run(self, first: int) -> None:
        try:
            for number in range(first, first + 90_000):
                if self.stop.is_set():
                    return
                batches.write(self.db, number)
                self.db.upsert(batches.ids(number), **batches.content(number, 1))
                if number % 3:
                    self.db.delete(batches.ids(number))
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Writers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors


def copied(db: softdb.SoftDB, place: Path) -> set[int]:
    db.snapshot(place)
    with softdb.open(place, verify=True) as copy:
        found = batches.seen(copy)
        batches.write(copy, 999_999)  # it lives its own life
    return found


def backed_up(db: softdb.SoftDB, place: Path) -> set[int]:
    """With SQLite's own tool, another connection, and no word to softdb: the catalogue alone is whole, too."""
    source = apsw.Connection(str(db.stats().path) + "/catalog.sqlite", apsw.SQLITE_OPEN_READONLY)
    place.mkdir()
    target = apsw.Connection(str(place / "catalog.sqlite"))
    with target.backup("main", source, "main") as backup:
        backup.step(-1)
    counts = dict(target.execute("SELECT substr(id, 1, instr(id, ':') - 1), count(*) FROM records GROUP BY 1"))
    assert target.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    source.close()
    target.close()
    assert set(counts.values()) == {batches.SIZE}
    return {int(count) for count in counts}


def checked(db: softdb.SoftDB, _: Path) -> set[int]:
    assert db.verify() % batches.SIZE == 0
    return batches.whole(list(db.scan(10**6)))


def compacted(db: softdb.SoftDB, place: Path) -> set[int]:
    report = db.compact()
    assert report.records % batches.SIZE == 0
    return checked(db, place)


def built(db: softdb.SoftDB, place: Path) -> set[int]:
    db.build_index("ivf")
    return checked(db, place)


@pytest.mark.few(1)
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("work", [copied, backed_up, checked, compacted, built])
def test_maintenance_is_correct_while_two_threads_write(
    path: Path, tally: Counter[str], work: Callable[[softdb.SoftDB, Path], set[int]], rounds: int
) -> None:
    with batches.open_empty(path) as db:
        writers = Writers(db)
        with writers, softdb.open(path, mode="r") as reader:
            for number in range(rounds):
                actual = work(db, path.with_name(f"copy{number}"))
                assert writers.lasting <= actual
                reader.refresh()
                assert writers.lasting <= batches.whole(list(reader.scan(10**6)))
                tally[f"under load: {work.__name__}"] += 1
        db.compact()
        assert batches.seen(db) >= writers.lasting
        assert db.verify() == len(db)


def shedding(path: Path, count: int) -> softdb.SoftDB:
    """Open a database of `count` records, nine of ten of them deleted."""
    db = softdb.open(path, dim=DIM, value_dim=4)
    for first in range(0, count, ROWS):
        ids = range(first, min(count, first + ROWS))
        keys = np.random.default_rng(first).standard_normal((len(ids), DIM))
        db.insert(ids, keys, keys[:, :4], [{"n": i, "text": "x" * 50} for i in ids])
    db.delete([i for i in range(count) if i % 10])
    return db


def expected(db: softdb.SoftDB, count: int) -> None:
    kept = list(range(0, count, 10))
    assert len(db) == len(kept) == db.verify()
    assert [i for records in db.scan(5000) for i in records.ids] == kept
    records = db.get(kept[:: len(kept) // 7])
    for i, key in zip(records.ids, records.keys.numpy(), strict=True):
        first = int(i) // ROWS * ROWS
        whole = np.random.default_rng(first).standard_normal((min(count - first, ROWS), DIM))
        assert np.array_equal(key, whole[int(i) - first].astype(np.float32))


class Room(Tap):
    """Largest disk usage during a call."""

    def __init__(self, path: Path) -> None:
        self.path, self.most = path, 0

    def after(self, op: Op) -> None:
        if op.name in ("write", "truncate", "unlink") and op.path.parent == self.path:
            self.most = max(self.most, files.occupied(self.path))


def measured(line: Connection, path: Path, count: int) -> None:
    """Compacts and says: bytes before, at most, and after; and memory at most."""
    segments.MAX_ROWS = compacting.MAX_ROWS = ROWS  # type: ignore[attr-defined]
    shedding(path, count).close()
    room = Room(path)
    with tapped(room, inside=path):
        db = softdb.open(path)
        before = files.occupied(path)
        tracemalloc.start()
        report = db.compact()
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        expected(db, count)
        db.close()
    line.send((before, room.most, report.bytes, memory))


@pytest.mark.slow
@pytest.mark.parametrize("small", [30_000, pytest.param(200_000, marks=pytest.mark.exhaustive)])
def test_a_compaction_frees_the_disk_in_little_memory_and_little_room(
    path: Path, tally: Counter[str], small: int
) -> None:
    results = []
    for count in (small, 4 * small):
        with other(measured, path.with_name(str(count)), count) as child:
            before, most, after, memory = child.hear(5 * SECONDS)
        assert after < 0.3 * before, f"{count} records: {before} bytes before, {after} after"
        assert most < 1.1 * before + 3 * ROWS * (DIM + 6) * 4, f"{count} records: {most} bytes meanwhile"
        results.append((before - after, most - before, memory))
    (_, _, memory), (freed, room, more) = results
    each = (more - memory) / (3 * small)
    # numbers of dead rows and marks of live ones, but no column (of 144 bytes a record) and no payload
    assert each < 48, f"memory grows by {each} bytes a record: {memory}, {more}"
    tally["compaction: share of the disk freed, in percent"] = 100 * freed // (freed + after)
    tally["compaction: bytes of disk meanwhile beyond those before"] = max(0, room)
    tally["compaction: bytes of memory a record beyond a fixed sum"] = int(each)
