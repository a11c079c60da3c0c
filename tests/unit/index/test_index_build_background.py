"""Builds in the background: reads and writes continue, and the finished index includes them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.index import Floats, N, recall, scores, world
from doubles.held_builds import goes_on_once_waited_for
from worlds import holding, index_report

import softdb
from softdb.errors import Cancelled
from softdb.index import finder
from softdb.index.background import Build, Step
from softdb.index.build import Target, tuned
from softdb.reports import IndexReport

ROOT = Path(softdb.__file__).parent.parent
SECONDS = 60.0


class Held:
    """A progress callback that holds a build at a moment until it is let go."""

    def __init__(self, what: str = "adding") -> None:
        self.what, self.there, self.go = what, threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def __call__(self, what: str, done: int, whole: int) -> None:
        self.threads.add(threading.current_thread().name)
        if what == self.what:
            self.there.set()
            assert self.go.wait(SECONDS)


def clustered(path: Path | None = None, **words: Any) -> softdb.SoftDB:
    return holding(world()[0], payloads=[{"i": i} for i in range(N)], path=path, **words)


@contextlib.contextmanager
def building(
    db: softdb.SoftDB, kind: str = "ivf", moment: str = "adding", **words: Any
) -> Iterator[Build[IndexReport]]:
    """Hold a build at a moment while the block runs, then let it finish."""
    held = Held(moment)
    build = db.build_index(kind, background=True, progress=held, **words)
    try:
        assert held.there.wait(SECONDS)
        yield build
    finally:
        held.go.set()
    with contextlib.suppress(Cancelled):
        build.result(SECONDS)


def builders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "softdb-build"]


def agrees(db: softdb.SoftDB, queries: Floats, least: float = 0.9) -> None:
    """Search by the index finds what exact search finds, and nothing that is not there."""
    found, true = db.search(queries, k=10), db.search(queries, k=10, exact=True)
    assert bool(found.live.all())
    hits = [len(set(one) & set(two)) for one, two in zip(found.rows.tolist(), true.rows.tolist(), strict=True)]
    assert np.mean(hits) / 10 >= least
    assert all(one in db for ids in found.ids for one in ids)


def test_a_build_returns_at_once_and_its_report_later(tmp_path: Path) -> None:
    _, queries = world()
    with clustered(tmp_path / "db") as db:
        with building(db) as build:
            assert (build.done, build.progress) == (False, Step("adding", N, N))
            assert repr(build) == "<Build: adding 100 %>"
            assert db.stats().index == IndexReport("flat", building="adding 100 %")
            with pytest.raises(
                TimeoutError, match=r"not built after 0.01 seconds \(adding 100 %\); wait again or cancel"
            ):
                build.result(0.01)
            assert builders() == ["softdb-build"]
        assert build.done
        report = build.result()
        assert (report.kind, report.met, repr(build)) == ("ivf", True, f"<Build: done, {report}>")
        assert index_report(db) == report
        with softdb.open(tmp_path / "db", mode="r") as reader:  # it is kept already
            assert index_report(reader).kind == "ivf"
        agrees(db, queries)
        build.cancel()  # too late, which is fine
        assert build.result() is report
    assert not builders()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "on_disk", "compacted", "moment"),
    [
        ("ivf", True, True, "training"),
        ("ivf", True, True, "measuring"),
        ("ivf", True, False, "training"),
        ("ivf", False, True, "measuring"),
        ("ivf", False, False, "measuring"),
        ("hnsw", True, True, "measuring"),
    ],
)
def test_writes_during_a_build_are_found_afterwards(
    tmp_path: Path, kind: str, on_disk: bool, compacted: bool, moment: str
) -> None:
    keys, queries = world()
    with clustered(tmp_path / "db" if on_disk else None) as db:
        db.delete(range(0, 100))
        with building(db, kind, moment):
            gone = np.unique(db.search(queries, k=5).rows.numpy()).tolist()
            db.delete(gone[::2])
            db.upsert(gone[1::2], -keys[gone[1::2]])
            db.insert([f"new{i}" for i in range(len(queries))], 3 * queries)
            if compacted:
                db.compact()
            agrees(db, queries, 1.0)
        assert index_report(db).kind == kind
        hits = db.search(queries, k=10)
        assert hits.rows[:, 0].tolist() == db.search(queries, k=1, exact=True).rows[:, 0].tolist()
        assert not {one for ids in hits.ids for one in ids} & {*gone[::2], *range(100)}
        agrees(db, queries)
        assert len(db.search(queries[:1], k=len(db)).ids[0]) == len(set(db.search(queries[:1], k=len(db)).ids[0]))
        index = db.core.finder.index
        assert index is not None
        if compacted and kind == "ivf":  # codes of what compaction removed are taken out
            assert index.count == N - 100 - len(gone)
        with building(db, kind):  # anew, over rows with gaps
            db.insert(["last"], 9 * queries[:1])
        assert db.search(queries[:1], k=1).ids == [["last"]]
        agrees(db, queries)
    if on_disk:
        with softdb.open(tmp_path / "db") as db:
            agrees(db, queries)


@pytest.mark.slow
def test_threads_read_and_write_all_the_while() -> None:
    _, queries = world()
    errors: list[BaseException] = []
    with clustered() as db:
        build = db.build_index("ivf", background=True)

        def write() -> None:
            try:
                for i in range(20):
                    db.insert([f"w{i}"], queries[i : i + 1] * 5)
                    assert db.search(queries[i], k=1).ids == [[f"w{i}"]]
                    db.delete([f"w{i}"])
                    assert db.search(queries[i], k=1).ids != [[f"w{i}"]]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        while not build.done:
            assert bool(db.search(queries, k=3).live.all())
        for thread in threads:
            thread.join()
        assert not errors
        agrees(db, queries)


def test_one_build_at_a_time() -> None:
    with clustered() as db:
        db.build_index("ivf")
        with building(db):
            for other in (
                lambda: db.build_index("ivf"),
                lambda: db.build_index("ivf", background=True),
                lambda: db.tune(),
            ):
                with pytest.raises(
                    softdb.BadInput, match=r"being built or tuned already \(adding 100 %\); wait for it"
                ):
                    other()
        assert db.build_index("ivf", background=True).result(SECONDS).kind == "ivf"
        assert db.tune(0.5).target == 0.5


def test_a_build_in_the_foreground_is_shown_too() -> None:
    seen = []
    with clustered() as db:
        db.build_index("ivf", progress=lambda *_: seen.append(index_report(db).building))
    assert {"training 0 %", "training 100 %", "adding 100 %"} <= set(seen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"kind": "magic"}, "build_index: kind is 'magic'; choose one of"),
        ({"recall": 0}, "build_index: recall is 0; expected a share above 0"),
        ({"k": 0}, "k is 0"),
        ({"memory": 10}, "memory is 10 bytes, but the smallest index of kind 'ivf'"),
        ({"queries": [[1.0]]}, "queries are 1 wide but this database's keys are 16 wide"),
        ({"background": 1}, "background is 1; expected True or False"),
    ],
)
def test_bad_input_is_refused_at_once(words: dict[str, Any], message: str) -> None:
    with clustered() as db:
        with pytest.raises(softdb.BadInput, match=message):
            db.build_index(**{"kind": "ivf", "background": True, **words})
        assert db.stats().index is None
        assert not builders()
        db.delete(range(N - 10))
        with pytest.raises(softdb.BadInput, match="10 records are too few to train an index on"):
            db.build_index("ivf", background=True)
    with pytest.raises(softdb.Closed, match="this handle is closed"):
        db.build_index("ivf", background=True)


def test_a_reader_cannot_build_an_index(tmp_path: Path) -> None:
    clustered(tmp_path / "db").close()
    with softdb.open(tmp_path / "db", mode="r") as db, pytest.raises(softdb.ReadOnly, match="handle is read-only"):
        db.build_index(background=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["training", "adding", "measuring"])
def test_a_cancelled_build_leaves_the_old_index(tmp_path: Path, moment: str) -> None:
    _, queries = world()
    with clustered(tmp_path / "db") as db:
        db.build_index("ivf")
        before, stats = db.core.finder.index, db.stats().index
        said = rf"build_index: the build was cancelled while {moment} \d+ %: cancel\(\) was called; the old index"
        with building(db, moment=moment) as build:
            build.cancel()
            assert not build.done
        with pytest.raises(Cancelled, match=said):
            build.result()
        assert repr(build) == "<Build: cancelled>"
        assert db.core.finder.index is before
        assert db.stats().index == stats
        actual = db.search(queries, k=5).rows.tolist()
        assert db.build_index("ivf", background=True).result(SECONDS).kind == "ivf"
        db.build_index("ivf")
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert index_report(db).kind == "ivf"
        agrees(db, queries)
        assert len(actual) == len(queries)


def test_a_build_may_be_cancelled_until_it_is_taken_into_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with clustered() as db:

        def last(*arguments: Any) -> None:
            tuned(*arguments)
            assert db._finder._build is not None
            db._finder._build.cancel()

        monkeypatch.setattr("softdb.index.build.tuned", last)
        build = db.build_index("ivf", background=True)
        with pytest.raises(Cancelled, match="cancelled while measuring 100 %"):
            build.result(SECONDS)
        assert db.stats().index is None


def test_a_failed_build_raises_at_result_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(what: str, done: int, whole: int) -> None:
        raise RuntimeError("the lamp is out")

    with clustered() as db:
        build = db.build_index("ivf", background=True, progress=broken)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the lamp is out"):
                build.result(SECONDS)
        assert repr(build) == "<Build: failed>"
        db.close()  # joins the thread, which logs last
    assert "the index was not built, the old index stays in use: the lamp is out" in caplog.text


def test_an_error_of_ours_names_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise softdb.BadInput("no lists")

    monkeypatch.setattr(finder, "build", fails)
    with clustered() as db:
        build = db.build_index("ivf", background=True)
        with pytest.raises(softdb.BadInput, match=r"^build_index: no lists$"):
            build.result(SECONDS)


@pytest.mark.parametrize("timeout", [-1, True, "long", float("nan")])
def test_timeouts_that_are_none(timeout: Any) -> None:
    with clustered() as db:
        build = db.build_index(background=True)
        with pytest.raises(softdb.BadInput, match=r"timeout is .*; expected seconds, 0 or more"):
            build.result(timeout)
        assert build.result(float("inf")).kind == "flat"


def test_waiting_for_oneself_is_refused() -> None:
    builds: list[Build[IndexReport]] = []
    ready = threading.Event()

    def waits(*_: object) -> None:
        assert ready.wait(SECONDS)
        builds[0].result()

    with clustered() as db:
        builds.append(db.build_index("ivf", background=True, progress=waits))
        ready.set()
        with pytest.raises(softdb.BadInput, match="progress callback, where it would wait for ever"):
            builds[0].result(SECONDS)


def test_closing_cancels_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, queries = world()
    db = clustered(tmp_path / "db")
    db.build_index("ivf")
    held = Held("adding")
    build = db.build_index("ivf", background=True, progress=held)
    assert held.there.wait(SECONDS)
    goes_on_once_waited_for(monkeypatch, held.go)
    db.close()
    assert build.done
    assert not builders()
    with pytest.raises(Cancelled, match="the database was closed; the old index stays in use"):
        build.result()
    with softdb.open(tmp_path / "db") as db:
        assert index_report(db).kind == "ivf"
        agrees(db, queries)


def test_a_callback_may_close_the_database(tmp_path: Path) -> None:
    db = clustered(tmp_path / "db")
    build = db.build_index("ivf", background=True, progress=lambda *_: db.close())
    with pytest.raises(Cancelled, match="the database was closed"):
        build.result(SECONDS)
    with softdb.open(tmp_path / "db") as db:
        assert len(db) == N


def test_a_tuning_ends_with_the_database_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = clustered(tmp_path / "db")
    db.build_index("ivf")
    there, errors = threading.Event(), []

    def slow(*arguments: Any) -> None:
        there.set()
        deadline = time.monotonic() + SECONDS
        while db._finder._build is not None and db._finder._build._stop is None and time.monotonic() < deadline:
            time.sleep(0.01)
        tuned(*arguments)

    def tune() -> None:
        try:
            db.tune(0.5)
        except Cancelled as error:
            errors.append(str(error))

    monkeypatch.setattr(finder, "tuned", slow)
    thread = threading.Thread(target=tune)
    thread.start()
    assert there.wait(SECONDS)
    db.close()
    thread.join(SECONDS)
    (error,) = errors
    assert error.startswith("tune: the build was cancelled while measuring 0 %: the database was closed")


@pytest.mark.slow
def test_the_thread_builds_with_as_many_threads_as_the_caller() -> None:
    import faiss

    before, seen = faiss.omp_get_max_threads(), []
    with clustered() as db:
        for threads in (3, 1):
            faiss.omp_set_num_threads(threads)
            try:
                callback = lambda *_: seen.append(faiss.omp_get_max_threads())  # noqa: E731
                db.build_index("ivf", background=True, progress=callback).result(SECONDS)
            finally:
                faiss.omp_set_num_threads(before)
            assert set(seen) == {threads}
            seen.clear()


def test_the_tuning_queries_may_change_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()
    seen: list[list[list[float]]] = []
    mine = torch.ones(3, 16)

    def takes(*arguments: Any) -> None:
        assert changed.wait(SECONDS)
        targets = [argument for argument in arguments if isinstance(argument, Target)]
        seen.extend(target.queries.tolist() for target in targets if target.queries is not None)
        raise softdb.BadInput("seen enough")

    monkeypatch.setattr(finder, "build", takes)
    with clustered() as db:
        build = db.build_index("ivf", background=True, queries=mine)
        mine.zero_()
        changed.set()
        with pytest.raises(softdb.BadInput, match="seen enough"):
            build.result(SECONDS)
    assert seen == [[[1.0] * 16] * 3]


def test_a_search_does_not_wait_while_another_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    _, queries = world()
    with clustered() as db:
        db.build_index("ivf")
        db.insert([f"n{i}" for i in range(1000)], world(2)[0][:1000])
        before = db.core.finder.index
        with db._finder._lock:  # as if it saved
            agrees(db, queries)
            assert db.core.finder.index is before
        agrees(db, queries)
        assert db.core.finder.index is not before


def test_a_reader_from_before_an_index_searches_exactly(tmp_path: Path) -> None:
    keys, queries = world()
    with clustered(tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.delete(range(500))
        db.insert(range(N, N + 500), 2 * keys[:500])
        db.build_index("ivf")
        truth = scores("dot", queries, keys)
        assert reader.search(queries, k=10).rows.tolist() == reader.search(queries, k=10, exact=True).rows.tolist()
        assert recall(reader.search(queries, k=10), truth, 10) == 1
        assert reader.stats().index is None
        reader.refresh()
        assert index_report(reader).kind == "ivf"
        agrees(reader, queries)


# -- processes ---------------------------------------------------------------------------------------------------------


def in_child(send: Any, db: softdb.SoftDB, build: Build[IndexReport], queries: Floats) -> None:
    try:
        try:
            build.result(SECONDS)
        except Cancelled as error:
            told = str(error)
        found = db.search(queries, k=5).rows.tolist()
        db.close()
        send.send((build.done, told, found, builders()))
    except BaseException as error:
        send.send(repr(error))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("locked", [True, False])
def test_a_forked_child_has_no_builder(tmp_path: Path, locked: bool) -> None:
    _, queries = world()
    with clustered(tmp_path / "db") as db:
        db.build_index("ivf")
        expected = db.search(queries, k=5).rows.tolist()
        with building(db) as build:
            context = multiprocessing.get_context("fork")
            receive, send = context.Pipe(False)
            with db._finder._lock if locked else contextlib.nullcontext():  # as if the builder held it
                child = context.Process(target=in_child, args=(send, db, build, queries))
                child.start()
            assert receive.poll(SECONDS)
            answer = receive.recv()
            child.join(SECONDS)
            assert not build.done
        said = "the build was cancelled while adding 100 %: it continues in the parent process only"
        assert answer == (True, f"{said}; the old index stays in use", expected, [])
        assert build.result().kind == "ivf"
        agrees(db, queries)


PROGRAM = """
import sys, threading, numpy as np, softdb
keys = np.random.default_rng(0).standard_normal((3000, 16))
db = softdb.open(sys.argv[1], dim=16)
db.insert(range(3000), keys)
db.build_index("ivf")
reached = threading.Event()
def held(what, done, whole):
    if what == sys.argv[2]:
        print("there", flush=True)
        reached.set()
        threading.main_thread().join()
build = db.build_index("ivf", background=True, progress=held)
reached.wait()
if sys.argv[3] == "stays":
    sys.stdin.read()
"""


def program(path: Path, moment: str, then: str) -> subprocess.Popen[str]:
    """A process that prints "there" when a build is held at a moment, until the main thread ends or for ever."""
    command = [sys.executable, "-c", PROGRAM, str(path), moment, then]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["adding", "measuring"])
def test_a_process_that_is_killed_leaves_the_old_index(tmp_path: Path, moment: str) -> None:
    with program(tmp_path / "db", moment, "stays") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        child.send_signal(signal.SIGKILL)
    with softdb.open(tmp_path / "db") as db:
        assert index_report(db).kind == "ivf"
        assert len(list((tmp_path / "db" / "index").iterdir())) == 1
        assert db.build_index("ivf", background=True).result(SECONDS).kind == "ivf"


@pytest.mark.slow
def test_the_end_of_the_program_cancels(tmp_path: Path) -> None:
    with program(tmp_path / "db", "adding", "ends") as child:
        out, errors = child.communicate(timeout=SECONDS)
    assert (child.returncode, out, errors) == (0, "there\n", "")
    with softdb.open(tmp_path / "db") as db:
        assert index_report(db).kind == "ivf"


def test_a_system_without_threads_leaves_no_build_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with clustered() as db:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                db.build_index("ivf", background=True)
        assert db.build_index("ivf").kind == "ivf"
