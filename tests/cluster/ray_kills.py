"""Actors and drivers are killed or stand still at named steps: right answers, by whomever, or a typed error in time.

A test module inherits `RayKills` and has a fixture `connected`, Ray's address.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from softdb import cluster
from softdb.cluster.hosts import named
from softdb.cluster.shard import NEWEST, Describe
from softdb.errors import ShardUnavailable, SoftDBError

HERE = Path(__file__).parent
DIM, N = 4, 60
TIMEOUT = 60.0  # Ray brings an actor back in some seconds, on a slow machine in more
SHORT = 4.0
LOST, HALF, WRONG = "cluster: acknowledged records lost", "cluster: half-applied writes seen", "cluster: wrong answers"
LATE = "cluster: milliseconds beyond the timeout"

STEPS = {  # of an actor: where it dies, and whether after that
    "asked, not begun": ("softdb.cluster.hosts:_answered", False),
    "answered, not said": ("softdb.cluster.hosts:_answered", True),
    "in the middle of a question": ("softdb.cluster.local:HydratedShard._answered", True),
    "told of a version": ("softdb.cluster.hydrate:Hydrated.follow", False),
    "changes read, not taken in": ("softdb.cluster.hydrate:Hydrated._apply", False),
    "one shard ahead of the other": ("softdb.cluster.hydrate:Hydrated._apply", True),
    "within SQLite's transaction": ("softdb.store.catalog:Catalog.put_setting", True),
}


def keys_of(ids: Any, turn: int = 0) -> np.ndarray:
    return np.stack([np.array([one % 7, one % 5, turn % 11, 1], np.float32) / 8 for one in ids])


def opened(url: str, timeout: float = TIMEOUT, **words: Any) -> cluster.TableCluster:
    return cluster.open(url, on="ray", timeout=timeout, cache=Path(url).parent / "cache", **words)


def actors(db: cluster.TableCluster) -> list[Any]:
    """Replicas of the one host in the order in which they are asked."""
    transport: Any = db.caller.transport
    return [transport.layout.hosts[0][i] for i in transport.layout.order(0)]


def pids(db: cluster.TableCluster) -> list[int]:
    return [ray.get(one.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT) for one in actors(db)]


def arm(actor: Any, where: str, late: bool) -> None:
    """Let an actor's process kill itself once it comes to a step."""

    def armed(_: Any) -> None:
        import importlib
        import os
        import signal

        module, _, name = where.partition(":")
        *owners, attribute = name.split(".")
        owner: Any = importlib.import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        real: Callable[..., Any] = getattr(owner, attribute)

        def call(*args: Any, **words: Any) -> Any:
            if late:
                real(*args, **words)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, attribute, call)

    ray.get(actor.__ray_call__.remote(armed), timeout=TIMEOUT)


def right(db: cluster.TableCluster, turns: dict[int, int], tally: Counter[str]) -> None:
    """Every kind of answer is that of these records: id -> the turn that wrote it."""
    what = LOST
    for name in (LOST, HALF, WRONG):
        tally[name] += 0
    try:
        names = sorted(turns)
        assert db.get(names).ids == names
        assert len(db) == len(turns)
        what, found = HALF, db.get(names)
        keys = np.concatenate([keys_of([name], turns[name]) for name in names])
        assert (found.payloads, found.keys.tolist()) == ([turns[name] for name in names], keys.tolist())
        what = WRONG
        answers_of(db, names, keys, [turns[name] for name in names])
    except AssertionError:
        tally[what] += 1
        raise


def answers_of(db: cluster.TableCluster, names: list[int], keys: np.ndarray, payloads: list[int]) -> None:
    """Assert that a pass, its gradient and a search are those of these records."""
    asked = torch.ones(1, DIM, dtype=torch.float64, requires_grad=True)
    pooled = db.attend(asked)
    own = torch.from_numpy(keys).double()
    weights = (own @ asked[0]).softmax(0)
    torch.testing.assert_close(pooled.output, (weights @ own)[None], rtol=1e-9, atol=1e-9)
    mine, true = (torch.autograd.grad(x.square().sum(), asked)[0] for x in (pooled.output, weights @ own))
    torch.testing.assert_close(mine, true, rtol=1e-8, atol=1e-10)
    near, scores = db.search(asked.detach().float(), 5, exact=True), keys.sum(1)
    best = sorted(range(len(names)), key=lambda i: (-scores[i], names[i]))[:5]
    assert near.ids == [[names[i] for i in best]]
    assert near.payloads == [[payloads[i] for i in best]]


class Turns:
    """Writes in numbered turns, and the records that must be stored."""

    def __init__(self, db: cluster.TableCluster) -> None:
        pairs = [pair for part in db.scan() for pair in zip(part.ids, part.payloads, strict=True)]
        self.state: dict[int, int] = {int(name): turn for name, turn in pairs}
        self.count = max(self.state.values())

    def write(self, db: cluster.TableCluster) -> None:
        """One turn: some records anew. What is written though it was not seen, is written."""
        self.count += 1
        some = [(17 * self.count + i) % N for i in range(20)]
        try:
            db.upsert(some, keys_of(some, self.count), payloads=[self.count] * len(some))
        except SoftDBError as error:
            if "the write is committed" not in str(error):
                raise
            db.refresh()
        self.state |= dict.fromkeys(some, self.count)


def survives(url: str, step: str, which: str, tally: Counter[str]) -> None:
    """Actors die at a step of a write or of the questions after it."""
    with opened(url) as db:
        turns = Turns(db)
        right(db, turns.state, tally)
        before = set(pids(db))
        mine = actors(db)
        for one in mine[:1] if which == "first" else mine:
            arm(one, *STEPS[step])
        turns.write(db)
        right(db, turns.state, tally)
        tally["cluster: kills"] += (gone := len(before - set(pids(db))))
        tally["cluster: kills: actors"] += gone
        tally["cluster: kills between commit and hydration"] += gone * (step in tuple(STEPS)[3:])
        assert gone
        right(db, turns.state, tally)


def signalled(processes: list[int], what: signal.Signals) -> None:
    for process in processes:
        os.kill(process, what)


def timed(db: cluster.TableCluster) -> list[float]:
    """The seconds that each question takes from now on."""
    transport: Any = db.caller.transport
    ask, took = transport.ask, list[float]()

    def call(*args: Any) -> Any:
        begun = time.monotonic()
        try:
            return ask(*args)
        finally:
            took.append(time.monotonic() - begun)

    transport.ask = call
    return took


DRIVER = """
import sys, json
sys.path[:0] = json.loads(sys.argv[5])
import ray
from test_table_writer_killed import die_at
from ray_kills import Turns, opened
url, address, where, late = sys.argv[1:5]
ray.init(address=address, log_to_driver=False)
with opened(url) as db:
    turns = Turns(db)
    turns.write(db)
    print(turns.count, flush=True)
    die_at(where, late == "late", 1)
    turns.write(db)
    print(turns.count, flush=True)
"""
DRIVEN = {  # where a driver dies
    "before the commit": ("softdb.lance_table.truth:Truth._written", "early"),
    "committed, not synced": ("softdb.lance_table.storage:Synced.sync", "early"),
    "synced, not seen": ("softdb.cluster.table_core:TableCore.seen", "early"),
    "actors asked": ("softdb.cluster.actors:_FanOut._send", "late"),
    "acknowledged": ("softdb.cluster.table_core:TableCore.seen", "late"),
}


def driven(url: str, address: str, step: str, tally: Counter[str]) -> None:
    """A driver in a process of its own dies; the actors live on, and another driver has all that it acknowledged."""
    paths = json.dumps([str(HERE), str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    command = [sys.executable, "-c", DRIVER, url, address, *DRIVEN[step], paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    acknowledged = int(done.stdout.split()[-1])
    with opened(url) as db:
        turns = Turns(db)
        tally[LOST] += turns.count not in (acknowledged, acknowledged + 1)
        assert turns.count in (acknowledged, acknowledged + 1)
        assert list(turns.state.values()).count(turns.count) == 20  # whole
        right(db, turns.state, tally)
        turns.write(db)
        right(db, turns.state, tally)
    places = [name for name in named(ray, "softdb-") if name.endswith("-places")]
    assert len(places) == 1, "the other driver made one of its own"
    tally["cluster: kills"] += 1
    tally["cluster: kills: drivers"] += 1
    tally["cluster: kills between commit and hydration"] += step in tuple(DRIVEN)[1:4]


WRITER = """
import sys, json
sys.path[:0] = json.loads(sys.argv[3])
import ray
from ray_kills import Turns, opened
ray.init(address=sys.argv[2], log_to_driver=False)
with opened(sys.argv[1]) as db:
    turns = Turns(db)
    while True:
        turns.write(db)
        print(turns.count, flush=True)
"""


def writer_killed(url: str, address: str, seconds: float, tally: Counter[str]) -> None:
    """Kill a driver process some seconds after its first write; its acknowledged records must be stored."""
    paths = json.dumps([str(HERE), str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, address, paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline())]
    time.sleep(seconds)
    process.kill()
    acknowledged += [int(one) for one in process.stdout.read().split()]
    assert process.wait(60) == -signal.SIGKILL
    with opened(url) as db:
        turns = Turns(db)
        last = acknowledged[-1]
        tally[LOST] += turns.count not in (last, last + 1)
        assert turns.count in (last, last + 1)
        assert list(turns.state.values()).count(turns.count) == 20  # whole
        right(db, turns.state, tally)
    tally["cluster: kills"] += 1
    tally["cluster: kills: drivers"] += 1


def actors_killed(url: str, count: int, seconds: float, tally: Counter[str]) -> None:
    """So many replicas are killed so long after a write and the questions after it have begun."""
    with opened(url) as db:
        turns, gone = Turns(db), pids(db)[:count]
        timer = threading.Timer(seconds, signalled, (gone, signal.SIGKILL))
        timer.start()
        try:
            turns.write(db)
            right(db, turns.state, tally)
        finally:
            timer.join()
        right(db, turns.state, tally)
    tally["cluster: kills"] += count
    tally["cluster: kills: actors"] += count


def worker_killed(url: str, folder: Path, seconds: float, tally: Counter[str]) -> None:
    """A worker of an ingest is killed so long after it has its rows: the job is one commit, or none."""
    names, flag = list(range(1000, 1040)), str(folder / "killed")

    def dies_once(batch: Any) -> Any:
        import contextlib
        import os
        import signal
        import threading

        with contextlib.suppress(FileExistsError):
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return batch

    with opened(url) as db:
        turns = Turns(db)
        keys = keys_of(names, turns.count).tolist()
        rows = [
            {"id": name, "key": key, "text": "", "payload": str(turns.count)}
            for name, key in zip(names, keys, strict=True)
        ]
        returned = False
        try:
            cluster.ingest(url, ray.data.from_items(rows, override_num_blocks=4).map_batches(dies_once))
            returned = True
        except (SoftDBError, ray.exceptions.RayError) as error:
            tally[f"cluster: ingests refused: {type(error).__name__}"] += 1
        db.refresh()
        there = names[0] in db
        tally[LOST] += returned and not there
        assert there or not returned
        state = turns.state | dict.fromkeys(names, turns.count) if there else turns.state
        right(db, state, tally)
        db.delete(names)
        right(db, turns.state, tally)
    assert Path(flag).exists()
    tally["cluster: kills"] += 1
    tally["cluster: kills: workers"] += 1


class RayKills:
    """A table of two shards with two replicas each, on one host."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, connected: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """A table of two shards with two replicas each, on one host. A key's numbers are those of its payload."""
        folder = tmp_path_factory.mktemp("kills")
        url = str(folder / "t.lance")
        with cluster.create(
            url, dim=DIM, shards=2, replicas=2, on="ray", timeout=TIMEOUT, cache=folder / "cache", ids="int"
        ) as db:
            db.insert(list(range(N)), keys_of(range(N)), payloads=[0] * N)
        yield url
        cluster.stop(url)

    @pytest.mark.parametrize(
        ("step", "which"), [("changes read, not taken in", "first"), ("one shard ahead of the other", "all")]
    )
    def test_an_actor_dies_between_the_commit_and_its_answer(
        self, url: str, step: str, which: str, tally: Counter[str]
    ) -> None:
        survives(url, step, which, tally)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("which", ["first", "all"])
    @pytest.mark.parametrize("step", STEPS)
    def test_an_actor_dies_at_any_step(self, url: str, step: str, which: str, tally: Counter[str]) -> None:
        survives(url, step, which, tally)

    def test_the_gradient_of_an_answer_whose_actor_has_died(self, url: str, tally: Counter[str]) -> None:
        """And its directory with it."""
        with opened(url) as db:
            turns = Turns(db)
            asked = torch.ones(2, DIM, dtype=torch.float64, requires_grad=True)
            pooled, hits = db.attend(asked), db.search(torch.ones(1, DIM), 5)
            cut = db.attend(asked, k=7)
            (true,) = torch.autograd.grad(pooled.output.square().sum(), asked, retain_graph=True)
            gone = pids(db)
            shutil.rmtree(Path(url).parent / "cache")
            for pid in gone:
                os.kill(pid, signal.SIGKILL)
            tally["cluster: kills"] += len(gone)
            (grad,) = torch.autograd.grad(pooled.output.square().sum(), asked)
            torch.testing.assert_close(grad, true, rtol=1e-9, atol=1e-12)
            assert torch.autograd.grad(cut.output.square().sum(), asked)[0].norm() > 0
            assert hits.payloads == [[turns.state[int(name)] for name in hits.ids[0]]]
            right(db, turns.state, tally)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("seed", range(160))
    def test_anyone_is_killed_at_any_moment(
        self, url: str, connected: str, tmp_path: Path, seed: int, tally: Counter[str]
    ) -> None:
        """Replicas, drivers and workers, in turn: with the kills at named steps more than 200."""
        seconds = random.Random(seed).random()
        if seed % 4 == 0:
            writer_killed(url, connected, 2 * seconds, tally)
        elif seed % 4 == 1:
            worker_killed(url, tmp_path, seconds / 4, tally)
        else:
            actors_killed(url, seed % 4 - 1, seconds / 2, tally)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("seed", range(12))
    def test_actors_stand_still_at_any_moment(self, url: str, seed: int, tally: Counter[str]) -> None:
        """One, then both, for a while: by the replica, or a typed error within the timeout and a second."""
        chance = random.Random(seed)
        with opened(url) as db:
            turns = Turns(db)
            right(db, turns.state, tally)
            for one in actors(db):  # one that was never asked has its directories to make yet
                asks = {shard: Describe(NEWEST) for shard in range(db.shards)}
                ray.get(one.answer.remote(pickle.dumps(asks)), timeout=TIMEOUT)
            running, both, impatient = pids(db), bool(seed % 2), opened(url, timeout=SHORT)
            stopped, took = running[: 1 + both], timed(impatient)
            timer = threading.Timer(chance.random() / 2, signalled, (stopped, signal.SIGSTOP))
            timer.start()
            try:
                ends = time.monotonic() + 8
                while time.monotonic() < ends:
                    try:
                        right(impatient, turns.state, tally)
                    except ShardUnavailable:
                        if not both:
                            raise
            finally:
                timer.join()
                signalled(stopped, signal.SIGCONT)
            tally["cluster: processes stopped (SIGSTOP)"] += 1 + both
            late = max(took) - SHORT
            tally[LATE] = max(tally[LATE], int(1000 * late))
            assert late < 1
            right(db, turns.state, tally)
            impatient.close()

    def test_a_driver_dies_between_the_commit_and_its_answer(
        self, url: str, connected: str, tally: Counter[str]
    ) -> None:
        driven(url, connected, "synced, not seen", tally)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("step", DRIVEN)
    @pytest.mark.parametrize("again", range(3))
    def test_a_driver_dies_at_any_step(
        self, url: str, connected: str, step: str, again: int, tally: Counter[str]
    ) -> None:
        driven(url, connected, step, tally)
