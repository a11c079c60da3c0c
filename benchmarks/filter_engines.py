"""Engines without fields that `filter_peers.py` compares: they search among the row numbers that match.

`Filter.mask` finds the matching rows by numpy on columns in memory, which is less work than reading stored payloads.
usearch is missing, because its Python `search` (2.26) takes neither a predicate nor ids.
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
Columns = dict[str, NDArray[Any]]  # by field, (n,) each
Effort = tuple[int, ...]

K = 10
EFS = tuple((round(2 ** (i / 3)),) for i in range(10, 43))  # efSearch from 10 to 16,384, each 26 % above the last


@dataclass(frozen=True)
class Filter:
    """A range of one field, and optionally values of others."""

    ranged: str
    low: int
    high: int  # exclusive
    equal: dict[str, Any] = field(default_factory=dict)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:  # (n,)
        """Return True for each record that matches."""
        mask = (columns[self.ranged] >= self.low) & (columns[self.ranged] < self.high)
        for name, value in self.equal.items():
            mask &= columns[name] == value
        return np.asarray(mask, np.bool_)

    def sql(self) -> str:
        """Return the filter as an SQL condition."""
        equal = [f"{name} = {value!r}" for name, value in self.equal.items()]
        return " AND ".join([*equal, f"{self.ranged} >= {self.low}", f"{self.ranged} < {self.high}"])


class Engine(ABC):
    """A search engine with a filter and an effort. Keys have length 1 and are compared by inner product."""

    packages: ClassVar[tuple[str, ...]]
    ladders: tuple[tuple[Effort, ...], ...] = (((),),)  # efforts in ascending order; the faster ladder counts
    exact = False  # True: compares with every match
    database = False  # True: evaluates the filter itself, on stored fields

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)

    @abstractmethod
    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Insert and index the records; `queries` may tune the index."""

    @abstractmethod
    def prepare(self, wanted: Filter) -> Any:
        """Return the filter in the form that `search` takes; called once for each filter."""

    @abstractmethod
    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:  # (q, K), -1 = none
        """Return the K nearest of each query among the matches."""

    def close(self) -> None:
        """Remove the files."""
        self.temporary.cleanup()


class RowFilterEngine(Engine):
    """An engine without fields: `prepare` finds the matching rows by numpy."""

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Index the keys and keep the columns in memory."""
        self.columns = columns
        self.index: Any = self.indexed(keys)

    @abstractmethod
    def indexed(self, keys: Floats) -> Any:
        """Return an index of the keys."""


class Faiss(RowFilterEngine):
    """FAISS with a selector. A selector holds a pointer, so `prepare` returns its array as well."""

    packages = ("faiss-cpu",)

    def indexed(self, keys: Floats) -> Any:
        """Train and fill an index of the subclass."""
        self.faiss: Any = import_module("faiss")
        self.faiss.omp_set_num_threads(self.threads)
        index = self.empty_index(*keys.shape)
        index.train(keys)
        index.add(keys)
        return index

    @abstractmethod
    def empty_index(self, n: int, dim: int) -> Any:
        """Return an empty index."""

    def prepare(self, wanted: Filter) -> Any:
        """Return a selector with a bit for each row, and the bits."""
        bits = np.packbits(wanted.mask(self.columns), bitorder="little")
        return self.faiss.IDSelectorBitmap(len(bits), self.faiss.swig_ptr(bits)), bits

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search with the selector."""
        return np.asarray(self.index.search(queries, K, params=self.parameters(prepared[0], effort))[1], np.int64)

    @abstractmethod
    def parameters(self, selector: Any, effort: Effort) -> Any:
        """Return FAISS' search parameters."""


class FaissFlat(Faiss):
    """FAISS' exact search over the matching ids."""

    exact = True

    def empty_index(self, n: int, dim: int) -> Any:
        """Return a flat index."""
        return self.faiss.IndexFlatIP(dim)

    def prepare(self, wanted: Filter) -> Any:
        """Return a selector of an array of ids, with which FAISS reads these keys alone, and the array."""
        ids = np.flatnonzero(wanted.mask(self.columns))
        return self.faiss.IDSelectorArray(len(ids), self.faiss.swig_ptr(ids)), ids

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """Return parameters with the selector alone."""
        return self.faiss.SearchParameters(sel=selector)


class FaissHNSW(Faiss):
    """FAISS' HNSW graph with M = 32."""

    ladders = (EFS,)

    def empty_index(self, n: int, dim: int) -> Any:
        """Return an empty graph for inner products."""
        index = self.faiss.IndexHNSWFlat(dim, 32, self.faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 100
        return index

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """Return parameters with efSearch and the selector."""
        return self.faiss.SearchParametersHNSW(efSearch=effort[0], sel=selector)


class FaissIVF(Faiss):
    """FAISS' IVF lists with 4-bit codes; the best candidates are compared exactly."""

    def empty_index(self, n: int, dim: int) -> Any:
        """Return an empty index with about 4 √n lists, and set the efforts to try."""
        lists = max(16, int(2 ** round(np.log2(4 * n**0.5))))
        probes = sorted({min(lists, round(2 ** (i / 3))) for i in range(60)})
        self.ladders = tuple(tuple((probe, factor) for probe in probes) for factor in (10, 40))
        codes = dim if dim < 256 else dim // 4
        return self.faiss.index_factory(dim, f"IVF{lists},PQ{codes}x4fs,RFlat", self.faiss.METRIC_INNER_PRODUCT)

    def parameters(self, selector: Any, effort: Effort) -> Any:
        """Return parameters with the number of lists, and of candidates for each of the K hits."""
        inner = self.faiss.SearchParametersIVF(nprobe=effort[0], sel=selector)
        return self.faiss.IndexRefineSearchParameters(k_factor=float(effort[1]), base_index_params=inner)


class Hnswlib(RowFilterEngine):
    """hnswlib's graph with M = 32; its predicate is a Python function, so that it searches on one thread."""

    packages, ladders = ("hnswlib",), (EFS,)

    def indexed(self, keys: Floats) -> Any:
        """Return a graph of the keys."""
        index = import_module("hnswlib").Index("ip", keys.shape[1])
        index.init_index(len(keys), M=32, ef_construction=100)
        index.set_num_threads(self.threads)
        index.add_items(keys)
        return index

    def prepare(self, wanted: Filter) -> Any:
        """Return the predicate: a lookup in an array of bytes, which runs no Python code."""
        return wanted.mask(self.columns).tobytes().__getitem__

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search; if a query finds fewer than K, hnswlib fails the whole call, and each query is searched alone."""
        self.index.set_ef(max(K, effort[0]))
        try:
            return np.asarray(self.index.knn_query(queries, K, num_threads=1, filter=prepared)[0], np.int64)
        except RuntimeError:
            if len(queries) == 1:
                return np.full((1, K), -1)
            return np.concatenate([self.search(query[None], prepared, effort) for query in queries])


LIBRARIES: dict[str, type[Engine]] = {
    "faiss-flat": FaissFlat,
    "faiss-hnsw": FaissHNSW,
    "faiss-ivf": FaissIVF,
    "hnswlib": Hnswlib,
}
