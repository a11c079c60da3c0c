"""Exact soft queries: softdb against torch's attention, the naive product and KeOps, in one run.

    python benchmarks/attend.py --n 1000000 --dim 128 --out benchmarks/results/attend.json

softdb answers through `db.attend`, from a database in memory, as the peers' tensors are. Every answer is checked before
its time counts: against float64 on a few queries, and against torch on all. Each round calls the engines in turn with
the same queries, so that a busy moment slows all of them; the next round has other queries. A ratio is the median of
the ratios of the rounds.
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
from common import MIB, each_of, in_turn, provenance, spread, write_json
from torch import Tensor

import softdb
from softdb import scores

Answer = Callable[[Tensor], Tensor]  # queries (q, d) to output (q, v)


class World:
    """Keys and values drawn from a normal distribution, the queries to ask, and databases of them."""

    def __init__(self, n: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n, self.dim = n, dim
        self.keys, self.values = (torch.randn(n, dim, generator=generator) for _ in range(2))
        self.generator = generator

    def queries(self, q: int) -> Tensor:
        """Draw new queries (q, dim), whose scores have standard deviation 1."""
        queries: Tensor = torch.randn(q, self.dim, generator=self.generator) / self.dim**0.5
        return queries

    def database(self, dtype: Literal["float32", "float16"] = "float32") -> softdb.SoftDB:
        """Return a database of the records in memory."""
        db = softdb.open(None, dim=self.dim, value_dim=self.dim, dtype=dtype)
        for low in range(0, self.n, 1 << 17):
            high = min(self.n, low + (1 << 17))
            db.insert(range(low, high), self.keys[low:high], self.values[low:high])
        return db

    def torch(self, queries: Tensor) -> Tensor:
        """Return the output of torch's scaled_dot_product_attention."""
        output = torch.nn.functional.scaled_dot_product_attention(
            queries[None, None], self.keys[None, None], self.values[None, None], scale=1.0
        )
        return output[0, 0]

    def naive(self, queries: Tensor) -> Tensor:
        """Return softmax(QKᵀ)V, all scores in memory at once."""
        return (queries @ self.keys.T).softmax(1) @ self.values

    def truth(self, queries: Tensor) -> Tensor:
        """Return softmax(QKᵀ)V in float64, computed in blocks."""
        wide = queries.double()
        output, total = (torch.zeros(len(queries), width, dtype=torch.float64) for width in (self.dim, 1))
        logits = torch.cat([wide @ block.double().T for block in torch.split(self.keys, 1 << 16)], dim=1)
        top = logits.amax(1, keepdim=True)
        for low in range(0, self.n, 1 << 16):
            weights = (logits[:, low : low + (1 << 16)] - top).exp()
            total += weights.sum(1, keepdim=True)
            output += weights @ self.values[low : low + (1 << 16)].double()
        return output / total


def checked(name: str, output: Tensor, expected: Tensor, values: Tensor) -> float:
    """Return the largest error of a row over the norm of the longest value; raise SystemExit above 1e-5."""
    error = float((output.double() - expected.double()).norm(dim=1).max() / values.norm(dim=1).max())
    if not error <= 1e-5:
        raise SystemExit(f"{name} is wrong by {error:.1e} of the longest value; expected at most 1e-5")
    return error


def timed(answers: dict[str, Answer], batches: list[Tensor], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each engine, and its ratio to the first engine in the same round."""
    calls = {name: each_of(batches, answer) for name, answer in answers.items()}
    milliseconds = {name: [1e3 * spent for spent in seconds] for name, seconds in in_turn(calls, rounds).items()}
    first = next(iter(milliseconds.values()))
    return {
        name: {
            **{key: round(value, 2) for key, value in spread(times).items()},
            "ratio": round(statistics.median(own / base for own, base in zip(times, first, strict=True)), 3),
        }
        for name, times in milliseconds.items()
    }


def peak_mib(answer: Answer, queries: Tensor) -> float:
    """Return the peak of the memory that Python and numpy allocate for an answer, in MiB."""
    tracemalloc.start()
    answer(queries)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(peak / MIB, 2)


def gradient(answer: Answer, queries: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the queries (q, d), by a forward and a backward pass."""
    leaf = queries.clone().requires_grad_()
    (grad_queries,) = torch.autograd.grad(answer(leaf), leaf, grad)
    return grad_queries


def forward(world: World, db: softdb.SoftDB, half: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """Measure the output of every engine for q queries."""
    batches = [world.queries(q) for _ in range(rounds + 1)]  # one more for the round that warms up
    queries = batches[0]
    with torch.no_grad():
        answers: dict[str, Answer] = {
            "torch": world.torch,
            "softdb": lambda queries: db.attend(queries).output,
            "softdb float16": lambda queries: half.attend(queries).output,
            "softdb cosine": lambda queries: db.attend(queries, score=scores.Cosine()).output,
            "softdb l2": lambda queries: db.attend(queries, score=scores.NegativeL2()).output,
        }
        answers["reading keys and values"] = lambda _: world.keys.sum() + world.values.sum()
        if q <= 64:
            answers["naive"] = world.naive
        truth, outputs = world.truth(queries[:8]), {name: answers[name](queries) for name in list(answers)[:3]}
        errors = {name: checked(name, outputs[name][:8], truth, world.values) for name in ("torch", "softdb")}
        checked("softdb, all queries", outputs["softdb"], outputs["torch"], world.values)
        off = (outputs["softdb float16"] - outputs["torch"]).norm(dim=1).max() / world.values.norm(dim=1).max()
        times = timed(answers, batches, rounds)
        extra = peak_mib(answers["softdb"], queries)
    return {"errors": errors, "float16 error": float(off), "ms": times, "extra_mib": extra}


def both_ways(world: World, db: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """Measure the output and the gradient of the queries."""
    batches, grad = [world.queries(q) for _ in range(rounds + 1)], torch.randn(q, world.dim, generator=world.generator)
    answers: dict[str, Answer] = {
        "torch": lambda queries: gradient(world.torch, queries, grad),
        "softdb": lambda queries: gradient(lambda leaf: db.attend(leaf).output, queries, grad),
    }
    expected, grad_queries = answers["torch"](batches[0]), answers["softdb"](batches[0])
    error = float((expected - grad_queries).norm(dim=1).max() / expected.norm(dim=1).max())
    if not error <= 1e-4:
        raise SystemExit(f"the gradient is wrong by {error:.1e}; expected at most 1e-4")
    times = timed(answers, batches, rounds)
    return {"error": error, "ms": times, "extra_mib": peak_mib(answers["softdb"], batches[0])}


def peaked(world: World, db: softdb.SoftDB, q: int, rounds: int) -> dict[str, Any]:
    """Measure a low temperature, where few records hold the weight and softdb skips blocks that add nothing."""
    batches = [world.queries(q) for _ in range(rounds + 1)]
    few = batches[0][:8]
    checked("softdb, peaked", db.attend(few, temperature=0.05).output, world.truth(few / 0.05), world.values)
    answers: dict[str, Answer] = {
        "torch": lambda queries: world.torch(queries / 0.05),
        "softdb": lambda queries: db.attend(queries, temperature=0.05).output,
    }
    with torch.no_grad():
        return timed(answers, batches, rounds)


def keops(n: int, rounds: int) -> dict[str, Any] | None:
    """Measure KeOps' softmax reduction on n records of several widths; return None if it is not installed."""
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        return None
    times = {}
    for dim in (3, 64, 128):
        world = World(n, dim)
        db, batches = world.database(), [world.queries(64) for _ in range(rounds + 1)]

        def reduced(queries: Tensor, world: World = world) -> Tensor:
            score = LazyTensor(queries[:, None, :]) | LazyTensor(world.keys[None])
            output: Tensor = score.sumsoftmaxweight(LazyTensor(world.values[None]), axis=1)
            return output

        def attended(queries: Tensor, db: softdb.SoftDB = db) -> Tensor:
            return db.attend(queries).output

        for name, answer in (("KeOps", reduced), ("softdb", attended)):
            checked(name, answer(batches[0]), world.naive(batches[0]), world.values)
        times[f"d = {dim}"] = timed({"KeOps": reduced, "softdb": attended}, batches, rounds)
    return times


def main() -> None:
    """Measure every number of queries and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", default="1,8,64,256")
    parser.add_argument("--gradients", default="1,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keops-n", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    world = World(args.n, args.dim)
    db, half = world.database(), world.database("float16")
    result = provenance(["softdb", "torch", "numpy", "pykeops"])
    result |= {"n": args.n, "dim": args.dim, "threads": args.threads}
    for q in map(int, args.queries.split(",")):
        result[f"forward, q = {q}"] = forward(world, db, half, q, args.rounds)
        print(f"forward, q = {q}: {result[f'forward, q = {q}']}", flush=True)
    for q in map(int, args.gradients.split(",")):
        name = f"forward and backward, q = {q}"
        result[name] = both_ways(world, db, q, max(3, args.rounds // 2))
        print(f"{name}: {result[name]}", flush=True)
    result["peaked, T = 0.05, q = 64"] = peaked(world, db, 64, args.rounds)
    del world, db, half
    gc.collect()
    result["KeOps, q = 64"] = keops(args.keops_n, args.rounds)
    print(result["peaked, T = 0.05, q = 64"], result["KeOps, q = 64"], sep="\n")
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
