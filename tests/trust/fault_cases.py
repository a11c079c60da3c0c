"""A step of a verb fails, as a disk does that is full, broken or gone; what database and handle must do then."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import kill_verbs as verbs
import numpy as np
import pytest
from kill_rounds import answers
from kill_verbs import DIM, RICH, SCHEMAS, Act, Maker, Random, World, put
from oracle import State, Truth, check
from tap import Op, Tap, tapped

import softdb
from softdb.store import writer as writing
from softdb.store.catalog import Catalog

SCHEMA = SCHEMAS[0]
REASONS = r"disk I/O error|disk is full|full|Input/output error|No space left"


class Fault(NamedTuple):
    """An answer of the disk."""

    at: int  # the step, from 0 on
    error: int  # an errno
    half: bool = False  # of a write is made before it fails
    stays: bool = False  # every later step fails, too

    def __str__(self) -> str:
        how = " after half of it" * self.half + " and all after it" * self.stays
        return f"step {self.at}{how}: {errno.errorcode[self.error]}"


class Disk(Tap):
    """A log of the steps that fails some of them once it is set to."""

    def __init__(self) -> None:
        self.log: list[Op] = []
        self.fault: Fault | None = None
        self.struck: Op | None = None  # the first that failed
        self.begun = 0  # length of the log when the fault was set

    def set(self, fault: Fault | None) -> None:
        self.fault, self.begun = fault, len(self.log)

    def mend(self) -> None:
        self.fault = None

    def before(self, op: Op) -> None:
        at = len(self.log) - self.begun
        self.log.append(op)
        if self.fault is None or at < self.fault.at or (at > self.fault.at and not self.fault.stays):
            return
        self.struck = self.struck or op
        if self.fault.half and op.name == "write":
            descriptor = os.open(op.path, os.O_WRONLY)
            os.pwrite(descriptor, op.data[: len(op.data) // 2], op.offset)
            os.close(descriptor)
        raise OSError(self.fault.error, os.strerror(self.fault.error))


@dataclass(frozen=True)
class Case:
    """A verb, its base, and the steps at which it may be cut while writing can continue."""

    maker: Maker
    base: str  # of BASES; "" for nothing at all
    goes_on: Callable[[Op], bool] = lambda op: False
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.maker.__name__


def close(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return Act("close", lambda world: world.db.close(), state)


def small(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """Insert into an existing segment."""
    return put("insert", ["a", "b"], random, schema, n, state)


def large(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """An insert that needs new segments."""
    return put("insert", list(range(300)), random, schema, n, state)


def of_index(op: Op) -> bool:
    return op.kind == "index" or op.path.name == "index"


def of_copy(op: Op) -> bool:
    return "copy-" in str(op.path)


def of_catalog(op: Op) -> bool:
    return op.path.name.startswith(("catalog.sqlite", "unfinished.sqlite")) and "gathered" not in op.kind


def of_new_segment(op: Op) -> bool:
    """Of what compaction writes aside; where a sync has failed, the handle may rather stop."""
    return op.kind in ("keys", "values", "rows") and op.name != "sync"


def of_gathered(op: Op) -> bool:
    """Steps in the folder of new keys, which has a catalogue of its own, and in files written aside."""
    return "gathered" in op.kind or of_new_segment(op)


CASES = [  # a plain `pytest` runs the first two
    Case(small, "plain"), Case(verbs.compact, "plain", of_new_segment), Case(large, "plain"),
    Case(verbs.upsert, "plain"), Case(verbs.update, "plain"), Case(verbs.delete, "plain"),
    Case(verbs.delete_where, "plain"), Case(verbs.field, "plain"), Case(verbs.snapshot, "plain", of_copy),
    Case(verbs.reembed, "plain", of_gathered),
    Case(verbs.reopen, "plain"), Case(close, "plain"),
    Case(verbs.index, "rich", of_index), Case(verbs.compact, "indexed", of_index, "compact with an index"),
    Case(verbs.snapshot, "indexed", of_copy, "snapshot with an index"), Case(verbs.reopen, "indexed", of_index),
]  # fmt: skip


class Base(NamedTuple):
    """A directory to copy, left by a killed writer, and its records."""

    folder: Path
    state: State


def made(folder: Path, name: str) -> Base:
    """The base of that name."""
    folder.mkdir()
    working = folder / "working"
    working.mkdir()
    world, random, state = World(working / "db", SCHEMA), np.random.default_rng(3), State()
    for n, count in enumerate((40, 50, 30) if name == "plain" else (RICH, 150)):
        one = put("insert", [f"{n}-{i}" for i in range(count)], random, SCHEMA, n, state)
        one.do(world)
        state = one.after
    for maker in (*([verbs.index] if name == "indexed" else []), verbs.delete, verbs.update):
        one = maker(random, SCHEMA, 9, state)
        one.do(world)
        state = one.after
    shutil.copytree(working, folder / "left")  # with a log that is not folded in
    world.db.close()
    return Base(folder / "left", state)


def attempt(case: Case, base: Base, room: Path, fault: Fault | None) -> list[Op]:
    """Do a verb to a copy while a step of it fails, and return its steps. Raises AssertionError for what goes wrong."""
    shutil.copytree(base.folder, room)
    disk = Disk()
    one = case.maker(np.random.default_rng(21), SCHEMA, 50, base.state)
    with tapped(disk, room), passed_over(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "PAGES", 8)  # a commit folds its log in, and that may fail
        world = World(room / "db", SCHEMA)
        disk.set(fault)
        error = failure(one, world)
        steps = disk.log[disk.begun :]
        if fault is not None and not fault.stays:
            disk.mend()
        allowed = [one.after] if error is None else [base.state, one.after]
        if not world.db._store.closed:
            allowed = [handle(world.db, case, disk, error, allowed)] if fault is None or not fault.stays else allowed
            if fault is not None and fault.stays:
                refuses(world.db, error, allowed)
            before_close = len(disk.log)
            close(np.random.default_rng(0), SCHEMA, 0, {}).do(world)
            no_second_sync(case, disk, before_close)
    reopened(room / "db", allowed if error is None else [*allowed, one.after])
    copied(room / "copy-50", base.state, error, fault is not None and fault.stays)
    shutil.rmtree(room)
    assert fault is not None or error is None, f"{case} fails without a fault: {error}"
    return steps


def create(path: Path, fault: Fault | None) -> list[Op]:
    """Make a database while a step fails, and return the steps; the next to open it finds it new, and makes it."""
    broken = Disk()
    broken.set(fault)
    expected = contextlib.nullcontext() if fault is None else contextlib.suppress(softdb.SoftDBError)
    with tapped(broken, path), passed_over(), expected:
        softdb.open(path, dim=DIM, **SCHEMA).close()
    try:
        softdb.open(path, mode="r").close()
    except (softdb.NotADatabase, softdb.CorruptionError):
        assert broken.struck is not None
    with softdb.open(path, dim=DIM, **SCHEMA) as db:
        one = put("insert", ["first"], np.random.default_rng(0), SCHEMA, 0, check(db, {}))
        db.insert(["first"], **verbs.columns([one.after["first"]]))
        check(db, one.after)
    reopened(path, [one.after])
    return broken.log


@contextlib.contextmanager
def passed_over() -> Iterator[None]:
    """SQLite passes over errors when it folds its log in at the end; but apsw raises what a Python VFS has raised."""
    close = Catalog.close

    def quietly(catalog: Catalog) -> None:
        with contextlib.suppress(apsw.Error):
            close(catalog)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Catalog, "close", quietly)
        yield


def failure(one: Act, world: World) -> softdb.SoftDBError | None:
    """Return the error of a verb, if it belongs to softdb's family."""
    try:
        one.do(world)
    except softdb.SoftDBError as error:
        return error
    except Exception as error:
        if isinstance(error, SystemError) and "apsw.Backup" in str(error):
            return softdb.WriteFailed("apsw stumbles over two exceptions of a Python VFS at once")
        raise AssertionError(f"{one.name} raises {type(error).__name__}: {error}") from error
    return None


def handle(db: softdb.SoftDB, case: Case, disk: Disk, error: softdb.SoftDBError | None, allowed: list[State]) -> State:
    """Check a handle after a fault: it reads, and writes or raises. Return the stored records."""
    db.refresh()
    state = check(db, *allowed)
    answers(db, state)
    probe = put("upsert", ["probe"], np.random.default_rng(1), SCHEMA, 60, state)
    refused = refusal(db, probe.after["probe"])
    if refused is None:
        state = probe.after
    else:
        assert disk.struck is not None
        folded = of_catalog(disk.struck) and disk.struck.name != "read"  # after the commit: the verb has happened
        assert error is not None or folded, f"nothing was raised, but the next write fails: {refused}"
        assert not case.goes_on(disk.struck), f"{disk.struck.point} need not end all writing: {refused}"
        said_first(refused)
    check(db, state)
    return state


def refusal(db: softdb.SoftDB, record: Truth) -> softdb.WriteFailed | None:
    """Return the error that stopped a write, None if it succeeded."""
    try:
        db.upsert(["probe"], **verbs.columns([record]))
    except softdb.WriteFailed as error:
        return error
    return None


def copied(path: Path, state: State, error: softdb.SoftDBError | None, stays: bool) -> None:
    """A copy that was cut short is gone; on a disk that takes nothing any more it is at least no database."""
    if not path.exists():
        return
    assert error is None or stays, "what is left of a copy that failed was not removed"
    try:
        with softdb.open(path, mode="r", verify=True) as db:
            check(db, state)
    except softdb.NotADatabase:
        assert stays, "a copy that was acknowledged is no database"


def refuses(db: softdb.SoftDB, error: softdb.SoftDBError | None, allowed: list[State]) -> None:
    """A handle on a disk that takes nothing any more: it reads, and each write says why it fails."""
    check(db, *allowed)
    refused = refusal(db, Truth(np.ones(DIM), np.ones(3), None))
    assert refused is not None, "a write was acknowledged by a disk that takes none"
    said_first(refused)
    check(db, *allowed)


def said_first(refused: softdb.WriteFailed) -> None:
    assert any(one in str(refused) for one in REASONS.split("|")), f"the first reason is not told: {refused}"


def no_second_sync(case: Case, disk: Disk, before_close: int) -> None:
    """After a sync that failed, the pages count as clean: another one would succeed and mean nothing.

    At its end a connection folds its log in, all of which was synced before, and that syncs the log once more. What
    is left of a copy that failed is removed. Another handle is another matter.
    """
    if disk.struck is None or not disk.struck.name.startswith("sync") or of_copy(disk.struck):
        return
    if "gathered" in disk.struck.kind:
        return  # of a database that is made anew, unless it proves to be whole
    if case.maker is verbs.reopen or (case.maker is verbs.compact and of_catalog(disk.struck)):
        return  # of the log that compaction folds in there is a test of its own
    struck = next(i for i, op in enumerate(disk.log) if op is disk.struck)
    later = disk.log[struck + 1 : before_close]
    again = [op.point for op in later if op.name == disk.struck.name and op.path == disk.struck.path]
    assert not again, f"{disk.struck.point} failed and was called again"


def reopened(path: Path, allowed: list[State]) -> None:
    """Assert that reopening shows one of the states and that writing works."""
    with softdb.open(path, mode="r") as db:
        state = check(db, *allowed)
    with softdb.open(path, verify=True) as db:
        check(db, state)
        probe = put("upsert", ["later"], np.random.default_rng(2), SCHEMA, 61, state)
        db.upsert(["later"], **verbs.columns([probe.after["later"]]))
        check(db, probe.after)
    with softdb.open(path, mode="r", verify=True) as db:
        check(db, probe.after)
