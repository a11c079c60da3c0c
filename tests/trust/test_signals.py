"""Ctrl-C, other signals and injected exceptions leave the old or the new state, a working handle and no lock."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import crowd_batches as batches
import numpy as np
import pytest
import torch
from crowd_interrupt import Interruption, moments
from crowd_process import SECONDS, other
from worlds import holding

import softdb

# errors in a generator closed by an interrupt, or in a half listed directory, reach only pytest
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

QUICK, EXHAUSTIVE = 25, pytest.param(10**6, marks=pytest.mark.exhaustive)  # moments tried at most


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever starts these tests in the background may have Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def made(path: Path | None, **how: Any) -> softdb.SoftDB:
    db = batches.open_empty(path, **how)
    for batch in range(5):
        batches.write(db, batch)
    return db


QUERY = torch.zeros(1, batches.DIM)

VERBS: dict[str, Callable[[softdb.SoftDB, int, Path], Any]] = {
    "insert": lambda db, n, _: batches.write(db, n),
    "upsert": lambda db, n, _: db.upsert(batches.ids(3), **batches.content(3)),
    "update": lambda db, n, _: db.update(batches.ids(3), keys=batches.content(3)["keys"]),
    "delete": lambda db, n, _: db.delete(batches.ids(4)),
    "compact": lambda db, n, _: db.compact(),
    "payloads": lambda db, n, _: db.update(batches.ids(3), payloads=batches.content(3)["payloads"]),
    "search": lambda db, n, _: db.search(QUERY, k=3).ids,
    "attend": lambda db, n, _: db.attend(QUERY),
    "scan": lambda db, n, _: list(db.scan(9)),
    "count": lambda db, n, _: db.count({"batch": {"$gte": n}}),
    "get": lambda db, n, _: db.get(batches.ids(1)),
    "verify": lambda db, n, _: db.verify(),
    "flush": lambda db, n, _: (db.update(batches.ids(3), payloads=batches.content(3)["payloads"]), db.flush()),
    "refresh": lambda db, n, _: db.refresh(),
    "snapshot": lambda db, n, copies: db.snapshot(copies / str(n)),
}
WRITES = ("insert", "upsert", "update", "delete")


def elsewhere(work: Callable[[], Any]) -> None:
    """Do something in another thread of the same handle, which must never wait for an interrupted one."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "another thread waits for ever"
    if raised:
        raise raised[0]


def check_complete(db: softdb.SoftDB, number: int) -> None:
    """Raise AssertionError unless the handle reads, agrees with itself, and writes on."""
    found = batches.whole(list(db.scan(1000)))
    assert {0, 1, 2, 3} <= found
    assert len(db) == db.count({"of": batches.SIZE}) == batches.SIZE * len(found), "snapshot and catalogue differ"
    assert db.delete(batches.ids(number)) == (batches.SIZE if number in found else 0)
    if 4 not in found:
        batches.write(db, 4)


def sampled(count: int, most: int, seed: int = 0) -> list[int]:
    """So many of the moments 1 … count, at random."""
    return sorted(np.random.default_rng(seed).permutation(np.arange(1, count + 1))[:most].tolist())


# -- at every moment ---------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("most", [QUICK, EXHAUSTIVE])
@pytest.mark.parametrize(
    ("verb", "durability"), [*((verb, "full") for verb in VERBS), *((verb, "relaxed") for verb in (*WRITES, "flush"))]
)
def test_an_interrupt_at_any_moment_leaves_old_or_new(
    path: Path, tally: Counter[str], verb: str, durability: str, most: int
) -> None:
    work, copies = VERBS[verb], path.parent / "copies"
    copies.mkdir()
    db = made(path, durability=durability)
    work(db, 100, copies)
    check_complete(db, 100)
    count = moments(lambda: work(db, 101, copies))
    check_complete(db, 101)
    kept: list[KeyboardInterrupt | None] = []  # a kept traceback must hold no lock
    for number, at in enumerate(sampled(count, most), 102):
        interruption = Interruption(at)
        kept.append(interruption.during(lambda n=number: work(db, n, copies)))  # type: ignore[misc]
        tally["interrupts"] += 1
        try:
            elsewhere(lambda: db.search(QUERY, k=3))
            elsewhere(lambda n=number: check_complete(db, n))  # type: ignore[misc]
            check_complete(db, 100)
        except BaseException as error:
            raise AssertionError(f"{verb}, interrupted at {at} of {count}: {interruption.where}") from error
    assert any(kept)
    db.verify()
    db.close()
    with softdb.open(path, verify=True) as again:
        assert batches.seen(again) == {0, 1, 2, 3, 4}
    assert not [file for file in path.rglob("*") if file.name.startswith(".softdb-")]


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["search", "count", "get", "scan"])
def test_a_kept_traceback_of_an_interrupt_blocks_no_later_write(path: Path, verb: str) -> None:
    kept: list[KeyboardInterrupt] = []
    with made(path) as writer, softdb.open(path, mode="r") as db:
        count = moments(lambda: VERBS[verb](db, 1, path))
        for number, at in enumerate(sampled(count, QUICK), 101):
            interruption = Interruption(at)
            error = interruption.during(lambda: VERBS[verb](db, 1, path))
            if error is None:
                continue
            kept.append(error)
            batches.write(writer, number)
            db.refresh()
            assert number in batches.seen(db), f"a reader stays behind since an interrupt at {interruption.where}"
            writer.delete(batches.ids(number))
    assert kept


@pytest.mark.parametrize("most", [QUICK, EXHAUSTIVE])
def test_an_interrupt_while_opening_leaves_no_lock(path: Path, tally: Counter[str], most: int) -> None:
    made(path).close()
    lost = 0  # descriptors whose number an interrupt has swallowed: they hold no lock
    before = len(os.listdir("/proc/self/fd"))
    count = moments(lambda: softdb.open(path).close())
    for at in sampled(count, most):
        opened: list[softdb.SoftDB] = []
        interruption = Interruption(at)
        kept = interruption.during(lambda: opened.append(softdb.open(path)))  # noqa: B023
        tally["interrupts"] += 1
        for db in opened:
            db.close()
        try:
            softdb.open(path).close()
        except softdb.DatabaseLocked as error:
            raise AssertionError(f"opening, interrupted at {at} of {count}: {interruption.where}") from error
        del kept
        lost += any(word in interruption.where.rpartition("/")[2] for word in ("open", "in close, entering"))
    gc.collect()  # the frames of a traceback
    assert len(os.listdir("/proc/self/fd")) <= before + lost


@pytest.mark.parametrize("most", [QUICK, EXHAUSTIVE])
def test_an_interrupted_creation_can_be_opened(tmp_path: Path, tally: Counter[str], most: int) -> None:
    count = moments(lambda: batches.open_empty(tmp_path / "first").close())
    for at in sampled(count, most):
        path = tmp_path / str(at)
        interruption = Interruption(at)
        opened: list[softdb.SoftDB] = []
        interruption.during(lambda: opened.append(batches.open_empty(path)))  # noqa: B023
        tally["interrupts"] += 1
        for db in opened:
            db.close()
        with batches.open_empty(path) as db:
            batches.write(db, 1)
            assert batches.seen(db) == {1}, f"creating, interrupted at {at} of {count}: {interruption.where}"


@pytest.mark.parametrize("most", [QUICK, EXHAUSTIVE])
def test_an_interrupted_close_can_be_repeated(path: Path, tally: Counter[str], most: int) -> None:
    made(path).close()
    count = moments(softdb.open(path).close)
    for at in sampled(count, most):
        db = softdb.open(path)
        interruption = Interruption(at)
        interruption.during(db.close)
        tally["interrupts"] += 1
        db.close()
        with softdb.open(path) as again:
            assert len(again) == 5 * batches.SIZE, f"closing, interrupted at {at} of {count}: {interruption.where}"


@pytest.mark.slow
@pytest.mark.parametrize("most", [8, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_an_interrupted_build_is_over(path: Path, tally: Counter[str], most: int) -> None:
    """The next one may begin, and closing does not wait for it."""
    db = softdb.open(path, dim=8)
    keys = np.random.default_rng(0).standard_normal((5000, 8))
    db.insert(range(5000), keys)
    db.build_index("ivf")
    count = moments(lambda: db.build_index("ivf"))
    early = list(range(1, min(count, 120), max(1, 120 // most)))
    for at in sorted({*early, *sampled(count, most)}):
        interruption = Interruption(at)
        interruption.during(lambda: db.build_index("ivf"))
        tally["interrupts"] += 1
        try:
            elsewhere(lambda: db.search(keys[:2], k=3))
            assert db.build_index("flat").kind == "flat"
            elsewhere(lambda: db.insert([-1], keys[:1]))
            db.delete([-1])
        except BaseException as error:
            raise AssertionError(f"building, interrupted at {at} of {count}: {interruption.where}") from error
    elsewhere(db.close)
    with softdb.open(path, verify=True) as again:
        assert len(again) == 5000


@pytest.mark.slow
def test_an_interrupt_while_an_index_is_loaded_leaves_its_lock_free(path: Path, tally: Counter[str]) -> None:
    keys = np.random.default_rng(0).standard_normal((5000, 8))
    with holding(keys, path=path) as db:
        db.build_index("ivf")
    with softdb.open(path) as db:
        count = moments(lambda: db.search(keys[:1], k=3))
    for at in sampled(count, QUICK):
        db = softdb.open(path)
        interruption = Interruption(at)
        interruption.during(lambda: db.search(keys[:1], k=3))  # noqa: B023
        tally["interrupts"] += 1
        try:
            elsewhere(lambda: db.search(keys[:1], k=3))  # noqa: B023
            elsewhere(db.compact)
            elsewhere(db.close)
        except BaseException as error:
            raise AssertionError(f"searching, interrupted at {at} of {count}: {interruption.where}") from error


# -- real signals ------------------------------------------------------------------------------------------------------


def signalled(line: Connection, path: Path, signals: int, seed: int) -> None:
    """Uses every verb while another thread sends signals; then says how many came, and which batches it holds."""
    random, db = np.random.default_rng(seed), made(path)
    for name in VERBS:
        VERBS[name](db, 99, path.parent)  # fill lazy imports and caches
    over, main, sent, number = threading.Event(), threading.main_thread().ident, 0, 100
    assert main is not None

    def send() -> None:
        for pause in random.exponential(0.004, signals):
            time.sleep(pause)
            turn = number
            signal.pthread_kill(main, signal.SIGINT)
            while number == turn:  # it has come: two at once would be one
                time.sleep(0.0005)
        over.set()

    inside = [False]

    def interrupt(*_: object) -> None:
        if inside[0]:  # in the midst of a verb, not of this function
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    names = [name for name in VERBS if name != "snapshot"]
    while not over.is_set():
        number += 1
        try:
            inside[0] = True
            VERBS[names[number % len(names)]](db, number, path)
            inside[0] = False
        except KeyboardInterrupt:
            inside[0] = False
            sent += 1
    thread.join()
    db.refresh()
    found = batches.whole(list(db.scan(1000)))
    assert len(db) == batches.SIZE * len(found)
    elsewhere(lambda: batches.write(db, 98))
    db.close()
    line.send((sent, found | {98}))


@pytest.mark.slow
@pytest.mark.parametrize("signals", [100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_real_signals_at_random_moments(path: Path, tally: Counter[str], signals: int) -> None:
    seed = 0
    with other(signalled, path, signals, seed) as process:
        sent, held = process.hear(10 * SECONDS)
        process.end()
    tally["signals"] += sent
    assert sent > signals // 3, "too few came in the midst of something"
    with softdb.open(path, verify=True) as again:
        assert batches.whole(list(again.scan(1000))) == held, f"seed {seed}"


class Thrown(Exception):
    """An exception that no code of softdb expects."""


@pytest.mark.slow
@pytest.mark.parametrize("times", [40, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_exceptions_set_in_other_threads(path: Path, tally: Counter[str], times: int) -> None:
    random, db = np.random.default_rng(1), made(path)
    names = [name for name in VERBS if name not in ("snapshot", *WRITES)] + ["insert"]
    for number in range(100, 100 + times):
        begun, ended = threading.Event(), threading.Event()

        def work(number: int = number, begun: threading.Event = begun, ended: threading.Event = ended) -> None:
            with contextlib.suppress(Thrown):
                begun.set()
                try:
                    for name in names:
                        VERBS[name](db, number, path)
                finally:
                    ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(SECONDS)
        time.sleep(float(random.uniform(0, 0.004)))
        if not ended.is_set() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Thrown))
        thread.join(SECONDS)
        assert not thread.is_alive(), f"the thread of exception {number} hangs"
        tally["exceptions set in other threads"] += 1
        db.refresh()
        actual = batches.whole(list(db.scan(1000)))
        assert {0, 1, 2, 3, 4} <= actual
        assert len(db) == batches.SIZE * len(actual)
        db.delete(batches.ids(number))
    db.close()
    with softdb.open(path, verify=True) as again:
        assert {0, 1, 2, 3, 4} <= batches.seen(again)


def test_an_exception_thrown_into_a_scan_ends_it_alone(path: Path) -> None:
    with made(path) as db:
        scan: Any = db.scan(10)
        next(scan)
        with pytest.raises(Thrown, match="in"):
            scan.throw(Thrown("in"))
        with pytest.raises(StopIteration):
            next(scan)
        half = db.scan(10)
        next(half)  # a scan that is never continued
        elsewhere(lambda: batches.write(db, 9))
        assert batches.seen(db) == {0, 1, 2, 3, 4, 9}


def writes_on(line: Connection, path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    db = batches.open_empty(path)
    for batch in range(10**6):
        batches.write(db, batch)
        line.send(batch)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_process_ended_by_a_signal_leaves_whole_batches_and_no_lock(path: Path, number: int) -> None:
    last = 0
    with other(writes_on, path) as writer:
        while last < 20:
            last = writer.hear()
        if number == signal.SIGINT:
            os.kill(writer.pid, number)
            writer.process.join(SECONDS)
        else:
            writer.kill(number)
        with contextlib.suppress(EOFError, AssertionError):  # at its end it tells of the KeyboardInterrupt
            while writer.line.poll():
                last = writer.hear()
        with softdb.open(path, verify=True) as db:
            assert set(range(last + 1)) <= batches.seen(db) <= set(range(last + 2))
