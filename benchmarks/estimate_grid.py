"""Time of `rtol=` against the exact pass in a grid of databases and questions: drawing must never cost much more.

    python benchmarks/estimate_grid.py --out benchmarks/results/estimate-grid.json

Clustered records; n × d × values, and for each database batches of q queries at temperature T. Values are the keys
or 64 random numbers that do not depend on the keys. Estimated and exact answers take turns, with other queries each
turn, the same for both; a cell is the ratio of their medians, without the first two turns.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json

import softdb
from softdb.tools.bench.datasets import load

RTOL, LARGEST = 0.05, 1.1
TEMPERATURES, BATCHES = (0.02, 0.05, 0.2, 1.0), (1, 16, 256)
TURNS = {1: 40, 16: 14, 256: 7}


def filled(folder: Path, n: int, d: int, values: str) -> tuple[softdb.SoftDB, torch.Tensor]:
    """Return an indexed database of clustered records, and queries."""
    data = load("clustered", n=n, dim=d, most=3000)
    width, generator = (64 if values == "random" else d), np.random.default_rng(0)
    db = softdb.open(folder, dim=d, value_dim=None if values == "keys" else width)
    low = 0
    for _, keys in data.blocks():
        random = generator.standard_normal((len(keys), width), np.float32) if values == "random" else None
        db.insert(range(low, low + len(keys)), keys, random)
        low += len(keys)
    db.build_index("ivf", recall=0.95, queries=data.queries[2000:])
    return db, torch.from_numpy(data.queries[:2000].astype(np.float32))


def ratio(db: softdb.SoftDB, queries: torch.Tensor, q: int, temperature: float) -> tuple[float, float, float]:
    """Return median milliseconds of estimated and of exact answers, and the share of queries answered exactly."""
    times: tuple[list[float], list[float]] = [], []
    exact = 0.0
    for turn in range(TURNS[q]):
        low = turn * q % (len(queries) - q)
        for way in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            answer = db.attend(queries[low : low + q], temperature=temperature, rtol=None if way else RTOL)
            times[way].append((time.perf_counter() - start) * 1e3)
            exact += 0 if way else float(answer.exact.float().mean()) / TURNS[q]
    return float(np.median(times[0][2:])), float(np.median(times[1][2:])), exact


def cells(n: int, d: int, values: str) -> list[dict[str, Any]]:
    """Measure the cells of one database."""
    with tempfile.TemporaryDirectory() as folder:
        db, queries = filled(Path(folder) / "db", n, d, values)
        measured = []
        with db:
            for q, temperature in itertools.product(BATCHES, TEMPERATURES):
                estimated, exact, share = ratio(db, queries, q, temperature)
                measured.append(
                    {"n": n, "d": d, "values": values, "q": q, "temperature": temperature}
                    | {"ms": round(estimated, 3), "exact_ms": round(exact, 3), "ratio": round(estimated / exact, 3)}
                    | {"answered_exactly": round(share, 3)}
                )
                print(measured[-1], flush=True)
    return measured


def main() -> None:
    """Measure the grid, print each cell and those above LARGEST, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 100_000, 500_000])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grid = [cell for shape in itertools.product(args.sizes, args.dims, ("keys", "random")) for cell in cells(*shape)]
    over = [cell for cell in grid if cell["ratio"] > LARGEST]
    print(f"{len(over)} of {len(grid)} cells above {LARGEST}:", *over, sep="\n")
    result = {
        **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
        "above": len(over),
        "grid": grid,
    }
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
