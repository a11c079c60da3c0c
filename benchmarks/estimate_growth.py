"""Time of an estimated soft query as the database grows: 10⁵, 10⁶, 10⁷ clustered records of 128 float16.

    python benchmarks/estimate_growth.py --out benchmarks/results/estimate-growth.json

Temperature and rtol are 0.05. Answers are compared with the exact ones first; the share within the tolerance is in the
result. Estimated and exact answers take turns, with another query or batch each time. A picture goes beside the JSON.
10⁷ records take 3 GB of disk and ten minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import torch
from common import MIB, provenance, write_json

import softdb
from softdb.tools.bench.datasets import load

TEMPERATURE, RTOL, DIM = 0.05, 0.05, 128


def grown(n: int, folder: Path) -> dict[str, Any]:
    """Measure milliseconds of one query and of a batch of 64, estimated and exact."""
    data = load("clustered", n=n, dim=DIM, most=2000)
    with softdb.open(folder, dim=DIM, dtype="float16") as db:
        low = 0
        for _, keys in data.blocks():
            db.insert(range(low, low + len(keys)), keys)
            low += len(keys)
        report = db.build_index("ivf", recall=0.95, queries=data.queries[1000:])
        queries = torch.from_numpy(data.queries.astype(np.float32))
        exact = db.attend(queries[:16], temperature=TEMPERATURE).output
        pooled = db.attend(queries[:16], temperature=TEMPERATURE, rtol=RTOL)
        error = (pooled.output - exact).norm(dim=1) / exact.norm(dim=1)
        single, batch = timed(db, torch.split(queries[16:], 1), 60), timed(db, torch.split(queries[104:], 64), 9)
    return {
        "n": n,
        "index_mib": round(report.bytes / MIB, 1),
        "within": round(float((error <= RTOL).float().mean()), 3),
        "mean_error": round(float(error.mean()), 4),
        "exact_answers": int(pooled.exact.sum()),
        "one_ms": single[0],
        "exact_one_ms": single[1],
        "batch_64_ms": batch[0],
        "exact_batch_64_ms": batch[1],
    }


def timed(db: softdb.SoftDB, batches: Sequence[torch.Tensor], turns: int) -> tuple[float, float]:
    """Return median milliseconds of estimated and of exact answers, which take turns, with another batch each time."""
    times: tuple[list[float], list[float]] = [], []
    for turn in range(turns):
        for way, rtol in enumerate((RTOL, None)):
            start = time.perf_counter()
            db.attend(batches[(2 * turn + way) % len(batches)], temperature=TEMPERATURE, rtol=rtol)
            times[way].append((time.perf_counter() - start) * 1e3)
    return round(float(np.median(times[0][2:])), 3), round(float(np.median(times[1][2:])), 3)


def main() -> None:
    """Measure each size and write the times and their growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for the databases (default: a temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = []
    for n in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            sizes.append(grown(n, Path(folder) / "db"))
        print(sizes[-1], flush=True)
    result = {
        **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
        "sizes": sizes,
        "growth": {
            name: round(sizes[-1][name] / sizes[0][name], 2)
            for name in ("one_ms", "exact_one_ms", "batch_64_ms", "exact_batch_64_ms")
        },
    }
    print(result["growth"])
    if args.out:
        write_json(args.out, result)
        pictures.estimate_growth(result, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
