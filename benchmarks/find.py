"""Finding, by the harness of `softdb bench`, with one engine more: FAISS over softdb's own index.

python benchmarks/find.py wordnet:DIR --engines softdb,hnswlib,faiss-refine --threads 2,1 --plot FILE.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Rows, faiss_module
from softdb.tools.bench.datasets import Dataset, load
from softdb.tools.bench.engines import Engine, Progress, Setup
from softdb.tools.bench.grid import DEFAULT, Ask, run
from softdb.tools.bench.peers import ENGINES
from softdb.tools.bench.report import compared, draw, write_json

LEAST_CANDIDATES = 64  # as softdb.index.search has it


class FaissRefine(Engine):
    """FAISS' IndexRefineFlat over softdb's own index with its own parameters: the price of softdb beyond FAISS.

    Name it after the softdb whose index it takes.
    """

    name = "faiss-refine"
    modules = ("faiss",)
    packages = ("faiss-cpu", "faiss-gpu")
    each_goal = True

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0, before: Sequence[Engine] = ()) -> None:
        super().__init__(data, setup, variant)
        ours: list[Any] = [engine for engine in before if engine.name.startswith("softdb")]
        self.beside: Any = next((engine for engine in ours if engine.name == "softdb-ivf"), ours[0] if ours else None)

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        """Only the keys; the codes are softdb's."""
        index = None if self.beside is None else self.beside.index
        if index is None:
            self.facts = {"left_out": "there is no index of softdb before it to take over"}
            return {}
        faiss, k = faiss_module(), self.setup.k
        by_l2 = self.data.metric is Metric.L2
        flat = faiss.IndexFlat(self.data.dim, faiss.METRIC_L2 if by_l2 else faiss.METRIC_INNER_PRODUCT)
        seconds = self.added(progress, lambda low, block: flat.add(block))
        self.inner: Any = faiss.IndexRefine(index.inner, flat)
        self._kept = flat, index  # FAISS holds pointers only
        effort = index.effort * max(1, -(-k // index.tuned_for))
        self.parameters: Any = faiss.IndexRefineSearchParameters(
            k_factor=max(LEAST_CANDIDATES, index.fetch_k * k) / k,
            base_index_params=index.parameters(effort, None),
        )
        self.facts = {"index": self.beside.label, index.effort_name: effort, "fetch_k": index.fetch_k}
        return {"adding": seconds}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Rows only; the effort is softdb's."""
        return np.asarray(self.inner.search(queries, self.setup.k, params=self.parameters)[1], np.int64)

    def bytes(self) -> int:
        """softdb's codes, and the keys once more."""
        return int(self.beside.bytes()) + self.data.n * self.data.dim * 4


def over_faiss(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What softdb costs beyond FAISS with the same index, at each goal: a share in batches, milliseconds alone."""
    found = []
    for row in (row for row in rows if row["engine"] == FaissRefine.name):
        place = {"goal": row["goal"], "threads": row["threads"], "label": row["facts"]["index"]}
        ours = next(one for one in rows if place.items() <= one.items())
        batch = row["batch_queries_s"]["median"] / ours["batch_queries_s"]["median"] - 1
        single = ours["single_ms"]["median"] - row["single_ms"]["median"]
        found.append({**place, "batch_cost": round(batch, 3), "single_cost_ms": round(single, 4)})
    return found


def measured(data: Dataset, ask: Ask) -> dict[str, Any]:
    """The report of `softdb bench`, with the cost over FAISS beside it."""
    result = run(data, ask, print)
    peers = [row for row in result["rows"] if row["engine"] != FaissRefine.name]
    return {**result, "compared": compared(peers), "over_faiss": over_faiss(result["rows"])}


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--engines", default=",".join((*DEFAULT, FaissRefine.name)))
    parser.add_argument("--recalls", default="0.95,0.98")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    result = measured(
        load(args.dataset),
        Ask(
            tuple(args.engines.split(",")), tuple(map(float, args.recalls.split(","))),
            threads=tuple(map(int, args.threads.split(","))), rounds=args.rounds,
            known={**ENGINES, FaissRefine.name: FaissRefine},
        ),
    )  # fmt: skip
    for row in result["rows"]:
        batch, single = row["batch_queries_s"]["median"], row["single_ms"]["median"]
        print(f"{row['label']:20} {row['goal']} recall {row['recall']:.3f} {batch:10,.0f} queries/s {single:.3f} ms")
    print(*result["compared"], *result["over_faiss"], sep="\n")
    if args.out:
        write_json(args.out, result)
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
