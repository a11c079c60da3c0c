"""One database with a declared field for 100 namespaces of 1,000 records, against a directory for each of them.

    python benchmarks/namespaces.py

Checks that both answer the same, then times: opening, searches that go from namespace to namespace, and dropping one.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import softdb

SPACES, EACH, DIM = 100, 1000, 384


def timed(name: str, works: list[Callable[[], object]]) -> None:
    """The median of some works, each timed alone, in milliseconds."""
    times = []
    for work in works:
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    print(f"{name:55s} {statistics.median(times):9.2f} ms (first {times[0]:.2f})")


def main() -> None:
    """Fill both, compare, time."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((SPACES, EACH, DIM)).astype(np.float32)
    queries = rng.standard_normal((SPACES, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with softdb.open(root / "one", dim=DIM, fields=["space"]) as db:
            for i in range(SPACES):
                db.insert([f"{i}/{j}" for j in range(EACH)], keys[i], payloads=[{"space": f"user {i}"}] * EACH)
        for i in range(SPACES):
            with softdb.open(root / f"many/{i}", dim=DIM) as db:
                db.insert([f"{i}/{j}" for j in range(EACH)], keys[i])
        timed("open the one database", [lambda: softdb.open(root / "one").close()] * 5)
        timed("open and close one directory of 100", [lambda: softdb.open(root / "many/0").close()] * 5)
        one, many = softdb.open(root / "one"), [softdb.open(root / f"many/{i}") for i in range(SPACES)]

        def in_one(i: int) -> softdb.Hits:
            return one.search(queries[i], where={"space": f"user {i}"})

        for i in range(0, SPACES, 9):
            assert in_one(i).ids == many[i].search(queries[i]).ids
        timed(
            "search, another namespace each time, one database", [functools.partial(in_one, i) for i in range(SPACES)]
        )
        timed("search, the same namespace again, one database", [lambda: in_one(3)] * 50)
        timed("search, a directory each", [functools.partial(many[i].search, queries[i]) for i in range(SPACES)])
        timed("drop one, one database", [functools.partial(one.delete, where={"space": f"user {i}"}) for i in range(5)])
        timed("give back its room: compact", [one.compact])

        def drop(i: int) -> None:
            many[i].close()
            shutil.rmtree(root / f"many/{i}")

        timed("drop one, a directory each", [functools.partial(drop, i) for i in range(5)])
        print("bytes", one.stats().bytes, sum(db.stats().bytes for db in many[5:]))
        one.close()
        for db in many[5:]:
            db.close()


if __name__ == "__main__":
    main()
