"""Choice of the fastest way: `search` beside the index and the comparison of records, `rtol=` beside the exact answer.

    python benchmarks/ways.py --out benchmarks/results/ways.json

The ways are timed by turns in random order, each after a call of its own that does not count, so that other work on the
machine slows them alike. Each call has other queries. Ratios are of medians. The goal on any machine: `search` takes at
most a tenth more than the faster of its two ways, and `rtol=` at most a tenth more than the exact answer.
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
from common import each_of, provenance, write_json

import softdb
from softdb.index import planner, search
from softdb.index.planner import Way

WORLDS = ((5_000, 16), (5_000, 384), (20_000, 32), (50_000, 384), (200_000, 128))
QUERIES = (1, 8, 64, 256)
STORED = 4096  # queries that the batches are taken from


def world(n: int, dim: int, folder: Path) -> tuple[softdb.SoftDB, np.ndarray[Any, Any]]:
    """Return a database of clustered records with an index, and queries of the same clusters (STORED, d)."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(10, n // 100), dim), np.float32)

    def drawn(count: int) -> np.ndarray[Any, Any]:
        return centres[random.integers(0, len(centres), count)] + 0.7 * random.standard_normal((count, dim), np.float32)

    db = softdb.open(folder / f"{n}-{dim}", dim=dim, value_dim=dim)
    keys = drawn(n)
    db.insert(range(n), keys, keys)
    db.build_index("ivf")
    db.watch(share=0)
    return db, drawn(STORED)


def in_turn(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    random = np.random.default_rng(0)
    for _ in range(turns):
        for name in random.permutation(list(ways)):
            run = ways[name]
            run()  # so that no way pays for the data that the way before left in the cache
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: round(1000 * float(np.median(column)), 3) for name, column in seconds.items()}


def searches(db: softdb.SoftDB, batches: list[np.ndarray[Any, Any]], turns: int) -> dict[str, float]:
    """Time the search that softdb chooses, the search by the index, and the comparison of records."""
    index = db.core.finder.index
    assert index is not None
    db.search(batches[0], k=10)
    chosen = planner.way

    def by(way: Way | None) -> Callable[[], object]:
        """Return a run of the batches by one way; None: by the way that softdb chooses."""

        def run(queries: np.ndarray[Any, Any]) -> None:
            setattr(search, "way", chosen if way is None else lambda *_, **__: way)  # noqa: B010 - not exported
            db.search(queries, k=10)

        return each_of(batches, run)

    ways = {"search": by(None), "index": by("index"), "records": by("blocks")}
    medians = in_turn(ways, turns)
    setattr(search, "way", chosen)  # noqa: B010
    return {**medians, "ratio": round(medians["search"] / min(medians["index"], medians["records"]), 3)}


def estimates(
    db: softdb.SoftDB, batches: list[np.ndarray[Any, Any]], temperature: float, turns: int
) -> dict[str, float]:
    """Time the soft query to a tolerance, and the exact soft query."""
    tensors = [torch.from_numpy(batch) for batch in batches]

    def estimate(queries: torch.Tensor) -> object:
        return db.attend(queries, temperature=temperature, rtol=0.05)

    warm_up = each_of(tensors, estimate)
    for _ in range(20):
        warm_up()  # softdb measures first which way is faster for such queries
    ways: dict[str, Callable[[], object]] = {
        "rtol": each_of(tensors, estimate),
        "exact": each_of(tensors, lambda queries: db.attend(queries, temperature=temperature)),
    }
    medians = in_turn(ways, turns)
    return {**medians, "ratio": round(medians["rtol"] / medians["exact"], 3)}


def main() -> None:
    """Measure every world and number of queries and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--most", type=int, default=10**9, help="largest number of records of a world")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n, dim in WORLDS:
            if n > args.most:
                continue
            db, queries = world(n, dim, Path(folder))
            for q in QUERIES:
                batches = [queries[low : low + q] for low in range(0, STORED, q)]
                rows.append({"n": n, "dim": dim, "q": q, **searches(db, batches, args.turns)})
                print(rows[-1], flush=True)
                for temperature in (1.0, 0.1 * dim**0.5, dim) if q <= 8 else ():
                    medians = estimates(db, batches, temperature, args.turns)
                    rows.append({"n": n, "dim": dim, "q": q, "temperature": round(temperature, 2), **medians})
                    print(rows[-1], flush=True)
            db.close()
    if args.out:
        write_json(args.out, {**provenance(["softdb", "torch", "numpy", "faiss-cpu"]), "rows": rows})


if __name__ == "__main__":
    main()
