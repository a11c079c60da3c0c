"""Times by the number of records and by the number of hosts, for scaling_model.py; run by cluster.py."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from cluster_transports import ms, ray_nodes, timed
from common import each_of

import softdb
from softdb.check import Metric
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.shard import ClusterShard, Describe, Description, Draw, Message, PassOver, ShardQuery, ShardReplies

DIM, BATCH = 128, 100_000  # width of keys and values; records in an insert
DRAWS = 400  # draws of a round
HOSTS, ANSWERS = (1, 2, 4, 8), (1, 4, 16, 64, 256)  # actors that are called; answers that a caller merges


def filled(n: int) -> softdb.SoftDB:
    """Return a database of n random records with a key and a value."""
    random, db = np.random.default_rng(0), softdb.open(None, dim=DIM, value_dim=DIM)
    for low in range(0, n, BATCH):
        keys, values = (random.standard_normal((min(BATCH, n - low), DIM), np.float32) for _ in range(2))
        db.insert(range(low, low + len(keys)), keys, values)
    return db


def passes(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Measure milliseconds of one shard's pass for one query, and of a round of draws, by its number of records."""
    random, rows = np.random.default_rng(1), []
    queries = [ShardQuery(random.standard_normal((1, DIM), np.float32) / 4, Metric.DOT) for _ in range(repeats)]
    for n in sizes:
        db = filled(n)
        shard, drawn = DatabaseShard(db, 0, 1), np.full(1, DRAWS, np.int64)

        def scan(query: ShardQuery, shard: DatabaseShard = shard) -> object:
            return shard.answer(PassOver(shard.db.generation, query))

        def draw(seed: int, shard: DatabaseShard = shard, drawn: Any = drawn) -> object:
            return shard.answer(Draw(shard.db.generation, queries[seed % repeats], True, drawn, seed, 0.95, True))

        scans = each_of(queries, scan)
        timed(scans, 3)
        row: dict[str, Any] = {"n": n, "bytes": n * 2 * DIM * 4, "pass": ms(timed(scans, repeats))}
        db.build_index("ivf", recall=0.9)
        draws = each_of(range(3 + repeats), draw)  # another seed each time: earlier draws would be in the cache
        timed(draws, 3)
        row["round"] = ms(timed(draws, repeats))
        rows.append(row)
        print(json.dumps(row), flush=True)
        db.close()
    return rows


class Canned:
    """A transport that repeats a stored reply, so that only the caller's work takes time."""

    collective = False

    def __init__(self, shard: ClusterShard, hosts: int) -> None:
        self.shards, self.shard, self.replies, self.asked = hosts, shard, dict[type, Any](), 0

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Return the reply to the first message of this kind, for each shard."""
        self.asked += 1
        kind = type(next(iter(asks.values())))
        if kind not in self.replies:
            self.replies[kind] = self.shard.answer(next(iter(asks.values())))
        reply = self.replies[kind]
        if kind is Describe:
            own: Description = reply
            return ShardReplies({shard: own._replace(shard=shard, shards=self.shards) for shard in asks}, {})
        return ShardReplies(dict.fromkeys(asks, reply), {})

    def anyone(self, more: bool) -> bool:
        """Return `more`: there is no other rank."""
        return more

    def close(self) -> None:
        """Do nothing."""


def callers(repeats: int) -> list[dict[str, Any]]:
    """Measure milliseconds of the caller's own work, by the number of answers that it merges."""
    db, rows = filled(1000), []
    query = torch.ones(1, DIM) / 8  # the replies are stored ones: another query would change nothing
    for hosts in ANSWERS:
        transport = Canned(DatabaseShard(db, 0, 1), hosts)
        cluster = Cluster(transport)
        calls: dict[str, Callable[[], object]] = {
            "exact": functools.partial(cluster.attend, query),
            "estimate": functools.partial(cluster.attend, query, rtol=0.05, max_draws=1),
        }
        row: dict[str, Any] = {"hosts": hosts}
        for name, call in calls.items():
            timed(call, 5)
            transport.asked = 0
            row[name] = ms(timed(call, repeats))
            if transport.asked != repeats:
                raise SystemExit(f"{name}: {transport.asked / repeats} rounds of messages a query; expected 1")
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def fan_out(repeats: int) -> list[dict[str, Any]]:
    """Measure milliseconds of the clock and of the processor to call bare actors and take their replies."""
    rows = []
    request, reply_bytes = bytes(4 * DIM + 200), 4 * (DIM + 1) + 100
    with ray_nodes(1) as ray:

        class Bare:
            def answer(self, _: bytes) -> bytes:
                return bytes(reply_bytes)

        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(max(HOSTS))]
        ray.get([actor.answer.remote(request) for actor in actors])
        for hosts in HOSTS:

            def ask(hosts: int = hosts) -> object:
                return ray.get([actor.answer.remote(request) for actor in actors[:hosts]])

            timed(ask, 20)
            before = time.process_time()
            clock = timed(ask, repeats)
            row = {
                "hosts": hosts,
                "clock": ms(clock),
                "processor": round((time.process_time() - before) / repeats * 1e3, 3),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def growth(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Measure shards, callers and the fan-out."""
    return {
        "dim": DIM, "draws": DRAWS, "repeats": repeats,
        "shards": passes(sizes, max(5, repeats // 5)), "callers": callers(repeats), "fan-out": fan_out(repeats),
    }  # fmt: skip
