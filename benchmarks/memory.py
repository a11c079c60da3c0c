"""Time and memory of a training step of `softdb.nn.Memory` by the number of records, against hand-written peers.

    python benchmarks/memory.py --n 10000,100000,1000000 --out benchmarks/results/memory.json

A step is a forward pass, a backward pass and the optimiser's step, with 256 new queries, 64 pooled records for each,
and trained keys and values of width 128. The peers are FAISS with a gather, a softmax and SparseAdam, once with full
vectors in the lists and once with 4-bit codes and refinement; torch's softmax over all keys, with Adam; and the memory
of memorizing-transformers-pytorch, whose records get no gradient. Before a clock starts, every output is checked in
float64 for the records that the engine found, and its recall is measured. Rounds call the engines in turn, and a ratio
is the median of the ratios of the rounds. Memory is the growth of private memory (RssAnon) from the bare data to the
end of some steps, with each engine in a process of its own.
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
REPORTED = "codes", "lists", "records_per_match", "fetch_k", "recall"  # facts of the index in the result
PROBED = 32  # nprobe of FAISS
STEPS = 5  # steps over which memory is measured
LEAST_RECALL = 0.9  # softdb's recall, below which the benchmark stops


class World:
    """Keys in clusters, values, and queries near keys."""

    def __init__(self, n: int, args: argparse.Namespace) -> None:
        self.n, self.dim, self.k, self.batch, self.recall = n, args.dim, args.k, args.batch, args.recall
        self.random = torch.Generator().manual_seed(0)
        centres = torch.randn(max(1, n // 100), self.dim, generator=self.random)
        self.keys = torch.randn(n, self.dim, generator=self.random)
        self.keys += centres[torch.randint(len(centres), (n,), generator=self.random)]
        self.values = torch.randn(n, self.dim, generator=self.random)

    def queries(self) -> Tensor:
        """Draw a new batch of queries (q, d), each near a key."""
        near = self.keys[torch.randint(self.n, (self.batch,), generator=self.random)]
        queries: Tensor = (near + torch.randn(near.shape, generator=self.random)) / self.dim**0.5
        return queries


class Engine(ABC):
    """A trained memory."""

    name: ClassVar[str]
    trains: ClassVar[str] = "queries, keys and values"

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.begin(folder)

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """Insert the records and build the index."""

    @abstractmethod
    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (q, v) with its graph, and the pooled rows (q, k)."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimisers of the trained parameters; called once."""
        return []

    def step(self, queries: Tensor) -> None:
        """Take one training step."""
        if not hasattr(self, "_optimizers"):
            self._optimizers = self.optimizers()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        leaf = queries.clone().requires_grad_()
        output, _ = self.ask(leaf)
        torch.autograd.backward(output.square().mean())
        for optimizer in self._optimizers:
            optimizer.step()


class SoftDBMemory(Engine):
    """softdb.nn.Memory on a database on disk with an index."""

    name = "softdb"

    def begin(self, folder: Path) -> None:
        """Open the database in the folder, and fill and index it if it is new."""
        world, fresh = self.world, not folder.exists()
        self.db = softdb.open(folder, dim=world.dim, value_dim=world.dim)
        if fresh:
            for low in range(0, world.n, 1 << 16):
                block = slice(low, min(world.n, low + (1 << 16)))
                self.db.insert(range(block.start, block.stop), world.keys[block], world.values[block])
            self.db.build_index("ivf", recall=world.recall, k=world.k, queries=world.queries())
        index = self.db.stats().index
        assert index is not None
        self.index = index
        self.memory = Memory(self.db, k=world.k)

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Pool by the memory; raise SystemExit if it did not search by its index."""
        pooled = self.memory(queries)
        assert pooled.hits is not None
        if pooled.finder != "ivf":
            raise SystemExit(f"softdb searched by {pooled.finder!r}; expected its index 'ivf'")
        return pooled.output, pooled.hits.rows

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return SparseAdam."""
        return [torch.optim.SparseAdam(list(self.memory.parameters()), lr=LEARNING_RATE)]


class ByHand(Engine):
    """Keys and values as parameters, and a FAISS index of the keys."""

    def begin(self, folder: Path) -> None:
        """Build an index with the settings of softdb's, which the folder holds."""
        import faiss

        self.keys = torch.nn.Parameter(self.world.keys.clone())
        self.values = torch.nn.Parameter(self.world.values.clone())
        self.faiss = faiss
        self.index = self.new_index(json.loads((folder / "index.json").read_text()))

    @abstractmethod
    def new_index(self, like: dict[str, Any]) -> Any:
        """Return a FAISS index of the keys with the settings of softdb's index."""

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Find, gather, score, weigh and pool."""
        labels = torch.from_numpy(self.index.search(queries.detach().numpy(), self.world.k)[1])
        live, rows = labels >= 0, labels.clamp(min=0)  # -1 where the probed lists held too few
        scores = (F.embedding(rows, self.keys, sparse=True) @ queries.unsqueeze(-1)).squeeze(-1)
        weights = scores.masked_fill(~live, -torch.inf).softmax(1)
        return (weights.unsqueeze(1) @ F.embedding(rows, self.values, sparse=True)).squeeze(1), labels

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return SparseAdam."""
        return [torch.optim.SparseAdam([self.keys, self.values], lr=LEARNING_RATE)]


class Lists(ByHand):
    """IndexIVFFlat with as many lists as softdb's index."""

    name = "faiss ivf-flat"

    def new_index(self, like: dict[str, Any]) -> Any:
        """Return lists of full vectors."""
        dim = self.world.dim
        index = self.faiss.IndexIVFFlat(
            self.faiss.IndexFlatIP(dim), dim, like["lists"], self.faiss.METRIC_INNER_PRODUCT
        )
        index.train(self.world.keys[: like["lists"] * 64].numpy())
        index.add(self.world.keys.numpy())
        index.nprobe = PROBED
        return index


class Refined(ByHand):
    """4-bit codes in as many lists as softdb's index, refined by the exact keys."""

    name = "faiss refined codes"

    def new_index(self, like: dict[str, Any]) -> Any:
        """Return an IndexRefineFlat over IndexIVFPQFastScan."""
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
        """Make dense parameters."""
        self.keys = torch.nn.Parameter(self.world.keys.clone())
        self.values = torch.nn.Parameter(self.world.values.clone())

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return softmax(QKᵀ)V and all rows."""
        rows = torch.arange(self.world.n).expand(len(queries), -1)
        return (queries @ self.keys.T).softmax(1) @ self.values, rows

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return Adam."""
        return [torch.optim.Adam([self.keys, self.values], lr=LEARNING_RATE)]


class Memorizing(Engine):
    """The memory of memorizing-transformers-pytorch: an HNSW graph, and keys and values in a memory map."""

    name = "memorizing-transformers-pytorch"
    trains = "queries"

    def begin(self, folder: Path) -> None:
        """Fill one memory, as for a batch of one."""
        kind = import_module("memorizing_transformers_pytorch.knn_memory").KNNMemory
        world = self.world
        self.file = tempfile.NamedTemporaryFile(suffix=".memmap", dir=folder)  # noqa: SIM115 # open while this object is
        self.memory = kind(world.dim, max_memories=world.n, memmap_filename=self.file.name, multiprocessing=False)
        self.memory.add(torch.stack([world.keys, world.values], dim=1)[None])

    def ask(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Pool as KNNAttention does, without its projections."""
        records, live = self.memory.search(queries[None], self.world.k)
        keys, values = records[0].unbind(-2)
        scores = (keys @ queries.unsqueeze(-1)).squeeze(-1).masked_fill(~live[0], -torch.finfo(queries.dtype).max)
        rows = torch.from_numpy(self.memory.knns[0].index.search(queries.detach().numpy(), self.world.k)[1])
        return (scores.softmax(1).unsqueeze(1) @ values).squeeze(1), rows

    def step(self, queries: Tensor) -> None:
        """Run forward and backward; no parameter is trained."""
        leaf = queries.clone().requires_grad_()
        records, _ = self.memory.search(leaf[None], self.world.k)
        keys, values = records[0].unbind(-2)
        weights = (keys @ leaf.unsqueeze(-1)).squeeze(-1).softmax(1)
        (weights.unsqueeze(1) @ values).squeeze(1).square().mean().backward()


ENGINES: dict[str, type[Engine]] = {kind.name: kind for kind in (SoftDBMemory, Lists, Refined, Everything, Memorizing)}


def checked(engine: Engine) -> dict[str, float]:
    """Return the largest error of the outputs for the records found, and the recall; raise SystemExit if one is wrong.

    The recall of a peer may be low: it is published.
    """
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
    if not error <= 1e-4:
        raise SystemExit(f"{engine.name} is off by {error:.1e}; expected at most 1e-4")
    if recall < LEAST_RECALL and isinstance(engine, SoftDBMemory):
        raise SystemExit(f"{engine.name} has recall {recall:.2f}; expected at least {LEAST_RECALL}")
    return {"error": error, "recall": round(recall, 4)}


def timed(engines: list[Engine], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a step, and softdb's time over the engine's in the same round."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for i in range(rounds + 2):
        for engine in engines:
            queries = engine.world.queries()
            start = time.perf_counter()
            engine.step(queries)
            if i > 1:  # the first rounds warm up
                times[engine.name].append((time.perf_counter() - start) * 1e3)
    softdb_times = times["softdb"]
    return {
        name: {
            **{key: round(value, 2) for key, value in spread(column).items()},
            "softdb / this": round(statistics.median(a / b for a, b in zip(softdb_times, column, strict=True)), 3),
        }
        for name, column in times.items()
    }


def chosen(n: int, args: argparse.Namespace) -> list[str]:
    """Return the names of the engines that can handle n records."""
    names = [SoftDBMemory.name, Lists.name, Refined.name]
    if n <= args.most_dense:
        names.append(Everything.name)
    if n <= args.most_graph:
        if find_spec("memorizing_transformers_pytorch") is None:
            print("memorizing-transformers-pytorch is not installed; left out", flush=True)
        else:
            names.append(Memorizing.name)
    return names


def memory_of(name: str, n: int, folder: Path, args: argparse.Namespace) -> float:
    """Return the MiB that an engine takes beside the bare data, measured in a process of its own."""
    command = [sys.executable, __file__, "--n", str(n), "--engine", name, "--folder", str(folder)]
    for option in ("dim", "k", "batch", "recall", "threads"):
        command += [f"--{option}", str(getattr(args, option))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output.splitlines()[-1])


def grown(args: argparse.Namespace) -> None:
    """Print the growth of private memory in MiB, for `memory_of`."""
    world = World(int(args.n), args)
    with Peak() as peak:
        engine = ENGINES[args.engine](world, args.folder)
        for _ in range(STEPS):
            engine.step(world.queries())
    print(round(peak.more / MIB, 1))


def measured(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every engine with n records."""
    world = World(n, args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "db"
        memory_engine = SoftDBMemory(world, folder)
        names = chosen(n, args)
        (folder / "index.json").write_text(json.dumps(memory_engine.index.asdict()))
        engines = [memory_engine, *(ENGINES[name](world, folder) for name in names[1:])]
        checks = {engine.name: checked(engine) for engine in engines}
        times = timed(engines, args.rounds)
        memory_engine.db.close()
        engines.clear()
        memory = {name: memory_of(name, n, folder, args) for name in names}
    return {
        "index": {name: getattr(memory_engine.index, name) for name in REPORTED},
        "checks": checks,
        "ms": times,
        "trains": {name: ENGINES[name].trains for name in names},
        "mib": memory,
    }


def main() -> None:
    """Measure every number of records and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", default="10000,100000,1000000")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--most-dense", type=int, default=100_000, help="largest number of records for torch's softmax")
    parser.add_argument("--most-graph", type=int, default=100_000, help="largest number of records for a graph")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)  # measure the memory of one
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.engine:
        grown(args)
        return
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "faiss-cpu", "numpy", "memorizing-transformers-pytorch"]),
        **{name: getattr(args, name) for name in ("dim", "k", "batch", "threads")},
    }
    sizes = [int(n) for n in args.n.split(",")]
    for n in sizes:
        result[f"n = {n}"] = measured(n, args)
        print(f"n = {n}: {json.dumps(result[f'n = {n}'], indent=1)}", flush=True)
    medians = [result[f"n = {n}"]["ms"]["softdb"]["median"] for n in sizes]
    result["growth"] = {"from": sizes[0], "to": sizes[-1], "ratio": round(medians[-1] / medians[0], 3)}
    print("growth", result["growth"])
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
