"""Fine-tuning of an embedding model through the database, against sentence-transformers' loss with in-batch negatives.

    python benchmarks/fine_tuning.py --data DIR --pace 60 --out benchmarks/results/fine-tuning.json
    python benchmarks/fine_tuning.py --data DIR --seeds 3 --out benchmarks/results/fine-tuning.json
    python benchmarks/fine_tuning.py --data DIR --validate --ways database --set rate=2e-4 --out choice.json
    python benchmarks/fine_tuning.py --data DIR --memory --out benchmarks/results/fine-tuning-memory.json

all-MiniLM-L6-v2 is trained with another dictionary's definitions as queries and WordNet's glosses as records; a fifth
of the words is held out. There are three ways:

    database               DatabaseLoss, with every stored gloss in the denominator and the untrained model's keys
    in-batch               MultipleNegativesRankingLoss over pairs of a definition and the gloss of its word that is
                           nearest by the untrained model; the trained model encodes the corpus again before evaluation
    in-batch, stored keys  the same loss, with the stored keys of those glosses

(The library's Cached loss has the same value and gradient and costs a second forward pass, which batches that fit into
memory do not need.) Word embeddings are frozen, there is no dropout, AdamW warms up over a tenth of the steps, and the
definitions of a batch have similar lengths, for `in-batch` together with their glosses.

The settings of each way are in CHOSEN. `--validate` chose them: it leaves the held-out words out and evaluates on a
fifth of the others.

The budget is CPU time of training steps alone (user + system, one thread), in seconds. A busy sibling core makes a step
take longer. Therefore `--pace` measures on a quiet machine what a step of each way takes, and later runs with the same
`--out` have as many steps as fit into the budget at that pace. Encoding the corpus again does not count, but is
reported. Results named `some` are among `--corpus` records: the right ones of the held-out queries, and others. Results
named `all` are among every record; `in-batch` needs `--whole` for them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import torch
from common import Peak, provenance, write_json
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

import softdb
from softdb.integrations.sentence_transformers import DatabaseLoss
from softdb.text import SentenceEncoder
from softdb.train import ranking

LENGTH = 48  # tokens: one definition in a hundred is longer


@dataclass
class Settings:
    """Settings of one way."""

    batch: int = 32
    rate: float = 1e-4
    temperature: float = 0.05
    frozen: int = 0  # layers of the model, from the first on, that are not trained
    dropped: float = 0.0  # share of the training definitions left out: those least like any gloss of their word
    blend: float = 1.0  # weight of the trained parameters against the untrained ones (Wortsman et al. 2022)
    dropout: float = 0.0
    head: float = 0.0  # learning rate of a linear layer after the model, the identity at first; 0: no such layer


CHOSEN = {
    "database": Settings(rate=2e-4),
    "in-batch": Settings(),
    "in-batch, stored keys": Settings(batch=64),
}


class World:
    """Glosses with their stored keys, definitions with their right records, and a split by word."""

    def __init__(self, folder: Path, seed: int, validate: bool) -> None:
        def lines(name: str) -> list[dict[str, Any]]:
            with gzip.open(folder / name, "rt") as file:
                return [json.loads(line) for line in file]

        records, definitions = lines("records.jsonl.gz"), lines("queries.jsonl.gz")
        places = {record["id"]: i for i, record in enumerate(records)}
        self.glosses = [record["gloss"] for record in records]
        self.queries = [line["definition"] for line in definitions]
        self.right = [sorted({places[answer] for answer in line["answers"]}) for line in definitions]
        self.keys = np.load(folder / "keys.npy").astype(np.float32)
        self.untrained = np.load(folder / "queries.npy").astype(np.float32)
        scores = [self.keys[right] @ query for right, query in zip(self.right, self.untrained, strict=True)]
        self.nearest = [right[int(row.argmax())] for right, row in zip(self.right, scores, strict=True)]
        self.likeness = np.array([row.max() for row in scores])
        words = np.unique([line["word"] for line in definitions], return_inverse=True)[1]
        order = np.random.default_rng(seed).permutation(words.max() + 1)
        fifth = len(order) // 5
        test, train = (order[fifth : 2 * fifth], order[2 * fifth :]) if validate else (order[:fifth], order[fifth:])
        self.train, self.test = (np.flatnonzero(np.isin(words, split)) for split in (train, test))
        answers = {place for i in self.test for place in self.right[i]}
        others = np.random.default_rng(seed).permutation(sorted(set(range(len(records))) - answers))
        self.answers, self.others = np.array(sorted(answers)), others
        self.db = softdb.open(None, dim=self.keys.shape[1])
        self.db.insert(range(len(self.keys)), self.keys)

    def some(self, count: int) -> np.ndarray[Any, Any]:
        """Return the records of a smaller corpus, the answers of the held-out queries among them."""
        return np.sort(np.concatenate([self.answers, self.others[: max(0, count - len(self.answers))]]))

    def training(self, dropped: float) -> np.ndarray[Any, Any]:
        """Return the training definitions without the share that is least like any gloss of its word."""
        least = np.quantile(self.likeness[self.train], dropped)
        return np.asarray(self.train[self.likeness[self.train] >= least])

    def judged(
        self, queries: np.ndarray[Any, Any], test: Any, keys: Any = None, places: Any = None
    ) -> dict[str, float]:
        """Return recall and MRR of the queries among all stored keys, or among other keys with these ids."""
        right, vectors = [self.right[i] for i in test], torch.from_numpy(queries)
        if keys is None:
            report = ranking(self.db, vectors, right)
        else:
            with softdb.open(None, dim=keys.shape[1]) as db:
                db.insert(places, keys)
                report = ranking(db, vectors, right)
        return {name: round(getattr(report, name), 4) for name in ("recall_1", "recall_10", "mrr_100")}


def new_model(settings: Settings) -> SentenceTransformer:
    """Return MiniLM with frozen word embeddings, and the settings' dropout and head."""
    model: Any = SentenceEncoder("all-MiniLM-L6-v2", device="cpu")._loaded
    model.max_seq_length = LENGTH
    frozen = [".embeddings.", *(f".layer.{i}." for i in range(settings.frozen))]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(fragment in name for fragment in frozen)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = settings.dropout
    if settings.head:
        head = Dense(384, 384, bias=False, activation_function=torch.nn.Identity())
        head.linear.weight.data = torch.eye(384)
        model = SentenceTransformer(modules=[*model, head, Normalize()], device="cpu")
    return model


def batches(positions: Any, lengths: Any, size: int, seed: int) -> Any:
    """Yield batches of positions without end; the definitions of a batch have similar lengths."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(positions)
        blocks = [order[low : low + 512] for low in range(0, len(order), 512)]
        by_length = np.concatenate([block[np.argsort(lengths[block], kind="stable")] for block in blocks])
        cut = [by_length[low : low + size] for low in range(0, len(by_length), size)]
        yield from (cut[i] for i in random.permutation(len(cut)))


def encoded(model: SentenceTransformer, texts: list[str]) -> np.ndarray[Any, Any]:
    """Return the vectors of the texts (n, d), made in eval mode."""
    training = model.training
    vectors = model.eval().encode(texts, batch_size=128, show_progress_bar=False, normalize_embeddings=True)
    model.train(training)
    return np.asarray(vectors, np.float32)


def loss_of(world: World, way: str, model: SentenceTransformer, settings: Settings) -> Any:
    """Return the loss of a way, a function of a batch of positions of definitions."""

    def tokens(batch: Any) -> Any:
        return model.preprocess([world.queries[i] for i in batch])

    if way == "database":
        database_loss = DatabaseLoss(model, world.db, temperature=settings.temperature)
        return lambda batch: database_loss([tokens(batch)], [world.right[i] for i in batch])
    library = MultipleNegativesRankingLoss(model, scale=1 / settings.temperature)

    def pairs(batch: Any) -> Any:
        right = [world.nearest[i] for i in batch]
        if way == "in-batch":
            return library([tokens(batch), model.preprocess([world.glosses[i] for i in right])], None)
        queries = model(tokens(batch))["sentence_embedding"]
        return library.compute_loss_from_embeddings([queries, torch.from_numpy(world.keys[right])], None)

    return pairs


def blend(model: SentenceTransformer, before: dict[str, Any], after: dict[str, Any], share: float) -> None:
    """Set the parameters of the model to (1 - share) before + share after."""
    model.load_state_dict(
        {k: torch.lerp(v, after[k], share) if v.is_floating_point() else v for k, v in before.items()}
    )


class Learner:
    """A model that one way trains, a step at a time."""

    def __init__(self, world: World, way: str, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.model = new_model(settings).train()
        self.loss = loss_of(world, way, self.model, settings)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.parameters = list(trained.values())
        groups = [
            {"params": [p for name, p in trained.items() if ("linear.weight" in name) == in_head], "rate": rate}
            for in_head, rate in ((False, settings.rate), (True, settings.head))
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
        lengths = self._lengths(world.queries)
        if way == "in-batch":
            lengths = lengths + self._lengths([world.glosses[i] for i in world.nearest])
        self.batches = batches(world.training(settings.dropped), lengths, settings.batch, seed)

    def _lengths(self, texts: list[str]) -> Any:
        return np.array([len(tokens) for tokens in self.model.tokenizer(texts, truncation=True)["input_ids"]])

    def step(self, done: float) -> tuple[float, float]:
        """Take one step; `done` is the share of the budget used so far. Return its loss and its CPU seconds."""
        start = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, 10 * done + 0.05) * max(0.02, 1 - done)
        value = self.loss(next(self.batches))
        self.optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return value.item(), time.process_time() - start


def paces(world: World, settings: dict[str, Settings], seconds: float) -> dict[str, float]:
    """Return the mean CPU seconds of a step of each way, stepping in turn for `seconds` in all."""
    learners = {way: Learner(world, way, 0, chosen) for way, chosen in settings.items()}
    for learner in learners.values():
        learner.step(0.0)
    costs: dict[str, list[float]] = {way: [] for way in learners}
    while sum(map(sum, costs.values())) < seconds:
        for way, learner in learners.items():
            costs[way].append(learner.step(0.0)[1])
    return {way: round(float(np.mean(column)), 4) for way, column in costs.items()}


def trained(
    world: World, way: str, seed: int, settings: Settings, args: argparse.Namespace, pace: float | None
) -> dict[str, Any]:
    """Train one way for `--seconds` of CPU time, counted at `pace` seconds per step if it is args, and evaluate it."""
    learner = Learner(world, way, seed, settings)
    model = learner.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched, curve = world.test[: args.watched], list[dict[str, Any]]()

    def note(seconds: float, step: int, losses: list[float]) -> None:
        """Add a point to the curve, evaluated among all stored keys, which is cheap for every way."""
        judged = world.judged(encoded(model, [world.queries[i] for i in watched]), watched) if len(watched) else {}
        mean = {"loss": round(float(np.mean(losses)), 4)} if losses else {}
        curve.append({"seconds": round(seconds, 1), "step": step, **mean, **judged})
        print(way, seed, curve[-1], flush=True)

    note(0.0, 0, [])
    spent, step, losses = 0.0, 0, list[float]()
    while spent < args.seconds:
        value, cost = learner.step(spent / args.seconds)
        spent, step, losses = spent + (pace or cost), step + 1, [*losses, value]
        if spent >= curve[-1]["seconds"] + args.every or spent >= args.seconds:
            note(spent, step, losses)
            losses = []
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result: dict[str, Any] = {"settings": asdict(settings), "curve": curve}
    for share in args.blends or [settings.blend]:
        blend(model, before, after, share)
        result[f"blend {share:g}"] = measured(world, way, model, args)
    return result


def measured(world: World, way: str, model: SentenceTransformer, args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a model on the held-out words, with the stored keys and, for `in-batch`, with keys encoded again."""
    test = world.test[: args.judged]
    queries, some = encoded(model, [world.queries[i] for i in test]), world.some(args.corpus)
    result: dict[str, Any] = {"all, stored keys": world.judged(queries, test)}
    if args.corpus:
        result["some, stored keys"] = world.judged(queries, test, world.keys[some], some)
        if way == "in-batch":
            start = time.process_time()
            keys = encoded(model, [world.glosses[i] for i in some])
            result["encoding_s"] = round((time.process_time() - start) / len(some) * len(world.keys), 1)
            result["some, encoded anew"] = world.judged(queries, test, keys, some)
    if args.whole and way == "in-batch":
        keys = encoded(model, world.glosses)
        result["all, encoded anew"] = world.judged(queries, test, keys, np.arange(len(keys)))
    return result


def memory(world: World, records: int, folder: Path) -> dict[str, Any]:
    """Return the largest private memory of ten steps over `records` records on disk."""
    model, size = new_model(CHOSEN["database"]).train(), CHOSEN["database"].batch
    with softdb.open(folder / "db", dim=world.keys.shape[1]) as db:
        db.insert(range(records), world.keys[:records])
    right = [i for i in world.train if world.nearest[i] < records][: 10 * size]
    with softdb.open(folder / "db", mode="r") as db:
        loss = DatabaseLoss(model, db)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        world.keys = world.keys[:1]
        with Peak() as peak:
            for low in range(0, len(right), size):
                batch = right[low : low + size]
                texts = [world.queries[i][:80] for i in batch]
                value = loss([model.preprocess(texts)], [[world.nearest[i]] for i in batch])
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"records": records, "more_mb": round(peak.more / 1e6), "peak_mb": round(peak.bytes / 1e6)}


def table(result: dict[str, Any]) -> None:
    """Print recall@10 of every run in percent, and the mean gain over the untrained model."""
    before = result["untrained"]
    for way, runs in result["runs"].items():
        for among in ("all, stored keys", "all, encoded anew", "some, stored keys", "some, encoded anew"):
            key = f"blend {next(iter(runs.values()))['settings']['blend']:g}"
            recalls = {seed: run[key][among]["recall_10"] for seed, run in runs.items() if among in run[key]}
            if recalls:
                gains = [
                    value - before[seed][among[: among.index(",")]]["recall_10"] for seed, value in recalls.items()
                ]
                values = ", ".join(f"{100 * value:.1f}" for value in recalls.values())
                print(f"| {way}: {among} | {values} | {100 * float(np.mean(gains)):+.1f} |", flush=True)


def main() -> None:
    """Run what the result file lacks, and write it after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=60, help="CPU seconds between measurements")
    parser.add_argument("--watched", type=int, default=600, help="held-out queries of the curve")
    parser.add_argument("--judged", type=int, help="held-out queries of the final evaluation (default: all)")
    parser.add_argument("--corpus", type=int, default=15_000, help="records to encode again to evaluate in-batch")
    parser.add_argument("--whole", action="store_true", help="evaluate in-batch also on every record, encoded again")
    parser.add_argument("--ways", nargs="+", default=list(CHOSEN), choices=list(CHOSEN))
    parser.add_argument("--validate", action="store_true", help="evaluate on left-out training words; seed 0")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings to change")
    parser.add_argument("--pace", type=float, metavar="SECONDS", help="only measure the time of steps, for so long")
    parser.add_argument("--blends", type=float, nargs="*", help="blends to evaluate, in place of the chosen one")
    parser.add_argument("--memory", type=int, nargs="*", help="only measure memory, with so many records")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.memory is not None and len(args.memory) == 1:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(memory(World(args.data, 0, False), args.memory[0], Path(folder))))
        return
    result |= provenance(["softdb", "torch", "numpy", "sentence-transformers"])
    if args.memory is not None:
        measure_memory(args, result)
        return
    result["seconds"] = args.seconds
    changed = {name: type(getattr(Settings, name))(float(number)) for name, number in (s.split("=") for s in args.set)}
    settings = {way: replace(CHOSEN[way], **changed) for way in args.ways}
    if args.pace:
        result["pace"] = paces(World(args.data, 0, True), settings, args.pace)
        print(result["pace"])
        write_json(args.out, result)
        return
    pace: dict[str, float] = result.get("pace", {})
    if args.validate:
        world = World(args.data, 0, True)
        for way in args.ways:
            result.setdefault("tried", {}).setdefault(way, []).append(
                {"seconds": args.seconds, **trained(world, way, 0, settings[way], args, pace.get(way))}
            )
            write_json(args.out, result)
            print(way, {k: v for k, v in result["tried"][way][-1].items() if k != "curve"}, flush=True)
        return
    runs: dict[str, Any] = result.setdefault("runs", {})
    before = result.setdefault("untrained", {})
    for seed in range(args.seeds):
        world = World(args.data, seed, False)
        if str(seed) not in before:
            queries, some = world.untrained[world.test], world.some(args.corpus)
            before[str(seed)] = {
                "all": world.judged(queries, world.test),
                "some": world.judged(queries, world.test, world.keys[some], some),
                "queries": len(world.test), "records": len(some),
            }  # fmt: skip
        for way in args.ways:
            if str(seed) not in runs.setdefault(way, {}):
                runs[way][str(seed)] = trained(world, way, seed, settings[way], args, pace.get(way))
                print(seed, way, {k: v for k, v in runs[way][str(seed)].items() if k != "curve"}, flush=True)
                write_json(args.out, result)
    pictures.fine_tuning(result, args.out.with_suffix(".png"))
    table(result)


def measure_memory(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure each number of records in a process of its own, so that none inherits another's memory."""
    for records in args.memory or (20_000, 117_659):
        options = ["--data", str(args.data), "--out", str(args.out), "--memory", str(records)]
        completed = subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.PIPE, text=True)
        line = completed.stdout.splitlines()[-1]
        result.setdefault("memory", []).append(json.loads(line))
        print(line, flush=True)
    write_json(args.out, result)


if __name__ == "__main__":
    main()
