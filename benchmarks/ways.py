"""Whether the fastest way is taken: `search` beside the index and exact search, `rtol=` beside the exact answer.

    python benchmarks/ways.py --out benchmarks/results/ways.json

The ways are timed by turns in random order, each after a call of its own that does not count, so that whatever else the
machine does slows them alike; ratios are of medians. `search` may take a tenth more than the better of the two, and
`rtol=` than the exact answer, whatever costs what on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json

import softdb
from softdb.index.planner import Planner, Way

WORLDS = ((5_000, 16), (5_000, 384), (20_000, 32), (50_000, 384), (200_000, 128))
QUERIES = (1, 8, 64, 256)


def world(n: int, dim: int, folder: Path) -> tuple[softdb.SoftDB, np.ndarray[Any, Any]]:
    """Clusters, and queries from them."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(10, n // 100), dim), np.float32)

    def some(count: int) -> np.ndarray[Any, Any]:
        return centres[random.integers(0, len(centres), count)] + 0.7 * random.standard_normal((count, dim), np.float32)

    db = softdb.open(folder / f"{n}-{dim}", dim=dim, value_dim=dim)
    keys = some(n)
    db.insert(range(n), keys, keys)
    db.build_index("ivf")
    db.watch(share=0)
    return db, some(max(QUERIES))


def in_turn(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median milliseconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    random = np.random.default_rng(0)
    for _ in range(turns):
        for name in random.permutation(list(ways)):
            run = ways[name]
            run()  # so that none pays for what the one before left in the cache
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: round(1000 * float(np.median(found)), 3) for name, found in seconds.items()}


def searches(db: softdb.SoftDB, queries: np.ndarray[Any, Any], turns: int) -> dict[str, float]:
    """The search as it comes, by the index, and by comparing records."""
    index = db.core.finder.index
    assert index is not None
    db.search(queries, k=10)
    searcher = db.core.finder.searcher(index)
    own = searcher.planner

    class Only(Planner):
        """A planner that knows one way."""

        only: Way = "index"

        def way(self, matches: int, queries: int, k: int, filtered: bool, pairs: bool = False) -> Way:
            return self.only

    class Records(Only):
        only = "blocks"

    def by(planner: Planner) -> Callable[[], object]:
        def run() -> None:
            searcher.planner = planner
            db.search(queries, k=10)

        return run

    ways = {"search": by(own), "index": by(Only(index)), "records": by(Records(index))}
    found = in_turn(ways, turns)
    searcher.planner = own
    return {**found, "ratio": round(found["search"] / min(found["index"], found["records"]), 3)}


def estimates(db: softdb.SoftDB, queries: np.ndarray[Any, Any], temperature: float, turns: int) -> dict[str, float]:
    """The soft query to a tolerance, and exactly."""
    asked = torch.from_numpy(queries)
    for _ in range(20):
        db.attend(asked, temperature=temperature, rtol=0.05)  # what is learned of the kind of question
    ways: dict[str, Callable[[], object]] = {
        "rtol": lambda: db.attend(asked, temperature=temperature, rtol=0.05),
        "exact": lambda: db.attend(asked, temperature=temperature),
    }
    found = in_turn(ways, turns)
    return {**found, "ratio": round(found["rtol"] / found["exact"], 3)}


def main() -> None:
    """Every world, some queries and many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--most", type=int, default=10**9, help="records of a world at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n, dim in WORLDS:
            if n > options.most:
                continue
            db, queries = world(n, dim, Path(folder))
            for q in QUERIES:
                rows.append({"n": n, "dim": dim, "q": q, **searches(db, queries[:q], options.turns)})
                print(rows[-1], flush=True)
                for temperature in (1.0, 0.1 * dim**0.5, dim) if q <= 8 else ():
                    found = estimates(db, queries[:q], temperature, options.turns)
                    rows.append({"n": n, "dim": dim, "q": q, "temperature": round(temperature, 2), **found})
                    print(rows[-1], flush=True)
            db.close()
    if options.out:
        write_json(options.out, {**provenance(["softdb", "torch", "numpy", "faiss-cpu"]), "rows": rows})


if __name__ == "__main__":
    main()
