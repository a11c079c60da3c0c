"""A process that writes is killed at named steps: what it has acknowledged is there, and nothing is half there."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from softdb import cluster

DIM, SIZE, TURNS = 4, 6, 8
State = dict[int | str, int]  # id -> the turn that wrote it

STEPS = {  # where the kill comes: before the call of a function, or after it
    "before the commit": ("softdb.cluster.truth:Truth._written", False),
    "committed, not synced": ("softdb.cluster.synced:Synced.sync", False),
    "synced, not seen": ("softdb.cluster.table_cluster:TableCluster._seen", False),
    "changes read, not taken in": ("softdb.cluster.hydrate:Hydrated._apply", False),
    "one shard ahead of the others": ("softdb.cluster.hydrate:Hydrated._apply", True),
    "within SQLite's transaction": ("softdb.store.catalog:Catalog.put_setting", True),
    "a directory emptied": ("softdb.cluster.hydrate:Hydrated._anew", True),
    "new shards made, not noted": ("softdb.cluster.truth:Truth.put_shards", False),
    "new shards noted, not used": ("softdb.cluster.truth:Truth.put_shards", True),
    "acknowledged": ("softdb.cluster.table_cluster:TableCluster._seen", True),
}


def turn(i: int) -> tuple[str, list[int | str]]:
    """What is done in one turn, to ids of which half are those of the turn before."""
    return ("insert", "upsert", "delete", "grow")[i % 4], [str(3 * i + j) for j in range(SIZE)]


def after(state: State, i: int) -> State:
    """The state after a turn."""
    what, ids = turn(i)
    if what == "delete":
        return {name: by for name, by in state.items() if name not in ids}
    return state if what == "grow" else {**state, **dict.fromkeys(ids, i)}


def work(url: str, cache: str, step: str, count: int, says: Connection) -> None:
    """In a process of its own: write, say what was acknowledged, and die at the `count`-th time of a step."""
    place, late = STEPS[step]
    module, _, name = place.partition(":")
    owner, attribute = getattr(importlib.import_module(module), name.partition(".")[0]), name.partition(".")[2]
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
    with cluster.open(url, cache=cache) as db:
        for i in range(TURNS):
            what, ids = turn(i)
            if what == "grow":
                db.grow()
            elif what == "delete":
                db.delete(ids)
            else:
                getattr(db, what)(ids, np.full((SIZE, DIM), i), payloads=[i] * SIZE)
            says.send(i)


def killed(folder: Path, step: str, count: int) -> bool:
    """Kill a writer, and compare what is there with what it said; whether the kill came at all."""
    url, cache = str(folder / "t.lance"), str(folder / "cache")
    cluster.create(url, dim=DIM, shards=2, cache=cache).close()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "apsw"])
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(url, cache, step, count, says))
    process.start()
    says.close()
    last = -1
    with contextlib.suppress(EOFError):
        while hears.poll(180):
            last = hears.recv()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    states: list[State] = [{}]
    for i in range(TURNS):
        states.append(after(states[-1], i))
    for where in (cache, str(folder / "elsewhere")):  # what it has left, and made anew
        with cluster.open(url, "r", cache=where) as db:
            found = {one: value for part in db.scan() for one, value in zip(part.ids, part.payloads, strict=True)}
            assert len(db) == len(found)
        # everything that was acknowledged, and at most the next turn, whole
        assert found in states[last + 1 : last + 3], f"{step}, {count}: after turn {last}"
    return bool(process.exitcode)


@pytest.mark.parametrize("step", STEPS)
def test_at_a_named_step(tmp_path: Path, step: str) -> None:
    rare = step.startswith(("new shards", "a directory"))
    assert killed(tmp_path, step, 1 if rare else 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(300))
def test_at_any_step(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    killed(tmp_path, chance.choice(sorted(STEPS)), chance.randrange(1, 30))
