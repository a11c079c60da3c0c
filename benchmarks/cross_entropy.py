"""Cross entropy of a softmax over trainable rows, forward and backward: softdb, torch, and sampled negatives.

    python benchmarks/cross_entropy.py --wordnet DIR --rounds 9 --out benchmarks/results/cross-entropy.json

Each case is queries × rows × width. Losses and gradients of the exact ways are compared with autograd in float64 before
any clock starts. In each round every way takes one step: loss, backward, new gradients. `more_mib` is the private
memory that a step needs at most beyond what it returns. Ways that draw or truncate have `gradient_error`, the root mean
square over a few draws of ‖g - g_exact‖ / ‖g_exact‖ for the gradients of rows and queries, so that ways can be compared
at equal time. Log-uniform draws are those of torch's and TensorFlow's examples, for rows sorted by frequency.

The rows are clusters with Zipf's frequencies as offsets, most frequent first, and the targets are drawn from the
softmax. With --wordnet the first case has the dictionary's definitions as queries and rows at temperature 0.05.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import MIB, Peak, in_turn, provenance, spread, write_json
from torch import Tensor
from torch.nn import functional as F

from softdb import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (q, d), rows (n, d), targets (q,) -> ()
CASES = ("256x117659x384", "1024x54542x64")
EXACT = ("torch plain", "torch linear_cross_entropy", "softdb exact")
PRECISION = 1e-5  # of a loss; 10 times as much of a gradient's length


class World(NamedTuple):
    """Queries, rows and targets; scores are their products, divided by a temperature already."""

    queries: Tensor  # (q, d)
    weight: Tensor  # (n, d)
    targets: Tensor  # (q,)


def made(q: int, n: int, d: int) -> World:
    """Return clustered rows, and queries of the same clusters."""
    random = torch.Generator().manual_seed(0)
    log_frequency = torch.arange(1, n + 1).pow(-0.8).log()
    centres = torch.randn(200, d - 1, generator=random)

    def of_clusters(count: int) -> Tensor:
        own = centres[torch.randint(200, (count,), generator=random)]
        vectors: Tensor = 1.5 * d**-0.25 * (own + 0.8 * torch.randn(count, d - 1, generator=random))
        return vectors

    weight = torch.cat([of_clusters(n), (log_frequency - log_frequency.mean()).unsqueeze(1)], 1)
    queries = torch.cat([of_clusters(q), torch.full((q, 1), 0.7)], 1)
    chances = torch.cat(
        [part.softmax(1).multinomial(1, generator=random) for part in torch.split(queries @ weight.mT, 64)]
    )
    return World(queries, weight, chances[:, 0])


def wordnet(folder: Path, q: int) -> World:
    """Return definitions of one dictionary as queries, and those of another as rows; the nearest is the target."""
    weight = torch.from_numpy(np.load(folder / "keys.npy").astype(np.float32))
    random = torch.Generator().manual_seed(0)
    queries = torch.from_numpy(np.load(folder / "queries.npy").astype(np.float32))
    queries = queries[torch.randperm(len(queries), generator=random)[:q]]
    return World(queries / 0.05, weight, (queries @ weight.mT).argmax(1))


# -- ways --------------------------------------------------------------------------------------------------------------


def plain(queries: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return torch's loss of torch's scores, a (q, n) matrix."""
    return F.cross_entropy(F.linear(queries, weight), targets)


def negatives(queries: Tensor, weight: Tensor, targets: Tensor, count: int) -> Tensor:
    """Return the binary cross entropy of the target and of `count` uniform negatives a query, as SASRec and its kin."""
    rows = torch.cat([targets.unsqueeze(1), torch.randint(len(weight), (len(queries), count))], 1)
    scores = (F.embedding(rows, weight, sparse=True) @ queries.unsqueeze(2)).squeeze(2)
    truth = torch.zeros_like(scores)
    truth[:, 0] = 1
    return F.binary_cross_entropy_with_logits(scores, truth, reduction="sum") / len(queries)


def log_uniform(queries: Tensor, weight: Tensor, targets: Tensor, count: int) -> Tensor:
    """Return the loss with Z estimated from rows drawn with the probabilities log(1 + 1 / row), rows from 1."""
    n = len(weight)
    rows = (((n + 1.0) ** torch.rand(count, dtype=torch.float64)).long() - 1).clamp(max=n - 1)
    chance = torch.log1p(1 / (rows + 1.0)) / math.log(n + 1)
    scores = queries @ F.embedding(rows, weight, sparse=True).mT - (count * chance).log().float()
    positive = (queries * F.embedding(targets, weight, sparse=True)).sum(1, keepdim=True)
    scores = scores.masked_fill(rows == targets.unsqueeze(1), -torch.inf)
    return (torch.cat([positive, scores], 1).logsumexp(1) - positive[:, 0]).mean()


def ways(n: int) -> dict[str, Loss]:
    """Return every way by name; the first three are exact."""
    chunked = functools.partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    result: dict[str, Loss] = {
        "torch plain": plain,
        "torch linear_cross_entropy": F.linear_cross_entropy,
        "softdb exact": linear_cross_entropy,
        "torch linear_cross_entropy, chunked": chunked,
    }
    for count in (1, 256):
        result[f"BCE, negatives={count}"] = functools.partial(negatives, count=count)
    for count in (1000, 4000, 16000):
        if 2 * count < n:
            result[f"softdb max_draws={count}"] = functools.partial(linear_cross_entropy, max_draws=count)
            result[f"log-uniform draws={count}"] = functools.partial(log_uniform, count=count)
    result["softdb k=64"] = functools.partial(linear_cross_entropy, k=64)
    result["softdb k=64, max_draws=1000"] = functools.partial(linear_cross_entropy, k=64, max_draws=min(1000, n // 3))
    return result


# -- measurement -------------------------------------------------------------------------------------------------------


def step(loss: Loss, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients of queries and rows."""
    queries, weight = (tensor.detach().requires_grad_() for tensor in world[:2])
    value = loss(queries, weight, world.targets)
    value.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert weight.grad is not None
    return value.detach(), queries.grad, weight.grad


def distance(grads: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    """Return ‖g - g_right‖ / ‖g_right‖ over all gradients."""
    apart = sum(float((a.to_dense().double() - b.double()).square().sum()) for a, b in zip(grads, right, strict=True))
    return float((apart / sum(float(b.double().square().sum()) for b in right)) ** 0.5)


def require_right(world: World, named: dict[str, Loss]) -> tuple[Tensor, ...]:
    """Raise ValueError unless the exact ways agree with float64; return the gradients in float64."""
    value, *right = step(plain, World(world.queries.double(), world.weight.double(), world.targets))
    for name in EXACT:
        own, *grads = step(named[name], world)
        errors = abs(float(own.double() - value)) / max(1.0, float(value)), distance(tuple(grads), tuple(right)) / 10
        if not max(errors) < PRECISION:
            raise ValueError(
                f"{name} differs from float64 by {errors[0]:.1e} in the loss, {errors[1]:.1e} in gradients"
            )
        print(f"{name}: loss within {errors[0]:.1e}, gradients within {10 * errors[1]:.1e} of float64", flush=True)
    return tuple(right)


def measured(world: World, rounds: int) -> dict[str, Any]:
    """Return seconds, memory and errors of every way."""
    named = ways(len(world.weight))
    right = require_right(world, named)
    rows: dict[str, dict[str, Any]] = {}
    for name, loss in named.items():
        with Peak() as peak:
            returned = step(loss, world)
        kept = sum(grad.untyped_storage().nbytes() for grad in returned if not grad.is_sparse)
        rows[name] = {"more_mib": round(max(0, peak.more - kept) / MIB, 1)}
        if name not in EXACT and not name.startswith(("BCE", "torch")):
            errors = [distance(step(loss, world)[1:], right) for _ in range(5)]
            rows[name]["gradient_error"] = round(float(np.mean(np.square(errors)) ** 0.5), 4)
    seconds = in_turn({name: functools.partial(step, loss, world) for name, loss in named.items()}, rounds)
    for name, each in seconds.items():
        rows[name]["step_ms"] = {key: round(1e3 * x, 2) for key, x in spread(each).items()}
        ratios = [own / base for own, base in zip(each, seconds["torch plain"], strict=True)]
        rows[name]["of_torch_plain"] = round(float(np.median(ratios)), 3)
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    """Measure every case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="queries x rows x width")
    parser.add_argument("--wordnet", type=Path, help="folder of keys.npy and queries.npy for the first case")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {**provenance(["softdb", "torch", "numpy"]), "cases": []}
    sgemm = result["machine"]["sgemm_gflop_s"]
    for i, case in enumerate(args.cases):
        torch.manual_seed(i)
        q, n, d = map(int, case.split("x"))
        of_wordnet = args.wordnet is not None and i == 0
        world = wordnet(args.wordnet, q) if of_wordnet else made(q, n, d)
        q, n, d = len(world.queries), *world.weight.shape
        print(f"-- {q} queries, {n} rows, width {d}", flush=True)
        rows = measured(world, args.rounds)
        floor = {
            name: round(2e-6 * q * n * d * products / sgemm, 1) for name, products in (("torch", 3), ("softdb", 4))
        }
        data = "wordnet" if of_wordnet else "clustered"
        result["cases"].append({"data": data, "q": q, "n": n, "d": d, "ms_of_products_by_sgemm": floor, "ways": rows})
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
