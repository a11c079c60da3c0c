"""Reading: time and private memory of a large database to open and answer.

    python benchmarks/serve.py --n 1000000 --dim 128 --out benchmarks/results/serve.json

Each question runs in a process of its own, so that its memory can be measured. Every answer is checked before its time
counts: exact search and attention against numpy in float64 on a few queries, records against those that were stored.
Each timed query is another one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import MIB, Peak, each_of, in_turn, provenance, spread, write_json
from numpy.typing import NDArray

from softdb.tools.bench.datasets import queries_near, world

__all__ = ["queries_near", "world"]  # other benchmarks import them from here

Floats = NDArray[np.float32]
TEMPERATURE = 0.05


def times(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return milliseconds of a call: median, min and max; a first call warms up."""
    (seconds,) = in_turn({"call": call}, repeats).values()
    return {name: round(value * 1e3, 4) for name, value in spread(seconds).items()}


def ask_open(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure opening, and `get` of 10,000 random ids."""
    import softdb

    random, open_database = np.random.default_rng(2), softdb.open  # this imports torch, before the clock starts
    with Peak() as peak:
        start = time.perf_counter()
        db = open_database(path, mode="r")
        seconds = time.perf_counter() - start
    opened = peak.bytes - peak.before
    keys = np.load(path.parent / "keys.npy", mmap_mode="r")
    milliseconds = []
    for _ in range(9):
        rows = random.integers(0, args.n, 10_000)
        ids = [f"r{row:07d}" for row in rows]
        start = time.perf_counter()
        records = db.get(ids)
        milliseconds.append((time.perf_counter() - start) * 1e3)
        assert np.array_equal(records.keys.numpy(), keys[rows]), "get returned other keys than were stored"
    return {
        "open_ms": round(seconds * 1e3, 2),
        "open_private_mib": round(opened / MIB, 1),
        "imported_private_mib": round(peak.before / MIB, 1),
        "get_10000_ms": {name: round(value, 2) for name, value in spread(milliseconds[1:]).items()},
        "get_10000_first_ms": round(milliseconds[0], 2),
    }


def ask_memory(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Check and measure exact search and exact attention, and their private memory."""
    import torch

    import softdb

    torch.set_num_threads(args.threads)
    stored, open_database = np.load(path.parent / "queries.npy"), softdb.open
    queries, singles = stored[:4], [stored[i : i + 1] for i in range(4, 20)]
    with Peak() as peak:
        db = open_database(path, mode="r")
        hits = db.search(queries, k=10, exact=True)
        pooled = db.attend(queries, temperature=TEMPERATURE)
        large = db.attend(np.repeat(queries, 64, axis=0), temperature=TEMPERATURE)
    check_exact(np.load(path.parent / "keys.npy", mmap_mode="r"), queries, hits, pooled)
    assert torch.allclose(large.output[::64], pooled.output, atol=1e-5), "attention depends on the batch"
    return {
        "database_mib": round(sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file()) / MIB, 1),
        "peak_private_mib": round(peak.bytes / MIB, 1),
        "imported_private_mib": round(peak.before / MIB, 1),
        "exact_search_1_ms": times(each_of(singles, lambda query: db.search(query, k=10, exact=True)), 7),
        "exact_attend_1_ms": times(each_of(singles, lambda query: db.attend(query, temperature=TEMPERATURE)), 7),
        "bytes_floor_ms_at_40_gb_s": round(args.n * args.dim * 4 / 40e9 * 1e3, 2),
    }


def check_exact(keys: Floats, queries: Floats, hits: Any, pooled: Any) -> None:
    """Compare hits, output and lse with float64, a block of records at a time; raise AssertionError if one is wrong."""
    wide = queries.astype(np.float64)
    scores = np.concatenate(
        [wide @ keys[i : i + 65536].astype(np.float64).T for i in range(0, len(keys), 65536)], axis=1
    )
    best = np.sort(scores, axis=1)[:, ::-1][:, :10]
    np.testing.assert_allclose(hits.scores.numpy(), best, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, hits.rows.numpy(), 1), best, atol=1e-5)
    top = scores.max(1, keepdims=True)
    weights = np.exp((scores - top) / TEMPERATURE)
    lse = np.log(weights.sum(1)) + top[:, 0] / TEMPERATURE
    output = sum(weights[:, i : i + 65536] @ keys[i : i + 65536] for i in range(0, len(keys), 65536))
    np.testing.assert_allclose(pooled.lse.numpy(), lse, rtol=1e-5)
    np.testing.assert_allclose(
        pooled.output.numpy(), output / weights.sum(1, keepdims=True), atol=1e-5 * np.abs(keys).max()
    )


def prepare(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the database in batches of 10,000."""
    import softdb

    keys = world(args.n, args.dim)
    np.save(path.parent / "keys.npy", keys)
    np.save(path.parent / "queries.npy", queries_near(keys, 1000))
    ids = [f"r{row:07d}" for row in range(args.n)]
    start = time.perf_counter()
    with softdb.open(path, dim=args.dim) as db:
        for low in range(0, args.n, 10_000):
            db.insert(ids[low : low + 10_000], keys[low : low + 10_000])
    return {"insert_records_s": round(args.n / (time.perf_counter() - start))}


QUESTIONS = {"prepare": prepare, "open": ask_open, "memory": ask_memory}


def main() -> None:
    """Ask every question in a process of its own and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--question", choices=QUESTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.question:
        print(json.dumps(QUESTIONS[args.question](args.scratch / "db", args)))
        return
    facts = provenance(["softdb", "torch", "numpy", "apsw", "faiss-cpu"])
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        answers: dict[str, Any] = {}
        for question in QUESTIONS:
            command = [sys.executable, *sys.argv, "--question", question, "--scratch", scratch]
            runs = 1 if question == "prepare" else args.repeats
            answers[question] = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for _ in range(runs)
            ]
            print(question, json.dumps(answers[question], indent=1))
    if args.out:
        write_json(args.out, {**facts, "n": args.n, "dim": args.dim, "answers": answers})


if __name__ == "__main__":
    main()
