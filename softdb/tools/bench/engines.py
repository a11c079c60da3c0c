"""The interface of an engine, and the engines of softdb; the others are in `peers`."""

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

from softdb.index.build import LEAST
from softdb.index.contract import Floats, Index, Rows, faiss_module
from softdb.opening import open as open_database
from softdb.tools.bench.datasets import Dataset

Progress = Callable[[str, int, int], None]  # the step, the amount done, the total
RECORDS_PER_COMMIT = 100_000


@dataclass(frozen=True)
class Setup:
    """Parameters that all engines get."""

    k: int = 10
    threads: int = 2  # number of threads of a build
    construction: int = 100  # efConstruction: records that a graph visits to add a record


class Engine(ABC):
    """An index over a dataset. After `build`, call `search` with an effort; more effort raises recall."""

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()  # modules that must be installed
    packages: ClassVar[tuple[str, ...]] = ()  # packages whose versions are reported
    variants: ClassVar[tuple[int, ...]] = (0,)  # values of a build parameter; the best one counts
    varied: ClassVar[str] = ""  # name of the parameter in `variants`
    effort_name: ClassVar[str] = ""
    efforts: ClassVar[tuple[int, int]] = (0, 0)  # smallest and largest effort
    each_goal: ClassVar[bool] = False  # True if the engine tunes itself, so that it is built for each recall
    number_bytes: ClassVar[int] = 4  # bytes of each number of the keys that `bytes` includes; 0: it includes no keys

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0) -> None:
        self.data, self.setup, self.variant = data, setup, variant
        self.threads = setup.threads
        self.facts: dict[str, Any] = {}  # for the report

    @classmethod
    def missing(cls) -> list[str]:
        """Return the modules that are not installed."""
        return [module for module in cls.modules if find_spec(module) is None]

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        """Return the reason why the engine cannot search the dataset; empty if it can."""
        return ""

    @property
    def label(self) -> str:
        """Name of the engine, with its variant."""
        return f"{self.name} {self.varied}={self.variant}" if self.varied else self.name

    @abstractmethod
    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        """Build the index; return the seconds of each stage: choosing, training, adding, measuring."""

    @abstractmethod
    def search(
        self,
        queries: Floats,  # (q, d)
        effort: int,  # 0: the effort that the engine chose itself
    ) -> Rows:  # (q, k), -1 = none
        """Return the k nearest rows of each query."""

    @abstractmethod
    def bytes(self) -> int:
        """Return the size of the index in bytes."""

    def pin(self, threads: int) -> None:
        """Set the number of threads for further searches."""
        self.threads = threads

    def close(self) -> None:  # noqa: B027 - most engines have nothing to close
        """Close the engine's files."""

    def added(self, progress: Progress, add: Callable[[int, Floats], object]) -> float:
        """Add the keys in blocks; return the seconds that adding took, without reading."""
        seconds = 0.0
        for low, block in self.data.blocks():
            start = time.perf_counter()
            add(low, block)
            seconds += time.perf_counter() - start
            progress(f"{self.label}: adding", low + len(block), self.data.n)
        return seconds


class _Database(Engine):
    """softdb itself: `build_index` and `search` of a database on disk."""

    name, kind = "softdb", "auto"
    modules: ClassVar[tuple[str, ...]] = ("faiss",)
    packages = ("softdb", "torch", "numpy", "faiss-cpu", "faiss-gpu")
    each_goal = True
    number_bytes = 0

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        few = cls.kind not in ("auto", "flat") and data.n < LEAST
        return f"{data.n:,} keys are too few to train it on; it needs {LEAST:,}" if few else ""

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0) -> None:
        super().__init__(data, setup, variant)
        self._folder = tempfile.TemporaryDirectory(prefix="softdb-bench-")
        self.db = open_database(Path(self._folder.name) / "db", dim=data.dim, metric=data.metric.value)
        for low in range(0, data.n, RECORDS_PER_COMMIT):
            keys = np.asarray(data.keys[low : low + RECORDS_PER_COMMIT], np.float32)
            self.db.insert(range(low, low + len(keys)), keys)

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        seconds: dict[str, float] = {}
        start, stage = time.perf_counter(), "choosing"

        def step(next_stage: str, done: int, total: int) -> None:
            nonlocal start, stage
            now = time.perf_counter()
            seconds[stage] = seconds.get(stage, 0.0) + now - start
            start, stage = now, next_stage
            progress(f"{self.label}: {stage}", done, total)

        k, queries = self.setup.k, self.data.half(second=False).queries
        self.facts = self.db.build_index(self.kind, recall=recall, k=k, queries=queries, progress=step).summary()
        step("", 1, 1)
        return seconds

    def search(self, queries: Floats, effort: int) -> Rows:
        index = self.index
        if effort and index is not None:
            index.effort = min(effort, index.effort_most)
        return self.db.search(queries, k=self.setup.k).rows.numpy()

    @property
    def index(self) -> Index | None:  # None for exact search
        return self.db.core.finder.index

    def bytes(self) -> int:
        return int(self.facts.get("bytes", 0))

    def close(self) -> None:
        self.db.close()
        self._folder.cleanup()


class _DatabaseIVF(_Database):
    name, kind = "softdb-ivf", "ivf"


class _DatabaseHNSW(_Database):
    name, kind = "softdb-hnsw", "hnsw"


class _DatabaseFlat(_Database):
    name, kind = "softdb-flat", "flat"
    modules = ()
    each_goal = False


SOFTDB: tuple[type[Engine], ...] = (_Database, _DatabaseIVF, _DatabaseHNSW, _DatabaseFlat)


def pin_threads(threads: int) -> None:
    """Set the number of threads of torch and, if it is installed, of FAISS in this process."""
    torch.set_num_threads(threads)
    if find_spec("faiss") is not None:
        faiss_module().omp_set_num_threads(threads)
