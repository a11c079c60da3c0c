"""Training of a projection of the queries through the database, against torch's softmax over every key.

    python benchmarks/learn.py --data wordnet:DIR --splits 3 --further --out benchmarks/results/learn-wordnet.json
    python benchmarks/learn.py --data clustered --n 1000000 --out benchmarks/results/learn-1m.json

Adam trains one d × d matrix on the query, which begins as the identity, on the retrieval log-likelihood with every
record in the denominator. The ways differ only in that denominator: "torch" (q @ Kᵀ over all keys), "exact" (softdb
over all records), "drawn" (`rtol=` with at most --candidates draws) and "truncated" (the k nearest). Seconds are those
of the training steps alone. Held-out queries are evaluated between them, by exact search and with the exact loss.
WordNet's queries are another dictionary's definitions, split by word; a synthetic query is a rotated key with noise.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pictures
import torch
from common import provenance, write_json
from torch import Tensor

import softdb
from softdb.nn import EverySteps, View, retrieval_loss
from softdb.tools.bench.datasets import load
from softdb.train import ranking

TEMPERATURE = 0.05
Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, list[list[Any]]], Tensor]  # queries as the model made them, and their right ids


class World(NamedTuple):
    """Records with ids 0 … n - 1, and queries with their right records."""

    db: softdb.SoftDB
    keys: Tensor  # (n, d)
    queries: Tensor  # (m, d)
    right: list[list[Any]]
    groups: np.ndarray[Any, Any]  # (m,) group of each query: a group is not split between training and held-out queries


def wordnet(folder: Path, path: Path, index: bool = True) -> World:
    """Return the reverse dictionary, with an index if `index`."""

    def lines(name: str) -> list[dict[str, Any]]:
        with gzip.open(folder / name, "rt") as file:
            return [json.loads(line) for line in file]

    places = {record["id"]: i for i, record in enumerate(lines("records.jsonl.gz"))}
    definitions = lines("queries.jsonl.gz")
    keys = np.load(folder / "keys.npy").astype(np.float32)
    queries = torch.from_numpy(np.load(folder / "queries.npy").astype(np.float32))
    words = np.unique([line["word"] for line in definitions], return_inverse=True)[1]
    right: list[list[Any]] = [[places[answer] for answer in line["answers"]] for line in definitions]
    return World(_filled(path, keys, queries[:1000] if index else None), torch.from_numpy(keys), queries, right, words)


def turned(n: int, dim: int, path: Path) -> World:
    """Return clustered keys, and queries that are rotated keys with noise."""
    data = load("clustered", n=n, dim=dim, most=10)
    keys = np.concatenate([keys for _, keys in data.blocks()])
    random = np.random.default_rng(5)
    chosen = random.choice(n, 20_000, replace=False)
    rotation = np.linalg.qr(np.eye(dim) + 0.05 * random.standard_normal((dim, dim)))[0]
    # QR may flip the sign of a column: undo it, so that the matrix is a small rotation and not a reflection
    rotation = rotation * np.sign(np.diag(rotation))
    queries = keys[chosen] @ rotation + 0.6 / dim**0.5 * random.standard_normal((len(chosen), dim))
    tensor = torch.from_numpy(queries.astype(np.float32))
    right: list[list[Any]] = [[row] for row in chosen.tolist()]
    return World(_filled(path, keys, tensor[:1000]), torch.from_numpy(keys), tensor, right, chosen)


def _filled(path: Path, keys: np.ndarray[Any, Any], queries: Tensor | None) -> softdb.SoftDB:
    db = softdb.open(path, dim=keys.shape[1])
    for low in range(0, len(keys), 100_000):
        db.insert(range(low, low + len(keys[low : low + 100_000])), keys[low : low + 100_000])
    if queries is not None:
        db.build_index("ivf", recall=0.95, queries=queries)
    return db


def by_torch(keys: Tensor) -> Loss:
    """Return the loss by torch's softmax over all keys."""

    def loss(queries: Tensor, right: list[list[Any]]) -> Tensor:
        scores = queries @ keys.T / TEMPERATURE
        places = torch.full((len(right), max(map(len, right))), -1)
        for i, rows in enumerate(right):
            places[i, : len(rows)] = torch.tensor(rows)
        right_scores = scores.gather(1, places.clamp(min=0)).masked_fill(places < 0, -torch.inf)
        return (scores.logsumexp(1) - right_scores.logsumexp(1)).mean()

    return loss


def by_softdb(db: softdb.SoftDB, **options: Any) -> Loss:
    """Return the loss through the database, with options of `retrieval_loss`."""
    return lambda queries, right: retrieval_loss(db, queries, right, temperature=TEMPERATURE, **options)


def trained(
    world: World, model: torch.nn.Module, loss: Loss, split: int, args: argparse.Namespace, view: View | None = None
) -> dict[str, Any]:
    """Train in one way and return its curve: seconds of training, and the evaluation on held-out queries."""
    random = torch.Generator().manual_seed(split)
    count = int(world.groups.max()) + 1
    held = torch.zeros(count, dtype=torch.bool)
    held[torch.randperm(count, generator=random)[: count // 5]] = True
    held = held[torch.from_numpy(world.groups)]
    test, train = held.nonzero()[:, 0][: args.held], (~held).nonzero()[:, 0]
    optimizer = torch.optim.Adam([*model.parameters(), *([] if view is None else view.parameters())], lr=args.rate)

    def measured() -> dict[str, float]:
        if view is not None:
            view.reindex()
            with torch.no_grad():
                rows = view.search(model(world.queries[test]), 10).rows
            hits = [set(world.right[i]) & set(row) for i, row in zip(test.tolist(), rows.tolist(), strict=True)]
            return {"recall_10": round(sum(map(bool, hits)) / len(hits), 4)}
        report = ranking(world.db, world.queries[test], [world.right[i] for i in test.tolist()], model)
        few = test[:512]
        with torch.no_grad():
            exact = retrieval_loss(
                world.db, model(world.queries[few]), [world.right[i] for i in few.tolist()], temperature=TEMPERATURE
            )
        figures = {name: round(getattr(report, name), 4) for name in ("recall_1", "recall_10", "mrr_100")}
        return {**figures, "loss": round(exact.item(), 4)}

    curve, spent, step = [{"seconds": 0.0, "step": 0, **measured()}], 0.0, 0
    for _ in range(args.epochs):
        for batch in train[torch.randperm(len(train), generator=random)].split(args.batch)[: args.steps]:  # type: ignore[no-untyped-call]
            start = time.perf_counter()
            optimizer.zero_grad()
            loss(model(world.queries[batch]), [world.right[i] for i in batch.tolist()]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if view is not None:
                view.step()
            spent, step = spent + time.perf_counter() - start, step + 1
            if step % args.every == 0:
                curve.append({"seconds": round(spent, 2), "step": step, **measured()})
    if curve[-1]["step"] != step:
        curve.append({"seconds": round(spent, 2), "step": step, **measured()})
    return {"before": curve[0], "after": curve[-1], "ms_a_step": round(spent / step * 1e3, 1), "curve": curve}


class Residual(torch.nn.Module):
    """x + W_2 relu(W_1 x), which begins as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inside, self.outside = torch.nn.Linear(dim, 2 * dim), torch.nn.Linear(2 * dim, dim)
        torch.nn.init.zeros_(self.outside.weight)
        torch.nn.init.zeros_(self.outside.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, d) to (…, d)."""
        added: Tensor = self.outside(self.inside(x).relu())
        return x + added


def identity(dim: int) -> torch.nn.Linear:
    """Return a projection that begins as the identity."""
    projection = torch.nn.Linear(dim, dim, bias=False)
    torch.nn.init.eye_(projection.weight)
    return projection


def further(world: World, args: argparse.Namespace) -> dict[str, Any]:
    """Train larger models than one matrix on the first split."""
    dim, draws = world.keys.shape[1], torch.Generator().manual_seed(0)
    drawn = by_softdb(world.db, rtol=0.9, max_draws=args.candidates, generator=draws)
    curves = {
        "query: matrix and a residual layer": trained(
            world, torch.nn.Sequential(identity(dim), Residual(dim)), drawn, 0, args
        )
    }
    view = View(world.db, Residual(dim), reindex=EverySteps(80))

    def through_view(queries: Tensor, right: list[list[Any]]) -> Tensor:
        """Return the loss with the view's nearest records and the batch's right records as negatives."""
        rows = torch.tensor([positives[0] for positives in right])
        own = view.encoder(world.keys[rows])
        scores = queries @ own.T / TEMPERATURE
        beyond = view.attend(queries, k=100, temperature=TEMPERATURE).lse
        others = torch.logaddexp(beyond, scores.logsumexp(1))
        loss: Tensor = (others - scores.diagonal()).mean()
        return loss

    name = "query: matrix; keys: residual layer through a view"
    curves[name] = trained(world, identity(dim), through_view, 0, args, view)
    for name, curve in curves.items():
        print(name, curve["before"], curve["after"], curve["ms_a_step"], flush=True)
    return curves


def main() -> None:
    """Train every way on every split and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR or clustered")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="largest number of steps in an epoch")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--candidates", type=int, default=100, help="largest number of draws for a query")
    parser.add_argument("-k", type=int, default=100, help="candidates of the truncated way")
    parser.add_argument("--held", type=int, default=5000, help="held-out queries to evaluate")
    parser.add_argument("--every", type=int, default=40, help="steps between evaluations")
    parser.add_argument("--ways", nargs="+", default=["torch", "exact", "drawn", "truncated"])
    parser.add_argument("--further", action="store_true", help="train larger models, too, on one split")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db"
        name, _, where = args.data.partition(":")
        world = wordnet(Path(where), path) if name == "wordnet" else turned(args.n, args.dim, path)
        draws = torch.Generator().manual_seed(0)
        ways: dict[str, Loss] = {
            "torch": by_torch(world.keys),
            "exact": by_softdb(world.db),
            "drawn": by_softdb(world.db, rtol=0.9, max_draws=args.candidates, generator=draws),
            "truncated": by_softdb(world.db, k=args.k),
        }
        splits: list[dict[str, Any]] = []
        for split in range(args.splits):
            splits.append({})
            for way in args.ways:
                torch.manual_seed(split)
                splits[-1][way] = trained(world, identity(world.keys.shape[1]), ways[way], split, args)
                curve = splits[-1][way]
                print(split, way, curve["before"], curve["after"], curve["ms_a_step"], "ms a step", flush=True)
        result = {
            **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
            "data": {"name": name, "n": len(world.keys), "dim": world.keys.shape[1], "queries": len(world.queries)},
            "gain_of_recall_10": {
                way: round(
                    float(np.mean([s[way]["after"]["recall_10"] - s[way]["before"]["recall_10"] for s in splits])), 4
                )
                for way in args.ways
            },
            "time_of_torch": {
                way: round(float(np.mean([s[way]["ms_a_step"] / s["torch"]["ms_a_step"] for s in splits])), 3)
                for way in (args.ways if "torch" in args.ways else ())
            },
            "splits": splits,
        }
        print(result["gain_of_recall_10"], result["time_of_torch"])
        if args.further:
            result["further"] = further(world, args)
        world.db.close()
    if args.out:
        write_json(args.out, result)
        pictures.learn(result, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
