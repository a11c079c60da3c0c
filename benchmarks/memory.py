"""A training step of `softdb.nn.Memory` as the records grow, against what people write by hand in its place.

    python benchmarks/memory.py --n 10000,100000,1000000 --out benchmarks/results/memory.json

A step is forward, backward and the optimiser's: 256 queries, 64 records pooled for each, keys and values of width 128
trained. Peers: FAISS by hand, a gather, a softmax and SparseAdam, once with full vectors in the lists and once with
softdb's own codes and a refinement; torch's softmax over all keys, with Adam; and memorizing-transformers-pytorch's
memory, whose records get no gradient. Before a clock starts every engine's answer is checked in float64 for the records
that it found, and its recall. Rounds go over the engines in turn; a ratio is the median of the rounds' own. Memory is
the growth of private memory (RssAnon) from the bare data to the end of some steps, each engine in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import MIB, Peak, provenance, spread, write_json
from torch import Tensor
from torch.nn import functional as F

import softdb
from softdb.nn import Memory

LEARNING_RATE = 1e-3
REPORTED = "codes", "lists", "records_per_match", "fetch_k", "recall"  # of the index
PROBED = 32  # lists of FAISS that a search looks at
STEPS = 5  # that memory is measured over
LEAST = 0.9  # recall of softdb below which no time counts


class World:
    """Keys in clusters, values, and queries near keys."""

    def __init__(self, n: int, given: argparse.Namespace) -> None:
        self.n, self.dim, self.k, self.batch, self.recall = n, given.dim, given.k, given.batch, given.recall
        self.random = torch.Generator().manual_seed(0)
        centres = torch.randn(max(1, n // 100), self.dim, generator=self.random)
        self.keys = torch.randn(n, self.dim, generator=self.random)
        self.keys += centres[torch.randint(len(centres), (n,), generator=self.random)]
        self.values = torch.randn(n, self.dim, generator=self.random)

    def queries(self) -> Tensor:
        """A batch, each beside some key."""
        near = self.keys[torch.randint(self.n, (self.batch,), generator=self.random)]
        found: Tensor = (near + torch.randn(near.shape, generator=self.random)) / self.dim**0.5
        return found


class Engine(ABC):
    """A memory that is trained."""

    name: ClassVar[str]
    trains: ClassVar[str] = "queries, keys and values"

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.begin(folder)

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """Take the records in, and whatever finds them."""

    @abstractmethod
    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The output (q, v) with its graph, and the records (q, k) that it is of."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of what is trained; made once."""
        return []

    def step(self, queries: Tensor) -> None:
        """One of training."""
        if not hasattr(self, "_made"):
            self._made = self.optimizers()
        for optimizer in self._made:
            optimizer.zero_grad()
        leaf = queries.clone().requires_grad_()
        output, _ = self.ask(leaf)
        torch.autograd.backward(output.square().mean())
        for optimizer in self._made:
            optimizer.step()


class Ours(Engine):
    """softdb.nn.Memory on a database on disk, by its index."""

    name = "softdb"

    def begin(self, folder: Path) -> None:
        """A database in the folder, or the one that is there."""
        world, fresh = self.world, not folder.exists()
        self.db = softdb.open(folder, dim=world.dim, value_dim=world.dim)
        if fresh:
            for low in range(0, world.n, 1 << 16):
                part = slice(low, min(world.n, low + (1 << 16)))
                self.db.insert(range(part.start, part.stop), world.keys[part], world.values[part])
            self.db.build_index("ivf", recall=world.recall, k=world.k, queries=world.queries())
        index = self.db.stats().index
        assert index is not None
        self.index = index
        self.memory = Memory(self.db, k=world.k)

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """As its users do."""
        pooled = self.memory(queries)
        assert pooled.hits is not None
        if pooled.finder != "ivf":
            raise SystemExit(f"softdb looked by {pooled.finder!r}, not by its index; no time counts")
        return pooled.output, pooled.hits.rows

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """SparseAdam."""
        return [torch.optim.SparseAdam(list(self.memory.parameters()), lr=LEARNING_RATE)]


class ByHand(Engine):
    """Parameters, and a FAISS index of them beside."""

    def begin(self, folder: Path) -> None:
        """An index like softdb's."""
        import faiss

        self.keys = torch.nn.Parameter(self.world.keys.clone())
        self.values = torch.nn.Parameter(self.world.values.clone())
        self.faiss = faiss
        self.index = self.made(json.loads((folder / "index.json").read_text()))

    @abstractmethod
    def made(self, like: dict[str, Any]) -> Any:
        """A FAISS index of the keys, with the parameters that softdb's has."""

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Find, gather, score, weigh, pool."""
        found = torch.from_numpy(self.index.search(queries.detach().numpy(), self.world.k)[1])
        live, rows = found >= 0, found.clamp(min=0)  # -1 where the lists looked at held too few
        scores = (F.embedding(rows, self.keys, sparse=True) @ queries.unsqueeze(-1)).squeeze(-1)
        weights = scores.masked_fill(~live, -torch.inf).softmax(1)
        return (weights.unsqueeze(1) @ F.embedding(rows, self.values, sparse=True)).squeeze(1), found

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """SparseAdam."""
        return [torch.optim.SparseAdam([self.keys, self.values], lr=LEARNING_RATE)]


class Lists(ByHand):
    """IndexIVFFlat with as many lists as softdb's index."""

    name = "faiss ivf-flat"

    def made(self, like: dict[str, Any]) -> Any:
        """Full vectors in lists."""
        dim = self.world.dim
        index = self.faiss.IndexIVFFlat(
            self.faiss.IndexFlatIP(dim), dim, like["lists"], self.faiss.METRIC_INNER_PRODUCT
        )
        index.train(self.world.keys[: like["lists"] * 64].numpy())
        index.add(self.world.keys.numpy())
        index.nprobe = PROBED
        return index


class Refined(ByHand):
    """4-bit codes in as many lists, and the exact keys beside: what softdb's index is, in FAISS' own words."""

    name = "faiss refined codes"

    def made(self, like: dict[str, Any]) -> Any:
        """IndexRefineFlat over IndexIVFPQFastScan."""
        dim = self.world.dim
        inner = self.faiss.index_factory(dim, f"IVF{like['lists']},PQ{dim // 2}x4fs", self.faiss.METRIC_INNER_PRODUCT)
        inner.train(self.world.keys[: max(1 << 14, like["lists"] * 64)].numpy())
        inner.nprobe = PROBED
        index = self.faiss.IndexRefineFlat(inner)
        index.add(self.world.keys.numpy())
        index.k_factor = float(like["fetch_k"])
        return index


class Everything(Engine):
    """torch's softmax over all keys."""

    name = "torch, every key"

    def begin(self, folder: Path) -> None:
        """Dense parameters."""
        self.keys = torch.nn.Parameter(self.world.keys.clone())
        self.values = torch.nn.Parameter(self.world.values.clone())

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """softmax(QKᵀ)V."""
        everything = torch.arange(self.world.n).expand(len(queries), -1)
        return (queries @ self.keys.T).softmax(1) @ self.values, everything

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam."""
        return [torch.optim.Adam([self.keys, self.values], lr=LEARNING_RATE)]


class Memorizing(Engine):
    """The memory of memorizing-transformers-pytorch: an HNSW graph, and keys and values in a memory map."""

    name = "memorizing-transformers-pytorch"
    trains = "queries"

    def begin(self, folder: Path) -> None:
        """One index, as for a batch of one."""
        kept = import_module("memorizing_transformers_pytorch.knn_memory").KNNMemory
        world = self.world
        self.file = tempfile.NamedTemporaryFile(suffix=".memmap", dir=folder)  # noqa: SIM115 # held as long as this
        self.memory = kept(world.dim, max_memories=world.n, memmap_filename=self.file.name, multiprocessing=False)
        self.memory.add(torch.stack([world.keys, world.values], dim=1)[None])

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """As its KNNAttention does, without its projections."""
        found, live = self.memory.search(queries[None], self.world.k)
        keys, values = found[0].unbind(-2)
        scores = (keys @ queries.unsqueeze(-1)).squeeze(-1).masked_fill(~live[0], -torch.finfo(queries.dtype).max)
        rows = torch.from_numpy(self.memory.knns[0].index.search(queries.detach().numpy(), self.world.k)[1])
        return (scores.softmax(1).unsqueeze(1) @ values).squeeze(1), rows

    def step(self, queries: Tensor) -> None:
        """Forward and backward; there is nothing else to step."""
        leaf = queries.clone().requires_grad_()
        found, _ = self.memory.search(leaf[None], self.world.k)
        keys, values = found[0].unbind(-2)
        weights = (keys @ leaf.unsqueeze(-1)).squeeze(-1).softmax(1)
        (weights.unsqueeze(1) @ values).squeeze(1).square().mean().backward()


ENGINES: dict[str, type[Engine]] = {one.name: one for one in (Ours, Lists, Refined, Everything, Memorizing)}


def checked(engine: Engine) -> dict[str, float]:
    """The error of the outputs for the records that were found, and the recall; raises where an answer is wrong."""
    world = engine.world
    queries = world.queries()[:32]
    output, rows = engine.ask(queries)
    wide = queries.double()
    scores = (world.keys[rows].double() @ wide.unsqueeze(-1)).squeeze(-1)
    weights = scores.masked_fill(rows < 0, -torch.inf).softmax(1)
    expected = (weights.unsqueeze(1) @ world.values[rows].double()).squeeze(1)
    error = float((output.detach() - expected).norm(dim=1).max() / expected.norm(dim=1).max())
    truth = (queries @ world.keys.T).topk(world.k).indices
    recall = float((truth[:, :, None] == rows[:, None, :]).any(2).double().mean()) if rows.shape[1] == world.k else 1.0
    if not error <= 1e-4 or (recall < LEAST and isinstance(engine, Ours)):  # a peer's is published as it is
        raise SystemExit(f"{engine.name} is off by {error:.1e} with a recall of {recall:.2f}; no time counts")
    return {"error": error, "recall": round(recall, 4)}


def timed(engines: list[Engine], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, and softdb's over the engine's in the same round: below 1, softdb is faster."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for i in range(rounds + 2):
        for engine in engines:
            queries = engine.world.queries()
            start = time.perf_counter()
            engine.step(queries)
            if i > 1:  # the first rounds warm up
                times[engine.name].append((time.perf_counter() - start) * 1e3)
    ours = times["softdb"]
    return {
        name: {
            **{key: round(value, 2) for key, value in spread(theirs).items()},
            "softdb / this": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        }
        for name, theirs in times.items()
    }


def chosen(n: int, given: argparse.Namespace) -> list[str]:
    """The engines that can do with n records."""
    names = [Ours.name, Lists.name, Refined.name]
    if n <= given.most_dense:
        names.append(Everything.name)
    if n <= given.most_graph:
        if find_spec("memorizing_transformers_pytorch") is None:
            print("memorizing-transformers-pytorch is not installed; left out", flush=True)
        else:
            names.append(Memorizing.name)
    return names


def memory_of(name: str, n: int, folder: Path, given: argparse.Namespace) -> float:
    """MiB that an engine takes beside the bare data, in a process of its own."""
    words = [sys.executable, __file__, "--n", str(n), "--engine", name, "--folder", str(folder)]
    for word in ("dim", "k", "batch", "recall", "threads"):
        words += [f"--{word}", str(getattr(given, word))]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(found.splitlines()[-1])


def grown(given: argparse.Namespace) -> None:
    """Print the growth of private memory, in MiB: what `memory_of` asks."""
    world = World(int(given.n), given)
    with Peak() as peak:
        engine = ENGINES[given.engine](world, given.folder)
        for _ in range(STEPS):
            engine.step(world.queries())
    print(round(peak.more / MIB, 1))


def measured(n: int, given: argparse.Namespace) -> dict[str, Any]:
    """Everything about n records."""
    world = World(n, given)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "db"
        ours = Ours(world, folder)
        names = chosen(n, given)
        (folder / "index.json").write_text(json.dumps(ours.index.asdict()))
        engines = [ours, *(ENGINES[name](world, folder) for name in names[1:])]
        checks = {engine.name: checked(engine) for engine in engines}
        times = timed(engines, given.rounds)
        ours.db.close()
        engines.clear()
        memory = {name: memory_of(name, n, folder, given) for name in names}
    return {
        "index": {
            name: getattr(ours.index, name) for name in ("codes", "lists", "records_per_match", "fetch_k", "recall")
        },
        "checks": checks,
        "ms": times,
        "trains": {name: ENGINES[name].trains for name in names},
        "mib": memory,
    }


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", default="10000,100000,1000000")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--most-dense", type=int, default=100_000, help="records that torch compares all of")
    parser.add_argument("--most-graph", type=int, default=100_000, help="records that a graph is built of")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)  # one of them, for its memory
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    if given.engine:
        grown(given)
        return
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "faiss-cpu", "numpy", "memorizing-transformers-pytorch"]),
        **{name: getattr(given, name) for name in ("dim", "k", "batch", "threads")},
    }
    sizes = [int(n) for n in given.n.split(",")]
    for n in sizes:
        result[f"n = {n}"] = found = measured(n, given)
        print(f"n = {n}: {json.dumps(found, indent=1)}", flush=True)
    medians = [result[f"n = {n}"]["ms"]["softdb"]["median"] for n in sizes]
    result["growth"] = {"from": sizes[0], "to": sizes[-1], "ratio": round(medians[-1] / medians[0], 3)}
    print("growth", result["growth"])
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
