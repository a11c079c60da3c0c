"""Threads of a writer, readers in other processes, two writers, and a log that must stay small."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import crowd_batches as batches
import numpy as np
import pytest
from crowd_process import CONTEXT, SECONDS, other
from crowd_work import LASTING, MOST, PATIENCE, THERE, Crowd, reads, writes

import softdb

MINUTES = float(os.environ.get("SOFTDB_TRUST_MINUTES", "5"))
PAGES = 4000  # of SQLite's log: what a writer lets it grow to before it waits for readers
LOG = (2 * PAGES) * (4096 + 24)  # bytes: the bound, with the largest verb of these tests on top


def numbered(path: Path, count: int) -> softdb.SoftDB:
    db = batches.open_empty(path)
    for batch in range(count):
        batches.write(db, batch)
    return db


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [8, pytest.param(60 * MINUTES, marks=pytest.mark.exhaustive)])
def test_one_writing_process_with_eight_threads_and_four_that_read(
    path: Path, tally: Counter[str], seconds: float
) -> None:
    seed = int(seconds)
    numbered(path, LASTING).close()
    states = CONTEXT.RawArray("b", MOST)
    np.frombuffer(states, np.int8)[:LASTING] = THERE
    with contextlib.ExitStack() as running:
        readers = [running.enter_context(other(reads, path, states, seed + i)) for i in range(4)]
        for reader in readers:
            assert reader.hear() == "reading"
        writer = running.enter_context(other(writes, path, states, seconds, seed))
        counts, log = writer.hear(seconds + PATIENCE + 2 * SECONDS)
        for reader in readers:
            reader.say("stop")
        views = sum((reader.hear() for reader in readers), Counter[str]())
    assert all(views[one] or counts[one] for one in ("views", *Crowd.EACH)), f"too little happened: {views}, {counts}"
    tally["concurrency: seconds"] += int(seconds)
    tally["concurrency: views checked"] += views["views"]
    tally["concurrency: torn views"] += 0
    for what, count in counts.items():
        tally[f"concurrency: {what}"] += count
    tally["concurrency: most bytes of the log"] = max(tally["concurrency: most bytes of the log"], log)
    with softdb.open(path, verify=True) as db:
        there = np.frombuffer(states, np.int8) == THERE
        assert batches.seen(db) == set(np.flatnonzero(there).tolist()), f"seed {seed}"


def overlapping(line: Connection, path: Path, seconds: float) -> None:
    """Two readers of which one is always within a transaction, as with many readers."""
    stop = threading.Event()

    def read(db: softdb.SoftDB, wait: float) -> None:
        time.sleep(wait)
        while not stop.is_set():
            with db._store.read_transaction():
                time.sleep(seconds)

    threads = [threading.Thread(target=read, args=(softdb.open(path, mode="r"), seconds / 3 * i)) for i in range(3)]
    for thread in threads:
        thread.start()
    line.send("reading")
    line.recv()
    stop.set()
    for thread in threads:
        thread.join()
    line.send("done")


def busy(line: Connection, path: Path) -> None:
    """A reader that never closes, refreshes all the time, and keeps a scan half way."""
    db = softdb.open(path, mode="r")
    half = db.scan(10)
    next(half)
    line.send("reading")
    number = 0
    while not line.poll():
        number += 1
        db.refresh()
        db.count({"batch": {"$gte": number % 7}})
        batches.whole(list(db.scan(10**6)), lambda _: True)
    line.send(len(next(half)))


def grown(db: softdb.SoftDB, path: Path, bytes_written: int) -> int:
    """Writes that much to the log, and returns how large it became at most."""
    most, text = 0, "x" * 20_000
    for number in range(bytes_written // (batches.SIZE * len(text))):
        words = batches.content(number % 10, number)
        db.upsert(batches.ids(number % 10), **{**words, "payloads": [{**one, "t": text} for one in words["payloads"]]})
        most = max(most, (path / "catalog.sqlite-wal").stat().st_size)
    return most


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [60_000_000, pytest.param(3_000_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("readers", ["overlapping", "busy", "idle", "none"])
def test_the_log_stays_small_whatever_reads(path: Path, tally: Counter[str], readers: str, size: int) -> None:
    with numbered(path, 60) as db, contextlib.ExitStack() as running:
        others = []
        if readers == "idle":
            for _ in range(3):
                next(running.enter_context(softdb.open(path, mode="r")).scan(10))
        elif readers == "busy":
            others = [running.enter_context(other(busy, path)) for _ in range(2)]
        elif readers == "overlapping":
            others = [running.enter_context(other(overlapping, path, 0.06))]
        for one in others:
            assert one.hear() == "reading"
        log = grown(db, path, size)
        for one in others:
            one.say("stop")
            one.hear()
        tally[f"bytes of the log at most, readers {readers}"] = log
        assert log <= LOG, f"{log} bytes of log after {size} written"


def holds(line: Connection, path: Path) -> None:
    db = batches.open_empty(path)
    batches.write(db, 0)
    line.send("holding")
    line.recv()
    batches.write(db, 1)
    line.send("written")
    line.recv()


def test_a_second_handle_that_writes_is_refused_in_one_process_too(path: Path) -> None:
    with numbered(path, 1) as db:
        for _ in range(3):
            with pytest.raises(softdb.DatabaseLocked, match=f"process {os.getpid()}"):
                softdb.open(path)
        link = path.with_name("link")
        link.symlink_to(path)
        with pytest.raises(softdb.DatabaseLocked, match="process"):
            softdb.open(link)
        with softdb.open(path, mode="r") as reader:
            batches.write(db, 1)
            reader.refresh()
            assert batches.seen(reader) == {0, 1}
    with softdb.open(path) as again:
        assert batches.seen(again) == {0, 1}


def test_threads_that_open_at_once_leave_one_writer(path: Path) -> None:
    numbered(path, 1).close()
    opened: list[softdb.SoftDB] = []
    refused: list[BaseException] = []
    start = threading.Barrier(8)

    def try_it() -> None:
        start.wait()
        try:
            opened.append(softdb.open(path))
        except softdb.DatabaseLocked as error:
            refused.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(refused)) == (1, 7)
    batches.write(opened[0], 1)
    assert batches.seen(opened[0]) == {0, 1}
    opened[0].close()


@pytest.mark.slow
def test_a_stopped_writer_keeps_the_lock_and_blocks_no_reader(path: Path) -> None:
    with other(holds, path) as writer:
        assert writer.hear() == "holding"
        os.kill(writer.pid, signal.SIGSTOP)
        try:
            with pytest.raises(softdb.DatabaseLocked, match=f"process {writer.pid}"):
                softdb.open(path)
            with softdb.open(path, mode="r") as reader:
                assert batches.seen(reader) == {0}
        finally:
            os.kill(writer.pid, signal.SIGCONT)
        writer.say("go on")
        assert writer.hear() == "written"
        writer.say("end")
        writer.end()
    with softdb.open(path, verify=True) as db:
        assert batches.seen(db) == {0, 1}
