"""Query adapters: a projection trained by `softdb.train.fit`, recall before and after, beside Deep Memory's figures.

    python benchmarks/adapters.py --data scifact --vectors scifact-minilm.npz --lr 3e-4 --out adapters.json
    python benchmarks/adapters.py --data scifact --encoder ngrams

The folder has BEIR's form (corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv), such as SciFact's: 5,183
abstracts, and the claims that cite them, 809 to train on and 300 to test with. --vectors names a file that keeps the
vectors of the texts; encoding the abstracts by MiniLM takes some seven minutes of one core.

`fit` learns a matrix on the query from the training queries. Two thirds of the test queries have an abstract that also
answers a training query; the others are reported beside them, as `unseen`. A query is answered if any of its right
records is among the first k. `--validate` leaves the test queries out, and tests with a random fifth of the training
queries, to compare settings. A report has the settings, every seed, and the measures that fell.

PUBLISHED has Deep Lake's figures for Deep Memory on SciFact, a hosted service, with text-embedding-ada-002; its split
and its definition of recall are not known here.
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
from softdb.train import fit, ranking

PUBLISHED = {"recall_1": (0.442, 0.604), "recall_10": (0.673, 0.754)}  # before and after
MEASURES = ("recall_1", "recall_10", "mrr_100")
LABELS = {
    "recall_1": "recall@1",
    "recall_10": "recall@10",
    "mrr_100": "MRR@100",
    "unseen_recall_1": "recall@1, unseen",
    "unseen_recall_10": "recall@10, unseen",
}
SETTINGS = {"temperature": 0.05, "lr": 1e-4, "batch_size": 64, "epochs": 20}
WAYS: dict[str, dict[str, Any]] = {
    "every epoch": {"patience": None, "holdout": 0.05},
    "stopped early": {"patience": 3, "holdout": 0.2},
}


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


def adapted(data: World, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with one seed; return the measures of the test queries before and after, and those that fell."""
    with softdb.open(None, dim=data.keys.shape[1]) as db:
        db.insert(data.ids, data.keys)
        before, start = measured(db, data), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)  # the report names the measures that fell
            fitted = fit(db, data.queries["train"], data.right["train"], seed=seed, **settings)
        seconds, after = time.process_time() - start, measured(db, data, fitted.projection)
    return {
        "before": before, "after": after, "fell": [name for name in before if after[name] < before[name]],
        "held_out": {"before": fitted.before._asdict(), "after": fitted.after._asdict(), "fell": fitted.fell},
        "epochs": fitted.best, "losses": [round(epoch.loss, 4) for epoch in fitted.history], "cpu_s": round(seconds, 1),
    }  # fmt: skip


def validation(data: World, seed: int) -> World:
    """Return the training queries alone, a random fifth of them as test queries."""
    order = np.random.default_rng(seed).permutation(len(data.right["train"]))
    parts = dict(zip(("test", "train"), np.split(order, [len(order) // 5]), strict=True))
    right = {part: [data.right["train"][i] for i in chosen] for part, chosen in parts.items()}
    return data._replace(queries={part: data.queries["train"][chosen] for part, chosen in parts.items()}, right=right)


def means(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the means over the seeds: each measure before, after and its gain, with the gains' standard deviation."""
    table = {}
    for name in (prefix + measure for prefix in ("", "unseen_") for measure in MEASURES):
        before, after = (np.array([run[when][name] for run in runs]) for when in ("before", "after"))
        row = {"before": before.mean(), "after": after.mean(), "gain": (after - before).mean()}
        table[name] = {key: round(float(x), 4) for key, x in (row | {"deviation": (after - before).std()}).items()}
    return table


def markdown(table: dict[str, dict[str, float]]) -> list[str]:
    """Return the rows of a table in Markdown, in per cent, beside Deep Memory's figures."""
    rows = []
    for name, label in LABELS.items():
        pairs = [(table[name]["before"], table[name]["after"]), PUBLISHED.get(name)]
        cells = [f"{100 * p[0]:.1f} → {100 * p[1]:.1f} | {100 * (p[1] - p[0]):+.1f}" if p else "|" for p in pairs]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Train with every seed, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of BEIR's form")
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2", help="ngrams, or a model of sentence-transformers")
    parser.add_argument("--vectors", type=Path, help="a .npz file that keeps the vectors of the texts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validate", action="store_true", help="test with a fifth of the training queries")
    parser.add_argument("--out", type=Path, help="a JSON file")
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings, data = {name: getattr(args, name) for name in SETTINGS}, world(args.data, args.encoder, args.vectors)
    ways: dict[str, dict[str, Any]] = {}
    for way, stopping in WAYS.items():
        runs = {}
        for seed in range(args.seeds):
            known = validation(data, seed) if args.validate else data
            runs[str(seed)] = run = adapted(known, seed, settings | stopping)
            print(
                way, seed, {key: value for key, value in run.items() if key not in ("losses", "held_out")}, flush=True
            )
        ways[way] = {"settings": settings | stopping, "table": means(list(runs.values())), "seeds": runs}
        print("\n".join(markdown(ways[way]["table"])), flush=True)
    if args.out:
        facts = {"name": args.data.name, "encoder": args.encoder, "records": len(data.ids)}
        facts |= {part: len(names) for part, names in data.right.items()}
        packages = provenance(["softdb", "torch", "numpy", "sentence-transformers"])
        write_json(args.out, {**packages, "data": facts, "published": PUBLISHED, "ways": ways})


if __name__ == "__main__":
    main()
