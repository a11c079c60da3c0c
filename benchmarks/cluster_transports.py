"""What a cluster needs beyond its slowest shard, transport by transport: see cluster.py, which runs this."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import softdb
from softdb import cluster
from softdb.cluster import actors
from softdb.cluster.actors import Host
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.distributed import Ranks
from softdb.cluster.handle import Cluster
from softdb.cluster.local import Local
from softdb.cluster.shard import ClusterShard, Message
from softdb.errors import SoftDBError

SHARDS, K = 2, 10
TRANSPORTS = "here", "ray", "ray-2", "gloo"
WARM = 0.1  # of the questions, that are not counted
SCRIPT = Path(__file__).with_name("cluster.py")
FLOOR_BYTES = 1024  # that a floor sends

Ask = Callable[[Any, torch.Tensor], object]


class Noted:
    """A shard that notes how many seconds each message takes it."""

    def __init__(self, shard: ClusterShard) -> None:
        self.shard, self.seconds = shard, list[float]()

    def answer(self, ask: Message) -> Any:
        """As the shard does."""
        begun = time.perf_counter()
        try:
            return self.shard.answer(ask)
        finally:
            self.seconds.append(time.perf_counter() - begun)


class NotedHost(Host):
    """An actor whose shards note their times."""

    def _opened(self) -> Any:
        there, shards = self._shards is not None, super()._opened()
        if not there and not isinstance(shards, SoftDBError):
            self._shards = shards = {number: Noted(shard) for number, shard in shards.items()}  # type: ignore[misc]
        return shards

    def seconds(self) -> dict[int, list[float]]:
        """By shard, since the last time; they are let go."""
        found = {number: list(one.seconds) for number, one in self._opened().items()}
        for one in self._opened().values():
            one.seconds.clear()
        return found

    def nothing(self) -> None:
        """An empty call."""

    def read(self, _: bytes, numbers: int) -> float:
        """Seconds that it takes to read so many numbers for each shard, side by side: a call that does nothing else."""
        if not hasattr(self, "_numbers"):
            self._numbers = torch.ones(numbers)
        begun = time.perf_counter()
        list(self._pool.map(lambda _: self._numbers.sum(), self.own_shards))
        return time.perf_counter() - begun


def gradient(db: Any, query: torch.Tensor) -> torch.Tensor:
    """Of the query, of a loss of the answer."""
    leaf = query.clone().requires_grad_()
    return torch.autograd.grad(db.attend(leaf).output.square().sum(), leaf)[0]


ASKS: dict[str, Ask] = {
    "attend": lambda db, query: db.attend(query),
    "attend and gradient": gradient,
    "search": lambda db, query: db.search(query, K, exact=True),
}


def timed(ask: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each question."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        ask()
        found.append(time.perf_counter() - begun)
    return found


def ms(seconds: Any) -> dict[str, float]:
    """Median and spread in milliseconds."""
    return {"median": round(float(np.median(seconds)) * 1e3, 3)} | {
        name: round(float(np.quantile(seconds, at)) * 1e3, 3) for name, at in (("p10", 0.1), ("p90", 0.9))
    }


def beyond(db: Any, query: torch.Tensor, noted: Callable[[], list[list[float]]], repeats: int) -> dict[str, Any]:
    """Each question's milliseconds, its slowest shard's, and what is beyond that, all in the same questions."""
    found = dict[str, Any]()
    for name, ask in ASKS.items():
        asked = functools.partial(ask, db, query)
        timed(asked, max(2, int(WARM * repeats)))
        noted()
        whole = np.array(timed(asked, repeats))
        slowest = np.array(noted()).reshape(SHARDS, repeats, -1).max(0).sum(-1)  # of each message, in turn
        found[name] = {"whole": ms(whole), "slowest shard": ms(slowest), "overhead": ms(whole - slowest)}
    return found


class World:
    """Records, a query, and what one database answers."""

    def __init__(self, n: int, dim: int) -> None:
        random = np.random.default_rng(0)
        self.n, self.dim = n, dim
        self.keys = random.normal(size=(n, dim)).astype(np.float32)
        self.query = torch.tensor(random.normal(size=(1, dim)), dtype=torch.float32) / 2

    def check(self, db: Any) -> None:
        """Raises where the answers are not one database's."""
        one = softdb.open(None, dim=self.dim)
        one.insert(range(self.n), self.keys)
        torch.testing.assert_close(db.attend(self.query).output, one.attend(self.query).output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient(db, self.query), gradient(one, self.query), rtol=1e-4, atol=1e-5)
        if db.search(self.query, K, exact=True).ids != one.search(self.query, K, exact=True).ids:
            raise SystemExit("the cluster finds other records than one database; no time counts")

    def part(self, shard: int) -> softdb.SoftDB:
        """A shard's records, in memory."""
        db = softdb.open(None, dim=self.dim)
        db.insert(range(shard, self.n, SHARDS), self.keys[shard::SHARDS])
        return db


# -- transports --------------------------------------------------------------------------------------------------------


def here(world: World, repeats: int) -> dict[str, Any]:
    """Threads of this process."""
    parts = [Noted(DatabaseShard(world.part(shard), shard, SHARDS)) for shard in range(SHARDS)]

    def noted() -> list[list[float]]:
        found = [list(part.seconds) for part in parts]
        for part in parts:
            part.seconds.clear()
        return found

    with Cluster(Local(parts)) as db:
        world.check(db)
        return beyond(db, world.query, noted, repeats)


@contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """A cluster of Ray with so many nodes on this machine."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    own: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes: Any = Nodes(initialize_head=True, head_node_args={**own, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            nodes.add_node(**own)
        ray.init(address=nodes.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        nodes.shutdown()


def by_ray(world: World, repeats: int, nodes: int) -> dict[str, Any]:
    """Actors: one on each node, which share out the shards."""
    actors.Host = NotedHost  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder, ray_nodes(nodes) as ray:
        url, cache = Path(folder, "t.lance"), Path(folder, "cache")
        with cluster.create(url, dim=world.dim, shards=SHARDS, ids="int", cache=cache, timeout=200, on="ray") as db:
            db.insert(range(world.n), world.keys)
            hosts = [replicas[0] for replicas in db.caller.transport.hosts]  # type: ignore[attr-defined]

            def noted() -> list[list[float]]:
                found: dict[int, list[float]] = {}
                for one in ray.get([host.seconds.remote() for host in hosts]):
                    found |= one
                return [found[shard] for shard in range(SHARDS)]

            world.check(db)
            figures = {"actors": len(hosts)} | beyond(db, world.query, noted, repeats)
            calls = timed(lambda: ray.get([host.nothing.remote() for host in hosts]), repeats)
            sent, numbers = bytes(FLOOR_BYTES), world.n * world.dim // SHARDS

            def read() -> float:
                begun = time.perf_counter()
                inside = ray.get([host.read.remote(sent, numbers) for host in hosts])
                return float(time.perf_counter() - begun - max(inside))

            for _ in range(3):
                read()
            figures["floor"] = {"empty calls": ms(calls), "calls that read": ms([read() for _ in range(repeats)])}
        cluster.stop(url)
    return figures


def by_gloo(n: int, dim: int, repeats: int) -> dict[str, Any]:
    """Two ranks, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        arguments = ["--n", str(n), "--dim", str(dim), "--repeats", str(repeats), "--meeting", str(meeting)]
        started = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments, "--rank", str(rank)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(SHARDS)
        ]
        try:
            told = [one.communicate(timeout=200)[0] for one in started]
        finally:
            for one in started:
                one.kill()
    found: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return found


def rank_of(rank: int, meeting: str, world: World, repeats: int) -> dict[str, Any]:
    """One rank's part. Rank 0 asks one query, the others none, as every rank must ask."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SHARDS)
    own = Noted(DatabaseShard(world.part(rank), rank, SHARDS))
    transport = Ranks({rank: own})

    def noted() -> list[list[float]]:
        each = len(own.seconds) // SHARDS  # every rank's messages come in turn; the empty ones count, too
        mine = np.array(own.seconds[: each * SHARDS]).reshape(each, SHARDS).sum(1)
        own.seconds.clear()
        gathered: list[Any] = [None] * SHARDS
        dist.all_gather_object(gathered, mine.tolist())
        return gathered

    with closing(transport):
        db = Cluster(transport)
        if rank == 0:
            world.check(db)
        else:
            db.attend(world.query), gradient(db, world.query), db.search(world.query, K, exact=True)
        query = world.query if rank == 0 else world.query[:0]
        figures = beyond(db, query, noted, repeats)
        sent, taken = (torch.zeros(SHARDS * FLOOR_BYTES, dtype=torch.uint8) for _ in range(2))
        sizes = [FLOOR_BYTES] * SHARDS
        one = timed(lambda: dist.all_to_all_single(taken, sent, sizes, sizes), repeats)
        numbers, both, own_read = torch.ones(world.n * world.dim // SHARDS), list[float](), list[float]()
        for _ in range(repeats):
            begun = time.perf_counter()
            dist.all_to_all_single(taken, sent, sizes, sizes)
            own_read += timed(numbers.sum, 1)
            dist.all_to_all_single(taken, sent, sizes, sizes)
            both.append(time.perf_counter() - begun)
        reads: list[Any] = [None] * SHARDS
        dist.all_gather_object(reads, own_read)
        figures["floor"] = {
            "one all-to-all": ms(one),
            "two all-to-alls around a read": ms(np.array(both) - np.array(reads).max(0)),
        }
    dist.destroy_process_group()
    return figures


def overhead(world: World, repeats: int, transports: list[str]) -> dict[str, Any]:
    """Of every transport."""
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "here": lambda: here(world, repeats),
        "ray": lambda: by_ray(world, repeats, 1),
        "ray-2": lambda: by_ray(world, repeats, 2),
        "gloo": lambda: by_gloo(world.n, world.dim, repeats),
    }
    found = dict[str, Any]()
    for name in transports:
        found[name] = run[name]()
        print(name, json.dumps(found[name]), flush=True)
    return found
