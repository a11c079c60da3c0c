"""Exact attention beside the floor of the machine: its rates of reading, matrix products and exponentials.

    python benchmarks/floors.py --n 1000000 --dim 128 --out benchmarks/results/floors.json

The floor of a query is the longer of two times: to read its bytes once; and to compute its products at the rate of
torch's sgemm and its exponentials at the rate of a bare loop. Rates and queries are timed in turn in each round, with
other queries in each, and a ratio is the median of the ratios of the rounds. Each instruction set of the processor is
measured in a process of its own, with torch's libraries limited to it. Answers are checked before a time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attend import World, checked, gradient
from common import each_of, in_turn, provenance, write_json
from torch import Tensor

import softdb
from softdb.kernels import native
from softdb.kernels.threads import share_out

LIBRARIES = {  # environment variables that limit torch and its libraries to an instruction set
    "v2": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "v3": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
SIDE = 2048  # rows and columns of the matrices of sgemm
COUNT, REPEATS = 1 << 14, 200  # exponentials in an array that stays in the cache, and passes over it

Times = dict[str, list[float]]
Calls = dict[str, Callable[[], object]]


def rates(world: World, threads: int) -> Calls:
    """Return the calls that measure the three rates of a floor."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    arrays = [np.linspace(-20, 0, COUNT, dtype=np.float32) for _ in range(threads)]

    def exponentials(x: Any) -> None:
        out = np.empty_like(x)
        for _ in range(REPEATS):
            native().exponentials(x, out)

    return {
        "read": lambda: world.keys.sum() + world.values.sum(),
        "sgemm": lambda: left @ right,
        "exp": lambda: share_out(exponentials, arrays),
    }


def floor(world: World, q: int, half: bool, backward: bool, threads: int, seconds: dict[str, float]) -> float:
    """Return the least seconds that q queries can take, from the seconds of the three rates in the same round."""
    passes, products, bytes_each = (2, 5, 2 if half else 4) if backward else (1, 2, 2 if half else 4)
    read = passes * seconds["read"] * bytes_each / 4
    multiply = 2 * q * world.n * world.dim * products * seconds["sgemm"] / (2.0 * SIDE**3)
    weigh = passes * q * world.n * seconds["exp"] / (COUNT * REPEATS * threads)
    return max(read, multiply + weigh)


def row_of(times: Times, floors: Callable[[dict[str, float]], float]) -> dict[str, Any]:
    """Return medians in milliseconds, and the median ratios to the floor and to torch."""
    rounds = [dict(zip(times, line, strict=True)) for line in zip(*times.values(), strict=True)]
    least = [floors(line) for line in rounds]

    def ratio(name: str) -> float:
        return float(round(statistics.median(line["softdb"] / line[name] for line in rounds), 3))

    return {
        "floor_ms": round(statistics.median(least) * 1e3, 2),
        "ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in times.items()},
        "to the floor": round(
            statistics.median(line["softdb"] / bound for line, bound in zip(rounds, least, strict=True)), 3
        ),
        "to torch": ratio("torch") if "torch" in times else None,
    }


def forward(
    world: World, db: softdb.SoftDB, half: softdb.SoftDB, q: int, base: Calls, rounds: int, threads: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the output of q queries, over float32 and over float16 records."""
    batches = [world.queries(q) for _ in range(rounds + 1)]  # one more for the round that warms up

    def attended(queries: Tensor) -> Tensor:
        return db.attend(queries).output

    with torch.no_grad():
        few = batches[0][:8]
        error = checked(f"softdb, q = {q}", attended(batches[0])[:8], world.truth(few), world.values)
        peers: Calls = {"torch": each_of(batches, world.torch), "softdb": each_of(batches, attended)}
        times = in_turn({**base, **peers}, rounds)
        halved = in_turn({**base, "softdb": each_of(batches, lambda queries: half.attend(queries).output)}, rounds)
    to_float32 = statistics.median(halved["softdb"]) / statistics.median(times["softdb"])
    return (
        row_of(times, partial(floor, world, q, False, False, threads)) | {"error": error},
        row_of(halved, partial(floor, world, q, True, False, threads)) | {"to float32": round(to_float32, 3)},
    )


def both_ways(world: World, db: softdb.SoftDB, q: int, base: Calls, rounds: int, threads: int) -> dict[str, Any]:
    """Measure the output and the gradient of q queries."""
    batches, grad = [world.queries(q) for _ in range(rounds + 1)], torch.randn(q, world.dim, generator=world.generator)
    answers: dict[str, Callable[[Tensor], Tensor]] = {
        "torch": lambda queries: gradient(world.torch, queries, grad),
        "softdb": lambda queries: gradient(lambda leaf: db.attend(leaf).output, queries, grad),
    }
    expected, grad_queries = answers["torch"](batches[0]), answers["softdb"](batches[0])
    error = float((expected - grad_queries).norm(dim=1).max() / expected.norm(dim=1).max())
    if not error <= 1e-4:
        raise SystemExit(f"the gradient is wrong by {error:.1e}; expected at most 1e-4")
    times = in_turn({**base, **{name: each_of(batches, answer) for name, answer in answers.items()}}, rounds)
    return row_of(times, partial(floor, world, q, False, True, threads)) | {"error": error}


def measure(n: int, dim: int, threads: int, rounds: int) -> dict[str, Any]:
    """Measure all numbers of queries at the instruction set in use."""
    torch.set_num_threads(threads)
    world = World(n, dim)
    db, half = world.database(), world.database("float16")
    base, rows = rates(world, threads), dict[str, Any]()
    for q in (1, 8, 64, 256):
        wide, narrow = forward(world, db, half, q, base, rounds if q < 64 else max(3, rounds // 2), threads)
        rows |= {f"forward, q = {q}": wide, f"float16, q = {q}": narrow}
        print(q, wide, narrow, file=sys.stderr, flush=True)
    for q in (8, 64):
        rows[f"forward and backward, q = {q}"] = row = both_ways(world, db, q, base, max(3, rounds // 2), threads)
        print(q, row, file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in in_turn(base, rounds).items()}
    rows["rates"] = {
        "read GB/s": round(8 * n * dim / medians["read"] / 1e9, 1),
        "sgemm GFLOP/s": round(2 * SIDE**3 / medians["sgemm"] / 1e9, 1),
        "exp G/s": round(COUNT * REPEATS * threads / medians["exp"] / 1e9, 2),
    }
    return rows


def main() -> None:
    """Measure every instruction set and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--levels", help="instruction sets, comma-separated (default: all of the processor)")
    parser.add_argument("--here", action="store_true", help="measure the instruction set in use, print JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.n, args.dim, args.threads, args.rounds)))
        return
    result = provenance(["softdb", "torch", "numpy"]) | {"n": args.n, "dim": args.dim, "threads": args.threads}
    for level in args.levels.split(",") if args.levels else native().levels():
        arguments = [f"--{name}={getattr(args, name)}" for name in ("n", "dim", "rounds", "threads")]
        environment = {**os.environ, **LIBRARIES.get(level, {}), "SOFTDB_SIMD_LEVEL": level}
        run = [sys.executable, __file__, "--here", *arguments]
        result[level] = json.loads(subprocess.run(run, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        print(level, json.dumps(result[level], indent=1), flush=True)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
