"""The face of an engine, and the engines of softdb; `peers` has the others."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from softdb.index.contract import Floats, Index, Rows, faiss_module
from softdb.opening import open as open_database
from softdb.tools.bench.datasets import Dataset

Progress = Callable[[str, int, int], None]  # the step, the amount done, the total
COMMIT = 100_000  # records inserted at once


@dataclass(frozen=True)
class Setup:
    """Parameters that every engine shares."""

    k: int = 10
    threads: int = 2  # that build
    construction: int = 100  # records a graph looks at for each that it adds


class Engine(ABC):
    """One index over a dataset. Build it, then search it with an effort that raises recall."""

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()  # that must be installed
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions are reported
    variants: ClassVar[tuple[int, ...]] = (0,)  # each is built; the better one counts
    varied: ClassVar[str] = ""  # the parameter that differs between them
    effort_name: ClassVar[str] = ""
    efforts: ClassVar[tuple[int, int]] = (0, 0)  # least and most
    each_goal: ClassVar[bool] = False  # built anew for each recall asked for: it tunes itself
    holds_keys: ClassVar[bool] = True  # whether `bytes` includes the keys

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0, before: Sequence[Engine] = ()) -> None:
        self.data, self.setup, self.variant = data, setup, variant
        self.threads = setup.threads
        self.facts: dict[str, Any] = {}  # reported beside the numbers; "left_out" says why it cannot be measured

    @classmethod
    def missing(cls) -> list[str]:
        """Modules that are not installed."""
        return [module for module in cls.modules if find_spec(module) is None]

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        """The reason why it cannot search this dataset; empty where it can."""
        return ""

    @property
    def label(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.varied}={self.variant}" if self.varied else self.name

    @abstractmethod
    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        """Build the index; returns the seconds of each stage: choosing, training, adding, measuring."""

    @abstractmethod
    def search(
        self,
        queries: Floats,  # (q, d)
        effort: int,  # 0: as it tuned itself
    ) -> Rows:  # (q, k), -1 = none
        """The k nearest of each query."""

    @abstractmethod
    def bytes(self) -> int:
        """Size of the index."""

    def pin(self, threads: int) -> None:
        """Use so many threads from now on."""
        self.threads = threads

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close files."""

    def added(self, progress: Progress, add: Callable[[int, Floats], object]) -> float:
        """Add the keys in blocks; returns the seconds without those of bringing the blocks into memory."""
        seconds = 0.0
        for low, block in self.data.blocks():
            start = time.perf_counter()
            add(low, block)
            seconds += time.perf_counter() - start
            progress(f"{self.label}: adding", low + len(block), self.data.n)
        return seconds


class _Database(Engine):
    """`build_index` and `search` of a database on disk, as a user would."""

    name, kind = "softdb", "auto"
    modules: ClassVar[tuple[str, ...]] = ("faiss",)
    packages = ("softdb", "torch", "numpy", "faiss-cpu", "faiss-gpu")
    each_goal = True
    holds_keys = False

    def __init__(self, data: Dataset, setup: Setup, variant: int = 0, before: Sequence[Engine] = ()) -> None:
        super().__init__(data, setup, variant)
        self._folder = tempfile.TemporaryDirectory(prefix="softdb-bench-")
        self.db = open_database(Path(self._folder.name) / "db", dim=data.dim, metric=data.metric.value)
        for low in range(0, data.n, COMMIT):
            keys = np.asarray(data.keys[low : low + COMMIT], np.float32)
            self.db.insert(range(low, low + len(keys)), keys)

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        seconds: dict[str, float] = {}
        start, stage = time.perf_counter(), "choosing"

        def step(what: str, done: int, whole: int) -> None:
            nonlocal start, stage
            now = time.perf_counter()
            seconds[stage] = seconds.get(stage, 0.0) + now - start
            start, stage = now, what
            progress(f"{self.label}: {what}", done, whole)

        k, queries = self.setup.k, self.data.half(second=False).queries
        self.facts = self.db.build_index(self.kind, recall=recall, k=k, queries=queries, progress=step).told()
        step("", 1, 1)
        return seconds

    def search(self, queries: Floats, effort: int) -> Rows:
        index = self.index
        if effort and index is not None:
            index.effort = min(effort, index.effort_most)
        return self.db.search(queries, k=self.setup.k).rows.numpy()

    @property
    def index(self) -> Index | None:  # None: search is exact
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
    """Threads of torch and, where it is there, of FAISS in this process."""
    torch.set_num_threads(threads)
    if find_spec("faiss") is not None:
        faiss_module().omp_set_num_threads(threads)
