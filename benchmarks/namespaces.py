"""One database with a declared field for 100 namespaces of 1,000 records, against a directory for each namespace.

    python benchmarks/namespaces.py

The script checks that both give the same answers. Then it times opening, searches, and dropping a namespace. Each timed
search has another query.
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


def timed(name: str, calls: list[Callable[[], object]]) -> None:
    """Time each call alone, and print the median in milliseconds."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    print(f"{name:55s} {statistics.median(times):9.2f} ms (first {times[0]:.2f})")


def main() -> None:
    """Fill both, compare their answers, and time them."""
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
        single, many = softdb.open(root / "one"), [softdb.open(root / f"many/{i}") for i in range(SPACES)]

        def search(i: int, space: int) -> softdb.Hits:
            return single.search(queries[i], where={"space": f"user {space}"})

        for i in range(0, SPACES, 9):
            assert search(i, i).ids == many[i].search(queries[i]).ids
        timed(
            "search, another namespace each time, one database",
            [functools.partial(search, i, i) for i in range(SPACES)],
        )
        timed(
            "search, the same namespace again, one database", [functools.partial(search, i, 3) for i in range(SPACES)]
        )
        timed("search, a directory each", [functools.partial(many[i].search, queries[i]) for i in range(SPACES)])
        timed(
            "drop one, one database", [functools.partial(single.delete, where={"space": f"user {i}"}) for i in range(5)]
        )
        timed("compact after dropping, one database", [single.compact])

        def drop(i: int) -> None:
            many[i].close()
            shutil.rmtree(root / f"many/{i}")

        timed("drop one, a directory each", [functools.partial(drop, i) for i in range(5)])
        print("bytes", single.stats().bytes, sum(db.stats().bytes for db in many[5:]))
        single.close()
        for db in many[5:]:
            db.close()


if __name__ == "__main__":
    main()
