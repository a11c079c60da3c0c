"""Gradients of estimated soft queries against the exact ones: unbiased sums, and a bias of ratios that falls.

    python benchmarks/estimate_gradients.py --data wordnet:DIR --out benchmarks/results/estimate-gradients.json

x W = q are the queries, W = 1. Over many draws, on 20 random projections of the gradients to q and to W: the
t-statistics of Σ e^a and of Σ e^a v (their mean against the exact gradient); and the bias of the gradients of lse and
of the output, relative to the exact ones, as more candidates are drawn: ‖mean - exact‖², less what the noise of the
mean adds.
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


def gradients(db: softdb.SoftDB, x: torch.Tensor, losses: dict[str, Loss], **how: Any) -> dict[str, torch.Tensor]:
    """The gradient of each loss to q and to W, in one vector."""
    weight = torch.eye(x.shape[1], requires_grad=True)
    queries = x @ weight
    pooled = db.attend(queries, temperature=TEMPERATURE, **how)
    found = {}
    for name, loss in losses.items():
        parts = torch.autograd.grad(loss(pooled), (queries, weight), retain_graph=True)
        found[name] = torch.cat([part.flatten() for part in parts])
    return found


def measured(db: softdb.SoftDB, x: torch.Tensor, draws: int, candidates: int) -> dict[str, Any]:
    """What many draws say of the exact gradients."""
    exact = db.attend(x, temperature=TEMPERATURE)
    cotangent = torch.randn(exact.output.shape, generator=torch.Generator().manual_seed(1))

    def sums(pooled: softdb.Pooled) -> torch.Tensor:
        return (pooled.lse - exact.lse).exp()  # Ẑ / Z: the sum, scaled by a constant

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
    means = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in truth.items()}
    squares = dict.fromkeys(truth, 0.0)
    projected: dict[str, list[torch.Tensor]] = {name: [] for name in truth}
    for seed in range(draws):
        how = {"rtol": 1e-9, "max_draws": candidates, "generator": torch.Generator().manual_seed(seed)}
        for name, one in gradients(db, x, losses, **how).items():
            off = one - truth[name]
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
    """One line a number of candidates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        world = World(given.data, given.n, given.dim, given.queries, Path(folder))
        x = torch.from_numpy(np.asarray(world.queries, np.float32))
        found = [measured(world.dbs["keys"], x, given.draws, candidates) for candidates in (100, 200, 400)]
        print(*found, sep="\n")
    if given.out:
        write_json(given.out, {**provenance(["softdb", "torch", "numpy", "faiss-cpu"]), "gradients": found})


if __name__ == "__main__":
    main()
