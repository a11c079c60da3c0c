"""Outliers of norm under inner products: recall and time with and without comparing the longest keys.

    python benchmarks/outliers.py --out benchmarks/results/outliers.json

Keys have random directions and log-normal or Pareto norms. Queries have random directions; tuning has not seen them.
The truth is exact search, checked in float64. "On" and "off" are one index with the same effort, with its outliers of
norm and without them. Both are timed in turn with the same queries, and the ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json
from numpy.typing import NDArray

import softdb
from softdb.index.contract import Index

Array = NDArray[Any]
REPORTED = "codes", "records_per_match", "fetch_k", "outliers", "recall"  # facts of the index in the result
OUTLIERS = 0.001  # share of the records, the longest, whose recall is reported apart
NORMS = ("log-normal 0.25", "log-normal 0.5", "log-normal 1", "pareto 3")


class World:
    """Keys of different norms in a database with an index, queries, and the true nearest records."""

    def __init__(self, norms: str, n: int, dim: int, queries: int, folder: Path) -> None:
        random = np.random.default_rng(0)
        keys = random.standard_normal((n, dim), np.float32)
        keys *= (_norms(norms, n, random) / np.linalg.norm(keys, axis=1))[:, None].astype(np.float32)
        self.queries = random.standard_normal((queries, dim), np.float32)
        self.db = softdb.open(folder, dim=dim)
        for low in range(0, n, 100_000):
            self.db.insert(range(low, min(n, low + 100_000)), keys[low : low + 100_000])
        start = time.perf_counter()
        self.report = self.db.build_index("ivf", recall=0.95)
        self.seconds = time.perf_counter() - start
        self.db.watch(share=0.0)  # the checks of the recall watch would take time
        self.truth = self.db.search(self.queries, k=10, exact=True).rows.numpy()
        self._check(keys)
        rank = np.empty(n, np.int64)
        rank[np.argsort(-np.linalg.norm(keys, axis=1))] = np.arange(n)
        self.is_outlier = rank < OUTLIERS * n  # (n,)
        self.on = self._index()
        self.off = copy.copy(self.on)
        self.off.longest = np.empty(0, np.int64)

    def _check(self, keys: Array) -> None:
        """Raise AssertionError if exact search is not exact."""
        for i in range(0, len(self.queries), max(1, len(self.queries) // 20)):
            scores = keys.astype(np.float64) @ self.queries[i].astype(np.float64)
            if set(np.argsort(-scores)[:10].tolist()) != set(self.truth[i].tolist()):
                raise AssertionError(f"exact search misses a nearest record of query {i}; expected the ten best scores")

    def _index(self) -> Index:
        index = self.db.core.finder.index
        if index is None or index.longest is None or not len(index.longest):
            raise AssertionError("the index has no outliers of norm; expected some")
        return index

    def use(self, index: Index) -> None:
        """Let the database search by this index from now on."""
        self.db._finder._in_use = (index, self.db._finder._in_use[1])

    def recalls(self, index: Index) -> dict[str, Any]:
        """Return the shares of the true nearest that are found: of all, and of the outliers of norm among them."""
        self.use(index)
        recalls: dict[str, Any] = {}
        for k in (1, 10):
            rows = self.db.search(self.queries, k=k).rows.numpy()
            truth = self.truth[:, :k]
            hit, outlier = (truth[:, :, None] == rows[:, None]).any(2), self.is_outlier[truth]
            recalls[f"top-{k}"] = round(float(hit.mean()), 4)
            recalls[f"top-{k}, outliers"] = round(float(hit[outlier].mean()), 4)
            recalls[f"top-{k}, outliers there are"] = int(outlier.sum())
        return recalls

    def times(self, q: int, rounds: int) -> dict[str, Any]:
        """Return milliseconds of a query, on and off, and their ratio; they take turns in being first."""
        calls = 20 if q == 1 else max(1, 256 // q)
        pairs: list[tuple[float, float]] = []
        for turn in range(rounds + 2):
            seconds = {}
            for index in (self.on, self.off) if turn % 2 else (self.off, self.on):
                self.use(index)
                warm, *batches = [self._batch(q, turn * (calls + 1) + call) for call in range(calls + 1)]
                self.db.search(warm, k=10)
                start = time.perf_counter()
                for batch in batches:
                    self.db.search(batch, k=10)
                seconds[index is self.on] = (time.perf_counter() - start) / calls / q
            pairs.append((seconds[True], seconds[False]))
        on, off = np.array(pairs[2:]).T
        low, middle, high = np.quantile(on / off, [0.25, 0.5, 0.75])
        return {
            "ms_on": round(float(np.median(on)) * 1e3, 4),
            "ms_off": round(float(np.median(off)) * 1e3, 4),
            "ratio": round(float(middle), 4),
            "ratio_quartiles": [round(float(low), 4), round(float(high), 4)],
        }

    def _batch(self, q: int, number: int) -> Array:
        """Return the queries of a call (q, d)."""
        low = number * q % (len(self.queries) - q + 1)
        return self.queries[low : low + q]


def _norms(kind: str, n: int, random: np.random.Generator) -> Array:
    name, number = kind.split()
    if name == "pareto":
        return 1 + random.pareto(float(number), n)
    return np.exp(float(number) * random.standard_normal(n))


def measured(norms: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the recall and times of one world."""
    world = World(norms, args.n, args.dim, args.queries, folder)
    result: dict[str, Any] = {
        "norms": norms,
        "index": {name: getattr(world.report, name) for name in REPORTED},
        "recall_by_norm": world.report.recall_by_norm,
        "build_seconds": round(world.seconds, 1),
        "on": world.recalls(world.on),
        "off": world.recalls(world.off),
    }
    if result["on"]["top-1, outliers"] < 0.99:
        raise AssertionError(f"outliers of norm are missed; expected recall of at least 0.99: {result['on']}")
    result["times"] = {f"q={q}": world.times(q, args.rounds) for q in (1, 64, 256)}
    world.db.close()
    return result


def main() -> None:
    """Measure each world and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=["log-normal 0.5", "pareto 3"])
    parser.add_argument("--n", type=int, default=600_000)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import faiss

    faiss.omp_set_num_threads(args.threads)
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
        "threads": args.threads,
        "data": {"n": args.n, "dim": args.dim, "queries": args.queries, "outliers": OUTLIERS},
        "worlds": [],
    }
    for norms in args.norms:
        with tempfile.TemporaryDirectory() as folder:
            result["worlds"].append(measured(norms, args, Path(folder) / "db"))
        print(result["worlds"][-1], flush=True)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
