"""Forked and spawned processes: a child reads, is refused what it may not do, and leaves its parent alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import crowd_batches as batches
import numpy as np
import pytest
import torch
from crowd_process import SECONDS, Failure, Forked, other, when_a_fork_waits
from worlds import holding, index_report

import softdb
from softdb.store.catalog import Catalog

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")


def numbered(path: Path, count: int = 20) -> softdb.SoftDB:
    db = batches.open_empty(path)
    for batch in range(count):
        batches.write(db, batch)
    return db


def clustered(path: Path) -> softdb.SoftDB:
    """Open a database of enough records for an index."""
    return holding(np.random.default_rng(0).standard_normal((8000, 16)), payloads=[{"n": 1}] * 8000, path=path)


# -- children that outlive their parent --------------------------------------------------------------------------------


def parent(line: Connection, path: Path, handles: int) -> None:
    """A writer (and readers of the same path) with a child; each follows commands."""
    db = numbered(path)
    readers = [softdb.open(path, mode="r") for _ in range(handles - 1)]
    go, told = os.pipe()
    begun, begin = os.pipe()

    def child() -> Any:
        os.close(told)
        os.write(begin, b"1")  # the parent's lock is let go of by now
        os.read(go, 1)  # until the parent has exited
        found = []
        for _ in range(12):
            for one in (db, *readers):
                one.refresh()
                found.append(sorted(batches.whole([one.get(batches.ids(batch)) for batch in range(0, 20, 3)])))
            time.sleep(0.01)
        db.verify()
        line.send((found[-1], db.stats().mode))
        return None

    Forked(child)
    os.read(begun, 1)
    line.send("forked")
    if line.recv() == "close":
        for one in (db, *readers):
            one.close()
        line.send("closed")
    line.recv()


@pytest.mark.few(2)
@pytest.mark.parametrize(("how", "handles"), [("close", 1), ("close", 3), ("kill", 1), ("kill", 3)])
def test_a_child_keeps_reading_after_its_parent_exits_and_another_writes(path: Path, how: str, handles: int) -> None:
    """The parent's last close takes the WAL away, unless the child has a connection that is really its own."""
    with other(parent, path, handles) as writer:
        assert writer.hear() == "forked"
        writer.say(how)
        if how == "close":
            assert writer.hear() == "closed"
        else:
            os.kill(writer.pid, signal.SIGKILL)
            writer.process.join(SECONDS)
        with softdb.open(path) as db:
            batches.write(db, 2000)
            for round_ in range(20):
                db.update(batches.ids(round_ % 20), payloads=batches.content(round_ % 20)["payloads"])
                batches.write(db, 1000 + round_)
            db.compact()
            if how == "close":
                writer.kill()
            end = time.monotonic() + SECONDS
            while not writer.line.poll():
                assert time.monotonic() < end
                db.upsert(batches.ids(2000), **batches.content(2000))
            said = writer.hear()
            assert said == (list(range(0, 20, 3)), "r")
            assert batches.seen(db) == {*range(20), *range(1000, 1020), 2000}


def test_a_child_that_lives_on_does_not_keep_the_lock(path: Path) -> None:
    db = numbered(path, 1)
    done, end = os.pipe()
    begun, begin = os.pipe()

    def live_on() -> None:
        os.close(end)
        os.write(begin, b"x")
        os.read(done, 1)

    child = Forked(live_on)
    try:
        with pytest.raises(softdb.DatabaseLocked, match=f"process {os.getpid()}"):
            softdb.open(path)
        assert os.read(begun, 1) == b"x"
        db.close()
        with softdb.open(path) as again:
            batches.write(again, 1)
    finally:
        os.close(end)
        child.found()
        for descriptor in (done, begun, begin):
            os.close(descriptor)


def test_closing_releases_the_lock_although_a_child_inherited_it(path: Path) -> None:
    db = numbered(path, 1)
    directory = db._store._directory
    assert directory is not None
    assert directory.lock is not None
    shared = os.dup(directory.lock.descriptor)  # as a child that has just begun has it
    try:
        db.close()
        softdb.open(path).close()
    finally:
        os.close(shared)


def test_a_child_may_write_when_its_parent_has_closed(path: Path) -> None:
    db = numbered(path, 3)
    closed, tell = os.pipe()
    refused, tried = os.pipe()

    def child() -> str:
        with pytest.raises(softdb.ReadOnly, match="read-only"):
            batches.write(db, 99)
        with pytest.raises(softdb.DatabaseLocked, match=f"process {os.getppid()}"):
            softdb.open(path)
        os.write(tried, b"x")
        os.read(closed, 1)
        db.close()
        with softdb.open(path) as mine:
            batches.write(mine, 3)
            return str(sorted(batches.seen(mine)))

    forked = Forked(child)
    os.close(tried)  # then a child that ends is no wait without end
    os.read(refused, 1)
    os.close(refused)
    batches.write(db, 50)
    db.close()
    os.write(tell, b"x")
    assert forked.found() == "[0, 1, 2, 3, 50]"
    with softdb.open(path, verify=True) as again:
        assert batches.seen(again) == {0, 1, 2, 3, 50}


def test_a_database_in_memory_refuses_a_forked_child() -> None:
    with batches.open_empty(None) as db:
        batches.write(db, 0)

        def child() -> bool:
            with pytest.raises(softdb.Closed, match="memory of the process that opened it; give one with a path"):
                db.get(batches.ids(0))
            db.close()
            return db.closed

        assert Forked(child).found()
        batches.write(db, 1)
        assert batches.seen(db) == {0, 1}


def test_children_of_children_read_too(path: Path) -> None:
    with numbered(path, 4) as db:
        deepest = Forked(lambda: Forked(lambda: Forked(lambda: sorted(batches.seen(db))).found()).found())
        assert deepest.found() == [0, 1, 2, 3]
        batches.write(db, 4)
        assert batches.seen(db) == {0, 1, 2, 3, 4}


SCRIPT = """
import os, sys, torch, numpy as np, softdb
import crowd_batches as batches
db = batches.open_empty(sys.argv[1])
reader = softdb.open(sys.argv[1], mode="r") if sys.argv[2] == "two handles" else None
for batch in range(5):
    batches.write(db, batch)
child = os.fork()
if child == 0:
    assert batches.seen(db) == set(range(5))
    if sys.argv[3] == "closing":
        db.close()
    sys.exit(7)                        # the whole of Python is taken down, with all that it holds
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    softdb.open(sys.argv[1])
except softdb.DatabaseLocked:
    print("locked")
for batch in range(5, 30):
    batches.write(db, batch)
print(len(batches.seen(db)), db.verify(), os.path.getsize(sys.argv[1] + "/catalog.sqlite-wal") > 0)
sys.stdout.flush()
os._exit(0)                            # nothing is closed: the WAL holds what was written
"""


@pytest.mark.slow
@pytest.mark.parametrize(("handles", "end"), [("one handle", "as it is"), ("two handles", "closing")])
def test_the_exit_of_a_child_leaves_its_parent_alone(path: Path, handles: str, end: str) -> None:
    here = Path(__file__).parent
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, path, handles, end],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])},
        check=False,
    )
    assert (said.stdout, said.stderr, said.returncode) == ("locked\n30 480 True\n", "", 0)
    with softdb.open(path, verify=True) as db:
        assert batches.seen(db) == set(range(30))


# -- forks beside running threads --------------------------------------------------------------------------------------


def test_a_fork_waits_for_the_write_of_another_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise SQLite's own locks would be lost."""
    with numbered(path, 3) as db:
        inside, real = threading.Event(), Catalog.put_segment

        waits = when_a_fork_waits(monkeypatch)

        def pause(*args: Any) -> None:
            inside.set()
            assert waits.wait(SECONDS)
            real(*args)

        monkeypatch.setattr(Catalog, "put_segment", pause)
        thread = threading.Thread(target=lambda: batches.write(db, 3))
        thread.start()
        assert inside.wait(SECONDS)
        child = Forked(lambda: sorted(batches.seen(db)))
        assert child.found() == [0, 1, 2, 3]
        thread.join()
        assert batches.seen(db) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("children", [25, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_forks_while_threads_use_every_verb(path: Path, tally: Counter[str], children: int) -> None:
    """No child hangs on a lock that a thread of its parent held, and each sees whole batches."""
    db = numbered(path, 40)
    stop, errors = threading.Event(), list[BaseException]()

    def repeated(work: Callable[[int], Any]) -> None:
        try:
            for i in range(10**6):
                if stop.is_set():
                    return
                work(i)
        except BaseException as error:
            errors.append(error)

    query = torch.zeros(1, batches.DIM)
    db.search(query, k=5)  # fill lazy imports and caches
    db.attend(query.requires_grad_()).output.sum().backward()  # type: ignore[no-untyped-call]
    query = query.detach()
    works: list[Callable[[int], Any]] = [
        lambda i: db.upsert(batches.ids(100 + i % 50), **batches.content(100 + i % 50)),
        lambda _: db.search(query, k=5),
        lambda _: db.attend(query),
        lambda i: db.count({"batch": {"$gte": i % 7}}),
        lambda _: db.compact(),
        lambda _: list(db.scan(10**6)),
    ]
    threads = [threading.Thread(target=repeated, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        for number in range(children):
            results = set(Forked(lambda: _asked(db)).found())
            assert set(range(40)) <= results, f"child {number}"
            tally["forks while threads are inside a verb"] += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    db.close()
    with softdb.open(path, verify=True) as again:
        assert set(range(40)) <= batches.seen(again)


def _asked(db: softdb.SoftDB) -> list[int]:
    """Answers of a child at the newest generation, which its parent then changes."""
    with db._store.read_transaction():
        assert db.search(torch.zeros(1, batches.DIM), k=3).live.all()
    db.attend(torch.zeros(1, batches.DIM, requires_grad=True)).output.sum().backward()  # type: ignore[no-untyped-call]
    return sorted(batches.whole([db.get(batches.ids(batch)) for batch in range(40)]))


@pytest.mark.slow
def test_a_child_does_not_wait_for_a_watch_that_a_thread_of_its_parent_held(path: Path) -> None:
    with clustered(path) as db:
        db.build_index("ivf")
        queries = np.random.default_rng(1).standard_normal((4, 16))
        expected = db.search(queries, k=5).rows.tolist()
        watch = db._finder.watch
        with watch._lock, watch._checking, db._finder._lock:  # as another thread may at that moment
            child = Forked(lambda: (db.search(queries, k=5).rows.tolist(), index_report(db).live_checked >= 0))
        assert child.found() == (expected, True)


@pytest.mark.slow
def test_a_child_of_a_threaded_process_searches_attends_and_learns(path: Path) -> None:
    with clustered(path) as db:
        queries = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        torch.randn(900, 900) @ torch.randn(900, 900)
        db.build_index("ivf")
        before = db.search(queries, k=5).rows.tolist()
        build = db.build_index("ivf", background=True)

        def child() -> Any:
            assert build.done
            asked = queries.clone().requires_grad_()
            db.attend(asked, k=8).output.sum().backward()  # type: ignore[no-untyped-call]
            exact = db.search(queries, k=5, exact=True).rows.tolist()
            mine = holding(np.random.default_rng(0).standard_normal((6000, 16)))
            mine.build_index("ivf")  # FAISS in the child, with one thread
            assert mine.search(queries, k=1).live.all()
            return db.search(queries, k=5).rows.tolist(), exact, bool(asked.grad is not None), db.verify()

        rows, exact, learns, count = Forked(child).found()
        assert (learns, count) == (True, 8000)
        assert rows == before
        assert exact == db.search(queries, k=5, exact=True).rows.tolist()
        assert build.result(SECONDS).kind == "ivf"
        assert db.search(queries, k=5).live.all()


def test_a_fork_from_a_thread_gives_a_child_that_reads(path: Path) -> None:
    with numbered(path, 3) as db:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(Forked(lambda: sorted(batches.seen(db))).found()))
        thread.start()
        thread.join()
        assert results == [[0, 1, 2]]
        batches.write(db, 3)


def test_a_child_that_may_start_no_thread_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, here = threading.Thread.start, os.getpid()

    def start(thread: threading.Thread) -> None:
        if os.getpid() != here:
            raise RuntimeError("can't start new thread")
        own(thread)

    with numbered(path, 3) as db:
        monkeypatch.setattr(threading.Thread, "start", start)
        assert Forked(lambda: sorted(batches.seen(db))).found() == [0, 1, 2]
        batches.write(db, 3)


def test_a_child_reads_where_its_parent_compacts_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = os.pipe()
    gone, go = os.pipe()
    read = Catalog.segments

    def segments(catalog: Catalog) -> list[Any]:
        monkeypatch.undo()
        entries = read(catalog)
        os.write(ask, b"1")
        os.read(gone, 1)
        return entries

    def child() -> list[int]:
        os.read(gone, 1)
        monkeypatch.setattr(Catalog, "segments", segments)
        db.refresh()
        return sorted(batches.seen(db))

    with numbered(path, 3) as db:
        forked = Forked(child)
        for batch in range(2):  # the second time goes the segment that the first has made, which the child looks for
            db.delete(batches.ids(batch))
            db.compact()
            os.write(go, b"1")
            if not batch:
                os.read(asked, 1)
        assert forked.found() == [2]


def test_a_child_whose_directory_was_removed_is_refused(path: Path) -> None:
    """Not the parent's connection, which it would use in place of its own."""
    with numbered(path, 2) as db:
        path.rename(path.with_name("elsewhere"))

        def child() -> str:
            with pytest.raises(softdb.SoftDBError, match=r"cannot be read|replaced"):
                db.get(batches.ids(0))
            return "refused"

        assert Forked(child).found() == "refused"
        path.with_name("elsewhere").rename(path)
        assert batches.seen(db) == {0, 1}


# -- spawned processes -------------------------------------------------------------------------------------------------


def reads(send: Any, db: softdb.SoftDB) -> None:
    try:
        send.send((sorted(batches.seen(db)), db.stats().mode))
    except BaseException as error:
        send.send(Failure(repr(error)))


@pytest.mark.slow
@pytest.mark.parametrize(("start", "mode"), [("spawn", "rw"), ("forkserver", "r")])
def test_a_handle_is_sent_to_a_spawned_process(path: Path, start: str, mode: Any) -> None:
    numbered(path, 3).close()
    with softdb.open(path, mode=mode) as db:
        context = multiprocessing.get_context(start)
        receive, send = context.Pipe(False)
        child = context.Process(target=reads, args=(send, db))  # type: ignore[attr-defined]
        child.start()
        assert receive.poll(SECONDS)
        assert receive.recv() == ([0, 1, 2], "r")
        child.join(SECONDS)
        if mode == "rw":
            batches.write(db, 3)
