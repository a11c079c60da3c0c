"""Fine-tuning an embedding model through the database, against the library's own loss with in-batch negatives.

    python benchmarks/fine_tuning.py --data DIR --pace 60 --out benchmarks/results/fine-tuning.json
    python benchmarks/fine_tuning.py --data DIR --seeds 3 --out benchmarks/results/fine-tuning.json
    python benchmarks/fine_tuning.py --data DIR --validate --ways database --set rate=2e-4 --out choice.json
    python benchmarks/fine_tuning.py --data DIR --memory --out benchmarks/results/fine-tuning-memory.json

all-MiniLM-L6-v2 learns another dictionary's definitions as queries for WordNet's glosses; a fifth of the words is held
out. `database`: `DatabaseLoss`, every stored gloss in the denominator, keys as the untrained model made them.
`in-batch`: sentence-transformers' MultipleNegativesRankingLoss over pairs of a definition and the gloss of its word
that is nearest by the untrained model; the corpus is encoded anew by the trained model before it is judged. (The
library's Cached loss has the same value and gradient and costs a second forward pass; batches that fit into memory do
without.) `in-batch, stored keys`: the same loss of the library, with the stored keys of those glosses as they are.
All: word embeddings frozen, no dropout, AdamW, a tenth of warm-up; definitions of a batch of like length, for
`in-batch` with their glosses.

The settings of each way are in CHOSEN. They were chosen by `--validate`: the held-out words are left away, a fifth of
the others is judged instead.

The budget is seconds of the process' CPU time (user + system, one thread) in training steps alone. A core whose sibling
is busy takes longer for the same, so where `--pace` has measured on a quiet machine what a step of each way costs, with
the same `--out`, runs are of as many steps as these seconds hold, however busy the machine is. Encoding the corpus anew
is not in it, but told. `some` is among `--corpus` records, the right ones of the held-out queries and others, where the
corpus must be encoded again; `all` is among every record, which for `in-batch` is done with `--whole`.
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
    """What is chosen for each way."""

    batch: int = 32
    rate: float = 1e-4
    temperature: float = 0.05
    frozen: int = 0  # layers of the model, from below, that stay as they are
    dropped: float = 0.0  # share of the training definitions, those least like any gloss of their word, left out
    blend: float = 1.0  # how far from the untrained weights to the trained ones (Wortsman et al. 2022)
    dropout: float = 0.0
    head: float = 0.0  # rate of a linear layer behind the model, the identity at first; 0: no such layer


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

        records, asked = lines("records.jsonl.gz"), lines("queries.jsonl.gz")
        places = {record["id"]: i for i, record in enumerate(records)}
        self.glosses = [record["gloss"] for record in records]
        self.queries = [line["definition"] for line in asked]
        self.right = [sorted({places[answer] for answer in line["answers"]}) for line in asked]
        self.keys = np.load(folder / "keys.npy").astype(np.float32)
        self.untrained = np.load(folder / "queries.npy").astype(np.float32)
        near = [self.keys[mine] @ one for mine, one in zip(self.right, self.untrained, strict=True)]
        self.nearest = [mine[int(scores.argmax())] for mine, scores in zip(self.right, near, strict=True)]
        self.likeness = np.array([scores.max() for scores in near])
        words = np.unique([line["word"] for line in asked], return_inverse=True)[1]
        order = np.random.default_rng(seed).permutation(words.max() + 1)
        fifth = len(order) // 5
        held, rest = (order[fifth : 2 * fifth], order[2 * fifth :]) if validate else (order[:fifth], order[fifth:])
        self.train, self.test = (np.flatnonzero(np.isin(words, part)) for part in (rest, held))
        few = {place for i in self.test for place in self.right[i]}
        others = np.random.default_rng(seed).permutation(sorted(set(range(len(records))) - few))
        self.few, self.others = np.array(sorted(few)), others
        self.db = softdb.open(None, dim=self.keys.shape[1])
        self.db.insert(range(len(self.keys)), self.keys)

    def some(self, count: int) -> np.ndarray[Any, Any]:
        """The records of a smaller corpus."""
        return np.sort(np.concatenate([self.few, self.others[: max(0, count - len(self.few))]]))

    def learnt(self, dropped: float) -> np.ndarray[Any, Any]:
        """The training definitions but for those that no gloss of their word is like."""
        least = np.quantile(self.likeness[self.train], dropped)
        return np.asarray(self.train[self.likeness[self.train] >= least])

    def judged(
        self, queries: np.ndarray[Any, Any], test: Any, keys: Any = None, places: Any = None
    ) -> dict[str, float]:
        """How soon queries find a right record among all stored ones, or among other keys."""
        right, asked = [self.right[i] for i in test], torch.from_numpy(queries)
        if keys is None:
            found = ranking(self.db, asked, right)
        else:
            with softdb.open(None, dim=keys.shape[1]) as db:
                db.insert(places, keys)
                found = ranking(db, asked, right)
        return {name: round(getattr(found, name), 4) for name in ("recall_1", "recall_10", "mrr_100")}


def new_model(settings: Settings) -> SentenceTransformer:
    """MiniLM, its word embeddings frozen."""
    model: Any = SentenceEncoder("all-MiniLM-L6-v2", device="cpu")._loaded
    model.max_seq_length = LENGTH
    still = [".embeddings.", *(f".layer.{i}." for i in range(settings.frozen))]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in still)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = settings.dropout
    if settings.head:
        head = Dense(384, 384, bias=False, activation_function=torch.nn.Identity())
        head.linear.weight.data = torch.eye(384)
        model = SentenceTransformer(modules=[*model, head, Normalize()], device="cpu")
    return model


def batches(positions: Any, lengths: Any, size: int, seed: int) -> Any:
    """Positions of definitions, of like length within a batch, for ever."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(positions)
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


def loss_of(world: World, way: str, model: SentenceTransformer, settings: Settings) -> Any:
    """A function of positions of definitions: what a step lessens."""

    def asked(batch: Any) -> Any:
        return model.preprocess([world.queries[i] for i in batch])

    if way == "database":
        every = DatabaseLoss(model, world.db, temperature=settings.temperature)
        return lambda batch: every([asked(batch)], [world.right[i] for i in batch])
    library = MultipleNegativesRankingLoss(model, scale=1 / settings.temperature)

    def pairs(batch: Any) -> Any:
        right = [world.nearest[i] for i in batch]
        if way == "in-batch":
            return library([asked(batch), model.preprocess([world.glosses[i] for i in right])], None)
        queries = model(asked(batch))["sentence_embedding"]
        return library.compute_loss_from_embeddings([queries, torch.from_numpy(world.keys[right])], None)

    return pairs


def blended(model: SentenceTransformer, before: dict[str, Any], after: dict[str, Any], part: float) -> None:
    """Give the model weights between two states."""
    model.load_state_dict({k: torch.lerp(v, after[k], part) if v.is_floating_point() else v for k, v in before.items()})


class Learner:
    """A model that is trained in one way, a step at a time."""

    def __init__(self, world: World, way: str, seed: int, settings: Settings) -> None:
        torch.manual_seed(seed)
        self.model = new_model(settings).train()
        self.loss = loss_of(world, way, self.model, settings)
        learnt = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.parameters = list(learnt.values())
        groups = [
            {"params": [one for name, one in learnt.items() if ("linear.weight" in name) == ahead], "rate": rate}
            for ahead, rate in ((False, settings.rate), (True, settings.head))
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
        lengths = self._lengths(world.queries)
        if way == "in-batch":
            lengths = lengths + self._lengths([world.glosses[i] for i in world.nearest])
        self.batches = batches(world.learnt(settings.dropped), lengths, settings.batch, seed)

    def _lengths(self, texts: list[str]) -> Any:
        return np.array([len(one) for one in self.model.tokenizer(texts, truncation=True)["input_ids"]])

    def step(self, done: float) -> tuple[float, float]:
        """One step when such a share of them is done: its loss and the CPU seconds that it took."""
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
    """CPU seconds a step of each way, a step of each in turn for so long in all."""
    learners = {way: Learner(world, way, 0, one) for way, one in settings.items()}
    for learner in learners.values():
        learner.step(0.0)
    costs: dict[str, list[float]] = {way: [] for way in learners}
    while sum(map(sum, costs.values())) < seconds:
        for way, learner in learners.items():
            costs[way].append(learner.step(0.0)[1])
    return {way: round(float(np.mean(found)), 4) for way, found in costs.items()}


def trained(
    world: World, way: str, seed: int, settings: Settings, given: argparse.Namespace, pace: float | None
) -> dict[str, Any]:
    """One run of one way, for so many CPU seconds, or as many steps as take them at this pace."""
    learner = Learner(world, way, seed, settings)
    model = learner.model
    before = {name: one.clone() for name, one in model.state_dict().items()}
    watched, curve = world.test[: given.watched], list[dict[str, Any]]()

    def note(seconds: float, step: int, losses: list[float]) -> None:
        """Among all records, by their stored keys: what costs little to know of every way."""
        found = world.judged(encoded(model, [world.queries[i] for i in watched]), watched) if len(watched) else {}
        mean = {"loss": round(float(np.mean(losses)), 4)} if losses else {}
        curve.append({"seconds": round(seconds, 1), "step": step, **mean, **found})
        print(way, seed, curve[-1], flush=True)

    note(0.0, 0, [])
    spent, step, losses = 0.0, 0, list[float]()
    while spent < given.seconds:
        value, cost = learner.step(spent / given.seconds)
        spent, step, losses = spent + (pace or cost), step + 1, [*losses, value]
        if spent >= curve[-1]["seconds"] + given.every or spent >= given.seconds:
            note(spent, step, losses)
            losses = []
    after = {name: one.clone() for name, one in model.state_dict().items()}
    result: dict[str, Any] = {"settings": asdict(settings), "curve": curve}
    for part in given.blends or [settings.blend]:
        blended(model, before, after, part)
        result[f"blend {part:g}"] = measured(world, way, model, given)
    return result


def measured(world: World, way: str, model: SentenceTransformer, given: argparse.Namespace) -> dict[str, Any]:
    """What a model finds of the held-out words, with the corpus as it was and, if it can be, encoded anew."""
    test = world.test[: given.judged]
    queries, some = encoded(model, [world.queries[i] for i in test]), world.some(given.corpus)
    result: dict[str, Any] = {"all, stored keys": world.judged(queries, test)}
    if given.corpus:
        result["some, stored keys"] = world.judged(queries, test, world.keys[some], some)
        if way == "in-batch":
            start = time.process_time()
            keys = encoded(model, [world.glosses[i] for i in some])
            result["encoding_s"] = round((time.process_time() - start) / len(some) * len(world.keys), 1)
            result["some, encoded anew"] = world.judged(queries, test, keys, some)
    if given.whole and way == "in-batch":
        keys = encoded(model, world.glosses)
        result["all, encoded anew"] = world.judged(queries, test, keys, np.arange(len(keys)))
    return result


def memory(world: World, records: int, folder: Path) -> dict[str, Any]:
    """The largest private memory of ten steps over so many records on disk."""
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


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Recall and loss against CPU seconds, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, way in enumerate(CHOSEN):
        for turn, one in enumerate(runs.get(way, {}).values()):
            look = {"color": f"C{number}", "label": None if turn else way}
            points = one["curve"]
            left.plot([p["seconds"] for p in points], [100 * p["recall_10"] for p in points], **look)
            values = [p["loss"] / points[1]["loss"] for p in points[1:]]
            right.plot([p["seconds"] for p in points[1:]], values, **look)
    left.set(xlabel="CPU seconds of training", ylabel="recall@10, held out, stored keys (%)")
    right.set(xlabel="CPU seconds of training", ylabel="training loss / its first")
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)


def table(result: dict[str, Any]) -> None:
    """Recall@10 of every run as rows of a table, in percent; the mean of the gains over the untrained model last."""
    before = result["untrained"]
    for way, runs in result["runs"].items():
        for among in ("all, stored keys", "all, encoded anew", "some, stored keys", "some, encoded anew"):
            blend = f"blend {next(iter(runs.values()))['settings']['blend']:g}"
            found = {seed: one[blend][among]["recall_10"] for seed, one in runs.items() if among in one[blend]}
            if found:
                gains = [value - before[seed][among[: among.index(",")]]["recall_10"] for seed, value in found.items()]
                values = ", ".join(f"{100 * value:.1f}" for value in found.values())
                print(f"| {way}: {among} | {values} | {100 * float(np.mean(gains)):+.1f} |", flush=True)


def main() -> None:
    """Runs that are in the result already are not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=60, help="CPU seconds between measurements.")
    parser.add_argument("--watched", type=int, default=600, help="Held-out queries of the curve.")
    parser.add_argument("--judged", type=int, help="Held-out queries of the end; all of them unless given.")
    parser.add_argument("--corpus", type=int, default=15_000, help="Records that are encoded again to judge in-batch.")
    parser.add_argument("--whole", action="store_true", help="Encode every record again to judge in-batch, too.")
    parser.add_argument("--ways", nargs="+", default=list(CHOSEN), choices=list(CHOSEN))
    parser.add_argument("--validate", action="store_true", help="Judge training words that are left out; seed 0.")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="Settings other than the chosen.")
    parser.add_argument("--pace", type=float, metavar="SECONDS", help="Measure what steps cost, for so long, instead.")
    parser.add_argument("--blends", type=float, nargs="*", help="Judge these in place of the chosen.")
    parser.add_argument("--memory", type=int, nargs="*", help="Measure memory instead, of so many records.")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.memory is not None and len(given.memory) == 1:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(memory(World(given.data, 0, False), given.memory[0], Path(folder))))
        return
    result |= provenance(["softdb", "torch", "numpy", "sentence-transformers"])
    if given.memory is not None:
        measure_memory(given, result)
        return
    result["seconds"] = given.seconds
    changed = {name: type(getattr(Settings, name))(float(number)) for name, number in (s.split("=") for s in given.set)}
    settings = {way: replace(CHOSEN[way], **changed) for way in given.ways}
    if given.pace:
        result["pace"] = paces(World(given.data, 0, True), settings, given.pace)
        print(result["pace"])
        write_json(given.out, result)
        return
    pace: dict[str, float] = result.get("pace", {})
    if given.validate:
        world = World(given.data, 0, True)
        for way in given.ways:
            result.setdefault("tried", {}).setdefault(way, []).append(
                {"seconds": given.seconds, **trained(world, way, 0, settings[way], given, pace.get(way))}
            )
            write_json(given.out, result)
            print(way, {k: v for k, v in result["tried"][way][-1].items() if k != "curve"}, flush=True)
        return
    runs: dict[str, Any] = result.setdefault("runs", {})
    before = result.setdefault("untrained", {})
    for seed in range(given.seeds):
        world = World(given.data, seed, False)
        if str(seed) not in before:
            queries, some = world.untrained[world.test], world.some(given.corpus)
            before[str(seed)] = {
                "all": world.judged(queries, world.test),
                "some": world.judged(queries, world.test, world.keys[some], some),
                "queries": len(world.test), "records": len(some),
            }  # fmt: skip
        for way in given.ways:
            if str(seed) not in runs.setdefault(way, {}):
                runs[way][str(seed)] = trained(world, way, seed, settings[way], given, pace.get(way))
                print(seed, way, {k: v for k, v in runs[way][str(seed)].items() if k != "curve"}, flush=True)
                write_json(given.out, result)
    draw(runs, given.out.with_suffix(".png"))
    table(result)


def measure_memory(given: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure each number of records in a process of its own, so that none inherits another's memory."""
    for records in given.memory or (20_000, 117_659):
        words = [sys.executable, __file__, "--data", str(given.data), "--out", str(given.out), "--memory", str(records)]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        result.setdefault("memory", []).append(json.loads(told))
        print(told, flush=True)
    write_json(given.out, result)


if __name__ == "__main__":
    main()
