"""Disk errors at every step raise a typed error; the handle still reads, and the directory opens."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from fault_cases import (
    CASES,
    SCHEMA,
    Base,
    Case,
    Disk,
    Fault,
    attempt,
    create,
    failure,
    made,
    of_catalog,
    of_index,
    passed_over,
    reopened,
)
from fault_full import acknowledged, fill_again, live_on
from fault_reads import READS, read
from kill_verbs import World, columns, put, truth
from oracle import check
from tap import Failing, Op, step, tapped

import softdb
from softdb.store import disk, files

EXHAUSTIVE = pytest.mark.exhaustive
# errors of a Python VFS inside SQLite's own error handling reach no caller
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Base]]:
    """Directories to try on, in memory where there is such a place: an error is the same there."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="softdb-fault-") as room,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SOFTDB_KEY_FILE", str(tmp_path_factory.getbasetemp() / "index.key"))  # as in each test
        yield {name: made(Path(room) / name, name) for name in ("plain", "rich", "indexed")}


def some(case: Case, steps: list[Op], every: bool) -> list[int]:
    """The steps to try: all; of many records those of the index and a few of the others; or one of each name."""
    points = [op.point for op in steps]
    first, last = ({point: i for i, point in order} for order in (list(enumerate(points))[::-1], enumerate(points)))
    if case.base != "plain":
        few = [i for i, op in enumerate(steps) if of_index(op)]
        return sorted({*few, *first.values(), *last.values()}) if every else few
    return list(range(len(steps))) if every else sorted(first.values())


def faults(at: int, op: Op, every: bool) -> Iterator[Fault]:
    """Faults of a step: every error, or one."""
    errors = (errno.EIO, errno.ENOSPC)
    if of_catalog(op) and op.name not in ("write", "create"):
        errors = (errno.EIO, errno.EIO)  # SQLite says disk full of writes alone
    if not every:
        yield Fault(at, errors[at % 2], half=op.name == "write", stays=at % 3 == 0)
        return
    yield from (Fault(at, error, stays=stays) for error in sorted(set(errors)) for stays in (False, True))
    if op.name == "write":
        yield Fault(at, errno.ENOSPC, half=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_error_at_any_step_is_raised_and_loses_no_record(
    bases: dict[str, Base], tally: Counter[str], case: Case, every: bool
) -> None:
    base = bases[case.base]
    steps = attempt(case, base, base.folder.with_name("whole"), None)
    wrong = []
    for fault in [one for at in some(case, steps, every) for one in faults(at, steps[at], every)]:
        tally["faults injected"] += 1
        tally["faults: acknowledged records lost"] += 0
        try:
            attempt(case, base, base.folder.with_name(f"now-{tally['faults injected']}"), fault)
        except Exception as error:  # all of them are shown
            wrong.append(f"{case}, {steps[fault.at].point}, {fault}: {type(error).__name__} {error}")
    assert not wrong, f"{len(wrong)} failed:\n" + "\n".join(wrong[:40])


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("stays", [False, True])
def test_a_creation_that_fails_at_any_step_is_completed_by_the_next_open(
    tmp_path: Path, tally: Counter[str], error: int, stays: bool
) -> None:
    steps = create(tmp_path / "whole", None)
    assert len(steps) > 10
    for at in range(len(steps)):
        tally["faults injected"] += 1
        create(tmp_path / f"{at}", Fault(at, error, stays=stays))


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [case for case in CASES if case.base == "plain"], ids=str)
def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all(
    bases: dict[str, Base], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    whole = disk.write
    monkeypatch.setattr(disk, "write", lambda descriptor, data, offset: whole(descriptor, data[:13], offset))
    attempt(case, bases[case.base], bases[case.base].folder.with_name("bytes"), None)


@pytest.mark.parametrize("verb", READS)
def test_read_errors_are_raised_and_later_reads_succeed(bases: dict[str, Base], tally: Counter[str], verb: str) -> None:
    base = bases["plain"]
    reads = read(base, base.folder.with_name("read"), verb, None)
    assert reads
    for at in range(reads):
        tally["faults injected"] += 1
        read(base, base.folder.with_name(f"read-{at}"), verb, at)


@pytest.mark.parametrize("by", ["a compaction", "a commit"])
def test_a_sync_that_fails_when_the_log_is_folded_in_ends_writing(
    bases: dict[str, Base], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    base, room = bases["plain"], bases["plain"].folder.with_name("folding")
    shutil.copytree(base.folder, room)
    broken = Failing(step())
    with tapped(broken, room), passed_over():
        world = World(room / "db", SCHEMA)
        broken.fails = step("sync catalog.sqlite")
        if by == "a compaction":
            with pytest.raises(softdb.WriteFailed, match="the disk failed"):
                world.db.compact()
            check(world.db, base.state)
        else:
            monkeypatch.setattr("softdb.store.writer.PAGES", 1)  # every commit folds
            write(world, "done")  # on disk, in the log
        broken.fails = step()
        try:
            with pytest.raises(softdb.WriteFailed, match="an earlier write failed"):
                write(world, "more")
        finally:
            world.db.close()
            shutil.rmtree(room)


def write(world: World, name: str) -> None:
    world.db.upsert([name], **columns([truth(np.random.default_rng(3), SCHEMA, None)]))


def test_no_write_follows_a_failed_sync_of_the_log(bases: dict[str, Base]) -> None:
    """Its pages count as clean and may not be on disk: a commit behind them would be lost with them."""
    base, room = bases["plain"], bases["plain"].folder.with_name("behind")
    broken, later = Failing(step()), Disk()
    shutil.copytree(base.folder, room / "first")
    with tapped(broken, room), passed_over():
        world = World(room / "first" / "db", SCHEMA)
        write(world, "before")  # the log has its head
        broken.fails = step("sync catalog.sqlite-wal")
        with pytest.raises(softdb.WriteFailed, match="disk I/O error"):
            write(world, "a")
        broken.fails = step()
        shutil.copytree(room / "first", room / "second")  # as a process that dies now leaves it
        world.db.close()
    with tapped(later, room):
        world = World(room / "second" / "db", SCHEMA)
        write(world, "b")
        world.db.close()
    points = [op.point for op in later.log]
    assert "sync catalog.sqlite" in points[: points.index("write catalog.sqlite-wal")]
    shutil.rmtree(room)


def test_a_write_whose_columns_cannot_be_reopened_is_committed_or_raised(
    bases: dict[str, Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is made when there turn out to be too many open files."""
    room = bases["plain"].folder.with_name("crowded")
    shutil.copytree(bases["plain"].folder, room)
    world, state = World(room / "db", SCHEMA), bases["plain"].state
    one = put("insert", list(range(300)), np.random.default_rng(3), SCHEMA, 50, state)

    def crowded(path: Path, *_: object) -> BinaryIO:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", crowded)
        error = failure(one, world)
    world.db.refresh()
    check(world.db, *([one.after] if error is None else [state, one.after]))
    world.db.close()
    reopened(room / "db", [one.after] if error is None else [state, one.after])
    shutil.rmtree(room)


@pytest.mark.slow
def test_a_full_file_system_loses_no_acknowledged_record(tmp_path: Path, tally: Counter[str]) -> None:
    """A small one, in a name space of its own: so nothing is left of it, whatever happens."""
    folder = tmp_path / "full"
    folder.mkdir()
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    mount = f"mount -t tmpfs -o size=8m tmpfs {shlex.quote(str(folder))}"
    if shutil.which("unshare") is None or subprocess.run([*alone, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here: no unshare, or not allowed")
    script = shlex.join([sys.executable, str(Path(__file__).with_name("fault_full.py")), str(folder)])
    run = subprocess.run([*alone, "sh", "-c", f"{mount} && {script}"], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    tally["faults: file systems filled"] += 1


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [70_000, 150_000, 500_000])
def test_a_limit_on_the_size_of_files_is_as_good_as_a_full_disk(tmp_path: Path, tally: Counter[str], size: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores the signal, so writes fail
    try:
        state, n = fill_again(tmp_path / "db", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    live_on(tmp_path / "db", acknowledged(tmp_path / "db", state, state), n)
    tally["faults: file systems filled"] += 1
