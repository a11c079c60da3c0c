"""Signal handlers, lazy payloads, forks and late tracebacks in the middle of a verb."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from crowd_process import SECONDS, when_a_fork_waits

import softdb
from softdb.store import budget, catalog, files, keyed, segments
from softdb.store import writer as writing

DIM = 4


@pytest.fixture(autouse=True)
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flush of its own accord."""
    monkeypatch.setattr(writing, "DELAY", 1e6)


def opened(path: Path, durability: Any, *ids: str) -> softdb.SoftDB:
    db = softdb.open(path, dim=DIM, durability=durability)
    if ids:
        put(db, *ids)
        db.flush()
    return db


def put(db: softdb.SoftDB, *ids: str, payloads: Any = None) -> None:
    db.insert(list(ids), np.ones((len(ids), DIM)), payloads=payloads)


def stored_ids(path: Path) -> set[str]:
    """All records on disk."""
    with softdb.open(path, mode="r", verify=True) as db:
        return {str(one) for records in db.scan(10**6) for one in records.ids}


def after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, work: Callable[[], Any]) -> None:
    """Do something once, right after a function."""
    real = getattr(owner, name)
    done: list[bool] = []

    def both(*args: Any, **words: Any) -> Any:
        result = real(*args, **words)
        if not done:
            done.append(True)
            work()
        return result

    monkeypatch.setattr(owner, name, both)


@contextlib.contextmanager
def handler(work: Callable[[], Any]) -> Iterator[None]:
    """SIGUSR1 does that."""
    before = signal.signal(signal.SIGUSR1, lambda *_: work())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def signalled() -> None:
    signal.raise_signal(signal.SIGUSR1)


# -- a signal's handler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_handler_that_closes_within_a_verb_closes_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    db = opened(path, durability, "a", "b")
    put(db, "waits")
    after(monkeypatch, catalog.Catalog, "delete", signalled)  # between the deletion and the insertion of an upsert
    with handler(db.close):
        db.upsert(["a", "b"], np.zeros((2, DIM)))
    assert db._store.closed
    assert stored_ids(path) == {"a", "b", "waits"}
    with softdb.open(path) as again:
        assert again.get(["a"]).keys.tolist() == [[0.0] * DIM]


@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("verb", ["flush", "insert", "delete"])
def test_a_handler_that_writes_within_a_verb_writes_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, verb: str
) -> None:
    works: dict[str, Callable[[], Any]] = {
        "flush": lambda: db.flush(),
        "insert": lambda: put(db, "x"),
        "delete": lambda: db.delete(["a"]),
    }
    with opened(path, durability, "a", "b") as db, handler(works[verb]):
        after(monkeypatch, catalog.Catalog, "delete", signalled)
        db.upsert(["a", "c"], np.zeros((2, DIM)))
        put(db, "d")
    assert stored_ids(path) == {"a", "b", "c", "d"} - ({"a"} if verb == "delete" else set()) | (
        {"x"} if verb == "insert" else set()
    )


def test_a_handler_that_writes_within_a_flush_writes_after_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, "relaxed", "a") as db, handler(lambda: put(db, "x")):
        put(db, "b")
        after(monkeypatch, files, "sync", signalled)
        db.flush()
        assert stored_ids(path) == {"a", "b"}
    assert stored_ids(path) == {"a", "b", "x"}


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_handler_may_do_anything_within_a_lookup(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """It runs in the very thread that is in the middle of the query. A child leaves alone what waits to be flushed."""
    with opened(path, durability, "a", "b") as db:
        works: list[Callable[[], Any]] = [
            lambda: put(db, "c"),
            lambda: db.get(["a"]),
            lambda: db.delete(["b"]),
            lambda: db.refresh(),
            lambda: os.waitpid(os.fork() or os._exit(0), 0),
        ]
        for work in works:
            with monkeypatch.context() as patch, handler(work):
                after(patch, catalog.Catalog, "lookup", signalled)
                assert db.get(["a"]).ids == ["a"]
        with handler(db.close):
            after(monkeypatch, catalog.Catalog, "lookup", signalled)
            with contextlib.suppress(softdb.Closed):
                db.get(["a"])
    assert stored_ids(path) == {"a", "c"}


# -- lazy payloads -----------------------------------------------------------------------------------------------------


class Lazy(Sequence[Any]):
    """Two payloads that are made when they are drawn."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: Any) -> Any:
        if i > 1:
            raise IndexError(i)
        return self.make() if i else {}


def missing() -> Any:
    raise FileNotFoundError("captions/2.json")


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_payload_that_cannot_be_drawn_is_not_the_disk_s_fault(path: Path, durability: str) -> None:
    with opened(path, durability, "a") as db:
        put(db, "b")
        with pytest.raises(softdb.BadInput, match=r"FileNotFoundError: captions/2\.json"):
            put(db, "c", "d", payloads=Lazy(missing))
        put(db, "e")
    assert stored_ids(path) == {"a", "b", "e"}


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_payloads_are_drawn_before_the_write_begins(path: Path, durability: str) -> None:
    def flushed() -> Any:
        put(db, "within")
        db.flush()

    with opened(path, durability, "a", "b") as db:
        db.upsert(["a", "b"], np.zeros((2, DIM)), payloads=Lazy(flushed))
        assert db.get(["a"]).keys.tolist() == [[0.0] * DIM]
    assert stored_ids(path) == {"a", "b", "within"}


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_child_forked_by_a_payload_writes_nothing(path: Path, durability: str) -> None:
    def fork() -> Any:
        children.append(os.fork())

    children: list[int] = []
    with opened(path, durability, "a") as db:
        try:
            db.upsert(["a", "b"], np.zeros((2, DIM)), payloads=Lazy(fork))
        except BaseException as error:
            os._exit(0 if not children[0] and isinstance(error, softdb.ReadOnly) else 1)
        if not children[0]:
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        put(db, "c")
    assert stored_ids(path) == {"a", "b", "c"}


# -- interrupts --------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("step", ["delete", "put_segment", "advance", "lookup"])
def test_an_interrupt_within_a_write_is_raised_when_it_has_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, step: str
) -> None:
    keys = np.zeros((2, DIM), np.float32)
    with opened(path, durability, "a", "b") as db, handler(interrupt):
        put(db, "c")
        after(monkeypatch, catalog.Catalog, step, signalled)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            db.upsert(["a", "b"], keys)
        keys[:] = 7  # the caller's again: nothing reads it any more
        assert db.get(["a"]).keys.tolist() == [[0.0] * DIM]
        db.flush()
        assert stored_ids(path) == {"a", "b", "c"}
        put(db, "d")
    assert stored_ids(path) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("interrupts", [1, 3])
def test_an_interrupted_caller_waits_while_its_arrays_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    """It may change them as soon as it has the interrupt; a second one does not end the waiting."""
    keys, real = np.zeros((2, DIM), np.float32), files.write_at
    left = threading.Event()

    def interrupted(*args: Any) -> None:
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGUSR1)  # to the main thread
            assert not left.wait(0.2)  # time for a caller that does not wait; one that does needs none
        real(*args)

    with opened(path, "full", "a", "b") as db, handler(interrupt):
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_at", interrupted)
            try:
                db.upsert(["a", "b"], keys)
            except KeyboardInterrupt:
                left.set()
                keys[:] = 7
        assert keys.all(), "nothing was interrupted"
        assert db.get(["a"]).keys.tolist() == [[0.0] * DIM]
        assert db.verify() == 2


def test_an_interrupted_caller_s_waiting_write_never_begins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within, go = threading.Event(), threading.Event()

    def pause() -> None:
        within.set()
        assert go.wait(SECONDS)

    with opened(path, "full", "a") as db, handler(interrupt):
        after(monkeypatch, catalog.Catalog, "put_segment", pause)
        thread = threading.Thread(target=put, args=(db, "b"))
        thread.start()
        assert within.wait(SECONDS)
        jobs = db._store.worker._jobs

        class Interrupted:
            def put(self, job: Any) -> None:
                jobs.put(job)
                signalled()  # as it begins to wait

        with monkeypatch.context() as patch:
            patch.setattr(db._store.worker, "_jobs", Interrupted())
            with pytest.raises(KeyboardInterrupt, match=r"^$"):
                put(db, "c")
        go.set()
        thread.join()
    assert stored_ids(path) == {"a", "b"}


def test_a_build_in_the_callers_thread_ignores_the_program_s_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython takes the main thread for dead once a Ctrl-C has come into that question."""
    with opened(path, "full") as db:
        db.insert(range(1200), np.random.default_rng(0).standard_normal((1200, DIM)))
        monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
        assert db.build_index("ivf").kind == "ivf"


def test_a_statement_that_writes_is_never_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would make SQLite roll back the whole transaction, with all that waits to be flushed."""
    ids = [f"r{i}" for i in range(20_000)]
    with opened(path, "relaxed") as db:
        put(db, *ids)
        with monkeypatch.context() as patch:
            patch.setattr(budget, "STEPS", 0)
            patch.setattr(catalog.Catalog, "_bytes", lambda _: 0)
            with pytest.raises(softdb.CorruptionError, match="cycle of pages"):
                db.count({"x": 1})
            db._store.catalog.connection.execute(
                "SAVEPOINT test; DELETE FROM records WHERE row >= 0; ROLLBACK TO test; RELEASE test"
            )
        assert len(db) == len(db.get(ids)) == len(ids)


# -- at the same time --------------------------------------------------------------------------------------------------


def test_a_child_forked_during_an_opening_holds_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path, "full", "a").close()
    within, waits = threading.Event(), when_a_fork_waits(monkeypatch)

    def pause() -> None:
        within.set()
        assert waits.wait(SECONDS)  # a fork waits for calls in progress

    after(monkeypatch, keyed, "read", pause)
    handles: list[softdb.SoftDB] = []
    thread = threading.Thread(target=lambda: handles.append(softdb.open(path)))
    thread.start()
    assert within.wait(SECONDS)
    ours, its = os.pipe()
    child = os.fork()
    if not child:
        os.write(its, b"1")
        signal.pause()
        os._exit(0)
    try:
        thread.join()
        assert os.read(ours, 1) == b"1"
        handles[0]._store._directory.lock.close()  # type: ignore[union-attr]  # as the death of this process would
        with softdb.open(path) as db:
            put(db, "b")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(its)


def logged(log: list[str], name: str, first: list[Callable[[], None]]) -> Callable[..., Any]:
    """One of the functions of files, with a line in the log, and something else before it."""
    real: Callable[..., Any] = getattr(files, name)

    def both(one: Path, *rest: Any) -> Any:
        if first and one.name.startswith("rows"):  # the last of a segment's files
            first.pop()()
        log.append(f"{name} {one.name}")
        return real(one, *rest)

    return both


def test_a_compaction_beside_flushes_syncs_its_file_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with opened(path, "relaxed") as db:
        put(db, *(f"a{i}" for i in range(256)))
        put(db, *(f"b{i}" for i in range(300)))
        db.delete([f"a{i}" for i in range(0, 200, 2)])
        db.flush()

        def flush() -> None:
            db.update(["b1"], payloads=[{"n": 1}])
            db.flush()

        def elsewhere() -> None:
            thread = threading.Thread(target=flush)
            thread.start()
            thread.join()

        for name in ("sync_directory", "remove", "create"):
            monkeypatch.setattr(files, name, logged(log, name, [elsewhere] if name == "create" else []))
        db.compact()
    created = max(i for i, what in enumerate(log) if what.startswith("create"))
    removed = min(i for i, what in enumerate(log) if what in ("remove keys-00000000.npy", "remove keys-00000001.npy"))
    assert "sync_directory db" in log[created:removed], log


LOCKS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_catalogue_that_another_program_locks_can_be_written_to_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    with opened(path, durability, "a") as db:
        db._store.catalog.connection.set_busy_timeout(50)
        other = subprocess.Popen(
            [sys.executable, "-c", LOCKS, path / "catalog.sqlite"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(softdb.DatabaseLocked, match="another process keeps"):
            put(db, "b")
        other.communicate(b"enough")
        put(db, "c")
    assert stored_ids(path) == {"a", "c"}


def test_a_failed_checkpoint_takes_back_no_acknowledged_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, "relaxed", "a") as db:
        put(db, "b")
        after(
            monkeypatch, segments.ColumnFiles, "sync", lambda: setattr(db._store.writer, "_broken", apsw.IOError("EIO"))
        )
        db.flush()
        with pytest.raises(softdb.WriteFailed, match="an earlier write failed"):
            put(db, "c")
        assert len(db) == 2
    assert stored_ids(path) == {"a", "b"}
