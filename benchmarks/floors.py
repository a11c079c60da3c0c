"""Exact attention beside what the machine can do: how fast it reads memory, multiplies matrices and takes exponentials.

    python benchmarks/floors.py --n 1000000 --dim 128 --out benchmarks/results/floors.json

The floor of a question is the longer of the time to read its bytes once, and the time of its products at the rate of
torch's sgemm and of its exponentials at that of a bare loop over them. Rates and questions are timed in turn, round by
round, and each ratio is the median of the rounds' own. Every level that the processor has is measured in a process of
its own, with torch's libraries kept to the same instruction set. Answers are checked before a time counts.
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
from common import in_turn, provenance, write_json
from torch import Tensor

import softdb
from softdb.kernels import native
from softdb.kernels.threads import share_out

LIBRARIES = {  # what keeps torch and its libraries to a level
    "v2": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "v3": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
SIDE = 2048  # of the matrices of sgemm
COUNT, REPEATS = 1 << 14, 200  # exponentials at a time: they stay in the cache

Times = dict[str, list[float]]
Calls = dict[str, Callable[[], object]]


def rates(world: World, threads: int) -> Calls:
    """What a floor is made of."""
    one, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    arrays = [np.linspace(-20, 0, COUNT, dtype=np.float32) for _ in range(threads)]

    def exponentials(x: Any) -> None:
        out = np.empty_like(x)
        for _ in range(REPEATS):
            native().exponentials(x, out)

    return {
        "read": lambda: world.keys.sum() + world.values.sum(),
        "sgemm": lambda: one @ other,
        "exp": lambda: share_out(exponentials, arrays),
    }


def floor(world: World, q: int, half: bool, backward: bool, threads: int, seconds: dict[str, float]) -> float:
    """The least seconds that a question can take, from the seconds of the three rates in the same round."""
    passes, products, bytes_each = (2, 5, 2 if half else 4) if backward else (1, 2, 2 if half else 4)
    read = passes * seconds["read"] * bytes_each / 4
    multiply = 2 * q * world.n * world.dim * products * seconds["sgemm"] / (2.0 * SIDE**3)
    weigh = passes * q * world.n * seconds["exp"] / (COUNT * REPEATS * threads)
    return max(read, multiply + weigh)


def told(times: Times, floors: Callable[[dict[str, float]], float]) -> dict[str, Any]:
    """Medians in milliseconds, and the median ratios to the floor and to torch."""
    rounds = [dict(zip(times, line, strict=True)) for line in zip(*times.values(), strict=True)]
    least = [floors(line) for line in rounds]

    def ratio(name: str) -> float:
        return float(round(statistics.median(line["softdb"] / line[name] for line in rounds), 3))

    return {
        "floor_ms": round(statistics.median(least) * 1e3, 2),
        "ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in times.items()},
        "to the floor": round(
            statistics.median(line["softdb"] / here for line, here in zip(rounds, least, strict=True)), 3
        ),
        "to torch": ratio("torch") if "torch" in times else None,
    }


def forward(
    world: World, db: softdb.SoftDB, half: softdb.SoftDB, q: int, base: Calls, rounds: int, threads: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One answer over all records, of float32 and of float16."""
    queries = world.queries(q)

    def asked(database: softdb.SoftDB) -> Tensor:
        return database.attend(queries).output

    with torch.no_grad():
        error = checked(f"softdb, q = {q}", asked(db)[:8], world.truth(queries[:8]), world.values)
        times = in_turn({**base, "torch": partial(world.torch, queries), "softdb": partial(asked, db)}, rounds)
        halved = in_turn({**base, "softdb": partial(asked, half)}, rounds)
    to_float32 = statistics.median(halved["softdb"]) / statistics.median(times["softdb"])
    return (
        told(times, partial(floor, world, q, False, False, threads)) | {"error": error},
        told(halved, partial(floor, world, q, True, False, threads)) | {"to float32": round(to_float32, 3)},
    )


def both_ways(world: World, db: softdb.SoftDB, q: int, base: Calls, rounds: int, threads: int) -> dict[str, Any]:
    """The answer and the gradient of the queries."""
    queries, grad = world.queries(q), torch.randn(q, world.dim, generator=world.generator)

    def asked(leaf: Tensor) -> Tensor:
        return db.attend(leaf).output

    answers: Calls = {
        "torch": partial(gradient, world.torch, queries, grad),
        "softdb": partial(gradient, asked, queries, grad),
    }
    one, other = gradient(world.torch, queries, grad), gradient(asked, queries, grad)
    error = float((one - other).norm(dim=1).max() / one.norm(dim=1).max())
    if not error <= 1e-4:
        raise SystemExit(f"the gradient is wrong by {error:.1e}; no time counts")
    times = in_turn({**base, **answers}, rounds)
    return told(times, partial(floor, world, q, False, True, threads)) | {"error": error}


def measure(n: int, dim: int, threads: int, rounds: int) -> dict[str, Any]:
    """All questions at the level in use."""
    torch.set_num_threads(threads)
    world = World(n, dim)
    db, half = world.database(), world.database("float16")
    base, found = rates(world, threads), dict[str, Any]()
    for q in (1, 8, 64, 256):
        some = rounds if q < 64 else max(3, rounds // 2)
        wide, narrow = forward(world, db, half, q, base, some, threads)
        found |= {f"forward, q = {q}": wide, f"float16, q = {q}": narrow}
        print(q, wide, narrow, file=sys.stderr, flush=True)
    for q in (8, 64):
        found[f"forward and backward, q = {q}"] = here = both_ways(world, db, q, base, max(3, rounds // 2), threads)
        print(q, here, file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in in_turn(base, rounds).items()}
    found["rates"] = {
        "read GB/s": round(8 * n * dim / medians["read"] / 1e9, 1),
        "sgemm GFLOP/s": round(2 * SIDE**3 / medians["sgemm"] / 1e9, 1),
        "exp G/s": round(COUNT * REPEATS * threads / medians["exp"] / 1e9, 2),
    }
    return found


def main() -> None:
    """Measure every level and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--levels", help="some of the processor's, with commas between")
    parser.add_argument("--here", action="store_true", help="the level in use alone, on standard output")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.n, given.dim, given.threads, given.rounds)))
        return
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "numpy"]),
        "n": given.n,
        "dim": given.dim,
        "threads": given.threads,
    }
    for level in given.levels.split(",") if given.levels else native().levels():
        arguments = [f"--{name}={getattr(given, name)}" for name in ("n", "dim", "rounds", "threads")]
        environment = {**os.environ, **LIBRARIES.get(level, {}), "SOFTDB_SIMD_LEVEL": level}
        run = [sys.executable, __file__, "--here", *arguments]
        result[level] = json.loads(subprocess.run(run, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        print(level, json.dumps(result[level], indent=1), flush=True)
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
