"""Exact search for the 10 nearest of all records: softdb, FAISS' flat index, and torch's product with topk.

    python benchmarks/exact_search.py --n 1000000 --dim 128 --out benchmarks/results/exact-search-1m.json
    python benchmarks/exact_search.py --n 200000 --dim 384 --out benchmarks/results/exact-search-384.json

The three answer in turn, with other queries each time; times are medians. The floor is the longer of two times: to read
the keys once, and to compute their products at the rate of torch's sgemm. Before a time counts, the scores of each
answer are compared with the best scores in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import provenance, write_json
from numpy.typing import NDArray

import softdb

K = 10
TURNS = 7
CLUSTERS = 1000
Way = Callable[[NDArray[np.float32]], Any]


def world(n: int, dim: int, queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return clustered keys (n, dim), and queries (queries, dim) near some of them."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLUSTERS, dim), np.float32)
    keys = centres[random.integers(0, CLUSTERS, n)] + random.standard_normal((n, dim), np.float32)
    near = keys[random.integers(0, n, queries)] + random.standard_normal((queries, dim), np.float32)
    return keys / dim**0.5, near / dim**0.5


def ways(db: softdb.SoftDB, keys: NDArray[np.float32]) -> dict[str, Way]:
    """Return the searches; each takes queries (q, d) and returns rows (q, K)."""
    flat, table = faiss.IndexFlatIP(keys.shape[1]), torch.from_numpy(keys)
    flat.add(keys)
    return {
        "softdb": lambda queries: db.search(queries, k=K, exact=True).rows.numpy(),
        "faiss": lambda queries: flat.search(queries, K)[1],
        "torch": lambda queries: (torch.from_numpy(queries) @ table.T).topk(K).indices.numpy(),
    }


def check(name: str, rows: Any, queries: NDArray[np.float32], keys: NDArray[np.float32]) -> None:
    """Raise SystemExit if the rows are not those of the K best scores, up to the rounding of float32."""
    scores = queries.astype(np.float64) @ keys.T.astype(np.float64)
    best = -np.sort(-np.partition(scores, -K, axis=1)[:, -K:], axis=1)
    if not np.allclose(np.take_along_axis(scores, rows, 1), best, rtol=0, atol=1e-5 * np.abs(best).max()):
        raise SystemExit(f"{name} does not find the {K} nearest")


def timed(searches: dict[str, Way], queries: NDArray[np.float32], q: int) -> dict[str, float]:
    """Return the median milliseconds of each way for batches of q queries."""
    times: dict[str, list[float]] = {name: [] for name in searches}
    for turn in range(TURNS):
        batch = queries[turn * q : turn * q + q]
        for name, search in searches.items():
            start = time.perf_counter()
            search(batch)
            times[name].append((time.perf_counter() - start) * 1e3)
            time.sleep(0.02)  # until idle threads of OpenMP sleep
    return {name: float(np.median(column[1:])) for name, column in times.items()}


def main() -> None:
    """Check the answers, time the ways and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keys, queries = world(args.n, args.dim, TURNS * max(args.sizes))
    result = provenance(["softdb", "torch", "numpy", "faiss-cpu"])
    result |= {"n": args.n, "dim": args.dim, "k": K, "times": []}
    with softdb.open(None, dim=args.dim) as db:
        for low in range(0, args.n, 100_000):
            db.insert(range(low, min(low + 100_000, args.n)), keys[low : low + 100_000])
        searches = ways(db, keys)
        for name, search in searches.items():
            check(name, search(queries[:16]), queries[:16], keys)
        for q in args.sizes:
            read = keys.nbytes / result["machine"]["read_gb_s"] / 1e6
            products = 2 * keys.size * q / result["machine"]["sgemm_gflop_s"] / 1e6
            times = timed(searches, queries, q)
            row = {"q": q, "floor_ms": max(read, products)} | {f"{name}_ms": ms for name, ms in times.items()}
            result["times"].append({name: round(number, 2) for name, number in row.items()})
            print(result["times"][-1], flush=True)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
