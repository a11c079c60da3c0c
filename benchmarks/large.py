"""A large database: time and private memory to insert, build the index, open and search.

    python benchmarks/large.py --n 10000000 --dim 128 --dtype float16 --out benchmarks/results/large.json

The records are those of `softdb bench clustered` (2,000 Gaussian centres, Zipf(1.3) sizes, unit noise, normalised),
made a million at a time. Each step runs in a process of its own, so that its memory can be measured. Recall is measured
against exact search on queries that the index was not tuned on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import MIB, Peak, bytes_on_disk, provenance, spread, write_json
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CHUNK = 1_000_000  # records made at once
BATCH = 100_000  # records in a commit
CHECKED = 200  # queries that recall is measured on
K = 10


def chunks(n: int, dim: int) -> Iterator[tuple[int, Floats]]:
    """Yield the first row and the keys (m, d) of each chunk."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((2000, dim), dtype=np.float32) * 2
    sizes = 1 / np.arange(1, 2001) ** 1.3
    for low in range(0, n, CHUNK):
        count = min(CHUNK, n - low)
        keys = centres[random.choice(2000, count, p=sizes / sizes.sum())]
        keys += random.standard_normal((count, dim), dtype=np.float32)
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        yield low, keys


def questions(n: int, dim: int, q: int, seed: int) -> Floats:
    """Return queries (q, d): keys of the first chunk with noise of 0.6 / √d, normalised."""
    random, keys = np.random.default_rng(seed), next(chunks(min(n, CHUNK), dim))[1]
    queries = keys[random.integers(0, len(keys), q)]
    queries = queries + 0.6 / dim**0.5 * random.standard_normal(queries.shape, dtype=np.float32)
    return np.asarray(queries / np.linalg.norm(queries, axis=1, keepdims=True), np.float32)


def insert(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Insert every record in batches."""
    import softdb

    seconds = 0.0
    with softdb.open(path, dim=args.dim, dtype=args.dtype) as db:
        for low, keys in chunks(args.n, args.dim):
            start = time.perf_counter()
            for first in range(0, len(keys), BATCH):
                block = keys[first : first + BATCH]
                db.insert(range(low + first, low + first + len(block)), block)
            seconds += time.perf_counter() - start
    return {"insert_records_s": round(args.n / seconds), "bytes": bytes_on_disk(path)["allocated"]}


def build(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build and tune the index."""
    import softdb

    tuning = questions(args.n, args.dim, 1000, 1)
    with softdb.open(path) as db, Peak() as peak:
        start = time.perf_counter()
        report = db.build_index(recall=args.recall, k=K, queries=tuning)
        seconds = time.perf_counter() - start
    return {"build_s": round(seconds, 1), "build_private_mib": round(peak.more / MIB), "index": report.asdict()}


def answer(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure opening, the first search and many searches, and recall against exact search."""
    import softdb

    queries, open_database = questions(args.n, args.dim, 1200, 2), softdb.open
    with Peak() as peak:
        start = time.perf_counter()
        db = open_database(path, mode="r")
        opened = time.perf_counter() - start
        start = time.perf_counter()
        db.search(queries[:1], k=K)
        first = time.perf_counter() - start
        truth = db.search(queries[:CHECKED], k=K, exact=True).rows
        exact = peak.more
        rows = db.search(queries[:CHECKED], k=K).rows
        recall = float((rows[:, :, None] == truth[:, None, :]).any(2).float().mean())
        assert recall >= args.recall - 0.03, f"recall is {recall}; expected at least {args.recall - 0.03:.2f}"
        batch, single = [], []
        for turn in range(6):
            start = time.perf_counter()
            db.search(queries[CHECKED:], k=K)
            batch.append((len(queries) - CHECKED) / (time.perf_counter() - start))
            start = time.perf_counter()
            for query in queries[200 * turn : 200 * (turn + 1)]:
                db.search(query, k=K)
            single.append((time.perf_counter() - start) / 200 * 1e3)
    db.close()
    return {
        "open_ms": round(opened * 1e3, 2),
        "first_search_ms": round(first * 1e3, 1),
        "recall": round(recall, 4),
        "batch_queries_s": spread(batch[1:]),
        "single_ms": spread(single[1:]),
        "answer_private_mib": round(peak.more / MIB),
        "of_which_index_and_exact_search_mib": round(exact / MIB),
    }


STEPS = {"insert": insert, "build": build, "answer": answer}


def main() -> None:
    """Run each step in a process of its own and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--folder", type=Path, help="folder for the database, of several GB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(STEPS[args.step](args.folder / "db", args)))
        return
    result = provenance(["softdb", "torch", "numpy", "faiss-cpu"])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for step in STEPS:
            command = [sys.executable, *sys.argv, "--step", step, "--folder", folder]
            completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures = json.loads(completed.stdout)
            print(step, figures, flush=True)
            result |= figures
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
