"""Exact soft queries: softdb against torch's attention, the naive product and KeOps, in one run.

    python benchmarks/attend.py --n 1000000 --dim 128 --out benchmarks/results/attend.json

softdb answers through `db.attend`, from a database held in memory as the peers' tensors are. Every answer is checked
before its time counts: against float64 on a few queries, and against torch on all. Rounds go over the engines in turn,
so that a busy moment hits them alike; the ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from common import MIB, in_turn, provenance, spread, write_json
from torch import Tensor

import softdb
from softdb import scores

Answer = Callable[[], Tensor]


class World:
    """Keys, values and queries of dot products of unit spread, and a database of them."""

    def __init__(self, n: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n, self.dim = n, dim
        self.keys, self.values = (torch.randn(n, dim, generator=generator) for _ in range(2))
        self.generator = generator

    def queries(self, q: int) -> Tensor:
        """(q, dim), each with scores of standard deviation 1."""
        found: Tensor = torch.randn(q, self.dim, generator=self.generator) / self.dim**0.5
        return found

    def database(self, dtype: Literal["float32", "float16"] = "float32") -> softdb.SoftDB:
        """The records, in memory."""
        db = softdb.open(None, dim=self.dim, value_dim=self.dim, dtype=dtype)
        for low in range(0, self.n, 1 << 17):
            high = min(self.n, low + (1 << 17))
            db.insert(range(low, high), self.keys[low:high], self.values[low:high])
        return db

    def torch(self, queries: Tensor) -> Tensor:
        """torch's attention."""
        found = torch.nn.functional.scaled_dot_product_attention(
            queries[None, None], self.keys[None, None], self.values[None, None], scale=1.0
        )
        return found[0, 0]

    def naive(self, queries: Tensor) -> Tensor:
        """softmax(QKᵀ)V as it stands."""
        return (queries @ self.keys.T).softmax(1) @ self.values

    def truth(self, queries: Tensor) -> Tensor:
        """The same in float64, in blocks."""
        wide = queries.double()
        output, total = (torch.zeros(len(queries), width, dtype=torch.float64) for width in (self.dim, 1))
        logits = torch.cat([wide @ part.double().T for part in torch.split(self.keys, 1 << 16)], dim=1)
        top = logits.amax(1, keepdim=True)
        for low in range(0, self.n, 1 << 16):
            weights = (logits[:, low : low + (1 << 16)] - top).exp()
            total += weights.sum(1, keepdim=True)
            output += weights @ self.values[low : low + (1 << 16)].double()
        return output / total


def checked(name: str, found: Tensor, expected: Tensor, values: Tensor) -> float:
    """The largest error in a row, over the longest value; raises where it is more than 1e-5."""
    error = float((found.double() - expected.double()).norm(dim=1).max() / values.norm(dim=1).max())
    if not error <= 1e-5:
        raise SystemExit(f"{name} is wrong by {error:.1e} of the longest value; no time counts")
    return error


def timed(answers: dict[str, Answer], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each engine, and its ratio to the first in the same round."""
    found = {name: [1e3 * spent for spent in seconds] for name, seconds in in_turn(answers, rounds).items()}
    first = next(iter(found.values()))
    return {
        name: {
            **{key: round(value, 2) for key, value in spread(times).items()},
            "ratio": round(statistics.median(mine / theirs for mine, theirs in zip(times, first, strict=True)), 3),
        }
        for name, times in found.items()
    }


def most_mib(answer: Answer) -> float:
    """The most memory that an answer holds at once. softdb's compiled loops take theirs from numpy, which tells."""
    tracemalloc.start()
    answer()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(most / MIB, 2)


def gradient(answer: Callable[[Tensor], Tensor], queries: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the queries, forward and backward."""
    leaf = queries.clone().requires_grad_()
    (found,) = torch.autograd.grad(answer(leaf), leaf, grad)
    return found


def forward(world: World, db: softdb.SoftDB, half: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """One answer over all records."""
    queries = world.queries(q)
    with torch.no_grad():
        answers: dict[str, Answer] = {
            "torch": lambda: world.torch(queries),
            "softdb": lambda: db.attend(queries).output,
            "softdb float16": lambda: half.attend(queries).output,
            "softdb cosine": lambda: db.attend(queries, score=scores.Cosine()).output,
            "softdb l2": lambda: db.attend(queries, score=scores.NegativeL2()).output,
        }
        answers["reading keys and values"] = lambda: world.keys.sum() + world.values.sum()
        if q <= 64:
            answers["naive"] = lambda: world.naive(queries)
        truth = world.truth(queries[:8])
        errors = {name: checked(name, answers[name]()[:8], truth, world.values) for name in ("torch", "softdb")}
        checked("softdb, all queries", answers["softdb"](), answers["torch"](), world.values)
        close = (answers["softdb float16"]() - answers["torch"]()).norm(dim=1).max() / world.values.norm(dim=1).max()
        times = timed(answers, rounds)
        extra = most_mib(answers["softdb"])
    return {"errors": errors, "float16 error": float(close), "ms": times, "extra_mib": extra}


def both_ways(world: World, db: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """The answer and the gradient of the queries."""
    queries, grad = world.queries(q), torch.randn(q, world.dim, generator=world.generator)
    answers: dict[str, Answer] = {
        "torch": lambda: gradient(world.torch, queries, grad),
        "softdb": lambda: gradient(lambda leaf: db.attend(leaf).output, queries, grad),
    }
    one, other = answers["torch"](), answers["softdb"]()
    error = float((one - other).norm(dim=1).max() / one.norm(dim=1).max())
    if not error <= 1e-4:
        raise SystemExit(f"the gradient is wrong by {error:.1e}; no time counts")
    times = timed(answers, rounds)
    return {"error": error, "ms": times, "extra_mib": most_mib(answers["softdb"])}


def peaked(world: World, db: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """Weights that few records hold: blocks that cannot matter are not pooled."""
    queries = world.queries(q)
    expected = (world.truth(queries[:8] / 0.05)).float()
    checked("softdb, peaked", db.attend(queries[:8], temperature=0.05).output, expected, world.values)
    with torch.no_grad():
        return timed(
            {
                "torch": lambda: world.torch(queries / 0.05),
                "softdb": lambda: db.attend(queries, temperature=0.05).output,
            },
            rounds,
        )


def keops(n: int, rounds: int) -> dict[str, Any] | None:
    """KeOps' softmax reduction on n records of several widths; None where it is not installed."""
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        return None
    found = {}
    for dim in (3, 64, 128):
        world = World(n, dim)
        db, queries = world.database(), world.queries(64)

        def reduced(world: World = world, queries: Tensor = queries) -> Tensor:
            score = LazyTensor(queries[:, None, :]) | LazyTensor(world.keys[None])
            found: Tensor = score.sumsoftmaxweight(LazyTensor(world.values[None]), axis=1)
            return found

        def ours(db: softdb.SoftDB = db, queries: Tensor = queries) -> Tensor:
            return db.attend(queries).output

        checked("KeOps", reduced(), world.naive(queries), world.values)
        checked("softdb", ours(), world.naive(queries), world.values)
        found[f"d = {dim}"] = timed({"KeOps": reduced, "softdb": ours}, rounds)
    return found


def main() -> None:
    """Ask every question and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", default="1,8,64,256")
    parser.add_argument("--gradients", default="1,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keops-n", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    world = World(given.n, given.dim)
    db, half = world.database(), world.database("float16")
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "numpy", "pykeops"]),
        "n": given.n,
        "dim": given.dim,
        "threads": given.threads,
    }
    for q in map(int, given.queries.split(",")):
        result[f"forward, q = {q}"] = found = forward(world, db, half, q, given.rounds)
        print(f"forward, q = {q}: {found}", flush=True)
    for q in map(int, given.gradients.split(",")):
        result[f"forward and backward, q = {q}"] = found = both_ways(world, db, q, max(3, given.rounds // 2))
        print(f"forward and backward, q = {q}: {found}", flush=True)
    result["peaked, T = 0.05, q = 64"] = peaked(world, db, 64, given.rounds)
    del world, db, half
    gc.collect()
    result["KeOps, q = 64"] = keops(given.keops_n, given.rounds)
    print(result["peaked, T = 0.05, q = 64"], result["KeOps, q = 64"], sep="\n")
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
