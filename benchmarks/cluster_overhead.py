"""What a cluster costs beyond its slowest shard: one query, P = 1, 2, 4 shards, in this process and by actors of Ray.

    python benchmarks/cluster_overhead.py [--n 100000] [--dim 64] [--repeats 200] [--on here ray]

Answers are compared with one database's before a clock starts. A shard's own time is that of the same question to it
alone, in this process; what a cluster needs beyond the slowest of them is the overhead of merging and of what carries
the messages. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

import softdb
from softdb import cluster


def timed(ask: Callable[[], object], repeats: int) -> float:
    """Median of milliseconds, after a tenth as many that are not counted."""
    for _ in range(max(1, repeats // 10)):
        ask()
    found = list[float]()
    for _ in range(repeats):
        begun = time.perf_counter()
        ask()
        found.append(time.perf_counter() - begun)
    return float(np.median(found)) * 1000


def measured(
    db: cluster.TableCluster, parts: list[softdb.SoftDB], query: torch.Tensor, repeats: int
) -> dict[str, float]:
    """Milliseconds of one exact soft query and one exact search: the cluster's, and its slowest shard's."""
    asks: dict[str, Callable[[softdb.SoftDB | cluster.TableCluster], object]] = {
        "attend": lambda each: each.attend(query),
        "search": lambda each: each.search(query, 10, exact=True),
    }
    found = dict[str, float]()
    for name, ask in asks.items():
        slowest = max(timed(lambda part=part, ask=ask: ask(part), repeats) for part in parts)  # type: ignore[misc]
        whole = timed(lambda ask=ask: ask(db), repeats)  # type: ignore[misc]
        found |= {f"{name}_ms": whole, f"{name}_slowest_ms": slowest, f"{name}_overhead_ms": whole - slowest}
    return found


def main() -> None:
    """Measure every P and transport."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--on", nargs="+", default=["here", "ray"])
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(given.n, given.dim)).astype(np.float32)
    query = torch.tensor(rng.normal(size=(1, given.dim)), dtype=torch.float32)
    one = softdb.open(None, dim=given.dim)
    one.insert(range(given.n), keys)
    with tempfile.TemporaryDirectory() as folder:
        for shards in given.shards:
            url, cache = str(Path(folder, f"{shards}.lance")), Path(folder, "cache")
            cluster.create(url, dim=given.dim, shards=shards, ids="int", cache=cache, timeout=600).close()
            with cluster.open(url, cache=cache, timeout=600) as db:
                db.insert(range(given.n), keys)
            for on in given.on:
                # the shards' own databases, for their times; the actors have directories of their own
                with (
                    cluster.open(url, "r", cache=cache) as here,
                    cluster.open(url, on=on, cache=cache, timeout=600) as db,
                ):
                    parts = list(here.caller.transport.hydrated.databases.values())  # type: ignore[attr-defined]
                    torch.testing.assert_close(db.attend(query).output, one.attend(query).output, rtol=1e-4, atol=1e-4)
                    assert db.search(query, 10, exact=True).ids == one.search(query, 10, exact=True).ids
                    figures = {name: round(ms, 3) for name, ms in measured(db, parts, query, given.repeats).items()}
                print(json.dumps({"on": on, "shards": shards, "n": given.n, "dim": given.dim, **figures}), flush=True)
                if on == "ray":
                    cluster.stop(url)


if __name__ == "__main__":
    main()
