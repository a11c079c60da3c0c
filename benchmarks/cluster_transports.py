"""Time of a cluster beyond that of its slowest shard, for each transport; run by cluster.py."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import each_of

import softdb
from softdb import cluster
from softdb.cluster import hosts as ray_hosts
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.distributed import Ranks
from softdb.cluster.handle import Cluster
from softdb.cluster.hosts import Host
from softdb.cluster.local import Local
from softdb.cluster.shard import ClusterShard, Message
from softdb.errors import SoftDBError

SHARDS, K = 2, 10
TRANSPORTS = "here", "ray", "ray-2", "gloo"
QUERIES = 64  # different queries that are timed, one by one
WARM = 0.1  # share of the repeats that warm up and do not count
SCRIPT = Path(__file__).with_name("cluster.py")
FLOOR_BYTES = 1024  # sent by each call that measures the floor

Ask = Callable[[Any, torch.Tensor], object]


class Noted:
    """A shard that records how many seconds it takes for each message."""

    def __init__(self, shard: ClusterShard) -> None:
        self.shard, self.seconds = shard, list[float]()

    def report(self) -> None:
        """Report nothing."""

    def answer(self, ask: Message) -> Any:
        """Answer as the shard does."""
        begun = time.perf_counter()
        try:
            return self.shard.answer(ask)
        finally:
            self.seconds.append(time.perf_counter() - begun)


class NotedHost(Host):
    """An actor whose shards record their times."""

    def _opened(self, shards: Iterable[int]) -> Any:
        opened = super()._opened(shards)
        if not isinstance(opened, SoftDBError):
            shards_of: dict[int, Any] = dict(opened)
            noted: Any = {n: shard if isinstance(shard, Noted) else Noted(shard) for n, shard in shards_of.items()}
            self._shards = noted
            return noted
        return opened

    def seconds(self) -> dict[int, list[float]]:
        """Return and forget the seconds of each shard's messages since the last call."""
        shards = self._opened(self._own)
        seconds = {number: list(shard.seconds) for number, shard in shards.items()}
        for shard in shards.values():
            shard.seconds.clear()
        return seconds

    def nothing(self) -> None:
        """Do nothing, to measure an empty call."""

    def read(self, _: bytes, numbers: int) -> float:
        """Return the seconds to read so many numbers for each shard, in parallel, and do nothing else."""
        if not hasattr(self, "_numbers"):
            self._numbers = torch.ones(numbers)
        begun = time.perf_counter()
        list(self._pool.map(lambda _: self._numbers.sum(), self._own))
        return time.perf_counter() - begun


def gradient(db: Any, query: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the query for the squared norm of the output."""
    leaf = query.clone().requires_grad_()
    return torch.autograd.grad(db.attend(leaf).output.square().sum(), leaf)[0]


ASKS: dict[str, Ask] = {
    "attend": lambda db, query: db.attend(query),
    "attend and gradient": gradient,
    "search": lambda db, query: db.search(query, K, exact=True),
}


def timed(ask: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - begun)
    return seconds


def ms(seconds: Any) -> dict[str, float]:
    """Return the median and the 10 % and 90 % quantiles in milliseconds."""
    return {"median": round(float(np.median(seconds)) * 1e3, 3)} | {
        name: round(float(np.quantile(seconds, at)) * 1e3, 3) for name, at in (("p10", 0.1), ("p90", 0.9))
    }


def beyond(
    db: Any, queries: list[torch.Tensor], shard_seconds: Callable[[], list[list[float]]], repeats: int
) -> dict[str, Any]:
    """Return, for each verb, the time of the query, that of its slowest shard, and their difference.

    Each repeat asks another query; `shard_seconds` returns and forgets the seconds that each shard has recorded.
    """
    figures = dict[str, Any]()
    for name, ask in ASKS.items():
        call = each_of(queries, functools.partial(ask, db))
        timed(call, max(2, int(WARM * repeats)))
        shard_seconds()
        total = np.array(timed(call, repeats))
        slowest = np.array(shard_seconds()).reshape(SHARDS, repeats, -1).max(0).sum(-1)  # sum over a query's messages
        figures[name] = {"whole": ms(total), "slowest shard": ms(slowest), "overhead": ms(total - slowest)}
    return figures


class World:
    """Records, queries, and a check against one database."""

    def __init__(self, n: int, dim: int) -> None:
        random = np.random.default_rng(0)
        self.n, self.dim = n, dim
        self.keys = random.normal(size=(n, dim)).astype(np.float32)
        self.queries = [torch.tensor(random.normal(size=(1, dim)), dtype=torch.float32) / 2 for _ in range(QUERIES)]
        self.query = self.queries[0]  # the one whose answers are checked

    def check(self, db: Any) -> None:
        """Raise AssertionError or SystemExit if the answers differ from those of one database."""
        single = softdb.open(None, dim=self.dim)
        single.insert(range(self.n), self.keys)
        torch.testing.assert_close(db.attend(self.query).output, single.attend(self.query).output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient(db, self.query), gradient(single, self.query), rtol=1e-4, atol=1e-5)
        if db.search(self.query, K, exact=True).ids != single.search(self.query, K, exact=True).ids:
            raise SystemExit("the cluster finds other records than one database; expected the same ids")

    def part(self, shard: int) -> softdb.SoftDB:
        """Return a database of a shard's records in memory."""
        db = softdb.open(None, dim=self.dim)
        db.insert(range(shard, self.n, SHARDS), self.keys[shard::SHARDS])
        return db


# -- transports --------------------------------------------------------------------------------------------------------


def here(world: World, repeats: int) -> dict[str, Any]:
    """Measure shards in threads of this process."""
    shards = [Noted(DatabaseShard(world.part(shard), shard, SHARDS)) for shard in range(SHARDS)]

    def shard_seconds() -> list[list[float]]:
        seconds = [list(shard.seconds) for shard in shards]
        for shard in shards:
            shard.seconds.clear()
        return seconds

    with Cluster(Local(shards)) as db:
        world.check(db)
        return beyond(db, world.queries, shard_seconds, repeats)


@contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """Start a Ray cluster of `count` nodes on this machine."""
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
    """Measure actors of Ray: one on each node, each with its part of the shards."""
    ray_hosts.Host = NotedHost  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder, ray_nodes(nodes) as ray:
        url, cache = Path(folder, "t.lance"), Path(folder, "cache")
        with cluster.create(url, dim=world.dim, shards=SHARDS, ids="int", cache=cache, timeout=200, on="ray") as db:
            db.insert(range(world.n), world.keys)
            hosts = [replicas[0] for replicas in db.caller.transport.layout.hosts]  # type: ignore[attr-defined]

            def shard_seconds() -> list[list[float]]:
                seconds: dict[int, list[float]] = {}
                for by_shard in ray.get([host.seconds.remote() for host in hosts]):
                    seconds |= by_shard
                return [seconds[shard] for shard in range(SHARDS)]

            world.check(db)
            figures = {"actors": len(hosts)} | beyond(db, world.queries, shard_seconds, repeats)
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
    """Measure two gloo ranks, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        arguments = ["--n", str(n), "--dim", str(dim), "--repeats", str(repeats), "--meeting", str(meeting)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments, "--rank", str(rank)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(SHARDS)
        ]
        try:
            outputs = [process.communicate(timeout=200)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    figures: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return figures


def rank_of(rank: int, meeting: str, world: World, repeats: int) -> dict[str, Any]:
    """Measure as one rank: rank 0 asks one query, the others ask with none, because every rank must call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SHARDS)
    own = Noted(DatabaseShard(world.part(rank), rank, SHARDS))
    transport = Ranks({rank: own})

    def shard_seconds() -> list[list[float]]:
        count = len(own.seconds) // SHARDS  # every rank's messages come in turn; empty ones count, too
        own_seconds = np.array(own.seconds[: count * SHARDS]).reshape(count, SHARDS).sum(1)
        own.seconds.clear()
        gathered: list[Any] = [None] * SHARDS
        dist.all_gather_object(gathered, own_seconds.tolist())
        return gathered

    with closing(transport):
        db = Cluster(transport)
        if rank == 0:
            world.check(db)
        else:
            db.attend(world.query), gradient(db, world.query), db.search(world.query, K, exact=True)
        queries = world.queries if rank == 0 else [query[:0] for query in world.queries]
        figures = beyond(db, queries, shard_seconds, repeats)
        sent, received = (torch.zeros(SHARDS * FLOOR_BYTES, dtype=torch.uint8) for _ in range(2))
        sizes = [FLOOR_BYTES] * SHARDS
        empty = timed(lambda: dist.all_to_all_single(received, sent, sizes, sizes), repeats)
        numbers, both, own_read = torch.ones(world.n * world.dim // SHARDS), list[float](), list[float]()
        for _ in range(repeats):
            begun = time.perf_counter()
            dist.all_to_all_single(received, sent, sizes, sizes)
            own_read += timed(numbers.sum, 1)
            dist.all_to_all_single(received, sent, sizes, sizes)
            both.append(time.perf_counter() - begun)
        reads: list[Any] = [None] * SHARDS
        dist.all_gather_object(reads, own_read)
        figures["floor"] = {
            "one all-to-all": ms(empty),
            "two all-to-alls around a read": ms(np.array(both) - np.array(reads).max(0)),
        }
    dist.destroy_process_group()
    return figures


def overhead(world: World, repeats: int, transports: list[str]) -> dict[str, Any]:
    """Measure the overhead of each transport."""
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "here": lambda: here(world, repeats),
        "ray": lambda: by_ray(world, repeats, 1),
        "ray-2": lambda: by_ray(world, repeats, 2),
        "gloo": lambda: by_gloo(world.n, world.dim, repeats),
    }
    figures = dict[str, Any]()
    for name in transports:
        figures[name] = run[name]()
        print(name, json.dumps(figures[name]), flush=True)
    return figures
