"""The peers: libraries that are not softdb's, each imported only when it is built. All of them hold the keys.

voyager, annoy and pynndescent are what `vicinity` offers beyond the others. They are called directly: going through it
would only add its own time.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Rows
from softdb.tools.bench.datasets import Dataset
from softdb.tools.bench.engines import (
    Engine,
    FaissHNSW,
    FaissRefine,
    Say,
    SoftDBAuto,
    SoftDBFlat,
    SoftDBHNSW,
    SoftDBIVF,
)

__all__ = ["ENGINES", "Annoy", "Hnswlib", "PyNNDescent", "Usearch", "Voyager"]


class Hnswlib(Engine):
    """The HNSW of its authors."""

    name = "hnswlib"
    modules = packages = ("hnswlib",)
    variants, varied = (16, 32), "M"
    effort_name, efforts = "ef", (10, 8192)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Block by block."""
        space = "l2" if self.data.metric is Metric.L2 else "ip"
        self.index: Any = import_module("hnswlib").Index(space, self.data.dim)
        self.index.init_index(self.data.n, M=self.variant, ef_construction=self.setup.construction)
        threads = self.setup.threads
        return {"adding": self._added(say, lambda low, block: self.index.add_items(block, num_threads=threads))}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Labels, which are rows: none were given, so they count from 0."""
        self.index.set_ef(max(effort, self.setup.k))
        found = self.index.knn_query(queries, self.setup.k, num_threads=self._one_or_all(queries))[0]
        return np.asarray(found, np.int64)

    def bytes(self) -> int:
        """As it would save itself."""
        return int(self.index.index_file_size())


class Usearch(Engine):
    """HNSW in usearch."""

    name = "usearch"
    modules = packages = ("usearch",)
    variants, varied = (16, 32), "connectivity"
    effort_name, efforts = "expansion", (10, 8192)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Block by block."""
        metric = "l2sq" if self.data.metric is Metric.L2 else "ip"
        module, construction = import_module("usearch.index"), self.setup.construction
        self.index: Any = module.Index(
            ndim=self.data.dim, metric=metric, dtype="f32", connectivity=self.variant, expansion_add=construction
        )

        def add(low: int, block: Floats) -> None:
            self.index.add(np.arange(low, low + len(block)), block, threads=self.setup.threads)

        return {"adding": self._added(say, add)}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Keys, which are rows."""
        self.index.expansion_search = max(effort, self.setup.k)
        found = self.index.search(queries, self.setup.k, threads=self._one_or_all(queries)).keys
        return np.asarray(found).astype(np.int64).reshape(len(queries), self.setup.k)

    def bytes(self) -> int:
        """Its own account."""
        return int(self.index.memory_usage)


class Voyager(Engine):
    """Spotify's HNSW, after hnswlib."""

    name = "voyager"
    modules = packages = ("voyager",)
    variants, varied = (16, 32), "M"
    effort_name, efforts = "ef", (10, 8192)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Block by block, with rows for ids: it keeps no order of its own."""
        module, threads = import_module("voyager"), self.setup.threads
        space = module.Space.Euclidean if self.data.metric is Metric.L2 else module.Space.InnerProduct
        self.index: Any = module.Index(
            space, self.data.dim, M=self.variant, ef_construction=self.setup.construction, max_elements=self.data.n
        )

        def add(low: int, block: Floats) -> None:
            self.index.add_items(block, ids=np.arange(low, low + len(block)), num_threads=threads)

        return {"adding": self._added(say, add)}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Ids, which are rows."""
        ef, threads = max(effort, self.setup.k), self._one_or_all(queries)
        found = self.index.query(queries, self.setup.k, num_threads=threads, query_ef=ef)[0]
        return np.asarray(found).astype(np.int64)

    def bytes(self) -> int:
        """As it would save itself."""
        return len(self.index.as_bytes())


class Annoy(Engine):
    """Random trees. It takes one query at a time; a batch is spread over threads."""

    name = "annoy"
    modules = packages = ("annoy",)
    variants, varied = (50, 100), "trees"
    effort_name, efforts = "search_k", (100, 1 << 22)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """All keys one by one, then the trees."""
        metric = "euclidean" if self.data.metric is Metric.L2 else "dot"
        self.index: Any = import_module("annoy").AnnoyIndex(self.data.dim, metric)

        def add(low: int, block: Floats) -> None:
            for row, key in enumerate(block, low):
                self.index.add_item(row, key)

        seconds = self._added(say, add)
        start = time.perf_counter()
        self.index.build(self.variant, n_jobs=self.setup.threads)
        return {"adding": seconds + time.perf_counter() - start}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Rows, filled up with -1 where it found fewer."""

        def one(query: Floats) -> list[int]:
            return list(self.index.get_nns_by_vector(query, self.setup.k, effort))

        if self._one_or_all(queries) == 1:
            answers = [one(query) for query in queries]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                answers = list(pool.map(one, queries, chunksize=64))
        found = np.full((len(queries), self.setup.k), -1, np.int64)
        for rows, answer in zip(found, answers, strict=True):
            rows[: len(answer)] = answer
        return found

    def bytes(self) -> int:
        """As it saves itself; from then on it is mapped from that file."""
        with tempfile.TemporaryDirectory(prefix="softdb-bench-") as folder:
            path = Path(folder) / "trees.ann"
            self.index.save(str(path))
            return path.stat().st_size


class PyNNDescent(Engine):
    """A graph by nearest-neighbour descent, compiled by numba when it is first used."""

    name = "pynndescent"
    modules = packages = ("pynndescent",)
    variants, varied = (15, 30), "n_neighbors"
    effort_name, efforts = "epsilon_percent", (1, 100)
    EQUAL: ClassVar[float] = 1e-3  # lengths that differ by less are the same

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        """Its inner product is for keys of length 1."""
        if data.metric is not Metric.DOT:
            return ""
        lengths = np.linalg.norm(np.asarray(data.keys[:: max(1, data.n // 1000)], np.float64), axis=1)
        return "" if np.abs(lengths - 1).max() < cls.EQUAL else "its dot product needs keys of length 1"

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """All at once; a small one before, which is not counted, compiles it."""
        say(f"{self.label}: compiling", 0, 1)
        keys = np.concatenate([block for _, block in self.data.blocks()])
        self._made(keys[:500]).query(keys[:20], self.setup.k)
        say(f"{self.label}: adding", 0, 1)
        start = time.perf_counter()
        self.index: Any = self._made(keys)
        return {"adding": time.perf_counter() - start}

    def _made(self, keys: Floats) -> Any:
        metric = "euclidean" if self.data.metric is Metric.L2 else "dot"
        index = import_module("pynndescent").NNDescent(
            keys,
            metric=metric,
            n_neighbors=self.variant,
            random_state=0,
            n_jobs=self.setup.threads,
            parallel_batch_queries=True,
        )
        index.prepare()
        return index

    def pin(self, threads: int) -> None:
        """numba's own setting, too."""
        super().pin(threads)
        numba = import_module("numba")
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def search(self, queries: Floats, effort: int) -> Rows:
        """Rows only."""
        return np.asarray(self.index.query(queries, self.setup.k, epsilon=effort / 100)[0], np.int64)

    def bytes(self) -> int:
        """As it would pickle itself."""
        sink = _Sink()
        pickle.Pickler(sink, pickle.HIGHEST_PROTOCOL).dump(self.index)
        return sink.size


class _Sink:
    """A file that only counts."""

    size = 0

    def write(self, part: bytes) -> int:
        """Count it."""
        length = memoryview(part).nbytes
        self.size += length
        return length


ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        SoftDBAuto, SoftDBIVF, SoftDBHNSW, SoftDBFlat, FaissRefine, FaissHNSW,
        Hnswlib, Usearch, Voyager, Annoy, PyNNDescent,
    )
}  # fmt: skip
