"""What grows with records and with hosts, each by itself, for scaling_model.py: see cluster.py, which runs this."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from cluster_transports import ms, ray_nodes, timed

import softdb
from softdb.check import Metric
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.shard import ClusterShard, Describe, Description, Draw, Message, PassOver, ShardQuery, ShardReplies

DIM, BATCH = 128, 100_000  # of keys and values; records inserted at once
DRAWS = 400  # of a round
HOSTS, ANSWERS = (1, 2, 4, 8), (1, 4, 16, 64, 256)


def filled(n: int) -> softdb.SoftDB:
    """So many records of a key and a value."""
    random, db = np.random.default_rng(0), softdb.open(None, dim=DIM, value_dim=DIM)
    for low in range(0, n, BATCH):
        keys, values = (random.standard_normal((min(BATCH, n - low), DIM), np.float32) for _ in range(2))
        db.insert(range(low, low + len(keys)), keys, values)
    return db


def passes(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of one shard's pass for one query, and of a round of draws, by its number of records."""
    found, question = [], ShardQuery(np.random.default_rng(1).standard_normal((1, DIM), np.float32) / 4, Metric.DOT)
    for n in sizes:
        db = filled(n)
        shard, one = DatabaseShard(db, 0, 1), np.zeros(1, np.int64)

        def draw(seed: int, shard: DatabaseShard = shard, one: Any = one) -> object:
            told = Draw(shard.db.generation, question, True, one + DRAWS, seed, 0.95, True)
            return shard.answer(told)

        asked = functools.partial(shard.answer, PassOver(db.generation, question))
        timed(asked, 3)
        line: dict[str, Any] = {"n": n, "bytes": n * 2 * DIM * 4, "pass": ms(timed(asked, repeats))}
        db.build_index("ivf", recall=0.9)
        for seed in range(3):
            draw(seed)
        seconds = []
        for seed in range(repeats):  # each draws anew: what was drawn before is not in the cache
            begun = time.perf_counter()
            draw(seed)
            seconds.append(time.perf_counter() - begun)
        line["round"] = ms(seconds)
        found.append(line)
        print(json.dumps(line), flush=True)
        db.close()
    return found


class Canned:
    """A transport whose hosts answer at once, as they did before."""

    collective = False

    def __init__(self, shard: ClusterShard, hosts: int) -> None:
        self.shards, self.shard, self.kept, self.asked = hosts, shard, dict[type, Any](), 0

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """The same reply from each."""
        self.asked += 1
        kind = type(next(iter(asks.values())))
        if kind not in self.kept:
            self.kept[kind] = self.shard.answer(next(iter(asks.values())))
        reply = self.kept[kind]
        if kind is Describe:
            own: Description = reply
            return ShardReplies({shard: own._replace(shard=shard, shards=self.shards) for shard in asks}, {})
        return ShardReplies(dict.fromkeys(asks, reply), {})

    def anyone(self, more: bool) -> bool:
        """Itself."""
        return more

    def close(self) -> None:
        """Nothing to let go of."""


def callers(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of the caller's own work, by the number of answers that it merges."""
    db, found = filled(1000), []
    query = torch.ones(1, DIM) / 8
    for hosts in ANSWERS:
        transport = Canned(DatabaseShard(db, 0, 1), hosts)
        cluster = Cluster(transport)
        asked: dict[str, Callable[[], object]] = {
            "exact": functools.partial(cluster.attend, query),
            "estimate": functools.partial(cluster.attend, query, rtol=0.05, max_draws=1),
        }
        line: dict[str, Any] = {"hosts": hosts}
        for name, ask in asked.items():
            timed(ask, 5)
            transport.asked = 0
            line[name] = ms(timed(ask, repeats))
            if transport.asked != repeats:
                raise SystemExit(f"{name}: {transport.asked / repeats} questions; a line is of one")
        found.append(line)
        print(json.dumps(line), flush=True)
    return found


def fan_out(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds to send an exact question to bare actors and take their answers: by the clock, and of processor."""
    found = []
    sent, back = bytes(4 * DIM + 200), 4 * (DIM + 1) + 100
    with ray_nodes(1) as ray:

        class Bare:
            def answer(self, _: bytes) -> bytes:
                return bytes(back)

        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(max(HOSTS))]
        ray.get([one.answer.remote(sent) for one in actors])
        for hosts in HOSTS:

            def ask(hosts: int = hosts) -> object:
                return ray.get([one.answer.remote(sent) for one in actors[:hosts]])

            timed(ask, 20)
            before = time.process_time()
            clock = timed(ask, repeats)
            line = {
                "hosts": hosts,
                "clock": ms(clock),
                "processor": round((time.process_time() - before) / repeats * 1e3, 3),
            }
            found.append(line)
            print(json.dumps(line), flush=True)
    return found


def growth(sizes: list[int], repeats: int) -> dict[str, Any]:
    """All three."""
    return {
        "dim": DIM, "draws": DRAWS, "repeats": repeats,
        "shards": passes(sizes, max(5, repeats // 5)), "callers": callers(repeats), "fan-out": fan_out(repeats),
    }  # fmt: skip
