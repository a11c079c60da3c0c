"""Engines without fields that `filter_peers.py` compares: they search among records whose numbers they are given.

What matches is worked out by `Filter.mask`, numpy on columns in memory: less work than reading any stored payload.
usearch is missing: its Python `search` (2.26) takes neither a predicate nor ids.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["EFS", "LIBRARIES", "Columns", "Effort", "Engine", "Filter", "Floats", "K", "Rows"]

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]  # field: (n,)
Effort = tuple[int, ...]

K = 10
EFS = tuple((round(2 ** (i / 3)),) for i in range(10, 43))  # 10 to 16,384 in steps of a quarter


@dataclass(frozen=True)
class Filter:
    """A range of one field, and perhaps one value of another."""

    ranged: str
    low: int
    high: int  # not included
    equal: dict[str, Any] = field(default_factory=dict)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:  # (n,)
        """Where it matches."""
        found = (columns[self.ranged] >= self.low) & (columns[self.ranged] < self.high)
        for name, value in self.equal.items():
            found &= columns[name] == value
        return np.asarray(found, np.bool_)

    def sql(self) -> str:
        """As a condition in SQL."""
        parts = [f"{name} = {value!r}" for name, value in self.equal.items()]
        return " AND ".join([*parts, f"{self.ranged} >= {self.low}", f"{self.ranged} < {self.high}"])


class Engine(ABC):
    """Records with payload fields, and an effort to raise. Keys are of length 1 and compared by inner product."""

    packages: ClassVar[tuple[str, ...]]
    ladders: tuple[tuple[Effort, ...], ...] = (((),),)  # each from the least effort to the greatest; the faster counts
    exact = False  # compares with every match
    database = False  # works out itself what matches, from stored fields

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.keeping = tempfile.TemporaryDirectory()
        self.folder = Path(self.keeping.name)

    @abstractmethod
    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Take the records in and index them."""

    @abstractmethod
    def prepare(self, wanted: Filter) -> Any:
        """The filter in the form that `search` takes: what is done once for each filter."""

    @abstractmethod
    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:  # (q, K), -1 = none
        """The K nearest of each query among the matches."""

    def close(self) -> None:
        """Let go of files."""
        self.keeping.cleanup()


class GivenRows(Engine):
    """An engine that knows no fields: `prepare` works out by numpy which rows match."""

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """The columns stay in memory."""
        self.columns = columns
        self.index: Any = self.indexed(keys)

    @abstractmethod
    def indexed(self, keys: Floats) -> Any:
        """An index of the keys."""


class Faiss(GivenRows):
    """FAISS with a selector; FAISS keeps pointers, so what they point to goes with it."""

    packages = ("faiss-cpu",)

    def indexed(self, keys: Floats) -> Any:
        """By each kind's own settings."""
        self.faiss: Any = import_module("faiss")
        self.faiss.omp_set_num_threads(self.threads)
        index = self.made(*keys.shape)
        index.train(keys)
        index.add(keys)
        return index

    @abstractmethod
    def made(self, n: int, dim: int) -> Any:
        """An empty index."""

    def prepare(self, wanted: Filter) -> Any:
        """A bit for each row."""
        bits = np.packbits(wanted.mask(self.columns), bitorder="little")
        return self.faiss.IDSelectorBitmap(len(bits), self.faiss.swig_ptr(bits)), bits

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Labels only."""
        return np.asarray(self.index.search(queries, K, params=self.parameters(prepared[0], effort))[1], np.int64)

    @abstractmethod
    def parameters(self, selector: Any, effort: Effort) -> Any:
        """FAISS' own."""


class FaissFlat(Faiss):
    """Exact, over the ids that match."""

    exact = True

    def made(self, n: int, dim: int) -> Any:
        """The keys."""
        return self.faiss.IndexFlatIP(dim)

    def prepare(self, wanted: Filter) -> Any:
        """An array of ids, for which FAISS reads these keys only."""
        ids = np.flatnonzero(wanted.mask(self.columns))
        return self.faiss.IDSelectorArray(len(ids), self.faiss.swig_ptr(ids)), ids

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """None but the selector."""
        return self.faiss.SearchParameters(sel=selector)


class FaissHNSW(Faiss):
    """A graph, M = 32."""

    ladders = (EFS,)

    def made(self, n: int, dim: int) -> Any:
        """By inner product."""
        index = self.faiss.IndexHNSWFlat(dim, 32, self.faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 100
        return index

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """What is kept in view."""
        return self.faiss.SearchParametersHNSW(efSearch=effort[0], sel=selector)


class FaissIVF(Faiss):
    """Lists with 4-bit codes, the best of which are compared exactly: the index that softdb is built on."""

    def made(self, n: int, dim: int) -> Any:
        """Some 4 √n lists."""
        lists = max(16, int(2 ** round(np.log2(4 * n**0.5))))
        probes = sorted({min(lists, round(2 ** (i / 3))) for i in range(60)})
        self.ladders = tuple(tuple((probe, more) for probe in probes) for more in (10, 40))
        parts = dim if dim < 256 else dim // 4
        return self.faiss.index_factory(dim, f"IVF{lists},PQ{parts}x4fs,RFlat", self.faiss.METRIC_INNER_PRODUCT)

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """Lists, and how many candidates for each of the K."""
        inner = self.faiss.SearchParametersIVF(nprobe=effort[0], sel=selector)
        return self.faiss.IndexRefineSearchParameters(k_factor=float(effort[1]), base_index_params=inner)


class Hnswlib(GivenRows):
    """A graph, M = 32, and a predicate in Python; with one it searches on one thread, which holds the lock."""

    packages, ladders = ("hnswlib",), (EFS,)

    def indexed(self, keys: Floats) -> Any:
        """All at once."""
        index = import_module("hnswlib").Index("ip", keys.shape[1])
        index.init_index(len(keys), M=32, ef_construction=100)
        index.set_num_threads(self.threads)
        index.add_items(keys)
        return index

    def prepare(self, wanted: Filter) -> Any:
        """A byte for each row, read without a line of Python."""
        return wanted.mask(self.columns).tobytes().__getitem__

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """One query that finds fewer than K fails all of a call."""
        self.index.set_ef(max(K, effort[0]))
        try:
            return np.asarray(self.index.knn_query(queries, K, num_threads=1, filter=prepared)[0], np.int64)
        except RuntimeError:
            if len(queries) == 1:
                return np.full((1, K), -1)
            return np.concatenate([self.search(one[None], prepared, effort) for one in queries])


LIBRARIES: dict[str, type[Engine]] = {
    "faiss-flat": FaissFlat,
    "faiss-hnsw": FaissHNSW,
    "faiss-ivf": FaissIVF,
    "hnswlib": Hnswlib,
}
