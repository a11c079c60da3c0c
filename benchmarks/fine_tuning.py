"""Fine-tuning an embedding model through the database, against the library's own loss with in-batch negatives.

    python benchmarks/fine_tuning.py --data DIR --seeds 3 --seconds 240 --out benchmarks/results/fine-tuning.json
    python benchmarks/fine_tuning.py --data DIR --memory --out benchmarks/results/fine-tuning-memory.json

all-MiniLM-L6-v2 learns another dictionary's definitions as queries for WordNet's glosses; a fifth of the words is held
out. `database`: `DatabaseLoss`, every stored gloss in the denominator, keys as the untrained model made them.
`in-batch`: sentence-transformers' CachedMultipleNegativesRankingLoss over pairs of a definition and the gloss of its
word that is nearest by the untrained model; the corpus is encoded anew by the trained model before it is judged.
Both: word embeddings frozen, no dropout, AdamW, the same rate, definitions of a batch of like length.

The budget is seconds of the process' CPU time (user + system, one thread) in training steps alone: so other work on the
machine does not count. Encoding the corpus anew is not in it, but told. `corpus` records at most are judged among, the
right ones of the held-out queries among them, where the corpus must be encoded again; `all` is among every record.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Peak, command, commit, machine, versions, write_json
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

import softdb
from softdb.integrations.sentence_transformers import DatabaseLoss
from softdb.text import SentenceEncoder
from softdb.train import ranking

TEMPERATURE, RATE, LENGTH = 0.05, 1e-4, 40
BATCH = {"database": 32, "in-batch": 64}  # the first chosen among several; in-batch negatives want more


class World:
    """Glosses with their stored keys, definitions with their right records, and a split by word."""

    def __init__(self, folder: Path, seed: int) -> None:
        def lines(name: str) -> list[dict[str, Any]]:
            with gzip.open(folder / name, "rt") as file:
                return [json.loads(line) for line in file]

        records, asked = lines("records.jsonl.gz"), lines("queries.jsonl.gz")
        places = {record["id"]: i for i, record in enumerate(records)}
        self.glosses = [record["gloss"] for record in records]
        self.queries = [line["definition"] for line in asked]
        self.right = [sorted({places[answer] for answer in line["answers"]}) for line in asked]
        self.keys = np.load(folder / "keys.npy").astype(np.float32)
        untrained = np.load(folder / "queries.npy").astype(np.float32)
        near = zip(self.right, untrained, strict=True)
        self.nearest = [mine[int((self.keys[mine] @ one).argmax())] for mine, one in near]
        words = np.unique([line["word"] for line in asked], return_inverse=True)[1]
        order = np.random.default_rng(seed).permutation(words.max() + 1)
        held = np.isin(words, order[: len(order) // 5])
        self.train, self.test = np.flatnonzero(~held), np.flatnonzero(held)
        few = {place for i in self.test for place in self.right[i]}
        others = np.random.default_rng(seed).permutation(sorted(set(range(len(records))) - few))
        self.few, self.others = np.array(sorted(few)), others
        self.untrained = untrained[self.test]

    def some(self, count: int) -> np.ndarray[Any, Any]:
        """The records of a smaller corpus."""
        return np.sort(np.concatenate([self.few, self.others[: max(0, count - len(self.few))]]))


def judged(
    world: World, queries: np.ndarray[Any, Any], keys: np.ndarray[Any, Any], places: np.ndarray[Any, Any], test: Any
) -> dict[str, float]:
    """How soon held-out queries find a right record among some."""
    with softdb.open(None, dim=keys.shape[1]) as db:
        db.insert(places, keys)
        found = ranking(db, torch.from_numpy(queries), [world.right[i] for i in test])
    return {name: round(getattr(found, name), 4) for name in ("recall_1", "recall_10", "mrr_100")}


def new_model() -> SentenceTransformer:
    """MiniLM, its word embeddings frozen, without dropout."""
    model: Any = SentenceEncoder("all-MiniLM-L6-v2", device="cpu")._loaded
    model.max_seq_length = LENGTH
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".embeddings." not in name
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def batches(world: World, lengths: Any, size: int, seed: int) -> Any:
    """Positions of definitions, of like length within a batch, for ever."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(world.train)
        parts = [order[low : low + 512] for low in range(0, len(order), 512)]
        whole = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
        cut = [whole[low : low + size] for low in range(0, len(whole), size)]
        yield from (cut[i] for i in random.permutation(len(cut)))


def encoded(model: SentenceTransformer, texts: list[str]) -> np.ndarray[Any, Any]:
    """The vectors of texts, in eval mode."""
    training = model.training
    found = model.eval().encode(texts, batch_size=128, show_progress_bar=False, normalize_embeddings=True)
    model.train(training)
    return np.asarray(found, np.float32)


def trained(world: World, way: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run of one way."""
    torch.manual_seed(seed)
    model = new_model().train()
    lengths = np.array([len(one) for one in model.tokenizer(world.queries, truncation=True)["input_ids"]])
    loss: torch.nn.Module
    if way == "database":
        db = softdb.open(None, dim=world.keys.shape[1])
        db.insert(range(len(world.keys)), world.keys)
        loss = DatabaseLoss(model, db, temperature=TEMPERATURE)
    else:
        loss = CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=BATCH[way])
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, fused=True)
    every, few = np.arange(len(world.keys)), world.test[: given.watched]

    def watched() -> dict[str, Any]:
        """Among all records, by their stored keys: what costs nothing to know of both."""
        return judged(world, encoded(model, [world.queries[i] for i in few]), world.keys, every, few)

    curve: list[dict[str, Any]] = [{"seconds": 0.0, "step": 0, **watched()}]
    spent, losses = 0.0, list[float]()
    for step, batch in enumerate(batches(world, lengths, BATCH[way], seed), start=1):
        start = time.process_time()
        for group in optimizer.param_groups:
            warm = min(1.0, spent / (0.1 * given.seconds) + 0.05)
            group["lr"] = RATE * warm * max(0.02, 1 - spent / given.seconds)
        asked = model.preprocess([world.queries[i] for i in batch])
        if way == "database":
            value = loss([asked], [world.right[i] for i in batch])
        else:
            value = loss([asked, model.preprocess([world.glosses[world.nearest[i]] for i in batch])], None)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        spent, losses = spent + time.process_time() - start, [*losses, value.item()]
        if spent >= curve[-1]["seconds"] + given.every or spent >= given.seconds:
            curve.append(
                {"seconds": round(spent, 1), "step": step, "loss": round(float(np.mean(losses)), 4), **watched()}
            )
            losses = []
            print(way, seed, curve[-1], flush=True)
        if spent >= given.seconds:
            break
    queries = encoded(model, [world.queries[i] for i in world.test])
    some = world.some(given.corpus)
    result: dict[str, Any] = {
        "all, stored keys": judged(world, queries, world.keys, every, world.test),
        "some, stored keys": judged(world, queries, world.keys[some], some, world.test),
        "curve": curve,
    }
    if way != "database":
        start = time.process_time()
        keys = encoded(model, [world.glosses[i] for i in some])
        cost = (time.process_time() - start) / len(some) * len(world.keys)
        result |= {
            "some, encoded anew": judged(world, queries, keys, some, world.test),
            "encoding_all_s": round(cost, 1),
        }
    return result


def memory(world: World, records: int, folder: Path) -> dict[str, Any]:
    """The largest private memory of ten steps over so many records on disk."""
    model = new_model().train()
    with softdb.open(folder / "db", dim=world.keys.shape[1]) as db:
        db.insert(range(records), world.keys[:records])
    right = [i for i in world.train if world.nearest[i] < records][: 10 * BATCH["database"]]
    with softdb.open(folder / "db", mode="r") as db:
        loss = DatabaseLoss(model, db)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        world.keys = world.keys[:1]
        with Peak() as peak:
            for low in range(0, len(right), BATCH["database"]):
                batch = right[low : low + BATCH["database"]]
                texts = [world.queries[i][:80] for i in batch]
                value = loss([model.preprocess(texts)], [[world.nearest[i]] for i in batch])
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"records": records, "more_mb": round(peak.more / 1e6), "peak_mb": round(peak.bytes / 1e6)}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Recall and loss against CPU seconds, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, colour in (("database", "tab:blue"), ("in-batch", "tab:orange")):
        for number, one in enumerate(runs.get(way, {}).values()):
            label = None if number else way
            points = one["curve"]
            left.plot([p["seconds"] for p in points], [100 * p["recall_10"] for p in points], color=colour, label=label)
            values = [p["loss"] / points[1]["loss"] for p in points[1:]]
            right.plot([p["seconds"] for p in points[1:]], values, color=colour, label=label)
    left.set(xlabel="CPU seconds of training", ylabel="recall@10, held out, stored keys (%)")
    right.set(xlabel="CPU seconds of training", ylabel="training loss / its first")
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs that are in the result already are not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--every", type=float, default=50, help="CPU seconds between measurements.")
    parser.add_argument("--watched", type=int, default=400, help="Held-out queries of the curve.")
    parser.add_argument("--corpus", type=int, default=15_000, help="Records that are encoded again to judge in-batch.")
    parser.add_argument("--ways", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--memory", type=int, nargs="*", help="Measure memory instead, of so many records.")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.memory is not None:
        measure_memory(given, result)
        return
    result |= {
        "machine": machine(), "versions": versions(["softdb", "torch", "numpy", "sentence-transformers"]),
        "command": command(), "commit": commit(), "seconds": given.seconds, "rate": RATE, "batch": BATCH,
    }  # fmt: skip
    runs: dict[str, Any] = result.setdefault("runs", {way: {} for way in BATCH})
    before = result.setdefault("untrained", {})
    for seed in range(given.seeds):
        world = World(given.data, seed)
        every, some = np.arange(len(world.keys)), world.some(given.corpus)
        if str(seed) not in before:
            before[str(seed)] = {
                "all": judged(world, world.untrained, world.keys, every, world.test),
                "some": judged(world, world.untrained, world.keys[some], some, world.test),
                "queries": len(world.test), "records": len(some),
            }  # fmt: skip
        for way in given.ways:
            if str(seed) not in runs[way]:
                runs[way][str(seed)] = trained(world, way, seed, given)
                print(seed, way, {k: v for k, v in runs[way][str(seed)].items() if k != "curve"}, flush=True)
                write_json(given.out, result)
    draw(runs, given.out.with_suffix(".png"))


def measure_memory(given: argparse.Namespace, result: dict[str, Any]) -> None:
    """A process for each number of records, so that none inherits another's memory."""
    if len(given.memory) == 1:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(memory(World(given.data, 0), given.memory[0], Path(folder))))
        return
    for records in given.memory or (20_000, 117_659):
        words = [sys.executable, __file__, "--data", str(given.data), "--out", str(given.out), "--memory", str(records)]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        result.setdefault("memory", []).append(json.loads(told))
        print(told, flush=True)
    write_json(given.out, result)


if __name__ == "__main__":
    main()
