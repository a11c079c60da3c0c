"""The engines of softdb and FAISS. Each is a small class: build, search with an effort, bytes. The rest: `peers`."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Rows, faiss_module
from softdb.opening import open as open_database
from softdb.tools.bench.datasets import Dataset

__all__ = [
    "Engine",
    "FaissHNSW",
    "FaissRefine",
    "Say",
    "Setup",
    "SoftDBAuto",
    "SoftDBFlat",
    "SoftDBHNSW",
    "SoftDBIVF",
    "pin_threads",
]

Say = Callable[[str, int, int], None]  # what is being done, how much of it is done, the whole
COMMIT = 100_000  # records inserted at once
LEAST_CANDIDATES = 64  # as softdb.index.search has it


@dataclass(frozen=True)
class Setup:
    """What is the same for every engine."""

    k: int = 10
    threads: int = 2  # that build
    construction: int = 100  # records a graph looks at for each that it adds


class Engine(ABC):
    """One index over a dataset. Build it, then search it with an effort that raises recall."""

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()  # that must be installed
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions are reported
    variants: ClassVar[tuple[int, ...]] = (0,)  # each is built; the better one counts
    varied: ClassVar[str] = ""  # what differs between them
    effort_name: ClassVar[str] = ""
    efforts: ClassVar[tuple[int, int]] = (0, 0)  # least and most
    each_goal: ClassVar[bool] = False  # built anew for each recall asked for: it tunes itself
    holds_keys: ClassVar[bool] = True  # whether `bytes` has the keys in it

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0) -> None:
        self.data, self.setup, self.variant = data, setup, variant
        self.threads = setup.threads
        self.facts: dict[str, Any] = {}  # what it says of itself

    @classmethod
    def missing(cls) -> list[str]:
        """Modules that are not installed."""
        return [module for module in cls.modules if find_spec(module) is None]

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        """Why it cannot search this dataset; empty where it can."""
        return ""

    @property
    def label(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.varied}={self.variant}" if self.varied else self.name

    @abstractmethod
    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Build it; returns the seconds of each stage: choosing, training, adding, measuring."""

    @abstractmethod
    def search(
        self,
        queries: Floats,  # (q, d)
        effort: int,  # 0: as it tuned itself
    ) -> Rows:  # (q, k), -1 = none
        """The k nearest of each query."""

    @abstractmethod
    def bytes(self) -> int:
        """What the index occupies."""

    def pin(self, threads: int) -> None:
        """Use so many threads from now on."""
        self.threads = threads

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of files."""

    def _added(self, say: Say, add: Callable[[int, Floats], object]) -> float:
        """Seconds of adding the keys in blocks; bringing these into memory is not counted."""
        seconds = 0.0
        for low, block in self.data.blocks():
            start = time.perf_counter()
            add(low, block)
            seconds += time.perf_counter() - start
            say(f"{self.label}: adding", low + len(block), self.data.n)
        return seconds

    def _one_or_all(self, queries: Floats) -> int:
        """Threads for these queries: a pool only costs where there is one."""
        return self.threads if len(queries) > 1 else 1


class SoftDBAuto(Engine):
    """`build_index` and `search` of a database on disk, as a user would."""

    name = "softdb"
    kind: ClassVar[str] = "auto"
    modules: ClassVar[tuple[str, ...]] = ("faiss",)
    packages = ("softdb", "torch", "numpy", "faiss-cpu", "faiss-gpu")
    each_goal = True
    holds_keys = False

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0) -> None:
        super().__init__(data, setup, variant)
        self._folder = tempfile.TemporaryDirectory(prefix="softdb-bench-")
        self.db = open_database(Path(self._folder.name) / "db", dim=data.dim, metric=data.metric.value)
        for low in range(0, data.n, COMMIT):
            keys = np.asarray(data.keys[low : low + COMMIT], np.float32)
            self.db.insert(range(low, low + len(keys)), keys)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Choose, train, add and tune; the progress it reports tells the stages apart."""
        seconds: dict[str, float] = {}
        start, stage = time.perf_counter(), "choosing"

        def told(what: str, done: int, whole: int) -> None:
            nonlocal start, stage
            now = time.perf_counter()
            seconds[stage] = seconds.get(stage, 0.0) + now - start
            start, stage = now, what
            say(f"{self.label}: {what}", done, whole)

        k, queries = self.setup.k, self.data.half(second=False).queries
        self.facts = self.db.build_index(self.kind, recall=recall, k=k, queries=queries, progress=told).told()
        told("", 1, 1)
        return seconds

    def search(self, queries: Floats, effort: int) -> Rows:
        """With an effort of its own, or with the one given."""
        index = self.index
        if effort and index is not None:
            index.effort = min(effort, index.effort_most)
        return self.db.search(queries, k=self.setup.k).rows.numpy()

    @property
    def index(self) -> Index | None:
        """The index in use; None where search is exact."""
        return self.db.finder.index

    def bytes(self) -> int:
        """Codes and ids; the keys stay in the database's files."""
        return int(self.facts.get("bytes", 0))

    def close(self) -> None:
        """The database and its folder."""
        self.db.close()
        self._folder.cleanup()


class SoftDBIVF(SoftDBAuto):
    """The same with lists of 4-bit codes, whatever a trial prefers."""

    name, kind = "softdb-ivf", "ivf"


class SoftDBHNSW(SoftDBAuto):
    """The same with a graph over bytes."""

    name, kind = "softdb-hnsw", "hnsw"


class SoftDBFlat(SoftDBAuto):
    """No index: every key is compared."""

    name, kind = "softdb-flat", "flat"
    modules = ()
    each_goal = False


class FaissHNSW(Engine):
    """FAISS' IndexHNSWFlat."""

    name = "faiss-hnsw"
    modules = ("faiss",)
    packages = ("faiss-cpu", "faiss-gpu")
    variants, varied = (16, 32), "M"
    effort_name, efforts = "efSearch", (10, 8192)

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Block by block."""
        faiss = faiss_module()
        faiss.omp_set_num_threads(self.setup.threads)
        self.inner = faiss.IndexHNSWFlat(self.data.dim, self.variant, _measure(self.data))
        self.inner.hnsw.efConstruction = self.setup.construction
        return {"adding": self._added(say, lambda low, block: self.inner.add(block))}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Rows only."""
        parameters = faiss_module().SearchParametersHNSW(efSearch=max(effort, self.setup.k))
        return np.asarray(self.inner.search(queries, self.setup.k, params=parameters)[1], np.int64)

    def bytes(self) -> int:
        """As it would save itself."""
        return _written(self.inner)


class FaissRefine(Engine):
    """FAISS' IndexRefineFlat over softdb's own index with its own parameters: what softdb costs beyond FAISS."""

    name = "faiss-refine"
    modules = ("faiss",)
    packages = ("faiss-cpu", "faiss-gpu")
    each_goal = True
    beside: SoftDBAuto  # whose index it takes

    def build(self, recall: float, say: Say) -> dict[str, float]:
        """Only the keys; the codes are softdb's."""
        faiss = faiss_module()
        index = self.beside.index
        self.inner = self.parameters = None
        if index is None:
            self.facts = {"left_out": f"{self.beside.label} has no index here"}
            return {}
        flat = faiss.IndexFlat(self.data.dim, _measure(self.data))
        seconds = self._added(say, lambda low, block: flat.add(block))
        self.inner = faiss.IndexRefine(index.inner, flat)
        self._kept = flat, index  # FAISS holds pointers only
        k = self.setup.k
        effort = index.effort * max(1, -(-k // index.tuned_for))
        self.parameters = faiss.IndexRefineSearchParameters(
            k_factor=max(LEAST_CANDIDATES, index.fetch_k * k) / k,
            base_index_params=index.parameters(effort, None),
        )
        self.facts = {"index": self.beside.label, index.effort_name: effort, "fetch_k": index.fetch_k}
        return {"adding": seconds}

    def search(self, queries: Floats, effort: int) -> Rows:
        """Rows only."""
        assert self.inner is not None
        return np.asarray(self.inner.search(queries, self.setup.k, params=self.parameters)[1], np.int64)

    def bytes(self) -> int:
        """softdb's codes, and the keys once more."""
        return self.beside.bytes() + self.data.n * self.data.dim * 4


def _measure(data: Dataset) -> Any:
    faiss = faiss_module()
    return faiss.METRIC_L2 if data.metric is Metric.L2 else faiss.METRIC_INNER_PRODUCT


def _written(inner: Any) -> int:
    """Bytes of a FAISS index, counted as it is written to nowhere."""
    faiss, size = faiss_module(), 0

    def count(part: Any) -> None:
        nonlocal size
        size += len(part)

    faiss.write_index(inner, faiss.PyCallbackIOWriter(count))
    return size


def pin_threads(threads: int) -> None:
    """Threads of torch and, where it is there, of FAISS in this process."""
    torch.set_num_threads(threads)
    if find_spec("faiss") is not None:
        faiss_module().omp_set_num_threads(threads)
