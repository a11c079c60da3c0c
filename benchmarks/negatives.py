"""Negatives of a batch against the whole corpus, encoded again at each step, to train encoders of queries and keys.

    python benchmarks/negatives.py --data DIR --out benchmarks/results/negatives.json
    python benchmarks/negatives.py --data DIR --validate --set rate=3e-3 --out choice.json

Queries are another dictionary's definitions and records WordNet's glosses, both as vectors of all-MiniLM-L6-v2. Each
side has a residual layer (`KeyEncoder`, the identity at first), and Adam trains both, in two ways:

    in-batch    `info_nce(view, …, negatives=0)`: the negatives of a query are the right records of the batch's others
    corpus      `retrieval_loss(view, …)`: every record is a negative, encoded by the current encoder at each step

`in-batch` is trained twice: for as long as `corpus` ("equal time"), and for as many steps with the rate of `corpus`.
A fifth of the words is held out. Half of their definitions choose the best point of a curve, the other half is
reported, by exact search among all records, encoded anew. The budget is `--seconds` of CPU time (steps alone, one
thread). `--validate` evaluates on words that are neither; it chose rate and temperature for `--seconds` in CHOSEN. A
file that exists gets what it lacks: further seeds, batch sizes and ways, and points of the same curves by `--points`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json
from learn import World, wordnet
from torch import Tensor

from softdb.nn import View, info_nce, retrieval_loss
from softdb.train import ranking
from softdb.train.keys import KeyEncoder

MEASURES = ("recall_1", "recall_10", "mrr_100")


@dataclass
class Settings:
    """Settings of one way."""

    rate: float
    temperature: float


STEPS, TIME = "in-batch, equal steps", "in-batch, equal time"
CHOSEN = {"corpus": Settings(2e-3, 0.05), STEPS: Settings(2e-3, 0.05), TIME: Settings(3e-4, 0.05)}


class Sides:
    """Definitions that train, choose and are reported, split by word."""

    def __init__(self, world: World, seed: int, validate: bool, held: int) -> None:
        order = np.random.default_rng(seed).permutation(int(world.groups.max()) + 1)
        fifth = len(order) // 5
        parts = (order[fifth : 2 * fifth], order[2 * fifth :]) if validate else (order[:fifth], order[fifth:])
        held_out, train = (np.flatnonzero(np.isin(world.groups, part)) for part in parts)
        half = {word: i % 2 for i, word in enumerate(parts[0].tolist())}
        sides = np.array([half[word] for word in world.groups[held_out].tolist()])
        self.train = torch.from_numpy(train)
        self.choose, self.test = (torch.from_numpy(held_out[sides == side][:held]) for side in (0, 1))


def trained(
    world: World,
    sides: Sides,
    way: str,
    seed: int,
    batch: int,
    settings: Settings,
    args: argparse.Namespace,
    due: list[float],
    at: set[int],
) -> list[dict[str, Any]]:
    """Train one way until it has points after the CPU seconds `due` and after the steps `at`; return its points."""
    dim = world.keys.shape[1]
    queries, view = (
        KeyEncoder(dim, args.hidden, 2 * seed),
        View(world.db, KeyEncoder(dim, args.hidden, 2 * seed + 1), index="flat", batch_size=args.block),
    )
    optimizer = torch.optim.Adam([*queries.parameters(), *view.parameters()], lr=settings.rate)
    random = torch.Generator().manual_seed(seed)

    def loss(chosen: Tensor) -> Tensor:
        right = [world.right[i] for i in chosen.tolist()]
        if way == "corpus":
            return retrieval_loss(view, queries(world.queries[chosen]), right, temperature=settings.temperature)
        vectors = queries(world.queries[chosen])
        return info_nce(view, vectors, right, negatives=0, temperature=settings.temperature)

    def point() -> dict[str, Any]:
        view.reindex()
        results: dict[str, Any] = {"seconds": round(spent, 2), "step": step}
        for name, numbers in (("choose", sides.choose), ("test", sides.test)):
            report = ranking(view, world.queries[numbers], [world.right[i] for i in numbers.tolist()], queries)
            results[name] = {measure: round(getattr(report, measure), 4) for measure in MEASURES}
        print(way, batch, seed, results, flush=True)
        return results

    spent, step, curve = 0.0, 0, list[dict[str, Any]]()
    curve.append(point())
    while due or at:
        for chosen in sides.train[torch.randperm(len(sides.train), generator=random)].split(batch):  # type: ignore[no-untyped-call]
            start = time.process_time()
            optimizer.zero_grad()
            loss(chosen).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            spent, step = spent + time.process_time() - start, step + 1
            if step in at or any(spent >= seconds for seconds in due):
                curve.append(point())
                due, at = [seconds for seconds in due if seconds > spent], at - {step}
            if not due and not at:
                break
    return curve


def chosen_point(curve: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the point with the best MRR on the definitions that choose."""
    return max(curve, key=lambda point: point["choose"]["mrr_100"])


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each batch size and way, the means over the seeds at the chosen points and at the last points."""
    rows: list[dict[str, Any]] = []
    for batch in sorted({run["batch"] for run in runs}):
        for way in ("untrained", *CHOSEN):
            curves = [run["curves"]["corpus" if way == "untrained" else way] for run in runs if run["batch"] == batch]
            points = [curve[0] if way == "untrained" else chosen_point(curve) for curve in curves]
            last = [curve[0] if way == "untrained" else curve[-1] for curve in curves]
            row = {"batch": batch, "way": way, "steps": [point["step"] for point in points], **means(points)}
            if way != "untrained":
                pace = np.mean([1000 * point["seconds"] / point["step"] for point in last])
                row |= {"last": {"steps": [point["step"] for point in last], **means(last)}, "ms_a_step": float(pace)}
            rows.append(row)
    return rows


def means(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean measures of points on the reported definitions."""
    return {name: round(float(np.mean([point["test"][name] for point in points])), 4) for name in MEASURES}


def main() -> None:
    """Train every way with every batch size and seed, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reverse dictionary")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=40, help="CPU seconds of training, for each run")
    parser.add_argument(
        "--points", type=float, nargs="+", default=[0.02, 0.05, 0.15, 0.5, 1.0], help="shares to evaluate at"
    )
    parser.add_argument("--hidden", type=int, default=96, help="width of the hidden layer of both encoders")
    parser.add_argument("--held", type=int, default=1000, help="definitions that choose, and definitions reported")
    parser.add_argument("--block", type=int, default=4096, help="records encoded at once")
    parser.add_argument("--ways", nargs="+", default=list(CHOSEN), choices=list(CHOSEN))
    parser.add_argument("--validate", action="store_true", help="evaluate on left-out training words")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings to change")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    changed = {name: float(number) for name, number in (part.split("=") for part in args.set)}
    settings = {way: replace(CHOSEN[way], **changed) for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        world = wordnet(args.data, Path(folder) / "db", index=False)
        earlier: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
        runs: list[dict[str, Any]] = earlier.get("runs", [])
        result = {
            **provenance(["softdb", "torch", "numpy"]),
            "data": {"n": len(world.keys), "dim": world.keys.shape[1], "queries": len(world.queries)},
            "earlier": [*earlier.get("earlier", []), *([earlier["command"]] if earlier else [])],
            "seconds": args.seconds, "hidden": args.hidden, "validate": args.validate,
            "settings": {way: asdict(chosen) for way, chosen in settings.items()}, "summary": [], "runs": runs,
        }  # fmt: skip
        for seed in range(args.seeds):
            sides = Sides(world, seed, args.validate, args.held)
            for batch in args.batch:
                run = next((run for run in runs if (run["seed"], run["batch"]) == (seed, batch)), None)
                if run is None:
                    run = {"seed": seed, "batch": batch, "train": len(sides.train), "curves": {}}
                    runs.append(run)
                for way, chosen in settings.items():
                    due, at = [share * args.seconds for share in args.points], set[int]()
                    if way == STEPS:
                        steps = run["curves"]["corpus"][-1]["step"]
                        due, at = [], {max(1, steps // 4), max(1, steps // 2), steps}
                    curve = trained(world, sides, way, seed, batch, chosen, args, due, at)
                    points = {point["step"]: point for point in [*run["curves"].get(way, []), *curve]}
                    run["curves"][way] = [points[step] for step in sorted(points)]
                if all(way in run["curves"] for run in runs for way in CHOSEN):
                    result["summary"] = summary(runs)
                write_json(args.out, result)
        world.db.close()
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
