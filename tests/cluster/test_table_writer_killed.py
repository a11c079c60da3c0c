"""Writers killed at named and random steps: acknowledged records are there, and no batch is there in part.

Beside it a reader follows; afterwards the directories that it has left, and new ones, must answer with one state of the
records: that of the last turn that was acknowledged, or of the one that was being written, whole.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from object_stores import bucket

from softdb import cluster
from softdb.errors import SoftDBError
from softdb.lance_table import changes

DIM, TURNS = 4, 12
VERBS = ("insert", "upsert", "update", "delete", "compact", "grow")
State = dict[int | str, int]  # id -> the turn that wrote it
LOST, HALF, WRONG = "cluster: acknowledged records lost", "cluster: half-applied writes seen", "cluster: wrong answers"

STEPS = {  # where the kill comes: before the call of a function, or after it
    "before the commit": ("softdb.lance_table.truth:Truth._written", False),
    "committed, not synced": ("softdb.lance_table.storage:Synced.sync", False),
    "synced, not seen": ("softdb.cluster.table_core:TableCore.seen", False),
    "seen, nothing read": ("softdb.cluster.hydrate:Hydrated.follow", False),
    "nothing taken in": ("softdb.cluster.hydrate:Hydrated._catch_up", False),
    "changes read, not taken in": ("softdb.cluster.hydrate:Hydrated._apply", False),
    "one shard ahead of the others": ("softdb.cluster.hydrate:Hydrated._apply", True),
    "columns written, not synced": ("softdb.store.files:sync", False),
    "within SQLite's transaction": ("softdb.store.catalog:Catalog.put_setting", True),
    "a directory emptied": ("softdb.cluster.hydrate:Hydrated._anew", True),
    "a directory filled in part": ("softdb.cluster.hydrate:Hydrated._fill", True),
    "beside: copied, not brought on": ("softdb.database.handle:SoftDB.snapshot", True),
    "beside: complete, not in its place": ("softdb.cluster.directories:Directories._swap", False),
    "beside: in its place": ("softdb.cluster.directories:Directories._swap", True),
    "new shards made, not noted": ("softdb.lance_table.truth:Truth.put_shards", False),
    "new shards noted, not used": ("softdb.lance_table.truth:Truth.put_shards", True),
    "acknowledged": ("softdb.cluster.table_core:TableCore.seen", True),
}
BETWEEN = tuple(STEPS)[1:9]  # committed to the table, and not yet in every shard
ONCE = ("new shards", "a directory", "beside")  # steps that few turns pass


class Place(NamedTuple):
    """Path of a table and of the caches of its shards."""

    url: str
    options: dict[str, str] | None
    cache: str

    def opened(self, mode: Any, cache: str = "") -> cluster.TableCluster:
        return cluster.open(self.url, mode, cache=self.cache + cache, storage_options=self.options)


def turn(i: int) -> tuple[str, list[int | str]]:
    """The verb of one turn and its ids, some stored and some new."""
    what, base = VERBS[i % len(VERBS)], 12 * (i // len(VERBS))
    low, high = {"insert": (0, 6), "upsert": (3, 9), "update": (4, 8), "delete": (6, 12)}.get(what, (0, 0))
    return what, [str(base + j) for j in range(low, high)]


def after(state: State, i: int) -> State:
    """The state after a turn."""
    what, ids = turn(i)
    if what == "delete":
        return {name: by for name, by in state.items() if name not in ids}
    return {**state, **dict.fromkeys(ids, i)}


STATES: list[State] = [{}]
for _i in range(TURNS):
    STATES.append(after(STATES[-1], _i))


def do(db: cluster.TableCluster, i: int) -> None:
    """A turn."""
    what, ids = turn(i)
    if what in ("compact", "grow"):
        getattr(db, what)()
    elif what == "delete":
        db.delete(ids)
    else:
        getattr(db, what)(ids, np.full((len(ids), DIM), i / TURNS), payloads=[i] * len(ids))


def work(place: Place, step: str | None, count: int, says: Connection) -> None:
    """Write in a process of its own, report acknowledged turns, and die at the `count`-th time of a step."""
    if step is not None:
        if step.startswith("beside"):
            changes.LARGEST = 1
        die_at(*STEPS[step], count)
    with place.opened("rw") as db:
        for i in range(1, TURNS):
            try:
                do(db, i)
            except SoftDBError as error:  # its directories were taken away
                if "the write is committed" not in str(error):
                    raise
            says.send(i)


def die_at(where: str, late: bool, count: int) -> None:
    """Let this process kill itself at the `count`-th call of a function, before it or after."""
    module, _, name = where.partition(":")
    *owners, attribute = name.split(".")
    owner: Any = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    real: Callable[..., Any] = getattr(owner, attribute)
    calls = 0

    def call(*args: Any, **words: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **words)
        if calls >= count and late:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, attribute, call)


def held(db: cluster.TableCluster, tally: Counter[str]) -> State:
    """Assert that a handle's answers are complete and right."""
    batches = list(db.scan())
    found = {name: turn for part in batches for name, turn in zip(part.ids, part.payloads, strict=True)}
    keys = np.concatenate([np.zeros((0, DIM)), *(part.keys.numpy() for part in batches)])
    turns = np.array([turn for part in batches for turn in part.payloads], float)
    tally[HALF] += 1
    assert (keys == np.float32(turns[:, None] / TURNS)).all(), (
        "a record's key is of one turn and its payload of another"
    )
    assert len(found) == len(turns) == len(db)
    tally[HALF] -= 1
    tally[WRONG] += 1
    asked = np.ones((1, DIM))
    weights = np.exp(keys @ asked[0])
    if len(keys):
        np.testing.assert_allclose(db.attend(asked).output[0], weights @ keys / weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(db.attend(asked).lse[0], np.log(weights.sum()), rtol=1e-6)
        nearest = sorted(found, key=lambda name: (-found[name], str(name)))[:5]
        assert db.search(asked, 5, exact=True).ids == [nearest]
    tally[WRONG] -= 1
    return found


def among(found: State, low: int, high: int, tally: Counter[str]) -> None:
    """Assert that a state is that after some number of turns."""
    lost = any(by > found.get(name, -1) for name, by in STATES[low].items())
    tally[LOST if lost else HALF] += found not in STATES[low : high + 1]
    assert found in STATES[low : high + 1]


class Writer:
    """A working process and its reports."""

    def __init__(self, place: Place, step: str | None, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "numpy", "apsw"])
        self._hears, says = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(place, step, count, says))
        self.process.start()
        says.close()
        self.last, self._begun = 0, time.monotonic()  # the turn that it acknowledged last

    def heard(self) -> bool:
        """Read its reports; return False once it is dead."""
        assert time.monotonic() - self._begun < 300, "it hangs"
        with contextlib.suppress(EOFError):
            wait = 0.01
            while self._hears.poll(wait):
                self.last, wait = self._hears.recv(), 0.0
            return True
        self.process.join(60)
        assert self.process.exitcode in (0, -signal.SIGKILL), self.process.exitcode
        return False


def killed(place: Place, step: str | None, count: int, tally: Counter[str], chance: random.Random | None = None) -> int:
    """Kill a writer and compare the records with its reports; return the number of kills.

    By chance a reader follows it, the directories of its shards are removed meanwhile, and without a step it is killed
    at any moment.
    """
    with cluster.create(place.url, dim=DIM, shards=2, cache=place.cache, storage_options=place.options) as db:
        do(db, 0)
    if step is not None and step.startswith("a directory"):  # it makes them anew as it opens
        shutil.rmtree(place.cache)
    for name in (LOST, HALF, WRONG):
        tally[name] += 0
    writer, drawn = Writer(place, step, count), [1.0] * 4 if chance is None else [chance.random() for _ in range(4)]
    reader = place.opened("r", "-reader") if drawn[0] < 0.5 else None
    moment = None if step else 3 * drawn[1]  # after its start, or its first turn
    removes, since = drawn[2] < 0.2, time.monotonic() if drawn[3] < 0.3 else None
    while writer.heard():
        since = time.monotonic() if since is None and writer.last > 0 else since
        if moment is not None and since is not None and time.monotonic() > since + moment:
            writer.process.kill()
        if removes and writer.last >= 3:
            shutil.rmtree(place.cache, ignore_errors=True)
            removes = False
            tally["cluster: directories removed in use"] += 1
        if reader is not None:
            before = writer.last
            reader.refresh()
            found = held(reader, tally)
            writer.heard()
            among(found, before + 1, min(writer.last + 2, TURNS), tally)
    if reader is not None:
        reader.close()
    for cache in ("", "-elsewhere"):  # what it has left, and made anew
        with place.opened("r", cache) as db:
            among(held(db, tally), writer.last + 1, min(writer.last + 2, TURNS), tally)
    died = int(writer.process.exitcode != 0)
    tally["cluster: kills"] += died
    tally["cluster: kills between commit and hydration"] += died and step in BETWEEN
    return died


def local(folder: Path) -> Place:
    return Place(str(folder / "t.lance"), None, str(folder / "cache"))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.few(8)
def test_at_a_named_step(tmp_path: Path, step: str, tally: Counter[str]) -> None:
    assert killed(local(tmp_path), step, 1 if step.startswith(ONCE) else 6, tally)


@pytest.fixture
def in_a_bucket(tmp_path: Path) -> Iterator[Place]:
    with bucket() as (address, options):
        yield Place(f"{address}/t.lance", options, str(tmp_path / "cache"))


@pytest.mark.parametrize("step", ["synced, not seen", pytest.param("before the commit", marks=pytest.mark.exhaustive)])
def test_in_an_object_store(in_a_bucket: Place, step: str, tally: Counter[str]) -> None:
    assert killed(in_a_bucket, step, 3, tally)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(300))
def test_at_any_step(tmp_path: Path, seed: int, tally: Counter[str]) -> None:
    chance = random.Random(seed)
    step = chance.choice([None, *STEPS])
    count = 1 if step and step.startswith(ONCE) else chance.randrange(1, 30)
    killed(local(tmp_path), step, count, tally, chance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_at_any_step_in_an_object_store(in_a_bucket: Place, seed: int, tally: Counter[str]) -> None:
    chance = random.Random(seed)
    step = chance.choice([None, *(step for step in STEPS if "synced" not in step or "columns" in step)])
    killed(in_a_bucket, step, 1 if step and step.startswith(ONCE) else chance.randrange(1, 12), tally, chance)
