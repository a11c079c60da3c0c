"""Gradients of estimated soft queries against exact ones: bias of sums, and bias of ratios by the number of draws.

    python benchmarks/estimate_gradients.py --data wordnet:DIR --out benchmarks/results/estimate-gradients.json

The queries are q = x W with W = 1. The gradients with respect to q and W are projected on 20 random directions. Over
many draws the script reports the t-statistics of the sums Σ e^a and Σ e^a v (mean against the exact gradient), and the
relative bias of the gradients of lse and of the output by the number of candidates: ‖mean - exact‖², less the variance
of the mean.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json
from estimate import World

import softdb

TEMPERATURE = 0.05
Loss = Callable[[softdb.Pooled], torch.Tensor]


def gradients(db: softdb.SoftDB, x: torch.Tensor, losses: dict[str, Loss], **options: Any) -> dict[str, torch.Tensor]:
    """Return, for each loss, its gradients with respect to q and W in one vector."""
    weight = torch.eye(x.shape[1], requires_grad=True)
    queries = x @ weight
    pooled = db.attend(queries, temperature=TEMPERATURE, **options)
    vectors = {}
    for name, loss in losses.items():
        grads = torch.autograd.grad(loss(pooled), (queries, weight), retain_graph=True)
        vectors[name] = torch.cat([grad.flatten() for grad in grads])
    return vectors


def measured(db: softdb.SoftDB, x: torch.Tensor, draws: int, candidates: int) -> dict[str, Any]:
    """Compare the gradients of many draws with the exact gradients."""
    exact = db.attend(x, temperature=TEMPERATURE)
    cotangent = torch.randn(exact.output.shape, generator=torch.Generator().manual_seed(1))

    def sums(pooled: softdb.Pooled) -> torch.Tensor:
        return (pooled.lse - exact.lse).exp()  # Ẑ / Z, the sum scaled by a constant

    losses: dict[str, Loss] = {
        "sum": lambda pooled: sums(pooled).sum(),
        "sum of values": lambda pooled: (sums(pooled).unsqueeze(1) * pooled.output * cotangent).sum(),
        "lse": lambda pooled: pooled.lse.sum(),
        "output": lambda pooled: (pooled.output * cotangent).sum(),
    }
    truth = gradients(db, x, losses)
    q = x.numel()
    generator = torch.Generator().manual_seed(2)
    onto_q, onto_w = (torch.randn(20, width, generator=generator) for width in (q, x.shape[1] ** 2))
    means = {name: torch.zeros_like(vector, dtype=torch.float64) for name, vector in truth.items()}
    squares = dict.fromkeys(truth, 0.0)
    projected: dict[str, list[torch.Tensor]] = {name: [] for name in truth}
    for seed in range(draws):
        options = {"rtol": 1e-9, "max_draws": candidates, "generator": torch.Generator().manual_seed(seed)}
        for name, vector in gradients(db, x, losses, **options).items():
            off = vector - truth[name]
            means[name] += off.double() / draws
            squares[name] += float(off.double().square().sum()) / draws
            projected[name].append(torch.cat([onto_q @ off[:q], onto_w @ off[q:]]))
    result: dict[str, Any] = {"candidates": candidates, "draws": draws}
    for name in truth:
        off = torch.stack(projected[name]).double()
        t = off.mean(0) / (off.std(0) / draws**0.5)
        size, mean = float(truth[name].double().square().sum()), float(means[name].square().sum())
        noise = (squares[name] - mean) / (draws - 1)
        result[name] = {
            "largest_t": round(float(t.abs().max()), 2),
            "bias": round(max(0.0, (mean - noise) / size) ** 0.5, 5),
            "bias_seen_down_to": round((noise / size) ** 0.5, 5),
            "noise_of_one_draw": round((squares[name] / size) ** 0.5, 4),
        }
    return result


def main() -> None:
    """Measure several numbers of candidates and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        world = World(args.data, args.n, args.dim, args.queries, Path(folder))
        x = torch.from_numpy(np.asarray(world.queries, np.float32))
        rows = [measured(world.dbs["keys"], x, args.draws, candidates) for candidates in (100, 200, 400)]
        print(*rows, sep="\n")
    if args.out:
        write_json(args.out, {**provenance(["softdb", "torch", "numpy", "faiss-cpu"]), "gradients": rows})


if __name__ == "__main__":
    main()
