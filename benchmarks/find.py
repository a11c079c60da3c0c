"""Finding: recall, speed, build time and memory of softdb's indexes against hnswlib, usearch and FAISS' HNSW.

    python benchmarks/find.py --data wordnet:DIR --out benchmarks/results/find-wordnet.json
    python benchmarks/find.py --data clustered --n 1000000 --dim 128 --out benchmarks/results/find-clustered.json

Every engine raises its own effort on one half of the queries until the recall asked for is measured, and is timed on
the other half, whose recall is reported too. An engine that cannot reach it is shown with what it reached. Rounds go
over the engines in turn; peers hold the keys as float32 in memory, softdb has them in its files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MIB, command, commit, machine, spread, versions, write_json
from numpy.typing import NDArray
from serve import queries_near, world

import softdb

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
K = 10


class Engine(ABC):
    """An index over n keys by inner product, with one effort to raise."""

    name: str
    efforts: tuple[int, ...]
    build_seconds: float
    index: Any
    report: dict[str, Any] | None = None  # of an engine that tunes itself

    @abstractmethod
    def build(self, keys: Floats, recall: float, queries: Floats) -> None:
        """Build it, and tune it if it tunes itself."""

    @abstractmethod
    def search(self, queries: Floats, effort: int) -> Rows:
        """The K nearest of each query."""

    @abstractmethod
    def memory(self) -> int:
        """Bytes of the index, keys that it holds included."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of files."""


class Softdb(Engine):
    """`build_index` and `search` of a database on disk; it tunes itself."""

    efforts = (0,)

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"softdb {kind}", kind
        self.folder = tempfile.TemporaryDirectory()

    def build(self, keys: Floats, recall: float, queries: Floats) -> None:
        """Insert, which is not timed as a build, then build and tune."""
        self.db = softdb.open(Path(self.folder.name) / "db", dim=keys.shape[1])
        for low in range(0, len(keys), 100_000):
            part = keys[low : low + 100_000]
            self.db.insert(range(low, low + len(part)), part)
        start = time.perf_counter()
        self.report = self.db.build_index(self.kind, recall=recall, k=K, queries=queries)
        self.build_seconds = time.perf_counter() - start

    def search(self, queries: Floats, effort: int) -> Rows:
        """As a user would."""
        return self.db.search(queries, k=K).rows.numpy()

    def memory(self) -> int:
        """Codes and ids; the keys stay in the files."""
        return int((self.report or {}).get("bytes", 0))

    def close(self) -> None:
        """The database and its folder."""
        self.db.close()
        self.folder.cleanup()


class Hnswlib(Engine):
    """hnswlib, M = 32."""

    name, efforts = "hnswlib", (16, 32, 64, 128, 256, 512, 1024)

    def build(self, keys: Floats, recall: float, queries: Floats) -> None:
        """All at once."""
        import hnswlib

        start = time.perf_counter()
        self.index = hnswlib.Index("ip", keys.shape[1])
        self.index.init_index(len(keys), M=32, ef_construction=100)
        self.index.set_num_threads(torch.get_num_threads())
        self.index.add_items(keys)
        self.build_seconds = time.perf_counter() - start

    def search(self, queries: Floats, effort: int) -> Rows:
        """Labels only."""
        self.index.set_ef(max(effort, K))
        self.index.set_num_threads(torch.get_num_threads() if len(queries) > 1 else 1)
        return np.asarray(self.index.knn_query(queries, K)[0], np.int64)

    def memory(self) -> int:
        """As it would save itself."""
        return int(self.index.index_file_size())


class Usearch(Engine):
    """usearch, connectivity 32."""

    name, efforts = "usearch", (16, 32, 64, 128, 256, 512, 1024)

    def build(self, keys: Floats, recall: float, queries: Floats) -> None:
        """All at once."""
        from usearch.index import Index

        start = time.perf_counter()
        self.index = Index(ndim=keys.shape[1], metric="ip", dtype="f32", connectivity=32, expansion_add=100)
        self.index.add(np.arange(len(keys)), keys, threads=torch.get_num_threads())
        self.build_seconds = time.perf_counter() - start

    def search(self, queries: Floats, effort: int) -> Rows:
        """Keys only."""
        self.index.expansion_search = max(effort, K)
        threads = torch.get_num_threads() if len(queries) > 1 else 1
        return np.asarray(self.index.search(queries, K, threads=threads).keys, np.int64).reshape(len(queries), K)

    def memory(self) -> int:
        """Its own account."""
        return int(self.index.memory_usage)


class FaissHNSW(Engine):
    """FAISS IndexHNSWFlat, M = 32."""

    name, efforts = "faiss hnsw", (16, 32, 64, 128, 256, 512, 1024)

    def build(self, keys: Floats, recall: float, queries: Floats) -> None:
        """All at once."""
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        start = time.perf_counter()
        self.faiss: Any = faiss
        self.index = faiss.IndexHNSWFlat(keys.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        self.index.hnsw.efConstruction = 100
        self.index.add(keys)
        self.build_seconds = time.perf_counter() - start

    def search(self, queries: Floats, effort: int) -> Rows:
        """Labels only."""
        found = self.index.search(queries, K, params=self.faiss.SearchParametersHNSW(efSearch=max(effort, K)))[1]
        return np.asarray(found, np.int64)

    def memory(self) -> int:
        """As it would save itself."""
        return int(self.faiss.serialize_index(self.index).nbytes)


ENGINES = {
    "softdb": lambda: Softdb("auto"),
    "softdb-ivf": lambda: Softdb("ivf"),
    "hnswlib": Hnswlib,
    "usearch": Usearch,
    "faiss-hnsw": FaissHNSW,
}


def data(name: str, n: int, dim: int) -> tuple[Floats, Floats]:
    """Keys (n, d) and 2,000 queries."""
    if name.startswith("wordnet:"):
        folder = Path(name.removeprefix("wordnet:"))
        keys, queries = (np.load(folder / f"{part}.npy").astype(np.float32) for part in ("keys", "queries"))
        return keys, queries[np.random.default_rng(2).permutation(len(queries))[:2000]]
    if name == "clustered":
        keys = world(n, dim)
        return keys, queries_near(keys, 2000)
    random = np.random.default_rng(0)
    keys, queries = (random.standard_normal((count, dim), dtype=np.float32) for count in (n, 2000))
    return tuple(one / np.linalg.norm(one, axis=1, keepdims=True) for one in (keys, queries))


def nearest(keys: Floats, queries: Floats) -> Rows:
    """The true K nearest, in blocks."""
    best = torch.full((len(queries), K), -torch.inf)
    rows = torch.zeros(len(queries), K, dtype=torch.int64)
    for low in range(0, len(keys), 1 << 16):
        scores = torch.from_numpy(queries @ keys[low : low + (1 << 16)].T)
        both = torch.cat([best, scores], 1)
        places = torch.cat([rows, torch.arange(low, low + scores.shape[1]).expand(len(queries), -1)], 1)
        best, order = both.topk(K, dim=1)
        rows = places.gather(1, order)
    return rows.numpy()


def recall(found: Rows, truth: Rows) -> float:
    """Share of the true K nearest that were found."""
    return float((truth[:, :, None] == found[:, None, :]).any(2).mean())


def effort_for(engine: Engine, queries: Floats, truth: Rows, wanted: float) -> int:
    """The least effort of its own that reaches the recall; its greatest where none does."""
    for effort in engine.efforts:
        if recall(engine.search(queries, effort), truth) >= wanted:
            return effort
    return engine.efforts[-1]


def measured(engines: list[Engine], efforts: list[int], queries: Floats, rounds: int) -> list[dict[str, Any]]:
    """Batch rate and single latency of each, in turn."""
    batch: list[list[float]] = [[] for _ in engines]
    single: list[list[float]] = [[] for _ in engines]
    alone = [queries[i : i + 1] for i in range(200)]
    for turn in range(rounds + 1):
        for i, (engine, effort) in enumerate(zip(engines, efforts, strict=True)):
            start = time.perf_counter()
            engine.search(queries, effort)
            took = time.perf_counter() - start
            start = time.perf_counter()
            for one in alone:
                engine.search(one, effort)
            if turn:  # the first round warms up
                batch[i].append(len(queries) / took)
                single[i].append((time.perf_counter() - start) / len(alone) * 1e3)
    return [
        {"batch_queries_s": spread(many), "single_ms": spread(one)} for many, one in zip(batch, single, strict=True)
    ]


def main() -> None:
    """Build every engine once for each target, tune, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--recalls", default="0.95,0.98")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keys, queries = data(given.data, given.n, given.dim)
    tune, test = queries[:1000], queries[1000:]
    truths = nearest(keys, tune), nearest(keys, test)
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["softdb", "torch", "numpy", "faiss-cpu", "hnswlib", "usearch"]),
        "command": command(),
        "commit": commit(),
        "data": {"name": given.data.split(":")[0], "n": len(keys), "dim": keys.shape[1], "k": K},
        "threads": given.threads,
    }
    peers = {name: ENGINES[name]() for name in given.engines.split(",") if not name.startswith("softdb")}
    for name, engine in peers.items():
        engine.build(keys, 0, tune)
        print(f"built {name} in {engine.build_seconds:.1f} s", flush=True)
    for wanted in map(float, given.recalls.split(",")):
        engines = [ENGINES[name]() for name in given.engines.split(",") if name.startswith("softdb")]
        for engine in engines:
            engine.build(keys, wanted, tune)
        engines += list(peers.values())
        efforts = [effort_for(engine, tune, truths[0], wanted) for engine in engines]
        rows = measured(engines, efforts, test, given.rounds)
        for engine, effort, row in zip(engines, efforts, rows, strict=True):
            row.update(
                engine=engine.name,
                recall=round(recall(engine.search(test, effort), truths[1]), 4),
                effort=effort or engine.report,
                build_seconds=round(engine.build_seconds, 1),
                mib=round(engine.memory() / MIB, 1),
            )
            print(
                f"{wanted}: {engine.name:12} recall {row['recall']:.3f}  {row['batch_queries_s']['median']:8.0f}/s  "
                f"{row['single_ms']['median']:.3f} ms  build {row['build_seconds']} s  {row['mib']} MiB",
                flush=True,
            )
        result[f"recall {wanted}"] = rows
        for engine in engines[: len(engines) - len(peers)]:
            engine.close()
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
