"""Training a projection of the queries through the database, against torch's softmax over every key.

    python benchmarks/learn.py --data wordnet:DIR --splits 3 --further --out benchmarks/results/learn-wordnet.json
    python benchmarks/learn.py --data clustered --n 1000000 --out benchmarks/results/learn-1m.json

One d × d matrix on the query, which begins as the identity, by Adam on the retrieval log-likelihood with every record
in the denominator. The ways differ in that denominator alone: torch (q @ Kᵀ over all keys), softdb exactly, softdb
drawn (`rtol=`, at most so many candidates), and truncated to the k nearest. Seconds are those of the training steps;
what is held out is measured between them, by exact search; `loss` is the exact one, too. WordNet: another dictionary's
definitions, split by word. Synthetic: each query is a key, turned by a random rotation, with noise.
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
import torch
from common import provenance, write_json
from torch import Tensor

import softdb
from softdb.nn import EverySteps, View, retrieval_loss
from softdb.tools.bench.datasets import load
from softdb.train import ranking

TEMPERATURE = 0.05
COLOURS = {"torch": "tab:blue", "exact": "tab:orange", "drawn": "tab:green", "truncated": "tab:red"}
Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, list[list[Any]]], Tensor]  # queries as the model made them, and their right ids


class World(NamedTuple):
    """Records with ids 0 … n - 1, and queries with their right ones, some of them held out."""

    db: softdb.SoftDB
    keys: Tensor  # (n, d)
    queries: Tensor  # (m, d)
    right: list[list[Any]]
    groups: np.ndarray[Any, Any]  # (m,) what must not be split


def wordnet(folder: Path, path: Path) -> World:
    """The reverse dictionary."""

    def lines(name: str) -> list[dict[str, Any]]:
        with gzip.open(folder / name, "rt") as file:
            return [json.loads(line) for line in file]

    places = {record["id"]: i for i, record in enumerate(lines("records.jsonl.gz"))}
    asked = lines("queries.jsonl.gz")
    keys = np.load(folder / "keys.npy").astype(np.float32)
    queries = torch.from_numpy(np.load(folder / "queries.npy").astype(np.float32))
    words = np.unique([line["word"] for line in asked], return_inverse=True)[1]
    right: list[list[Any]] = [[places[answer] for answer in line["answers"]] for line in asked]
    return World(_filled(path, keys, queries[:1000]), torch.from_numpy(keys), queries, right, words)


def turned(n: int, dim: int, path: Path) -> World:
    """Clustered keys, and queries that are some of them, turned, with noise."""
    data = load("clustered", n=n, dim=dim, most=10)
    keys = np.concatenate([keys for _, keys in data.blocks()])
    random = np.random.default_rng(5)
    chosen = random.choice(n, 20_000, replace=False)
    rotation = np.linalg.qr(np.eye(dim) + 0.05 * random.standard_normal((dim, dim)))[0]
    # the sign of each column as it was: a small turn, not a reflection
    rotation = rotation * np.sign(np.diag(rotation))
    queries = keys[chosen] @ rotation + 0.6 / dim**0.5 * random.standard_normal((len(chosen), dim))
    asked = torch.from_numpy(queries.astype(np.float32))
    right: list[list[Any]] = [[one] for one in chosen.tolist()]
    return World(_filled(path, keys, asked[:1000]), torch.from_numpy(keys), asked, right, chosen)


def _filled(path: Path, keys: np.ndarray[Any, Any], queries: Tensor) -> softdb.SoftDB:
    db = softdb.open(path, dim=keys.shape[1])
    for low in range(0, len(keys), 100_000):
        db.insert(range(low, low + len(keys[low : low + 100_000])), keys[low : low + 100_000])
    db.build_index("ivf", recall=0.95, queries=queries)
    return db


def by_torch(keys: Tensor) -> Loss:
    """The plain softmax over all keys."""

    def loss(queries: Tensor, right: list[list[Any]]) -> Tensor:
        scores = queries @ keys.T / TEMPERATURE
        places = torch.full((len(right), max(map(len, right))), -1)
        for i, mine in enumerate(right):
            places[i, : len(mine)] = torch.tensor(mine)
        found = scores.gather(1, places.clamp(min=0)).masked_fill(places < 0, -torch.inf)
        return (scores.logsumexp(1) - found.logsumexp(1)).mean()

    return loss


def by_softdb(db: softdb.SoftDB, **how: Any) -> Loss:
    """The same through the database."""
    return lambda queries, right: retrieval_loss(db, queries, right, temperature=TEMPERATURE, **how)


def trained(
    world: World, model: torch.nn.Module, loss: Loss, split: int, given: argparse.Namespace, view: View | None = None
) -> dict[str, Any]:
    """The curve of one way: seconds of training, and what is held out."""
    random = torch.Generator().manual_seed(split)
    count = int(world.groups.max()) + 1
    held = torch.zeros(count, dtype=torch.bool)
    held[torch.randperm(count, generator=random)[: count // 5]] = True
    held = held[torch.from_numpy(world.groups)]
    test, train = held.nonzero()[:, 0][: given.held], (~held).nonzero()[:, 0]
    optimizer = torch.optim.Adam([*model.parameters(), *([] if view is None else view.parameters())], lr=given.rate)

    def measured() -> dict[str, float]:
        if view is not None:
            view.reindex()
            with torch.no_grad():
                rows = view.search(model(world.queries[test]), 10).rows
            mine = [set(world.right[i]) & set(one) for i, one in zip(test.tolist(), rows.tolist(), strict=True)]
            return {"recall_10": round(sum(map(bool, mine)) / len(mine), 4)}
        found = ranking(world.db, world.queries[test], [world.right[i] for i in test.tolist()], model)
        few = test[:512]
        with torch.no_grad():
            exact = retrieval_loss(
                world.db, model(world.queries[few]), [world.right[i] for i in few.tolist()], temperature=TEMPERATURE
            )
        shown = {name: round(getattr(found, name), 4) for name in ("recall_1", "recall_10", "mrr_100")}
        return {**shown, "loss": round(exact.item(), 4)}

    curve, spent, step = [{"seconds": 0.0, "step": 0, **measured()}], 0.0, 0
    for _ in range(given.epochs):
        for batch in train[torch.randperm(len(train), generator=random)].split(given.batch)[: given.steps]:  # type: ignore[no-untyped-call]
            start = time.perf_counter()
            optimizer.zero_grad()
            loss(model(world.queries[batch]), [world.right[i] for i in batch.tolist()]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if view is not None:
                view.step()
            spent, step = spent + time.perf_counter() - start, step + 1
            if step % given.every == 0:
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
        """(…, d) to (…, d)."""
        added: Tensor = self.outside(self.inside(x).relu())
        return x + added


def identity(dim: int) -> torch.nn.Linear:
    """A projection that begins as the identity."""
    projection = torch.nn.Linear(dim, dim, bias=False)
    torch.nn.init.eye_(projection.weight)
    return projection


def further(world: World, given: argparse.Namespace) -> dict[str, Any]:
    """Models beyond one matrix, on the first split: what each buys."""
    dim, draws = world.keys.shape[1], torch.Generator().manual_seed(0)
    drawn = by_softdb(world.db, rtol=0.9, max_draws=given.candidates, generator=draws)
    found = {
        "query: matrix and a residual layer": trained(
            world, torch.nn.Sequential(identity(dim), Residual(dim)), drawn, 0, given
        )
    }
    view = View(world.db, Residual(dim), reindex=EverySteps(80))

    def through_view(queries: Tensor, right: list[list[Any]]) -> Tensor:
        """The nearest of the view, and the other queries' right records, as negatives."""
        rows = torch.tensor([mine[0] for mine in right])
        own = view.encoder(world.keys[rows])
        scores = queries @ own.T / TEMPERATURE
        beyond = view.attend(queries, k=100, temperature=TEMPERATURE).lse
        others = torch.logaddexp(beyond, scores.logsumexp(1))
        loss: Tensor = (others - scores.diagonal()).mean()
        return loss

    name = "query: matrix; keys: residual layer through a view"
    found[name] = trained(world, identity(dim), through_view, 0, given, view)
    for name, one in found.items():
        print(name, one["before"], one["after"], one["ms_a_step"], flush=True)
    return found


def draw(splits: list[dict[str, Any]], path: Path) -> None:
    """Recall against seconds, one line a way, each way in a colour of its own in every picture."""
    from softdb.plots import figure, save

    drawn, (axes,) = figure()
    for name, one in splits[0].items():
        points = one["curve"][1:]  # a logarithmic axis has no place for the start, 0 s
        seconds, recalls = [p["seconds"] for p in points], [p["recall_10"] for p in points]
        axes.plot(seconds, recalls, marker=".", label=name, color=COLOURS[name])
    start = next(iter(splits[0].values()))["before"]["recall_10"]
    axes.axhline(start, color="0.5", linestyle=":", label="untrained")
    axes.set(xscale="log", xlabel="seconds of training", ylabel="recall@10 of held-out queries")
    axes.legend()
    save(drawn, path)


def main() -> None:
    """Every way on every split, written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR or clustered")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="At most so many an epoch.")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--candidates", type=int, default=100, help="Drawn for a query at most.")
    parser.add_argument("-k", type=int, default=100, help="Of the truncated way.")
    parser.add_argument("--held", type=int, default=5000, help="Held-out queries that are measured.")
    parser.add_argument("--every", type=int, default=40, help="Steps between measurements.")
    parser.add_argument("--ways", nargs="+", default=["torch", "exact", "drawn", "truncated"])
    parser.add_argument("--further", action="store_true", help="Also larger models, on one split.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db"
        name, _, where = given.data.partition(":")
        world = wordnet(Path(where), path) if name == "wordnet" else turned(given.n, given.dim, path)
        draws = torch.Generator().manual_seed(0)
        ways: dict[str, Loss] = {
            "torch": by_torch(world.keys),
            "exact": by_softdb(world.db),
            "drawn": by_softdb(world.db, rtol=0.9, max_draws=given.candidates, generator=draws),
            "truncated": by_softdb(world.db, k=given.k),
        }
        splits: list[dict[str, Any]] = []
        for split in range(given.splits):
            splits.append({})
            for way in given.ways:
                torch.manual_seed(split)
                splits[-1][way] = trained(world, identity(world.keys.shape[1]), ways[way], split, given)
                one = splits[-1][way]
                print(split, way, one["before"], one["after"], one["ms_a_step"], "ms a step", flush=True)
        result = {
            **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
            "data": {"name": name, "n": len(world.keys), "dim": world.keys.shape[1], "queries": len(world.queries)},
            "gain_of_recall_10": {
                way: round(
                    float(np.mean([s[way]["after"]["recall_10"] - s[way]["before"]["recall_10"] for s in splits])), 4
                )
                for way in given.ways
            },
            "time_of_torch": {
                way: round(float(np.mean([s[way]["ms_a_step"] / s["torch"]["ms_a_step"] for s in splits])), 3)
                for way in (given.ways if "torch" in given.ways else ())
            },
            "splits": splits,
        }
        print(result["gain_of_recall_10"], result["time_of_torch"])
        if given.further:
            result["further"] = further(world, given)
        world.db.close()
    if given.out:
        write_json(given.out, result)
        draw(splits, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
