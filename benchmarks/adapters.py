"""Query adapters: a projection trained by `softdb.train.fit`, recall before and after, beside Deep Memory's figures.

    python benchmarks/adapters.py --data scifact --vectors scifact-minilm.npz --out benchmarks/results/adapters.json
    python benchmarks/adapters.py --data scifact --encoder ngrams

The folder has BEIR's form (corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv), such as SciFact's: 5,183
abstracts, and the claims that cite them, 809 to train on and 300 to test with. --vectors names a file that keeps the
vectors of the texts; encoding the abstracts by MiniLM takes some seven minutes of one core.

`fit` learns a matrix on the query from training queries alone: a fifth of them is held out, half of it to choose the
epoch. Queries of one abstract lie on one side. The test queries are measured before and after. A fifth of them has an
abstract that also answers a training query; the others are reported beside them, as `unseen`. A query is answered if
any of its right records is among the first k. A report has the settings, every seed, and the measures that fell.

PUBLISHED has Deep Lake's figures for Deep Memory on SciFact, with another encoder: a hosted service, whose split and
definition of recall are not published in full.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import provenance, write_json
from torch import Tensor

import softdb
from softdb.encoders import ngrams
from softdb.errors import BadInput, TrainingWarning
from softdb.text import SentenceEncoder
from softdb.train import apply, fit, ranking

PUBLISHED = {"recall_1": (0.442, 0.604), "recall_10": (0.673, 0.754)}  # before and after
MEASURES = ("recall_1", "recall_10", "mrr_100")
SETTINGS = {"temperature": 0.05, "lr": 1e-3, "batch_size": 32, "epochs": 40, "patience": 6}
WAYS = {"the queries": False, "the queries and the keys": True}


class World(NamedTuple):
    """Records with their vectors, and the queries of both parts with the ids of their right records."""

    ids: list[str]
    keys: Tensor  # (n, d)
    queries: dict[str, Tensor]  # train, test: (m, d)
    right: dict[str, list[list[str]]]


def lines(path: Path) -> list[dict[str, str]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def world(folder: Path, encoder: str, cache: Path | None) -> World:
    """Read a folder of BEIR's form, and encode its texts unless the cache has their vectors."""
    corpus, claims = lines(folder / "corpus.jsonl"), lines(folder / "queries.jsonl")
    if cache is not None and cache.exists():
        saved = np.load(cache)
        vectors = {name: saved[name] for name in ("keys", "queries")}
        if [len(vectors["keys"]), len(vectors["queries"])] != [len(corpus), len(claims)]:
            raise BadInput(f"{cache} has the vectors of other texts; remove it or name another file with --vectors")
    else:
        encode = ngrams(encoder, 1024) or SentenceEncoder(encoder, device="cpu")
        texts = [f"{record.get('title', '')} {record['text']}".strip() for record in corpus]
        vectors = {"keys": encode(texts), "queries": encode([claim["text"] for claim in claims])}
        if cache is not None:
            np.savez(cache, **vectors)
    places = {claim["_id"]: i for i, claim in enumerate(claims)}
    queries, right = dict[str, Tensor](), dict[str, list[list[str]]]()
    for part in ("train", "test"):
        with (folder / "qrels" / f"{part}.tsv").open(newline="", encoding="utf-8") as file:
            answers: dict[str, list[str]] = {}
            for row in csv.DictReader(file, delimiter="\t"):
                if int(row["score"]) > 0:
                    answers.setdefault(row["query-id"], []).append(row["corpus-id"])
        queries[part] = torch.from_numpy(vectors["queries"][[places[name] for name in answers]])
        right[part] = list(answers.values())
    return World([record["_id"] for record in corpus], torch.from_numpy(vectors["keys"]), queries, right)


def measured(db: softdb.SoftDB, data: World, projection: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return the measures of all test queries, and of those whose right records answer no training query."""
    trained = {name for names in data.right["train"] for name in names}
    unseen = [i for i, names in enumerate(data.right["test"]) if trained.isdisjoint(names)]
    report: dict[str, Any] = {}
    for prefix, chosen in (("", range(len(data.right["test"]))), ("unseen_", unseen)):
        right = [data.right["test"][i] for i in chosen]
        result = ranking(db, data.queries["test"][list(chosen)], right, projection)
        report |= {f"{prefix}{name}": round(getattr(result, name), 4) for name in MEASURES}
        report[f"{prefix}queries"] = result.queries
    return report


def trained(data: World, keys: bool, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with one seed; return the measures of the held-out training queries and of the test queries."""
    with softdb.open(None, dim=data.keys.shape[1]) as db:
        db.insert(data.ids, data.keys)
        before, start = measured(db, data), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)  # the report names the measures that fell
            fitted = fit(db, data.queries["train"], data.right["train"], keys=keys, seed=seed, **settings)
        seconds = time.process_time() - start
        if keys:
            apply(db, fitted.projection)
        after = measured(db, data, fitted.projection)
    held_out = {
        f"{name}_{when}": round(getattr(result, name), 4)
        for name in MEASURES
        for when, result in (("before", fitted.before), ("after", fitted.after))
    }
    fell = [name for name in before if after[name] < before[name]]
    return {
        "before": before, "after": after, "fell": fell, "held_out": held_out, "held_out_fell": fitted.fell,
        "epochs": fitted.best, "cpu_s": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Train each way with every seed, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of BEIR's form")
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2", help="ngrams, or a model of sentence-transformers")
    parser.add_argument("--vectors", type=Path, help="a .npz file that keeps the vectors of the texts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--out", type=Path, help="a JSON file")
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(args, name) for name in SETTINGS}
    data = world(args.data, args.encoder, args.vectors)
    runs: dict[str, dict[str, Any]] = {way: {} for way in args.ways}
    gains: dict[str, dict[str, float]] = {}
    for way, seeds in runs.items():
        for seed in range(args.seeds):
            seeds[str(seed)] = trained(data, WAYS[way], seed, settings)
            print(way, seed, {k: v for k, v in seeds[str(seed)].items() if k not in ("before", "after")}, flush=True)
        gains[way] = {
            name: round(float(np.mean([run["after"][name] - run["before"][name] for run in seeds.values()])), 4)
            for name in next(iter(seeds.values()))["before"]
            if not name.endswith("queries")
        }
        print(way, "before", seeds["0"]["before"], "gain", gains[way], flush=True)
    if args.out:
        facts = provenance(["softdb", "torch", "numpy", "sentence-transformers"])
        sizes = {"records": len(data.ids), "dim": data.keys.shape[1]}
        sizes |= {part: len(names) for part, names in data.right.items()}
        facts |= {"data": {"name": args.data.name, "encoder": args.encoder, **sizes}, "settings": settings}
        write_json(args.out, {**facts, "published": PUBLISHED, "gains": gains, "runs": runs})


if __name__ == "__main__":
    main()
