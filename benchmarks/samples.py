"""Sampling from the soft distribution: by codes, by a pass over all records, and beside the exact soft query.

    python benchmarks/samples.py --data clustered --n 1000000 --out benchmarks/results/samples-1m.json
    python benchmarks/samples.py --data wordnet:DIR --out benchmarks/results/samples-wordnet.json

Samples are checked first, by a chi-square test over groups of records of about equal probability, computed in float64.
Times are medians of rounds that take the three answers in turn; each round has other queries.
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
from scipy import stats

import softdb
from softdb.tools.bench.datasets import load

TURNS = 16
GROUPS = 40  # groups of the chi-square test
LEAST_P = 1e-4  # p-value below which the benchmark stops


def checked(db: softdb.SoftDB, keys: Any, query: torch.Tensor, temperature: float) -> float:
    """Return the p-value of 8,000 samples of one query; raise SystemExit below LEAST_P."""
    scores = keys.astype(np.float64) @ query.double().numpy() / temperature
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    order = np.argsort(-weights)
    groups = np.empty(len(order), int)
    groups[order] = np.minimum((np.cumsum(weights[order]) * GROUPS).astype(int), GROUPS - 1)
    generator = torch.Generator().manual_seed(0)
    draws = [db.sample(query[None], 100, temperature=temperature, generator=generator).hits.rows for _ in range(80)]
    rows = torch.cat(draws).flatten().numpy()
    expected, counts = np.bincount(groups, weights, GROUPS) * len(rows), np.bincount(groups[rows], minlength=GROUPS)
    present = expected > 0
    p = float(stats.chisquare(counts[present], expected[present]).pvalue)
    if p < LEAST_P:
        raise SystemExit(f"samples at temperature {temperature} have p = {p:.2g}; expected at least {LEAST_P:g}")
    return p


def timed(db: softdb.SoftDB, queries: torch.Tensor, temperature: float, q: int, n: int) -> dict[str, Any]:
    """Measure the milliseconds of each way, in turn."""
    everything = torch.ones(q, len(db), dtype=torch.bool)  # a mask makes softdb take the pass
    scanned = []

    def by_codes(batch: torch.Tensor) -> None:
        scanned.append(float(db.sample(batch, n, temperature=temperature).scanned.float().mean()))

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "by_codes": by_codes,
        "by_a_pass": lambda batch: db.sample(batch, n, temperature=temperature, mask=everything),
        "attend_exactly": lambda batch: db.attend(batch, temperature=temperature),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        batch = queries[turn * q : turn * q + q]
        for name, way in ways.items():
            start = time.perf_counter()
            way(batch)
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {f"{name}_ms": round(float(np.median(column[2:])), 3) for name, column in times.items()}
    return {"temperature": temperature, "q": q, "n": n, "scanned": round(float(np.mean(scanned)), 3), **medians}


def main() -> None:
    """Check the samples, time the ways and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = {} if args.data.startswith("wordnet:") else {"n": args.n, "dim": 128}
    data = load(args.data, **size, most=2000)
    keys, queries = np.concatenate([block for _, block in data.blocks()]), torch.from_numpy(data.queries)
    with tempfile.TemporaryDirectory() as folder, softdb.open(folder, dim=keys.shape[1]) as db:
        for low in range(0, len(keys), 100_000):
            db.insert(range(low, low + len(keys[low : low + 100_000])), keys[low : low + 100_000])
        db.build_index("ivf", queries=data.queries[1000:])
        result: dict[str, Any] = {
            **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
            "data": {"name": args.data.split(":")[0], "n": len(keys), "dim": keys.shape[1]},
            "p": {str(t): round(checked(db, keys, queries[0], t), 4) for t in (0.02, 0.05, 0.2)},
        }
        result["times"] = [timed(db, queries, t, q, 10) for t in (0.02, 0.05, 0.2) for q in (1, 16)]
        print(result["p"], *result["times"], sep="\n")
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
